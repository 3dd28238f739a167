"""The self-test of `tools.prove.resume`: the proof must fail for a true history with one fault."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

from tools.prove.history import History, Run, kept_lines


def with_fault(history: History, fault: str, draw: random.Random) -> History:
    """Return a copy of a history with one fault, in a line that counts."""
    faulty = copy.deepcopy(history)
    kept = [line for lines in kept_lines(faulty).values() for line in lines]
    line = draw.choice([line for line in kept if len(line.keys) > 1 and all(line.valid)])
    run = next(run for run in faulty if any(other is line for other in run.lines))
    index = next(index for index, other in enumerate(run.lines) if other is line)
    FAULTS[fault](run, index)
    return faulty


def _drop(run: Run, index: int) -> None:
    del run.lines[index]


def _repeat(run: Run, index: int) -> None:
    run.lines.append(run.lines[index])


def _swap(run: Run, index: int) -> None:
    line = run.lines[index]
    line.keys[:2] = line.keys[1::-1]
    line.planned[:2] = line.planned[1::-1]
    line.shown[:2] = line.shown[1::-1]


def _skip_step(run: Run, index: int) -> None:
    """Remove a step, as after a checkpoint that counts a step too many."""
    step = run.lines[index].step
    run.lines[:] = [line for line in run.lines if line.step != step]


def _invalid(run: Run, index: int) -> None:
    run.lines[index].valid[0] = False


def _other_sample(run: Run, index: int) -> None:
    line = run.lines[index]
    line.keys[0] = line.keys[1]
    line.shown[0] = line.shown[1]


def _other_loss(run: Run, index: int) -> None:
    run.lines[index] = run.lines[index]._replace(loss=run.lines[index].loss + 1e-6)


FAULTS: dict[str, Callable[[Run, int], None]] = {
    "a line is dropped": _drop,
    "a line is repeated": _repeat,
    "two rows are swapped": _swap,
    "a step is skipped": _skip_step,
    "a row is marked invalid": _invalid,
    "a row shows another sample": _other_sample,
    "a loss differs in the 6th digit": _other_loss,
}
