"""What each step is measured by: the numbers of a line of metrics, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mmstream.bad_samples.quarantine import FILTERED, KINDS
from mmstream.train.distributed import TrainProcess
from mmstream.train.summary import Clock, Times, slowest, summarize
from mmstream.types import Batch

__all__ = ["Meter"]


class Meter:
    """Clock and counters of one rank.

    Args:
        stats: the loader's, for its waiting time and its bad samples.
        process: this process among the ranks.
        sources: names of a mixture's sources, whose rows are counted.
    """

    def __init__(self, stats: Any, process: TrainProcess, sources: Iterable[str] = ()) -> None:
        self._stats = stats
        self._process = process
        self._clock = Clock(process.device, stats)
        self._seen = self._nothing = torch.zeros(3, dtype=torch.float64, device=process.device)
        self._rows_of = dict.fromkeys(sources, 0)
        self._last: dict[str, Any] = {}
        self._num_unread = 0
        self._first = self._rest = (Times(), 0, 0.0)

    def start(self, *, paused: bool) -> None:
        """Begin to wait for a step's data; `paused` after saving or validating."""
        self._clock.start(paused=paused)

    def arrived(self, group: list[Batch]) -> None:
        """Count the batches of a step, which are here."""
        self._clock.arrived()
        for batch in group:
            self._seen = self._seen + _count(batch)
            if self._rows_of:
                self._count_sources(batch)
        lineage = group[-1]["__lineage__"]
        self._last = {"epoch": lineage.epoch, "step": lineage.step}

    def _count_sources(self, batch: Batch) -> None:
        lineage = batch["__lineage__"]
        empty = {bad.row for bad in lineage.bad if bad.substitute is None}
        for row, source in enumerate(batch["__source__"], start=lineage.start):
            self._rows_of[source] += row not in empty

    def stepped(self) -> None:
        """The step is given to the device, and has no line of its own."""
        self._clock.done()
        self._num_unread += 1

    def read(self, loss: Tensor, norm: Tensor, *, num_steps: int, lr: float) -> dict[str, Any]:
        """Return the line of this step, rates being since the line before; see `StepLog.write`.

        All ranks together; makes the host wait for the device.

        Args:
            loss: this rank's part of the step's.
            norm: of the gradient, the same on every rank.
            num_steps: optimizer steps, with this one.
            lr: learning rate of the step.
        """
        kinds = getattr(self._stats, "bad", {})
        counts = [*(kinds.get(kind, 0) for kind in KINDS), *self._rows_of.values()]
        whole, tokens, cells, rows, *counts = self._process.sum_over_ranks(
            loss, *self._seen, *counts
        ).tolist()
        bad = {kind: int(count) for kind, count in zip(KINDS, counts, strict=False) if count}
        drawn = zip(self._rows_of, counts[len(KINDS) :], strict=True)
        num_skipped = bad.get(FILTERED, 0)
        self._seen = self._nothing
        self.stepped()
        lap = self._clock.lap()
        self._sum_up(lap, rows)
        seconds = max(lap.total_s, 1e-9)
        line = {
            **self._last,
            "num_steps": num_steps,
            "loss": whole,
            "lr": lr,
            "grad_norm": norm.item(),
            "samples_per_s": round(rows / seconds, 1),
            "tokens_per_s": round(tokens / seconds, 1) if cells else None,
            "padding_fraction": round(1 - tokens / cells, 4) if cells else None,
            "wait_fraction": round(lap.wait_s / seconds, 3),
            "num_bad": sum(bad.values()) - num_skipped,
            "num_skipped": num_skipped,
            "bad": bad,
        }
        if self._rows_of:
            line["sources"] = {name: int(count) for name, count in drawn if count}
            self._rows_of = dict.fromkeys(self._rows_of, 0)
        if self._process.device.type == "cuda":
            line["idle_fraction"] = round(lap.idle_s / seconds, 3)
            line["memory_bytes"] = torch.cuda.max_memory_allocated(self._process.device)
        return line

    def summary(self) -> str:
        """Return the run in words, after the last step's line; all ranks together.

        The steps to the first line are left out, when there are others: they start workers and
        compile kernels.
        """
        first, rest = self._first, self._rest
        times, num_steps, num_samples = rest if rest[1] else first
        cuda = self._process.device.type == "cuda"
        return summarize(slowest(times, self._process), num_steps, num_samples, cuda=cuda)

    def _sum_up(self, lap: Times, num_samples: float) -> None:
        if not self._first[1]:
            self._first = lap, self._num_unread, num_samples
        else:
            times, steps, samples = self._rest
            self._rest = times + lap, steps + self._num_unread, samples + num_samples
        self._num_unread = 0


def _count(batch: Batch) -> Tensor:
    """Return tokens, places for tokens (0 without text) and valid rows, float64 [3]."""
    valid = batch["__valid__"]
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor):
        counts = [torch.zeros_like(valid.sum()), 0, valid.sum()]
    else:
        counts = [(mask * valid[:, None]).sum(), mask.numel(), valid.sum()]
    return torch.stack(
        [torch.as_tensor(count, dtype=torch.float64, device=valid.device) for count in counts]
    )
