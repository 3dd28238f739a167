"""The validation pass: the mean loss of a second dataset, exactly, and the training none the wiser.

The second loader has its own workers and its own state, which is set back before each pass, so each
pass sees the same batches, and the training stream stands where it stood.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from mmstream.batching.split import split_rows
from mmstream.device.to_device import DeviceLoader
from mmstream.train.distributed import StopRequest, TrainProcess
from mmstream.train.step import Trained, autocast, tensors_of

__all__ = ["Validation"]


@dataclass
class Validation:
    """Passes over the batches of a loader, the last of them filled up with invalid rows.

    Args:
        batches: on this rank's device, without shuffling and without dropping the last step.
        start: the loader's state from which each pass starts.
    """

    batches: DeviceLoader
    start: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.batches.state_dict()

    def run(
        self, trained: Trained, process: TrainProcess, stop: StopRequest, micro_batches: int = 1
    ) -> dict[str, float] | None:
        """Return what to log of one pass, the same on every rank; None when a signal ended it.

        ``loss`` is the sum of loss_sum over the sum of weight, over all valid rows of all ranks:
        for a contrastive loss, which is one of whole batches, the mean of the batches' losses
        weighted by their rows. ``weight`` are those rows or tokens, ``seconds`` what it took.
        """
        began = time.perf_counter()
        loss = weight = torch.zeros((), dtype=torch.float64, device=process.device)
        self.batches.load_state_dict(self.start)
        trained.model.eval()
        try:
            for batch in self.batches:
                if process.sum_over_ranks(sum(stop.flags())).item():
                    return None
                with torch.no_grad(), autocast(trained.precision, process.device):
                    for part in split_rows(tensors_of(batch), micro_batches):
                        loss_sum, counted = trained.model(part)
                        loss, weight = loss + loss_sum, weight + counted
        finally:
            trained.model.train()
        sums = process.sum_over_ranks(loss, weight).tolist()
        seconds = time.perf_counter() - began
        return {"loss": sums[0] / max(sums[1], 1.0), "weight": sums[1], "seconds": seconds}
