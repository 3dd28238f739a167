"""The proof of `tools.prove.resume`: the logs of all starts, the order, and an uninterrupted run.

The proof follows the weights. A start continues with the weights of a checkpoint. This undoes all
steps after the checkpoint, so a step counts when it was done for the last time. If a loader resumed
one step before or after its weights, that step would be repeated or lost. The proof notices this
even if the log of a killed start has the step.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mmstream.order import AnyOrder
from tools.prove.corpus import Corpus, Ref

T = TypeVar("T")

EpochStep = tuple[int, int]
"""(epoch, step)."""


class Line(NamedTuple):
    """A line in the log of a rank, about one step."""

    number: int
    """Steps of the weights before this one."""
    step: EpochStep
    start: int
    """First row of this rank in the global batch."""
    keys: list[str]
    planned: list[Ref]
    shown: list[Ref]
    valid: list[bool]
    loss: float


class Row(NamedTuple):
    """A row of a global batch in a log."""

    key: str
    planned: Ref
    shown: Ref
    valid: bool


@dataclass
class Run:
    """The logs of one start."""

    resumed: int | None = None
    """Steps of the checkpoint; None: it was killed before a rank had resumed."""
    lines: list[Line] = field(default_factory=list)
    """Lines of all ranks."""


History = list[Run]


@dataclass(frozen=True)
class Verdict:
    """Counts of the run, and of errors. Without errors, `lost` to `mistaken` are zero.

    Batches that were undone by a resume are checked too.
    """

    num_steps: int
    num_samples: int
    num_substituted: int
    num_steps_again: int
    """Steps that were delivered again after a kill, counted each time."""
    lost: int
    """Readable samples that are missing in an epoch; in a mixture, missing planned visits."""
    repeated: int
    """Readable samples that came again in an epoch; in a mixture, more often than planned."""
    unplanned: int
    """Batches with other rows or another validity than in the order, and steps that do not have
    each row exactly once."""
    different: int
    """Batches that differ from those of the uninterrupted run."""
    mistaken: int
    """Rows that show another sample than planned although it is readable, or show a bad sample."""
    loss_difference: float
    """Largest difference of a step's loss from the uninterrupted run. A loss is at most about 1."""

    @property
    def exact(self) -> bool:
        """Whether all data was as expected."""
        errors = (self.lost, self.repeated, self.unplanned, self.different, self.mistaken)
        return not any(errors)


def read_start(folder: Path) -> Run:
    """Return the logs of one start; a last line that a kill has cut off is ignored."""
    run = Run()
    for path in sorted(folder.glob("rank*.jsonl")):
        for text in path.read_bytes().splitlines(keepends=True):
            if not text.endswith(b"\n"):
                continue
            line = json.loads(text)
            if "resumed" in line:
                run.resumed = line["resumed"]
            else:
                run.lines.append(_line(line))
    return run


def _line(line: Mapping[str, Any]) -> Line:
    def refs(name: str) -> list[Ref]:
        return [(shard, index) for shard, index in line[name]]

    return Line(
        number=line["number"],
        step=(line["epoch"], line["step"]),
        start=line["start"],
        keys=line["keys"],
        planned=refs("planned"),
        shown=refs("shown"),
        valid=line["valid"],
        loss=line["loss"],
    )


def kept_lines(history: History) -> dict[EpochStep, list[Line]]:
    """Return (epoch, step) -> the lines whose step the weights of the run have kept."""
    lines: list[Line] = []
    for run in history:
        if run.resumed is not None:
            lines = [line for line in lines if line.number < run.resumed] + run.lines
    kept: dict[EpochStep, list[Line]] = {}
    for line in lines:
        kept.setdefault(line.step, []).append(line)
    return kept


def judge(
    history: History, uninterrupted: Run, corpus: Corpus, order: AnyOrder, num_epochs: int
) -> Verdict:
    """Compare a history of kills with the order, the corpus and an uninterrupted run."""
    plan = {
        (epoch, step): _planned(order, epoch, step)
        for epoch in range(num_epochs)
        for step in range(order.steps_per_epoch)
    }
    kept = kept_lines(history)
    kept_rows = {step: _rows(lines) for step, lines in kept.items()}
    quiet = kept_lines([uninterrupted])
    quiet_rows = {step: _rows(lines) for step, lines in quiet.items()}
    delivered = [line for run in history for line in run.lines]
    expected = Counter(
        (epoch, ref)
        for (epoch, _), rows in plan.items()
        for ref, valid in rows
        if valid and ref not in corpus.bad
    )
    if not corpus.is_mixture:  # the corpus alone says it, without the order under test
        readable = [ref for ref in corpus.keys if ref not in corpus.bad]
        expected = Counter((epoch, ref) for epoch in range(num_epochs) for ref in readable)
    shown = Counter(
        (epoch, row.shown)
        for (epoch, _), rows in kept_rows.items()
        for row in rows
        if row.valid and row.planned not in corpus.bad
    )
    valid_rows = [row for rows in kept_rows.values() for row in rows if row.valid]
    num_delivered_steps = sum(len({line.step for line in run.lines}) for run in history)
    return Verdict(
        num_steps=len(kept),
        num_samples=len(valid_rows),
        num_substituted=sum(row.shown != row.planned for row in valid_rows),
        num_steps_again=num_delivered_steps - len(kept),
        lost=sum((expected - shown).values()),
        repeated=sum((shown - expected).values()),
        unplanned=sum(not _is_planned(line, plan, corpus) for line in delivered)
        + sum(not _is_complete(kept.get(step, []), order.global_batch_size) for step in plan),
        different=sum(_rows([line]) != _rows_of_line(quiet_rows, line) for line in delivered)
        + len(plan.keys() ^ quiet_rows.keys()),
        mistaken=sum(not _is_right(row, corpus) for row in _rows(delivered)),
        loss_difference=max(_loss_difference(kept.get(step), quiet.get(step)) for step in plan),
    )


def _planned(order: AnyOrder, epoch: int, step: int) -> list[tuple[Ref, bool]]:
    refs = order.refs(epoch, step)
    pairs = zip(refs.shard.tolist(), refs.index.tolist(), strict=True)
    return list(zip(pairs, refs.valid.tolist(), strict=True))


def _rows(lines: Iterable[Line]) -> list[Row]:
    """Return the rows of lines, in the order of the global batch."""
    rows: list[Row] = []
    for line in sorted(lines, key=lambda line: line.start):
        columns = line.keys, line.planned, line.shown, line.valid
        rows += [Row(*row) for row in zip(*columns, strict=True)]
    return rows


def _rows_of_line(batches: Mapping[EpochStep, Sequence[T]], line: Line) -> Sequence[T]:
    """Return the rows of a global batch that a line has."""
    return batches.get(line.step, [])[line.start : line.start + len(line.keys)]


def _is_planned(
    line: Line, plan: Mapping[EpochStep, list[tuple[Ref, bool]]], corpus: Corpus
) -> bool:
    """Return whether a line has the rows of the order. A bad sample may be invalid."""
    rows = _rows_of_line(plan, line)
    return len(rows) == len(line.keys) and all(
        logged_ref == ref and (logged_valid == valid or (ref in corpus.bad and not logged_valid))
        for (ref, valid), logged_ref, logged_valid in zip(
            rows, line.planned, line.valid, strict=True
        )
    )


def _is_complete(lines: Sequence[Line], num_rows: int) -> bool:
    """Return whether the lines of a step have each row exactly once."""
    rows = [line.start + offset for line in lines for offset in range(len(line.keys))]
    return sorted(rows) == list(range(num_rows))


def _is_right(row: Row, corpus: Corpus) -> bool:
    """Return whether a row shows the planned sample or a good substitute of a bad sample."""
    may_show = row.shown == row.planned or row.planned in corpus.bad
    return may_show and row.shown not in corpus.bad and row.key == corpus.keys.get(row.shown)


def _loss_difference(lines: Sequence[Line] | None, quiet_lines: Sequence[Line] | None) -> float:
    if not lines or not quiet_lines:
        return float("inf")
    return abs(sum(line.loss for line in lines) - sum(line.loss for line in quiet_lines))


# -- the self-test: the proof must fail for a true history with one fault --------------------------


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
