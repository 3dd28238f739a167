"""Lineage in training logs: written by ``mmstream train --log-keys``, read to be checked.

A line of ``metrics-rank{r}.jsonl`` then has ``keys`` (of this rank's samples, as shown) and
``lineage``, one entry a loader step since the line before, so that no step is without:

    {"epoch": 0, "step": 5, "start": 8, "planned": [[0, 17], [3, 2]], "shown": {"9": [3, 40]}}

`planned` is (shard, index) of the rows from `start` on. `shown` names, by row of the global batch,
only what differs: a substitute, or null for a row that nothing could fill. The first entry of a run
and each with another order than the one before also have ``order``, the identity as in a state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmstream.errors import ConfigError
from mmstream.types import IntArray

__all__ = ["Logged", "SampleLog", "log_files", "read_lineage", "read_lines"]


UNFILLED = (-1, -1)
"""What an array says of a row that showed nothing."""


class SampleLog:
    """Gathers what `log_keys` adds to the lines of a training log; nothing unless `wanted`."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._keys: list[str] = []
        self._lineage: list[dict[str, Any]] = []
        self._order: Any = None

    def add(
        self, batches: Iterable[Mapping[str, Any]], order: Mapping[str, Any] | None = None
    ) -> None:
        """Note the batches of an optimizer step.

        Args:
            batches: in the order of steps.
            order: the identity of their order, ``state["order"]``; written where it changes.
        """
        for batch in batches if self._wanted else ():
            self._keys += batch["__key__"]
            entry = _describe(batch["__lineage__"])
            if order != self._order:
                self._order = entry["order"] = order
            self._lineage.append(entry)

    def take(self) -> dict[str, Any]:
        """Return what the next line gets, and forget it; nothing when nothing was noted."""
        keys, lineage, self._keys, self._lineage = self._keys, self._lineage, [], []
        return {"keys": keys, "lineage": lineage} if lineage else {}


def _describe(lineage: Any) -> dict[str, Any]:
    unfilled = {record.row for record in lineage.bad if record.substitute is None}
    shown = {
        str(row): None if row in unfilled else ref
        for row, (planned, ref) in enumerate(
            zip(lineage.planned, lineage.shown, strict=True), start=lineage.start
        )
        if planned != ref or row in unfilled
    }
    at = {"epoch": lineage.epoch, "step": lineage.step, "start": lineage.start}
    return at | {"planned": lineage.planned} | ({"shown": shown} if shown else {})


class Logged(NamedTuple):
    """One step's rows, of one rank or of all, int64 [rows, 2] of (shard, index)."""

    start: int
    planned: IntArray
    shown: IntArray
    """`UNFILLED` where a row showed nothing."""
    order: Mapping[str, Any] | None = None
    """The identity of the order that planned it; None where the log does not say."""


def log_files(paths: Iterable[str | Path]) -> list[Path]:
    """Return the metrics of all ranks: files as they are, and those in folders.

    Raises:
        ConfigError: a folder without metrics.
        FileNotFoundError: no such file.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(path.glob("metrics-rank*.jsonl")) if path.is_dir() else [path]
        if not inside:
            raise ConfigError(f"{path}: no metrics-rank*.jsonl in it")
        found += inside
    return found


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of one rank's metrics; a last one that a crash has torn is passed over.

    Raises:
        ConfigError: a line that is no JSON object.
        FileNotFoundError: no such file.
    """
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
            except ValueError:
                if not text.endswith("\n"):
                    return
                raise ConfigError(f"{path}:{number}: not a line of metrics") from None
            if not isinstance(line, dict):
                raise ConfigError(f"{path}:{number}: not a line of metrics")
            yield line


def read_lineage(paths: Iterable[Path]) -> dict[tuple[int, int], Logged]:
    """Return (epoch, step) -> what all ranks logged of it, put together in the order of rows.

    A step that was done again after a crash counts once, as it was done last; of the ranks that
    undid it, those are passed over that the world of the last time does not have.

    Raises:
        ConfigError: lines without lineage.
        FileNotFoundError: no such file.
    """
    parts: dict[tuple[int, int], dict[int, tuple[int, Logged]]] = {}
    for path in paths:
        order = None
        for line in read_lines(path):
            try:
                rank, world_size = line["rank"], line["world_size"]
                for entry in line["lineage"]:
                    order = entry.get("order", order)
                    ranks = parts.setdefault((entry["epoch"], entry["step"]), {})
                    ranks[rank] = world_size, _logged(entry, order)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError):
                raise ConfigError(
                    f"{path}: step {line.get('num_steps')} has no lineage: train with --log-keys"
                ) from None
    return {at: _joined(ranks) for at, ranks in parts.items()}


def _logged(entry: Mapping[str, Any], order: Mapping[str, Any] | None) -> Logged:
    planned = np.array(entry["planned"], dtype=np.int64).reshape(-1, 2)
    shown = planned.copy() if entry.get("shown") else planned
    for row, ref in entry.get("shown", {}).items():
        shown[int(row) - entry["start"]] = UNFILLED if ref is None else ref
    return Logged(entry["start"], planned, shown, order)


def _joined(ranks: Mapping[int, tuple[int, Logged]]) -> Logged:
    now = ranks[min(ranks)][0]
    parts: Sequence[Logged] = sorted(
        (part for world_size, part in ranks.values() if world_size == now),
        key=lambda part: part.start,
    )
    planned, shown = (np.concatenate([part[column] for part in parts]) for column in (1, 2))
    return Logged(parts[0].start, planned, shown, parts[0].order)
