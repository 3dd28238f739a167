"""Beside the flow: what a run was to deliver, and whether its logs say that it did.

    SampleLog       what ``mmstream train --log-keys`` writes into the lines of a training log
    read_lineage    the same, read
    check_logs      logs against the plan, step by step
    replay          which samples any step delivers, from its state alone, and their keys

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mmstream.dataset import keys
from mmstream.dataset.dataset import DatasetItems, ShardSource, by_dataset
from mmstream.errors import ConfigError, StateError, escaped, where
from mmstream.order import MAX_ATTEMPTS, AnyOrder
from mmstream.order.corpus import CONTENT_KEYS, differing_keys, same_order
from mmstream.packing.order import PackOrder
from mmstream.reading.step import BatchLineage
from mmstream.state import STATE_VERSION, order_of_state
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


# -- training logs against the plan ----------------------------------------------------------------
#
# References of samples are compared. So nothing is read but the logs, for a dataset of any size.

MAX_FAULTS = 10
"""Steps that are told in words."""


Orders: TypeAlias = AnyOrder | Callable[[int], AnyOrder]
"""One order for all epochs, or the order of each epoch: settings may change between epochs."""


@dataclass
class Check:
    """The logs of a run, compared with its plan."""

    num_steps: int = 0
    """Steps that were compared."""
    num_samples: int = 0
    """Samples that they plan."""
    lost: int = 0
    """Planned samples that no logged batch has planned."""
    repeated: int = 0
    """Samples that the logged batches of an epoch have planned more often than the order does."""
    unplanned: int = 0
    """Steps that differ from the plan: not logged, other rows, or a wrong substitute."""
    substituted: int = 0
    """Rows that showed a substitute."""
    unfilled: int = 0
    """Rows that showed nothing."""
    faults: list[str] = field(default_factory=list)
    """The first steps that differ from the plan, in words."""

    @property
    def holds(self) -> bool:
        """Whether everything was delivered as planned."""
        return self.lost + self.repeated + self.unplanned == 0


def check_logs(
    order: Orders,
    logged: Mapping[StepId, LoggedRows],
    steps: Iterable[StepId],
    *,
    name_of: Callable[[int], str] = str,
) -> Check:
    """Compare what was logged with the plan.

    Args:
        order: the order of the run.
        logged: see `read_lineage`.
        steps: the (epoch, step) that the logs should have, rising. Others count as unplanned.
        name_of: the name of a shard, for messages.
    """
    remaining = dict(logged)
    counter = _StepCounter(order, name_of)
    for epoch, group in groupby(steps, key=lambda step: step[0]):
        for step in group:
            counter.compare(step, remaining.pop(step, None))
        for step in [step for step in remaining if step[0] == epoch]:
            counter.add_unplanned(step, remaining.pop(step))
        counter.end_epoch()
    for step, rows in remaining.items():
        counter.add_unplanned(step, rows)
    counter.end_epoch()
    return counter.check


class _StepCounter:
    """Compares steps with the plan and counts, one epoch at a time."""

    def __init__(self, order: Orders, name_of: Callable[[int], str]) -> None:
        self._order_of_epoch = _by_epoch(order)
        self._name_of = name_of
        self.check = Check()
        self._planned_codes: list[IntArray] = []
        self._logged_codes: list[IntArray] = []

    def compare(self, step: StepId, rows: LoggedRows | None) -> None:
        """Count a step of the plan, and what was logged of it."""
        refs = self._order_of_epoch(step[0]).refs(*step)
        plan = np.stack([refs.shard, refs.index], axis=1)
        self.check.num_steps += 1
        self.check.num_samples += int(refs.valid.sum())
        self._planned_codes.append(_codes(plan[refs.valid]))
        if rows is None:
            self._add_fault(step, "not in the logs")
        elif rows.start == 0 and len(rows.planned) == len(plan):
            self._count(rows, refs.valid)
            self._add_fault(step, self._difference(step, plan, refs.valid, rows))
        else:
            self._count(rows, np.ones(len(rows.planned), dtype=np.bool_))
            self._add_fault(
                step,
                f"rows {rows.start} to {rows.start + len(rows.planned) - 1} are logged of "
                f"0 to {len(plan) - 1}: these must be the logs of all ranks, and of a run whose "
                "state this is",
            )

    def add_unplanned(self, step: StepId, rows: LoggedRows) -> None:
        """Count a logged step that the plan does not have."""
        self._count(rows, np.ones(len(rows.planned), dtype=np.bool_))
        self._add_fault(step, "not in the plan")

    def end_epoch(self) -> None:
        """Count what is lost and repeated in the epoch that ends here.

        Example: planned a, b, b and logged a, a, b. One b is lost, one a is repeated.
        """
        empty = np.zeros(0, dtype=np.int64)
        planned = np.concatenate([*self._planned_codes, empty])
        logged = np.concatenate([*self._logged_codes, empty])
        codes, code_of_row = np.unique(np.concatenate([planned, logged]), return_inverse=True)
        missing = np.bincount(code_of_row[: planned.size], minlength=codes.size)
        missing -= np.bincount(code_of_row[planned.size :], minlength=codes.size)
        self.check.lost += int(missing[missing > 0].sum())
        self.check.repeated -= int(missing[missing < 0].sum())
        self._planned_codes, self._logged_codes = [], []

    def _count(self, rows: LoggedRows, is_counted: npt.NDArray[np.bool_]) -> None:
        is_empty = (rows.shown == UNFILLED).all(axis=1) & is_counted
        is_other = (rows.shown != rows.planned).any(axis=1) & is_counted
        self.check.unfilled += int(is_empty.sum())
        self.check.substituted += int((is_other & ~is_empty).sum())
        self._logged_codes.append(_codes(rows.planned[is_counted]))

    def _difference(
        self, step: StepId, plan: IntArray, valid: npt.NDArray[np.bool_], rows: LoggedRows
    ) -> str | None:
        """Return the first difference of a step from the plan, in words. None: there is none."""
        for row in np.flatnonzero((rows.planned != plan).any(axis=1)).tolist():
            planned, logged = self._name(plan[row]), self._name(rows.planned[row])
            return f"row {row}: planned {planned}, logged {logged}"
        is_substitute = (
            (rows.shown != plan).any(axis=1) & (rows.shown != UNFILLED).all(axis=1) & valid
        )
        order = self._order_of_epoch(step[0])
        for row in np.flatnonzero(is_substitute).tolist():
            ref = tuple(rows.shown[row].tolist())
            substitutes = (
                order.substitute_unit(*step, row, attempt).refs[0]
                for attempt in range(MAX_ATTEMPTS)
            )
            if ref not in substitutes:
                name, of = self._name(ref), self._name(plan[row])
                return f"row {row}: {name} is not a substitute of {of}"
        for row, refs in rows.substitutes.items():
            packs = (
                set(order.substitute_unit(*step, row, attempt).refs)
                for attempt in range(MAX_ATTEMPTS)
            )
            if not any(set(refs) <= pack for pack in packs):
                return f"row {row}: {self._name(refs[0])} is of no substitute of this pack"
        return None

    def _add_fault(self, step: StepId, fault: str | None) -> None:
        if fault is not None:
            self.check.unplanned += 1
            if len(self.check.faults) < MAX_FAULTS:
                self.check.faults.append(f"epoch {step[0]} step {step[1]}: {fault}")

    def _name(self, ref: Iterable[int]) -> str:
        shard, index = ref
        return where(self._name_of(int(shard)), int(index))


def _codes(refs: IntArray) -> IntArray:
    """Return one integer for each (shard, index)."""
    return refs[:, 0] << 32 | refs[:, 1]


def steps_logged(order: Orders, logged: Iterable[StepId]) -> Iterator[StepId]:
    """Yield every (epoch, step) from the first logged one to the last."""
    first, last = min(logged), max(logged)
    for epoch in range(first[0], last[0] + 1):
        num_steps = _by_epoch(order)(epoch).steps_per_epoch
        start = first[1] if epoch == first[0] else 0
        stop = last[1] + 1 if epoch == last[0] else num_steps
        for step in range(start, min(stop, num_steps)):
            yield epoch, step


def _by_epoch(order: Orders) -> Callable[[int], AnyOrder]:
    return order if callable(order) else lambda _epoch: order


def orders_logged(
    order: AnyOrder, logged: Mapping[StepId, LoggedRows], source: ShardSource
) -> Callable[[int], AnyOrder]:
    """Return the order of each epoch of a run whose settings may have changed between epochs.

    The returned function raises StateError for an epoch whose order needs another dataset.

    Args:
        order: of a state of the run. It counts for all epochs where the logs do not mention it:
            they are of another run, or say nothing about orders.
        logged: all that the run logged.
        source: the dataset or mixture of the run.

    Raises:
        ConfigError: the logs hold something else in the place of an order.
        StateError: the logs are of another corpus with the same names and counts.
    """
    identity_from_epoch: dict[int, str] = {}
    for (epoch, _), rows in sorted(logged.items(), key=lambda item: item[0]):
        if rows.order is not None:
            identity_from_epoch[epoch] = json.dumps(rows.order, sort_keys=True)
    present = json.loads(json.dumps(order.identity()))
    identities = {text: json.loads(text) for text in identity_from_epoch.values()}
    try:
        of_present = {
            text for text, identity in identities.items() if same_order(identity, present)
        }
        if not of_present:
            for identity in identities.values():
                _refuse_other_content(identity, present)
            return lambda _epoch: order
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"not an order in these logs: {type(error).__name__}: {error}") from None

    @cache
    def order_of_identity(text: str) -> AnyOrder:
        state = {"version": STATE_VERSION, "epoch": 0, "step": 0, "order": identities[text]}
        plan = order.plan if isinstance(order, PackOrder) else None
        return order_of_state(state, source, plan)[0]

    def order_of_epoch(epoch: int) -> AnyOrder:
        earlier_epochs = [start for start in identity_from_epoch if start <= epoch]
        text = identity_from_epoch[max(earlier_epochs, default=min(identity_from_epoch))]
        try:
            return order if text in of_present else order_of_identity(text)
        except StateError as error:
            raise StateError(f"epoch {epoch}: {error}; --epoch N checks another alone") from None

    return order_of_epoch


def _refuse_other_content(logged: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise StateError where logs are of a corpus of the same shape with other bytes."""
    sources = {source["name"]: source for source in present.get("sources", ())}
    pairs = [("the dataset", logged, present)] + [
        (f"source {source['name']}", source, sources.get(source["name"], {}))
        for source in logged.get("sources", ())
    ]
    for subject, was, now in pairs:
        differing = set(differing_keys(was, now))
        if differing & set(CONTENT_KEYS) and not differing & {"corpus", "num_shards"}:
            raise StateError(
                f"{subject} is not the one of these logs: names and sample counts are the same, "
                "the shards' bytes are not; give the shards that the run was trained on"
            )


# -- the logs of a run ----------------------------------------------------------------------------

MetricsLines: TypeAlias = dict[StepId, dict[str, Any]]


class History(NamedTuple):
    """The logs of a run of ``mmstream train --log-keys``."""

    lines: MetricsLines
    """The line of metrics of each (epoch, step), with the keys of all ranks."""
    rows: dict[StepId, LoggedRows]


def read_history(folder: Path) -> History:
    """Return the history of a run from the folder of its metrics."""
    paths = log_files([folder])
    lines: MetricsLines = {}
    for path in paths:
        for line in read_lines(path):
            merged = lines.setdefault((line["epoch"], line["step"]), {**line, "keys": []})
            merged["keys"] = merged["keys"] + line["keys"]
    return History(lines, read_lineage(paths))


# -- the samples of any past or future step of a run, from its state and the manifest alone --------
#
# state -> order -> rows of a step [-> keys, one tar header per sample]
#
# It reads no payload, so a step is known in milliseconds for a dataset of any size. Substitutes of
# bad samples are not part of the plan: they are in the training logs and the quarantine file.


def read_keys(source: ShardSource, refs: Sequence[SampleRef]) -> list[str | None]:
    """Return the keys of samples, from their first tar headers alone.

    Reads as `mmstream.dataset.keys.read_keys`. The sources of a mixture are read side by side. A
    key that cannot be read is None and a warning.

    Raises:
        StorageError: storage failed after retries.
    """
    groups = by_dataset(source, [shard for shard, _ in refs])

    def read_one_dataset(group: DatasetItems) -> list[str | None]:
        local_refs = [
            (shard, refs[number][1])
            for shard, number in zip(group.shards, group.numbers, strict=True)
        ]
        prefix = f"{group.source}/" if group.source else ""
        return keys.read_keys(group.dataset.shards, local_refs, prefix=prefix)

    key_of_ref: dict[int, str | None] = {}
    with ThreadPoolExecutor(max(1, len(groups))) as pool:
        for group, keys_of_group in zip(groups, pool.map(read_one_dataset, groups), strict=True):
            key_of_ref |= zip(group.numbers, keys_of_group, strict=True)
    return [key_of_ref[number] for number in range(len(refs))]


class PlannedRow(NamedTuple):
    """One row of a step, as the order says."""

    epoch: int
    step: int
    row: int
    """Row of the global batch."""
    shard: str
    index: int  # type: ignore[assignment]  # the field's name wins over tuple.index
    valid: bool
    """False for the padding of a last, partial step."""
    key: str | None
    """None where it was not asked for or cannot be read."""


def replay(
    source: ShardSource,
    order: AnyOrder,
    epoch: int,
    steps: Iterable[int],
    rows: tuple[int, int] | None = None,
    *,
    keys: bool = False,
) -> Iterator[PlannedRow]:
    """Yield the samples of steps as planned, in the order of the global batch.

    Where rows are packs, a row comes once for each of its samples.

    Args:
        source: names the shards, and holds the keys.
        order: the order of the run, see `state.order_of_state`.
        epoch: any epoch, past or future.
        steps: steps of that epoch.
        rows: [start, stop), the rows of a rank (`ranks.rows_of_rank`). None: all rows.
        keys: whether to read the first tar header of each sample for its key.

    Raises:
        ConfigError: no such epoch or step.
        StorageError: storage failed after retries, with `keys`.
    """
    of_rank = rows or (0, order.global_batch_size)
    for step in steps:
        rows = order.rows_of(epoch, step, of_rank)
        shards, indexes, valid = (column.tolist() for column in order.refs(epoch, step, rows))
        refs = list(zip(shards, indexes, strict=True))
        key_of_row = read_keys(source, refs) if keys else [None] * len(refs)
        counts = order.document_counts(epoch, step, rows)
        row_of_sample = np.repeat(order.order_rows(epoch, step, rows), counts).tolist()
        for row, (shard, index), is_valid, key in zip(
            row_of_sample, refs, valid, key_of_row, strict=True
        ):
            yield PlannedRow(epoch, step, row, source.name_of(shard), index, is_valid, key)
