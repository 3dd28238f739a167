"""The proof behind `tools.prove.resume`: raw logs of all starts against the plan and a quiet run.

The history is that of the weights: a start goes on from those of a checkpoint, so what was done
beyond it before is undone, and counts once, the last time. A loader that went on one step before or
after its weights would repeat or lose that step, also where the log of a killed start shows it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mmstream.order import AnyOrder
from tools.prove.corpus import Corpus, Ref

__all__ = ["At", "History", "Line", "Run", "Verdict", "judge", "kept_lines", "read_start"]

T = TypeVar("T")

At = tuple[int, int]
"""(epoch, step)."""


class Line(NamedTuple):
    """What one rank logged of one step."""

    number: int
    """Steps that the weights had seen before this one."""
    at: At
    start: int
    keys: list[str]
    planned: list[Ref]
    shown: list[Ref]
    valid: list[bool]
    loss: float


class Row(NamedTuple):
    """One row of a global batch, as logged."""

    key: str
    planned: Ref
    shown: Ref
    valid: bool


@dataclass
class Run:
    """One start: the steps of its checkpoint (None: no rank came so far), and all ranks' lines."""

    resumed: int | None = None
    lines: list[Line] = field(default_factory=list)


History = list[Run]


@dataclass(frozen=True)
class Verdict:
    """Counts of what should not be, all zero when the promise was kept."""

    num_steps: int
    num_samples: int
    num_substituted: int
    num_steps_again: int
    """Steps that were delivered again after a kill, each time counted."""
    lost: int
    """Readable samples that no batch of an epoch showed; of a mixture, as often as planned."""
    repeated: int
    """Readable samples that an epoch showed once more; of a mixture, more often than planned."""
    unplanned: int
    """Batches, those undone too, with other rows or validity than the order's, and steps that are
    not there with each row once."""
    different: int
    """Batches, those undone too, that are not those of the undisturbed run."""
    mistaken: int
    """Rows that show something else than the planned sample or, where it is bad, a good one."""
    loss_difference: float
    """Largest difference of a step's loss, about 1 at most, from the undisturbed run's."""

    @property
    def exact(self) -> bool:
        """Whether the data was what it should be."""
        found = self.lost, self.repeated, self.unplanned, self.different, self.mistaken
        return not any(found)


def read_start(folder: Path) -> Run:
    """Return what the ranks of one start logged; a line that a kill has torn is no line."""
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
        line["number"], (line["epoch"], line["step"]), line["start"], line["keys"],
        refs("planned"), refs("shown"), line["valid"], line["loss"],
    )  # fmt: skip


def kept_lines(history: History) -> dict[At, list[Line]]:
    """Return (epoch, step) -> the lines of the time, or times, that the weights have seen it."""
    seen: list[Line] = []
    for run in history:
        if run.resumed is not None:
            seen = [line for line in seen if line.number < run.resumed] + run.lines
    kept: dict[At, list[Line]] = {}
    for line in seen:
        kept.setdefault(line.at, []).append(line)
    return kept


def judge(
    history: History, quiet: Run, corpus: Corpus, order: AnyOrder, num_epochs: int
) -> Verdict:
    """Compare a disturbed history with the plan, the corpus and an undisturbed run."""
    plan = {
        (epoch, step): _planned(order, epoch, step)
        for epoch in range(num_epochs)
        for step in range(order.steps_per_epoch)
    }
    kept, model = kept_lines(history), kept_lines([quiet])
    whole = {at: _rows(lines) for at, lines in kept.items()}
    same = {at: _rows(lines) for at, lines in model.items()}
    delivered = [line for run in history for line in run.lines]
    expected = Counter(
        (epoch, ref)
        for (epoch, _), rows in plan.items()
        for ref, valid in rows
        if valid and ref not in corpus.bad
    )
    if not corpus.is_mixture:  # then this is known without the library's order
        good = [ref for ref in corpus.key_of if ref not in corpus.bad]
        expected = Counter((epoch, ref) for epoch in range(num_epochs) for ref in good)
    seen = Counter(
        (epoch, row.shown)
        for (epoch, _), rows in whole.items()
        for row in rows
        if row.valid and row.planned not in corpus.bad
    )
    told = [row for rows in whole.values() for row in rows if row.valid]
    return Verdict(
        num_steps=len(kept),
        num_samples=len(told),
        num_substituted=sum(row.shown != row.planned for row in told),
        num_steps_again=sum(len({line.at for line in run.lines}) for run in history) - len(kept),
        lost=sum((expected - seen).values()),
        repeated=sum((seen - expected).values()),
        unplanned=sum(not _as_planned(line, plan, corpus) for line in delivered)
        + sum(not _complete(kept.get(at, []), order.global_batch_size) for at in plan),
        different=sum(_rows([line]) != _part(same, line) for line in delivered)
        + len(plan.keys() ^ same.keys()),
        mistaken=sum(not _rightly_shown(row, corpus) for row in _rows(delivered)),
        loss_difference=max(_difference(kept.get(at), model.get(at)) for at in plan),
    )


def _planned(order: AnyOrder, epoch: int, step: int) -> list[tuple[Ref, bool]]:
    refs = order.refs(epoch, step)
    pairs = zip(refs.shard.tolist(), refs.index.tolist(), strict=True)
    return list(zip(pairs, refs.valid.tolist(), strict=True))


def _rows(lines: Iterable[Line]) -> list[Row]:
    """Return the rows of one step's lines, in the order of rows."""
    rows: list[Row] = []
    for line in sorted(lines, key=lambda line: line.start):
        columns = line.keys, line.planned, line.shown, line.valid
        rows += [Row(*row) for row in zip(*columns, strict=True)]
    return rows


def _part(whole: Mapping[At, Sequence[T]], line: Line) -> Sequence[T]:
    """Return what a whole step has in the rows of a line."""
    return whole.get(line.at, [])[line.start : line.start + len(line.keys)]


def _as_planned(line: Line, plan: Mapping[At, list[tuple[Ref, bool]]], corpus: Corpus) -> bool:
    part = _part(plan, line)
    return len(part) == len(line.keys) and all(
        found == ref and (valid == holds or (ref in corpus.bad and not valid))
        for (ref, holds), found, valid in zip(part, line.planned, line.valid, strict=True)
    )


def _complete(lines: Sequence[Line], num_rows: int) -> bool:
    """Tell whether the lines of a step hold each row once."""
    rows = [line.start + place for line in lines for place in range(len(line.keys))]
    return sorted(rows) == list(range(num_rows))


def _rightly_shown(row: Row, corpus: Corpus) -> bool:
    fits = row.shown == row.planned or row.planned in corpus.bad
    return fits and row.shown not in corpus.bad and row.key == corpus.key_of.get(row.shown)


def _difference(lines: Sequence[Line] | None, others: Sequence[Line] | None) -> float:
    if not lines or not others:
        return float("inf")
    return abs(sum(line.loss for line in lines) - sum(line.loss for line in others))
