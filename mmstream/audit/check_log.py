"""Training logs against the plan: what ``mmstream train --log-keys`` logged, step by step.

References of samples are compared, so nothing is read but the logs, of a corpus of any size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mmstream.audit.training_log import UNFILLED, Logged
from mmstream.dataset.source import ShardSource
from mmstream.errors import StateError, where
from mmstream.order import MAX_ATTEMPTS, AnyOrder
from mmstream.state import STATE_VERSION, order_of_state
from mmstream.types import IntArray

__all__ = ["Check", "check_logs", "orders_logged", "steps_logged"]


At = tuple[int, int]
"""(epoch, step)."""

Orders: TypeAlias = AnyOrder | Callable[[int], AnyOrder]
"""The order of all epochs, or the one of an epoch: settings may change where one begins."""


@dataclass(frozen=True)
class Check:
    """What the logs of a run say, set beside its plan."""

    num_steps: int
    """Steps that were looked at."""
    num_samples: int
    """Samples that they plan."""
    lost: int
    """Planned samples that no logged batch planned."""
    repeated: int
    """Samples that logged batches of an epoch planned more often than the order does."""
    unplanned: int
    """Steps that are not as planned: not logged, other rows, or another sample in place of a bad
    one than the order gives."""
    substituted: int
    """Rows that showed a substitute."""
    unfilled: int
    """Rows that showed nothing."""
    faults: tuple[str, ...]
    """The first steps that are not as planned, in words."""

    @property
    def holds(self) -> bool:
        """Whether all was delivered as planned."""
        return self.lost + self.repeated + self.unplanned == 0


def check_logs(
    order: Orders,
    logged: Mapping[At, Logged],
    steps: Iterable[At],
    *,
    name_of: Callable[[int], str] = str,
    max_faults: int = 10,
) -> Check:
    """Compare what was logged with the plan.

    Args:
        order: of the run.
        logged: see `audit.training_log.read_lineage`.
        steps: (epoch, step) that should be there, in rising order; others count as unplanned.
        name_of: a shard's name, for the words.
        max_faults: most steps to tell in words.
    """
    left, told = dict(logged), _Tally(order, name_of)
    for epoch, group in groupby(steps, key=lambda at: at[0]):
        for at in group:
            told.compare(at, left.pop(at, None))
        strays = [at for at in left if at[0] == epoch]
        for at in strays:
            told.stray(at, left.pop(at))
        told.end_epoch()
    for at, rows in left.items():
        told.stray(at, rows)
    told.end_epoch()
    return Check(
        told.num_steps, told.num_samples, told.lost, told.repeated, told.unplanned,
        told.substituted, told.unfilled, tuple(told.faults[:max_faults]),
    )  # fmt: skip


class _Tally:
    """Counts, an epoch at a time."""

    def __init__(self, order: Orders, name_of: Callable[[int], str]) -> None:
        self._order_of, self._name_of = _by_epoch(order), name_of
        self.num_steps = self.num_samples = self.lost = self.repeated = 0
        self.unplanned = self.substituted = self.unfilled = 0
        self.faults: list[str] = []
        self._planned: list[IntArray] = []
        self._logged: list[IntArray] = []

    def compare(self, at: At, rows: Logged | None) -> None:
        """Count a step of the plan, and what was logged of it."""
        refs = self._order_of(at[0]).refs(*at)
        plan = np.stack([refs.shard, refs.index], axis=1)
        self.num_steps += 1
        self.num_samples += int(refs.valid.sum())
        self._planned.append(_codes(plan[refs.valid]))
        fault: str | None = "not in the logs"
        if rows is not None:
            whole = rows.start == 0 and len(rows.planned) == len(plan)
            self._count(rows, refs.valid if whole else np.ones(len(rows.planned), dtype=np.bool_))
            fault = self._difference(at, plan, refs.valid, rows) if whole else (
                f"rows {rows.start} to {rows.start + len(rows.planned) - 1} are logged of "
                f"0 to {len(plan) - 1}: these must be the logs of all ranks, and of a run whose "
                "state this is"
            )  # fmt: skip
        self._say(at, fault)

    def stray(self, at: At, rows: Logged) -> None:
        """Count a logged step that should not be there."""
        self._count(rows, np.ones(len(rows.planned), dtype=np.bool_))
        self._say(at, "not in the plan")

    def end_epoch(self) -> None:
        """Count what is lost and repeated in the epoch that ends here."""
        if self._planned or self._logged:
            planned, logged = (
                np.concatenate([*c, _NOTHING]) for c in (self._planned, self._logged)
            )
            codes, places = np.unique(np.concatenate([planned, logged]), return_inverse=True)
            missing = np.bincount(places[: planned.size], minlength=codes.size)
            missing -= np.bincount(places[planned.size :], minlength=codes.size)
            self.lost += int(missing[missing > 0].sum())
            self.repeated -= int(missing[missing < 0].sum())
        self._planned, self._logged = [], []

    def _count(self, rows: Logged, counted: npt.NDArray[np.bool_]) -> None:
        empty = (rows.shown == UNFILLED).all(axis=1) & counted
        other = (rows.shown != rows.planned).any(axis=1) & counted
        self.unfilled += int(empty.sum())
        self.substituted += int((other & ~empty).sum())
        self._logged.append(_codes(rows.planned[counted]))

    def _difference(
        self, at: At, plan: IntArray, valid: npt.NDArray[np.bool_], rows: Logged
    ) -> str | None:
        """Say where a step differs from the plan first; None where it does not."""
        for row in np.flatnonzero((rows.planned != plan).any(axis=1)).tolist():
            planned, logged = self._name(plan[row]), self._name(rows.planned[row])
            return f"row {row}: planned {planned}, logged {logged}"
        other = (rows.shown != plan).any(axis=1) & (rows.shown != UNFILLED).all(axis=1) & valid
        for row in np.flatnonzero(other).tolist():
            shown = tuple(rows.shown[row].tolist())
            order = self._order_of(at[0])
            due = (order.substitute(*at, row, attempt) for attempt in range(MAX_ATTEMPTS))
            if shown not in due:
                return f"row {row}: {self._name(shown)} is no substitute of {self._name(plan[row])}"
        return None

    def _say(self, at: At, fault: str | None) -> None:
        if fault is not None:
            self.unplanned += 1
            self.faults.append(f"epoch {at[0]} step {at[1]}: {fault}")

    def _name(self, ref: Iterable[int]) -> str:
        shard, index = ref
        return where(self._name_of(int(shard)), int(index))


_NOTHING = np.zeros(0, dtype=np.int64)


def _codes(refs: IntArray) -> IntArray:
    """Return one integer for each (shard, index)."""
    return refs[:, 0] << 32 | refs[:, 1]


def steps_logged(order: Orders, logged: Iterable[At]) -> Iterator[At]:
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
    order: AnyOrder, logged: Mapping[At, Logged], dataset: ShardSource
) -> Callable[[int], AnyOrder]:
    """Return the order of each epoch of a run whose settings may have changed between two epochs.

    Args:
        order: of a state of the run. Where the logs know no epoch of it, they are of another run or
            say nothing of orders, and this one counts for all.
        logged: all that the run logged.
        dataset: that of the run.

    The function that is returned raises StateError for an epoch whose order cannot be made of this
    dataset any more.
    """
    known: dict[int, str] = {}
    for (epoch, _), rows in sorted(logged.items(), key=lambda item: item[0]):
        if rows.order is not None:
            known[epoch] = json.dumps(rows.order, sort_keys=True)
    mine = json.dumps(order.identity(), sort_keys=True)
    if mine not in known.values():
        return lambda _epoch: order

    @cache
    def made(identity: str) -> AnyOrder:
        state = {"version": STATE_VERSION, "epoch": 0, "step": 0, "order": json.loads(identity)}
        return order_of_state(state, dataset)[0]

    def of(epoch: int) -> AnyOrder:
        before = max((known_one for known_one in known if known_one <= epoch), default=min(known))
        try:
            return order if known[before] == mine else made(known[before])
        except StateError as error:
            raise StateError(f"epoch {epoch}: {error}; --epoch N checks another alone") from None

    return of
