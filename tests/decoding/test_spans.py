"""Spans of rows and settings mean the same to the decoders of videos and recordings."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.media_files import audio_file, video_file

FILES = {mm.AudioDecoder: lambda: audio_file("wav"), mm.VideoDecoder: lambda: video_file("mp4")}

HUGE = 10**400
"""JSON may state it, and no float holds it."""


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    "row",
    [
        {"start_s": HUGE},
        {"start_s": 0, "end_s": HUGE},
        {"start_s": "0", "end_s": 1},
        {"start_s": False, "end_s": 1},
        {"start_s": 0.5, "end_s": 0.5},
        {"start_s": -1, "end_s": 1},
        {"start_s": [0], "end_s": "x" * 10_000},
        {"start_s": float("nan")},
    ],
    ids=["huge start", "huge end", "string", "bool", "empty", "negative", "long", "NaN"],
)
def test_a_row_that_states_no_span_is_a_bad_sample(kind: Any, row: dict[str, Any]) -> None:
    with pytest.raises(
        mm.errors.DecodeError, match=r"start_s=.*, end_s=.*: not a span in seconds"
    ) as error:
        kind().plan(FILES[kind](), row)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("span", [(0, HUGE), (1, 1), (2, 1), [0, 1], "rows"])
def test_a_setting_that_is_no_span_is_refused(kind: Any, span: Any) -> None:
    with pytest.raises(mm.ConfigError, match=r'give "row", \(start_s, end_s\) or None'):
        kind(span=span)


@pytest.mark.parametrize("kind", FILES)
def test_both_decoders_have_the_same_limits(kind: Any) -> None:
    decoder = kind()
    assert (decoder.span, decoder.max_bytes, decoder.timeout_s) == ("row", 4 << 30, 60.0)
    assert kind(timeout_s=None).timeout_s is None
    for name in ("max_bytes", "max_duration_s"):
        with pytest.raises(mm.ConfigError, match=f"{name}=None: give"):
            kind(**{name: None})
    for name in ("timeout_s", "max_duration_s"):
        with pytest.raises(mm.ConfigError, match=f"{name}=inf: give"):
            kind(**{name: float("inf")})


@pytest.mark.parametrize("kind", FILES)
def test_a_call_takes_a_span_where_the_decoder_goes_by_the_row(kind: Any) -> None:
    data = FILES[kind]()
    expected = kind(span=(0.2, 0.6))(data)
    assert kind()(data, span=(0.2, 0.6)).tolist() == expected.tolist()
    assert len(expected) < len(kind()(data))
    for setting in (None, (0, 0.5)):
        with pytest.raises(mm.ConfigError, match='it needs a decoder with span="row"'):
            kind(span=setting)(data, span=(0.2, 0.6))


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        *((kind, r"__call__, which a pipeline does") for kind in FILES),
        (mm.ImageDecoder, "override `decode`"),
        (partial(mm.TextDecoder, byte_tokenizer()), r"field=function\)"),
    ],
)
def test_a_subclass_whose_call_would_be_passed_over_is_refused(kind: Any, advice: str) -> None:
    class Changed(getattr(kind, "func", kind)):  # type: ignore[misc]
        def __call__(self, data: Any, **options: Any) -> Any:
            return super().__call__(data)

    with pytest.raises(mm.ConfigError, match=rf"Changed overrides .*{advice}"):
        Changed(*getattr(kind, "args", ()))
