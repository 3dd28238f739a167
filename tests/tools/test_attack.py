"""The attacks of tools.prove.attack are held off, and the judge sees those that are not."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mmstream as mm
from tests.helpers.paths import ROOT
from tools.prove.attack import ATTACKS
from tools.prove.attacks.attack import Attack, run_attack

EVERY = 10
"""The suite runs each tenth attack. Image bombs have tests of their own."""


@pytest.mark.slow
def test_attacks_are_held_off() -> None:
    options = ["--every", str(EVERY), "--max-seconds", "500"]
    run = subprocess.run(
        [sys.executable, "-m", "tools.prove.attack", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith(f"{len(ATTACKS[::EVERY])} attacks, 0 succeeded\n")


def refuse(_folder: Path) -> None:
    raise mm.errors.ManifestError("mmstream.json: impossible")


def goes_on(_folder: Path) -> None:
    pass


def has_a_bug(_folder: Path) -> None:
    raise KeyError("__source__")


def hoards(_folder: Path) -> None:
    assert len(bytearray(os.urandom(1 << 20)) * 1300)


def speaks_in_two_lines(_folder: Path) -> None:
    raise FileNotFoundError("mmstream.json:\n\x1b[2J")


def logs_an_escape_sequence(_folder: Path) -> None:
    logging.getLogger("mmstream").warning("a key: %s", "\x1b[2J")


def waits(_folder: Path) -> None:
    signal.pause()


def dies(_folder: Path) -> None:
    os.abort()


@pytest.mark.parametrize(
    ("run", "refusal"), [(refuse, "impossible"), (goes_on, None)], ids=["refused", "survived"]
)
def test_an_attack_that_is_held_off_is_no_failure(
    run: Callable[[Path], None], refusal: str | None
) -> None:
    assert run_attack(Attack("x", run, refusal)).failure == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "refusal", "failure"),
    [
        (refuse, None, "refused"),
        (refuse, "another reason", "does not say"),
        (goes_on, "impossible", "was not refused"),
        (has_a_bug, ".", "KeyError"),
        (hoards, None, "MB of memory"),
        (speaks_in_two_lines, ".", "not printable"),
        (logs_an_escape_sequence, None, "not printable"),
        (waits, None, "still running"),
        (dies, None, "SIGABRT"),
    ],
)
def test_an_attack_that_succeeds_is_a_failure(
    run: Callable[[Path], None], refusal: str | None, failure: str
) -> None:
    max_seconds = 1 if run is waits else 500  # a busy machine makes the others slow too
    assert failure in run_attack(Attack("x", run, refusal), max_seconds=max_seconds).failure
