"""A disturbed run against an undisturbed one, and both against the plan.

In: the metrics that ``mmstream train --log-keys`` writes. Out: counts that are all zero when every
sample was seen exactly once per epoch, in the planned global batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mmstream.audit.check_log import check_logs
from mmstream.audit.training_log import (
    LoggedRows,
    StepId,
    log_files,
    read_lineage,
    read_lines,
)
from mmstream.order import Order

MetricsLines: TypeAlias = dict[StepId, dict[str, Any]]


class History(NamedTuple):
    """What a run of ``mmstream train --log-keys`` logged."""

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
    """Limit for rounding: the sums of two ranks round differently from those of one."""

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
        abs(disturbed.lines[step]["loss"] - line["loss"]) / max(abs(line["loss"]), 1e-9)
        for step, line in undisturbed.lines.items()
        if step in disturbed.lines
    ]
    return Proof(
        num_steps=len(disturbed.lines),
        lost=check.lost,
        repeated=check.repeated,
        unplanned=check.unplanned,
        different=sum(
            not _is_same(disturbed.rows.get(step), undisturbed.rows.get(step)) for step in plan
        ),
        loss_difference=max(losses, default=float("inf")),
    )


def _is_same(rows: LoggedRows | None, other: LoggedRows | None) -> bool:
    if rows is None or other is None:
        return False
    has_same_plan = np.array_equal(rows.planned, other.planned)
    has_same_substitutes = rows.substitutes == other.substitutes
    return has_same_plan and has_same_substitutes and np.array_equal(rows.shown, other.shown)
