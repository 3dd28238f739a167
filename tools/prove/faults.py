"""The self-test of `tools.prove.resume`: a true history with one fault in it must not be proven."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

from tools.prove.history import History, Run, kept_lines

__all__ = ["FAULTS", "with_fault"]


def with_fault(history: History, fault: str, draw: random.Random) -> History:
    """Return a copy of a history with one fault, in a line that counts."""
    faulty = copy.deepcopy(history)
    kept = [line for lines in kept_lines(faulty).values() for line in lines]
    line = draw.choice([line for line in kept if len(line.keys) > 1 and all(line.valid)])
    run = next(run for run in faulty if any(other is line for other in run.lines))
    place = next(place for place, other in enumerate(run.lines) if other is line)
    FAULTS[fault](run, place)
    return faulty


def _drop(run: Run, place: int) -> None:
    del run.lines[place]


def _repeat(run: Run, place: int) -> None:
    run.lines.append(run.lines[place])


def _swap(run: Run, place: int) -> None:
    line = run.lines[place]
    line.keys[:2] = line.keys[1::-1]
    line.planned[:2], line.shown[:2] = line.planned[1::-1], line.shown[1::-1]


def _resume_late(run: Run, place: int) -> None:
    """A step that a checkpoint was taken to cover, and that nobody did."""
    at = run.lines[place].at
    run.lines[:] = [line for line in run.lines if line.at != at]


def _invalid(run: Run, place: int) -> None:
    run.lines[place].valid[0] = False


def _other_sample(run: Run, place: int) -> None:
    line = run.lines[place]
    line.keys[0], line.shown[0] = line.keys[1], line.shown[1]


def _other_loss(run: Run, place: int) -> None:
    run.lines[place] = run.lines[place]._replace(loss=run.lines[place].loss + 1e-6)


FAULTS: dict[str, Callable[[Run, int], None]] = {
    "a line is dropped": _drop,
    "a line is repeated": _repeat,
    "two rows are swapped": _swap,
    "a step is skipped": _resume_late,
    "a row is marked invalid": _invalid,
    "a row shows another sample": _other_sample,
    "a loss differs in the 6th digit": _other_loss,
}
