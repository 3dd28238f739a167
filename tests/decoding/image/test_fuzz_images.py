"""Mutated images of every format: tools/prove/fuzz_images.py, for a few hundred files."""

from __future__ import annotations

import pytest

import mmstream as mm
from tests.helpers.pictures import PNG
from tools.prove import fuzz_images
from tools.prove.fuzz_images import DECODERS, Failure, check, fuzz


@pytest.mark.slow
def test_mutated_files_decode_or_are_refused_in_one_line() -> None:
    outcomes = fuzz(500, max_inputs=250)
    assert outcomes.total() == 250
    assert outcomes["decoded"] > 20
    assert outcomes["refused"] > 20


@pytest.mark.parametrize("error", [ValueError("x"), mm.errors.DecodeError(""), MemoryError("x")])
def test_a_planted_bug_is_noticed(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_args: object) -> None:
        raise error

    monkeypatch.setattr(mm.ImageDecoder, "__call__", decode)
    if isinstance(error, mm.errors.DecodeError):
        monkeypatch.setattr(fuzz_images, "MAX_SECONDS", -1.0)
    with pytest.raises(Failure, match=r"Error: x|processor time"):
        check(PNG, DECODERS[0])
