"""How long a run is, and the batches of each of its optimizer steps.

loop.fit -> `length_of` -> `optimizer_steps` -> step.train_step
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

from mmstream.device.to_device import DeviceLoader
from mmstream.train.config import TrainConfig
from mmstream.types import Batch

__all__ = ["RunLength", "length_of", "optimizer_steps"]


@dataclass(frozen=True)
class RunLength:
    """Where a run ends, counted from its start and not from a resume.

    Attributes:
        max_epochs: epochs, or infinity. The run ends at this or at `max_steps`, what comes first.
        max_steps: optimizer steps, or infinity.
        planned_steps: optimizer steps of the epochs, or `max_steps` where no epochs are given. The
            cosine has this length, also where `max_steps` ends the run earlier.
    """

    max_epochs: float
    max_steps: float
    planned_steps: int

    @property
    def last_step(self) -> int:
        """The optimizer step with which the run ends."""
        return int(min(self.planned_steps, self.max_steps))

    def is_reached(self, epoch: int, num_steps: int) -> bool:
        """Tell whether nothing is left to do after so many optimizer steps, in this epoch."""
        return epoch >= self.max_epochs or num_steps >= self.max_steps


def length_of(config: TrainConfig, steps_per_epoch: int) -> RunLength:
    """Return how long a run is, from its settings and the loader steps of an epoch."""
    per_epoch = math.ceil(steps_per_epoch / config.accumulate)
    planned_steps = (config.num_epochs or 0) * per_epoch or config.max_steps or 0
    return RunLength(config.num_epochs or math.inf, config.max_steps or math.inf, planned_steps)


def optimizer_steps(
    batches: DeviceLoader, length: RunLength, accumulate: int, num_steps: int
) -> Generator[list[Batch], None, None]:
    """Yield the batches of each remaining optimizer step, `accumulate` at a time.

    The last group of an epoch may be smaller, so an epoch is a whole number of optimizer steps:
    5 loader steps with ``accumulate=2`` give groups of 2, 2 and 1. After the last step of the run
    no further batch is fetched.

    Args:
        batches: this rank's batches.
        length: where the run ends.
        accumulate: loader steps of an optimizer step.
        num_steps: optimizer steps that are done.
    """
    while not length.is_reached(batches.state_dict()["epoch"], num_steps):
        group: list[Batch] = []
        for batch in batches:
            group.append(batch)
            is_end_of_epoch = batches.state_dict()["step"] == 0
            if len(group) < accumulate and not is_end_of_epoch:
                continue
            yield group
            group = []
            num_steps += 1
            if num_steps == length.max_steps:
                return
