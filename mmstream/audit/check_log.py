"""Training logs against the plan: what ``mmstream train --log-keys`` logged, step by step.

It compares references of samples. So it reads nothing but the logs, for a dataset of any size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mmstream.audit.training_log import (
    UNFILLED,
    LoggedRows,
    StepId,
    log_files,
    read_lineage,
    read_lines,
)
from mmstream.dataset.source import ShardSource
from mmstream.errors import ConfigError, StateError, where
from mmstream.order import MAX_ATTEMPTS, AnyOrder
from mmstream.order.corpus import CONTENT_KEYS, differing_keys, same_order
from mmstream.packing.order import PackOrder
from mmstream.state import STATE_VERSION, order_of_state
from mmstream.types import IntArray

MAX_FAULTS = 10
"""Steps that are told in words."""


Orders: TypeAlias = AnyOrder | Callable[[int], AnyOrder]
"""One order for all epochs, or the order of each epoch: settings may change between epochs."""


@dataclass(frozen=True)
class Check:
    """The logs of a run, compared with its plan."""

    num_steps: int
    """Steps that were compared."""
    num_samples: int
    """Samples that they plan."""
    lost: int
    """Planned samples that no logged batch has planned."""
    repeated: int
    """Samples that the logged batches of an epoch have planned more often than the order does."""
    unplanned: int
    """Steps that differ from the plan: not logged, other rows, or a wrong substitute."""
    substituted: int
    """Rows that showed a substitute."""
    unfilled: int
    """Rows that showed nothing."""
    faults: tuple[str, ...]
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
        logged: see `audit.training_log.read_lineage`.
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
    return Check(
        counter.num_steps,
        counter.num_samples,
        counter.lost,
        counter.repeated,
        counter.unplanned,
        counter.substituted,
        counter.unfilled,
        tuple(counter.faults[:MAX_FAULTS]),
    )


class _StepCounter:
    """Compares steps with the plan and counts, one epoch at a time."""

    def __init__(self, order: Orders, name_of: Callable[[int], str]) -> None:
        self._order_of_epoch = _by_epoch(order)
        self._name_of = name_of
        self.num_steps = self.num_samples = 0
        self.lost = self.repeated = self.unplanned = 0
        self.substituted = self.unfilled = 0
        self.faults: list[str] = []
        self._planned_codes: list[IntArray] = []
        self._logged_codes: list[IntArray] = []

    def compare(self, step: StepId, rows: LoggedRows | None) -> None:
        """Count a step of the plan, and what was logged of it."""
        refs = self._order_of_epoch(step[0]).refs(*step)
        plan = np.stack([refs.shard, refs.index], axis=1)
        self.num_steps += 1
        self.num_samples += int(refs.valid.sum())
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
        self.lost += int(missing[missing > 0].sum())
        self.repeated -= int(missing[missing < 0].sum())
        self._planned_codes, self._logged_codes = [], []

    def _count(self, rows: LoggedRows, is_counted: npt.NDArray[np.bool_]) -> None:
        is_empty = (rows.shown == UNFILLED).all(axis=1) & is_counted
        is_other = (rows.shown != rows.planned).any(axis=1) & is_counted
        self.unfilled += int(is_empty.sum())
        self.substituted += int((is_other & ~is_empty).sum())
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
            self.unplanned += 1
            self.faults.append(f"epoch {step[0]} step {step[1]}: {fault}")

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
