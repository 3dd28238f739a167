"""Proof that a run kept the order's promises: its logs against the plan, and against another run's.

In: the metrics that ``mmstream train --log-keys`` writes. Out: counts that are all zero when every
sample was seen exactly once an epoch, in the planned global batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmstream.audit.check_log import check_logs
from mmstream.audit.training_log import Logged, log_files, read_lineage, read_lines
from mmstream.order import Order

__all__ = ["History", "Proof", "Steps", "prove", "read_history"]

Steps = dict[tuple[int, int], dict[str, Any]]


class History(NamedTuple):
    """What a run of ``mmstream train --log-keys`` logged."""

    lines: Steps
    """(epoch, step) -> the line of its metrics, with the keys of all ranks."""
    rows: dict[tuple[int, int], Logged]


def read_history(folder: Path) -> History:
    """Return the history of a run from the folder of its metrics."""
    paths = log_files([folder])
    lines: Steps = {}
    for path in paths:
        for line in read_lines(path):
            known = lines.setdefault((line["epoch"], line["step"]), {**line, "keys": []})
            known["keys"] = known["keys"] + line["keys"]
    return History(lines, read_lineage(paths))


@dataclass(frozen=True)
class Proof:
    """What the logs of a disturbed and an undisturbed run say."""

    num_steps: int
    lost: int
    """Planned samples that no batch showed."""
    repeated: int
    """Samples that an epoch showed more than once."""
    unplanned: int
    """Steps whose global batch is not the planned one."""
    different: int
    """Steps whose global batch is not that of the undisturbed run."""
    loss_difference: float
    """Largest relative difference of a step's loss between the two runs."""
    max_loss_difference: float = 1e-3
    """What float noise may do: sums of two ranks round otherwise than those of one."""

    @property
    def holds(self) -> bool:
        """Whether the data was exact and the losses agree within float noise."""
        exact = self.lost + self.repeated + self.unplanned + self.different == 0
        return exact and self.loss_difference < self.max_loss_difference


def prove(order: Order, disturbed: History, undisturbed: History, num_epochs: int) -> Proof:
    """Compare what two runs logged with each other and with the plan."""
    plan = [(epoch, step) for epoch in range(num_epochs) for step in range(order.steps_per_epoch)]
    check = check_logs(order, disturbed.rows, plan)
    losses = [
        abs(disturbed.lines[at]["loss"] - line["loss"]) / max(abs(line["loss"]), 1e-9)
        for at, line in undisturbed.lines.items()
        if at in disturbed.lines
    ]
    return Proof(
        num_steps=len(disturbed.lines),
        lost=check.lost,
        repeated=check.repeated,
        unplanned=check.unplanned,
        different=sum(not _same(disturbed.rows.get(at), undisturbed.rows.get(at)) for at in plan),
        loss_difference=max(losses, default=float("inf")),
    )


def _same(one: Logged | None, other: Logged | None) -> bool:
    if one is None or other is None:
        return False
    same_plan = np.array_equal(one.planned, other.planned)
    return same_plan and np.array_equal(one.shown, other.shown)
