"""Proof that a run kept the order's promises: its training logs against the plan.

In: the metrics that ``mmstream train --log-keys`` writes. Out: counts that are all zero when every
sample was seen exactly once an epoch, in the planned global batches.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmstream.dataset import Dataset
from mmstream.order import Order

__all__ = ["Proof", "Steps", "prove", "read_steps"]

Steps = dict[tuple[int, int], dict[str, Any]]


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


def prove(
    dataset: Dataset, order: Order, disturbed: Steps, undisturbed: Steps, num_epochs: int
) -> Proof:
    """Compare what two runs logged with each other and with the plan."""
    keys = {
        (shard, index): dataset.read(shard, index)["__key__"]
        for shard in range(dataset.num_shards)
        for index in range(int(dataset.counts[shard]))
    }
    plan: dict[tuple[int, int], list[str]] = {}
    for epoch in range(num_epochs):
        for step in range(order.steps_per_epoch):
            refs = order.refs(epoch, step)
            rows = zip(refs.shard.tolist(), refs.index.tolist(), strict=True)
            plan[epoch, step] = [keys[row] for row in rows]
    seen = {epoch: Counter[str]() for epoch in range(num_epochs)}
    for (epoch, _), line in disturbed.items():
        seen[epoch].update(line["keys"])
    planned = [(epoch, key) for (epoch, _), batch in plan.items() for key in batch]
    losses = [
        abs(disturbed[at]["loss"] - line["loss"]) / max(abs(line["loss"]), 1e-9)
        for at, line in undisturbed.items()
        if at in disturbed
    ]
    return Proof(
        num_steps=len(disturbed),
        lost=sum(seen[epoch][key] == 0 for epoch, key in planned),
        repeated=sum(n - 1 for counts in seen.values() for n in counts.values() if n > 1),
        unplanned=sum(disturbed.get(at, {}).get("keys") != batch for at, batch in plan.items()),
        different=sum(
            disturbed.get(at, {}).get("keys") != undisturbed.get(at, {}).get("keys") for at in plan
        ),
        loss_difference=max(losses, default=float("inf")),
    )


def read_steps(folder: Path) -> Steps:
    """Return the history of a run: (epoch, step) -> its line, with the keys of all ranks."""
    steps: Steps = {}
    for path in sorted(folder.glob("metrics-rank*.jsonl")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            at = line["epoch"], line["step"]
            known = steps.setdefault(at, {**line, "keys": []})
            known["keys"] = known["keys"] + line["keys"]
    return steps
