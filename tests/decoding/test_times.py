"""Times in a video or recording follow its span: the same frames and sounds before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmstream as mm
from mmstream.decoding.followers import placed_seconds
from mmstream.decoding.sample import decode_sample
from mmstream.types import SampleLineage
from tests.helpers.corpora import write_corpus
from tests.helpers.media_files import audio_file, video_file

EIGHTHS = st.integers(0, 80).map(lambda number: number / 8)
"""Seconds that floats add and subtract without rounding."""
VARIABLE = tuple(np.cumsum([0, *[0.1] * 10, *[0.3] * 10]).round(3).tolist())
"""When frames are shown: at ten in a second first, then at three."""


def sample(row: Any, index: int = 0, **files: bytes) -> dict[str, Any]:
    lineage = SampleLineage(0, index, 0)
    return {"__key__": "k", "__url__": "a.tar", "__lineage__": lineage, "json": row, **files}


def decoded(row: Any, decode: mm.Decode, index: int = 0, **files: bytes) -> dict[str, Any]:
    return decode_sample(sample(row, index, **files), decode)


@given(st.lists(st.tuples(EIGHTHS, EIGHTHS).map(sorted)), EIGHTHS, EIGHTHS.filter(bool))
def test_the_moments_of_an_interval_within_a_span_are_those_of_its_result(
    pairs: list[list[float]], start_s: float, length_s: float
) -> None:
    end_s = start_s + length_s
    moments = np.arange(0, 21, 1 / 8)
    in_span = moments[(moments >= start_s) & (moments < end_s)]
    times = mm.Times("json", follows="video")
    placed, visible = times.place({"json": pairs}, start_s, end_s)
    assert placed.shape == (len(pairs), 2)
    for before, after, share in zip(pairs, placed, visible, strict=True):
        expected = in_span[(in_span >= before[0]) & (in_span < before[1])] - start_s
        shifted = in_span - start_s
        np.testing.assert_array_equal(
            shifted[(shifted >= after[0]) & (shifted < after[1])], expected
        )
        assert 0 <= after[0] <= after[1] <= length_s
        if before[1] > before[0]:
            assert share == np.float32(len(expected) / 8 / (before[1] - before[0]))
        else:
            assert share == (before[0] in in_span)
    in_file, same = mm.Times("json", follows="video", origin="file").place(
        {"json": pairs}, start_s, end_s
    )
    np.testing.assert_array_equal(in_file, placed + start_s)
    np.testing.assert_array_equal(same, visible)


def test_points_keep_their_time_and_say_whether_they_are_in_the_span() -> None:
    times, visible = placed_seconds(np.array([0.5, 1.0, 1.5, 2.0]), 1.0, 2.0)
    assert times.tolist() == [0.5, 1.0, 1.5, 2.0]
    assert visible.tolist() == [False, True, True, False]
    points = mm.Times("json.t", follows="video", format="point")
    placed, visible = points.place({"json": {"t": []}}, 1.0, 2.0)
    assert placed.shape == visible.shape == (0,)
    assert points.place({"json": {"t": np.array([1.5])}}, 1.0, 2.0)[0].tolist() == [0.5]


@pytest.mark.parametrize("shown_at", [VARIABLE, tuple(i / 10 for i in range(30))])
def test_an_interval_has_the_same_frames_in_every_random_clip(shown_at: tuple[float, ...]) -> None:
    data = video_file(times_s=shown_at)
    # The third interval begins and ends between two frames; the fourth lies behind the video.
    pairs = [[0, 9], [0.05, 0.55], [1.45, 2.31], [70, 71]]
    row = {"segments": [{"start_s": start, "end_s": end, "text": "?"} for start, end in pairs]}
    for decoder in (mm.VideoDecoder(clip_s=0.7), mm.VideoDecoder(span=(0.95, 1.87))):
        decode = mm.Decode({"t": mm.Times("json.segments", follows="video")}, video=decoder)
        for index in range(6):
            result = decoded(row, decode, index, mp4=data)
            start_s = decoder.plan(
                data, rng=mm.sample_rng(sample(row, index), "video")
            ).shape.start_s
            pts = result["video_pts_s"].numpy()
            for (start, end), after, share in zip(
                pairs, result["t"].numpy(), result["t_visible"].tolist(), strict=True
            ):
                in_file = (pts >= max(start, start_s)) & (pts < end)
                in_span = (pts - start_s >= after[0]) & (pts - start_s < after[1])
                np.testing.assert_array_equal(in_span, in_file)
                assert share > 0 or not in_file.any()


def test_a_slow_part_of_a_video_ends_where_its_span_does() -> None:
    decoder = mm.VideoDecoder(span=(1.9, 3.1))
    assert decoder.plan(video_file(times_s=VARIABLE)).shape.end_s == 3.1
    film = video_file(times_s=VARIABLE, audio_codec="pcm_s16le", kind="mkv")
    clip = mm.VideoDecoder(span=(1.9, 3.1), clip_s=0.5, audio=mm.AudioDecoder())
    sound = decoded({}, mm.Decode(video=clip), mkv=film)["audio"]
    assert len(sound) == pytest.approx(0.5 * 16_000, abs=2)
    whole = mm.VideoDecoder().plan(video_file(num_frames=12, fps=10)).shape
    assert whole.end_s == pytest.approx(1.2)


def test_times_follow_a_random_crop_of_a_recording_and_the_sound_of_a_clip() -> None:
    row = {"times": [[0.5, 2.5]], "words": [0.5, 2.5]}
    fields = {
        "events": mm.Times("json.times", follows="wav", origin="file"),
        "words": mm.Times("json.words", follows="wav", format="point"),
    }
    crop = mm.AudioDecoder(duration_s=1.0, crop="random")
    data = audio_file("wav", seconds=3.0)
    result = decoded(row, mm.Decode({"wav": crop, **fields}), wav=data)
    start_s = crop.plan(data, rng=mm.sample_rng(sample(row), "audio wav")).start_s
    assert 0 < start_s < 2
    expected = [max(0.5, start_s), min(2.5, start_s + 1)]
    assert result["events"].tolist() == [pytest.approx(expected)]
    assert result["words"].tolist() == pytest.approx([0.5 - start_s, 2.5 - start_s])
    assert result["words_visible"].dtype == torch.bool
    clip = mm.VideoDecoder(span=(0.2, 0.8), audio=mm.AudioDecoder())
    track = mm.Times("json.times", follows="audio")
    film = video_file(num_frames=12, fps=10, audio_codec="pcm_s16le", kind="mkv")
    result = decoded(row, mm.Decode({"events": track}, video=clip), mkv=film)
    assert result["events"].tolist() == [pytest.approx([0.3, 0.6], abs=1e-4)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[2, 1]], r"interval 0 ends before it begins: \[2, 1\]"),
        ([{"start_s": 1}], "no number of seconds in"),
        ([[1, float("nan")]], "no number of seconds in"),
        ([[True, 2]], "no number of seconds in"),
        ([["1", 2]], "no number of seconds in"),
        ([[1, 10**400]], "no number of seconds in"),
        ([1, 2], "neither .start, end. nor start_s and end_s: 1"),
        ("all", "not a list with an entry for each interval: 'all'"),
    ],
)
def test_what_is_no_time_makes_a_bad_sample(value: Any, message: str) -> None:
    decode = mm.Decode({"t": mm.Times("json.t", follows="wav"), "wav": mm.AudioDecoder()})
    with pytest.raises(mm.errors.DecodeError, match=rf"a\.tar\[0\] k\.t: {message}"):
        decoded({"t": value}, decode, wav=audio_file("wav", seconds=0.1))


def test_times_follow_exactly_one_file() -> None:
    decode = mm.Decode({"t": mm.Times("json.t", follows="audio")}, audio=mm.AudioDecoder())
    data = audio_file("wav", seconds=0.1)
    with pytest.raises(
        mm.errors.DecodeError, match=r"k\.t: it follows the span of audio, .* has 2 enc"
    ):
        decoded({"t": []}, decode, **{"0.wav": data, "1.wav": data})
    with pytest.raises(mm.ConfigError, match="follows='video', which is no video or recording"):
        mm.Decode({"t": mm.Times("json.t", follows="video")}, audio=mm.AudioDecoder())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": ""}, "give a path such as"),
        ({"origin": "clip"}, "origin='clip': give 'span' or 'file'"),
    ],
)
def test_settings_of_times_that_cannot_work_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(mm.ConfigError, match=message):
        mm.Times(**{"source": "json.t", "follows": "video", **arguments})


def test_a_batch_has_a_list_of_times_alike_with_any_number_of_threads(tmp_path: Path) -> None:
    def files(number: int) -> dict[str, bytes]:
        row = json.dumps({"t": [[0.1 * i, 0.4] for i in range(number % 3)]}).encode()
        return {"wav": audio_file("wav", seconds=0.5), "json": row}

    folder = write_corpus(tmp_path, [8], files)
    pipeline = mm.Pipeline(
        mm.open_dataset(folder),
        global_batch_size=8,
        decode=mm.Decode(
            {"t": mm.Times("json.t", follows="audio")},
            audio=mm.AudioDecoder(duration_s=0.2, crop="random"),
        ),
    )
    batches = [next(iter(mm.Loader(pipeline, num_threads=n, num_workers=0))) for n in (1, 3)]
    for batch in batches:
        assert [times.shape for times in batch["t"]] == [(len(r["t"]), 2) for r in batch["json"]]
        assert {times.dtype for times in batch["t"]} == {torch.float64}
        assert all(times.min() >= 0 and times.max() < 0.2001 for times in batch["t"] if len(times))
    for first, second in zip(batches[0]["t"], batches[1]["t"], strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
