"""The fuzzer of audio and video, in short: it runs long by hand, as its module says."""

from __future__ import annotations

import sys

import pytest

from tools.prove import fuzz_media
from tools.prove.fuzz_media import CONTAINERS, Mutated, Report, check, file_of, fuzz


@pytest.mark.parametrize("container", CONTAINERS)
def test_mutated_files_decode_or_are_refused(container: str) -> None:
    for number in range(14):
        outcomes = check(file_of(container, number, seed=1))
        assert set(outcomes.values()) <= {"decoded", "refused"}


def test_an_error_that_is_no_decode_error_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_data: bytes) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(fuzz_media, "readers", lambda _container, _number: {"audio": fail})
    outcomes = check(Mutated("wav", 0, b""))
    assert outcomes == {"audio": "FAILED: IndexError: list index out of range"}


STARTS = "import json, os, sys, time; print(json.dumps({'start': 0}), flush=True);"
ANSWERS = (
    "answer = {'number': 0, 'outcomes': {'audio': 'refused'}, 'rss': 1, 'cpu_s': 0};"
    "print(json.dumps(answer), flush=True)"
)


@pytest.mark.parametrize(
    ("program", "failures"),
    [
        (f"{STARTS} {ANSWERS}", []),
        (f"{STARTS} os.abort()", ["file 0: the process ended with -6: "]),
        (f"{STARTS} time.sleep(100)", ["file 0: no answer for 1 s: "]),
        (
            f"{STARTS} {ANSWERS}; print('moov atom not found', file=sys.stderr)",
            ["output on stderr, of files 0 to 1: moov atom not found\n"],
        ),
    ],
    ids=["well", "crash", "hang", "noise"],
)
def test_crashes_hangs_and_noise_are_failures(
    program: str, failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in program:  # the others may take their time to start
        monkeypatch.setattr(fuzz_media, "MAX_WALL_S", 1.0)
    command = [sys.executable, "-c", program]
    monkeypatch.setattr(fuzz_media, "_child_command", lambda *_: command)
    report = fuzz("wav", 1)
    assert isinstance(report, Report)
    assert report.failures == failures
