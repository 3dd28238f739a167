"""Mutated images of every format: tools/prove/fuzz_images.py, for a few hundred files."""

from __future__ import annotations

import random

import pytest

from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.errors import DecodeError
from tests.helpers.pictures import PNG
from tools.prove import fuzz_images
from tools.prove.fuzz_images import DECODERS, Failure, check, fuzz, mutate, seeds


def test_mutated_files_decode_or_are_refused_in_one_line() -> None:
    outcomes = fuzz(500, max_inputs=250)
    assert outcomes.total() == 250
    assert outcomes["decoded"] > 20
    assert outcomes["refused"] > 20


def test_seeds_have_every_format_and_meet_limits() -> None:
    files = seeds()
    for start in (b"\xff\xd8", b"\x89PNG", b"GIF8", b"BM", b"RIFF", b"\0\0\0"):
        assert any(data.startswith(start) for data in files)
    assert any(check(data, DECODERS[3]) == "refused" for data in files)


def test_mutations_of_a_png_have_right_checksums() -> None:
    random_draws = random.Random(0)
    reasons = []
    for _ in range(100):
        try:
            ImageDecoder()(mutate(PNG, random_draws))
        except DecodeError as error:
            reasons.append(str(error))
    assert 0 < len(reasons) < 100
    assert not any("checksum" in reason for reason in reasons)


@pytest.mark.parametrize("error", [ValueError("x"), DecodeError(""), MemoryError("x")])
def test_a_planted_bug_is_noticed(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_args: object) -> None:
        raise error

    monkeypatch.setattr(ImageDecoder, "__call__", decode)
    if isinstance(error, DecodeError):
        monkeypatch.setattr(fuzz_images, "MAX_SECONDS", -1.0)
    with pytest.raises(Failure, match=r"Error: x|processor time"):
        check(PNG, DECODERS[0])
