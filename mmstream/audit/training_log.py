"""Sample lineage in training logs: ``mmstream train --log-keys`` writes it, the checks read it.

A line of ``metrics-rank{r}.jsonl`` then has ``keys`` (of this rank's samples, as shown) and
``lineage``, with one entry for each loader step since the line before:

    {"epoch": 0, "step": 5, "start": 8, "planned": [[0, 17], [3, 2]], "shown": {"9": [3, 40]}}

`planned` is (shard, index) of the rows from `start` on. `shown` names only rows that differ, by row
of the global batch: a substitute, or null for a row that nothing could fill. Where rows are packs,
`rows` has the row of each planned sample, `left_out` the numbers of those that were left out, and
`substitutes` the samples shown in rows that another pack has taken. The first entry of a
run also has ``order``, the identity as in a state. So does each entry with another order than the
one before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mmstream.errors import ConfigError, escaped
from mmstream.reading.step import BatchLineage
from mmstream.types import IntArray, SampleRef

StepId: TypeAlias = tuple[int, int]
"""(epoch, step)."""


UNFILLED = (-1, -1)
"""The (shard, index) of a row that showed nothing."""


class SampleLog:
    """Gathers what `log_keys` adds to the lines of a training log.

    Args:
        enabled: False gathers nothing.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._keys: list[str] = []
        self._lineage: list[dict[str, Any]] = []
        self._order: Any = None

    def add(
        self, batches: Iterable[Mapping[str, Any]], order: Mapping[str, Any] | None = None
    ) -> None:
        """Add the batches of an optimizer step.

        Args:
            batches: in the order of steps.
            order: the identity of their order, ``state["order"]``. Written where it changes.
        """
        for batch in batches if self._enabled else ():
            lineage: BatchLineage = batch["__lineage__"]
            self._keys += batch["__key__"][:: lineage.repeat]
            entry = _describe(lineage)
            if order != self._order:
                self._order = entry["order"] = order
            self._lineage.append(entry)

    def take(self) -> dict[str, Any]:
        """Return what the next line gets, and forget it. Empty when nothing was added."""
        keys, lineage, self._keys, self._lineage = self._keys, self._lineage, [], []
        return {"keys": keys, "lineage": lineage} if lineage else {}


def _describe(lineage: BatchLineage) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "epoch": lineage.epoch,
        "step": lineage.step,
        "start": lineage.start,
        "planned": lineage.planned,
    }
    if lineage.planned_rows is not None:
        return entry | _describe_packs(lineage, lineage.planned_rows)
    unfilled = {record.row for record in lineage.bad if record.substitute is None}
    pairs = zip(lineage.planned, lineage.shown, strict=True)
    deviations = {
        str(row): None if row in unfilled else ref
        for row, (planned, ref) in enumerate(pairs, start=lineage.start)
        if planned != ref or row in unfilled
    }
    return entry | ({"shown": deviations} if deviations else {})


def _describe_packs(lineage: BatchLineage, planned_rows: Sequence[int]) -> dict[str, Any]:
    left_out = lineage.bad_numbers()
    planned = set(lineage.planned)
    substitutes: dict[str, list[SampleRef]] = {}
    for row, ref in zip(lineage.rows or [], lineage.shown, strict=True):
        if ref not in planned:
            substitutes.setdefault(str(lineage.order_row(row)), []).append(ref)
    return {
        "rows": [lineage.order_row(row) for row in planned_rows],
        **({"left_out": left_out} if left_out else {}),
        **({"substitutes": substitutes} if substitutes else {}),
    }


class LoggedRows(NamedTuple):
    """The rows of one step, of one rank or of all. Arrays are int64 [rows, 2] of (shard, index)."""

    start: int
    planned: IntArray
    shown: IntArray
    """`UNFILLED` where a row showed nothing."""
    order: Mapping[str, Any] | None = None
    """The identity of the order that planned it. None where the log does not say."""
    rows: IntArray | None = None
    """The row of the global batch of each entry, where rows are packs. None: one entry a row."""
    substitutes: Mapping[int, list[SampleRef]] = {}
    """The samples of packs that were shown in the place of others, by row of the global batch."""


def log_files(paths: Iterable[str | Path]) -> list[Path]:
    """Return the metrics files of all ranks: files as given, and those in folders.

    Raises:
        ConfigError: a folder without metrics files.
        FileNotFoundError: no such file.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        metrics = sorted(path.glob("metrics-rank*.jsonl")) if path.is_dir() else [path]
        if not metrics:
            raise ConfigError(f"{path}: no metrics-rank*.jsonl in it")
        files += metrics
    return files


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of one rank's metrics. A last line that a crash cut off is left out.

    Raises:
        ConfigError: a line that is not a JSON object.
        FileNotFoundError: no such file.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                if not text.endswith("\n"):
                    return
                raise ConfigError(f"{path}:{number}: not a line of metrics") from None
            if not isinstance(line, dict):
                raise ConfigError(f"{path}:{number}: not a line of metrics")
            yield line


def read_lineage(paths: Iterable[Path]) -> dict[StepId, LoggedRows]:
    """Return what all ranks logged of each (epoch, step), joined in the order of rows.

    A step that was done again after a crash counts once, as it was done last. Where the last time
    had fewer ranks, the rows of the ranks that are gone are left out.

    Raises:
        ConfigError: lines without lineage.
        FileNotFoundError: no such file.
    """
    by_step: dict[StepId, dict[int, tuple[int, LoggedRows]]] = {}
    for path in paths:
        order = None
        for line in read_lines(path):
            try:
                rank, world_size = line["rank"], line["world_size"]
                for entry in line["lineage"]:
                    order = entry.get("order", order)
                    ranks = by_step.setdefault((entry["epoch"], entry["step"]), {})
                    ranks[rank] = world_size, _parse(entry, order)
            except (TypeError, ValueError, AttributeError, LookupError, OverflowError):
                step = escaped(line.get("num_steps"))
                raise ConfigError(
                    f"{path}: step {step} has no lineage: train with --log-keys"
                ) from None
    return {step: _join(ranks) for step, ranks in by_step.items()}


def _parse(entry: Mapping[str, Any], order: Mapping[str, Any] | None) -> LoggedRows:
    planned = np.array(entry["planned"], dtype=np.int64).reshape(-1, 2)
    if "rows" in entry:
        shown = planned.copy()
        shown[entry.get("left_out", [])] = UNFILLED
        of_row = entry.get("substitutes", {}).items()
        substitutes = {int(row): [(int(s), int(i)) for s, i in refs] for row, refs in of_row}
        numbers = np.array(entry["rows"], dtype=np.int64)
        return LoggedRows(entry["start"], planned, shown, order, numbers, substitutes)
    shown = planned.copy() if entry.get("shown") else planned
    for row, ref in entry.get("shown", {}).items():
        shown[int(row) - entry["start"]] = UNFILLED if ref is None else ref
    return LoggedRows(entry["start"], planned, shown, order)


def _join(ranks: Mapping[int, tuple[int, LoggedRows]]) -> LoggedRows:
    """Join the rows of ranks. Rank 0 is always there and knows the last world size."""
    last_world_size = ranks[min(ranks)][0]
    rows: Sequence[LoggedRows] = sorted(
        (logged for world_size, logged in ranks.values() if world_size == last_world_size),
        key=lambda logged: logged.start,
    )
    planned = np.concatenate([logged.planned for logged in rows])
    shown = np.concatenate([logged.shown for logged in rows])
    if rows[0].rows is None:
        return LoggedRows(rows[0].start, planned, shown, rows[0].order)
    numbers = np.concatenate([logged.rows for logged in rows if logged.rows is not None])
    by_row = np.argsort(numbers, kind="stable")  # packs are dealt to ranks
    substitutes = {row: refs for logged in rows for row, refs in logged.substitutes.items()}
    return LoggedRows(
        rows[0].start,
        planned[by_row],
        shown[by_row],
        rows[0].order,
        numbers[by_row],
        substitutes,
    )
