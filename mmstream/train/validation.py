"""Validation: the exact mean loss of a second dataset. It does not affect the training data.

    loop.fit -> `Validation.run`

The second loader has its own workers and its own state. The state is reset before each pass, so
each pass has the same batches.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from mmstream.device.to_device import DeviceLoader
from mmstream.errors import MMStreamError
from mmstream.train.config import TrainConfig
from mmstream.train.distributed import StopRequest, TrainProcess
from mmstream.train.step import Trained, autocast, micro_batches_of

__all__ = ["Validation"]


@dataclass
class Validation:
    """Validation passes over the batches of a loader.

    Args:
        batches: validation data on this rank's device, not shuffled, with ``drop_last=False``. So
            each sample comes once, and the last batch is filled with invalid rows.

    Attributes:
        start: state of the loader from which each pass starts.
    """

    batches: DeviceLoader
    start: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.batches.state_dict()

    def run(
        self, trained: Trained, process: TrainProcess, stop: StopRequest, config: TrainConfig
    ) -> dict[str, float] | None:
        """Run one pass over the validation data.

        Args:
            trained: the model.
            process: this rank.
            stop: the signals received so far; a signal on any rank ends the pass.
            config: says into which micro-batches a batch is cut.

        Returns:
            A dict, the same on every rank; None if a signal ended the pass.

            - loss: sum of loss_sum over sum of weight, over all valid rows of all ranks. A
              contrastive loss belongs to a whole batch: then it is the mean of the losses of the
              batches, weighted by their rows.
            - weight: those rows or tokens.
            - seconds: time that the pass took.

        Raises:
            MMStreamError: no row is valid and has a label, so there is no loss.
        """
        started = time.perf_counter()
        loss_sum = weight = torch.zeros((), dtype=torch.float64, device=process.device)
        self.batches.load_state_dict(self.start)
        trained.model.eval()
        try:
            for batch in self.batches:
                if process.sum_over_ranks(sum(stop.flags())).item():
                    return None
                with torch.no_grad(), autocast(trained.precision, process.device):
                    for micro_batch in micro_batches_of(batch, config, trained.model):
                        batch_loss, batch_weight = trained.model(micro_batch)
                        loss_sum = loss_sum + batch_loss
                        weight = weight + batch_weight
        finally:
            trained.model.train()
        total_loss, total_weight = process.sum_over_ranks(loss_sum, weight).tolist()
        if not total_weight:
            raise MMStreamError(
                "validation: no row is valid and has a label; look at the labels of its texts, at "
                "max_length and at its bad samples"
            )
        return {
            "loss": total_loss / total_weight,
            "weight": total_weight,
            "seconds": time.perf_counter() - started,
        }
