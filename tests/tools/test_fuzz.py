"""The parsers keep their promise on mutated inputs, and the fuzzer sees those that do not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import mmstream as mm
from tools.prove import fuzz
from tools.prove.fuzz import BrokenPromiseError, Parser, parsers

NUM_INPUTS = 400
"""For each parser. `python -m tools.prove.fuzz --seconds 3600` is the long form."""

NAMES = (
    "tar", "index", "arrow", "index_part", "column", "manifest",
    "bad_list", "mixture", "state", "row", "chat", "image",
    "baked", "plan", "plan_arrays",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_mutated_inputs_are_parsed_or_refused(name: str, tmp_path: Path) -> None:
    with parsers() as known:
        assert set(known) == set(NAMES)
        report = fuzz.fuzz(
            known[name], seconds=0, seed=1, save=tmp_path / "input.bin", min_inputs=NUM_INPUTS
        )
    assert 0 < report.num_accepted < report.num_inputs


def has_a_bug(data: bytes) -> None:
    {"a": 1}[data.decode("latin-1")]


class TwoLinesError(mm.SampleError):
    def __str__(self) -> str:
        return "bad:\nvery bad"


def speaks_in_two_lines(_data: bytes) -> None:
    raise TwoLinesError


def works_long(_data: bytes) -> None:
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass


def works_long_and_refuses(data: bytes) -> None:
    works_long(data)
    raise mm.SampleError("bad")


@pytest.mark.parametrize(
    ("parse", "message"),
    [
        (has_a_bug, "KeyError"),
        (speaks_in_two_lines, "not printable"),
        (works_long, "took "),
        (works_long_and_refuses, "took "),
    ],
)
def test_a_parser_that_breaks_its_promise_is_caught_and_the_input_saved(
    parse: Callable[[bytes], None],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fuzz, "MAX_SECONDS", 0.1)
    save = tmp_path / "input.bin"
    with pytest.raises(BrokenPromiseError, match=message):
        fuzz.fuzz(Parser(parse, [b"seed"]), 1.0, seed=1, save=save)
    with pytest.raises(BrokenPromiseError, match=message):
        fuzz.accepts(Parser(parse, []), save.read_bytes())
