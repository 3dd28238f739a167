"""Where the time of a run goes: measured at each step, summarised as text at the end.

    loop.fit -> Meter -> `Clock` at each step, `summarize` at the end

The time of a step on the host is divided in three: waiting for the loader, moving the batch to the
device (on a CPU: normalising it), and computing. On CUDA the host runs ahead of the device. So
events on the stream measure how long the device was idle between two steps.
"""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from mmstream.display.markup import count_text
from mmstream.train.distributed import TrainProcess

__all__ = ["Clock", "Times", "bottleneck", "slowest", "summarize"]

BOTTLENECK_SHARE = 1 / 3
"""Share of the time from which waiting is the bottleneck.

A run that waits for a third of the time would be 1.5 times as fast without waiting.
"""

NOTABLE_SHARE = 0.1
"""Share of the time from which waiting is mentioned, even if it is not the bottleneck."""

ADVICE = {
    "data": "training waits for batches: raise num_workers, or make samples cheaper (smaller "
    "images in the shards, fewer transforms, local shards)",
    "host-to-device": "batches reach the device late: keep images uint8 on the host (to_device "
    "normalises them on the device), crop smaller, drop fields that the model does not read",
    "compute": "the data keeps up with the model: to go faster, use bf16, compile, a larger batch "
    "per device, or more devices",
}


@dataclass(frozen=True)
class Times:
    """Seconds that some steps took on the host."""

    wait_s: float = 0.0
    """Waiting for the loader."""
    transfer_s: float = 0.0
    """Pinning, copying and normalising batches."""
    compute_s: float = 0.0
    """The step itself."""
    idle_s: float = 0.0
    """On CUDA: the device was idle between two steps."""

    @property
    def total_s(self) -> float:
        """Wait, transfer and compute time. Idle time overlaps with them."""
        return self.wait_s + self.transfer_s + self.compute_s

    def __add__(self, other: Times) -> Times:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Times(*(left + right for left, right in pairs))


class Clock:
    """Measures the steps of one rank. Each step calls `start`, `arrived` and `done`.

    Args:
        device: on CUDA, the idle time of the device is measured too.
        stats: counts of the loader. Its ``wait_s`` separates waiting from moving; without it, all
            of that time counts as waiting.
    """

    def __init__(self, device: torch.device, stats: Any) -> None:
        self._lap = Times()
        self._stats = stats
        self._cuda = device.type == "cuda"
        self._gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._step_end: torch.cuda.Event | None = None
        self.start(paused=True)

    def start(self, *, paused: bool) -> None:
        """Start to wait for data. The time since the last step is not counted.

        Args:
            paused: True after saving or validating. Then the idle time of the device since the last
                step is not counted either.
        """
        self._mark = time.perf_counter()
        self._loader_wait_before = self._loader_wait()
        if paused:
            self._step_end = None

    def arrived(self) -> None:
        """Stop waiting: the data of the step is on the device."""
        now = time.perf_counter()
        elapsed = now - self._mark
        wait = elapsed
        if self._loader_wait_before is not None:
            wait = min(elapsed, (self._loader_wait() or 0.0) - self._loader_wait_before)
        self._lap += Times(wait_s=wait, transfer_s=elapsed - wait)
        self._mark = now
        if self._cuda and self._step_end is not None:
            self._gaps.append((self._step_end, self._event()))

    def done(self) -> None:
        """End the step. On CUDA its kernels are launched, but may still run."""
        self._lap += Times(compute_s=time.perf_counter() - self._mark)
        if self._cuda:
            self._step_end = self._event()

    def lap(self) -> Times:
        """Return the times since the last call. The device must have finished its steps."""
        idle = sum(before.elapsed_time(after) for before, after in self._gaps) / 1000
        self._gaps.clear()
        lap = replace(self._lap, idle_s=idle)
        self._lap = Times()
        return lap

    def _loader_wait(self) -> float | None:
        return getattr(self._stats, "wait_s", None)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def bottleneck(times: Times) -> str:
    """Return what limits a run: "data", "host-to-device" or "compute".

    "data" and "host-to-device" need a third of the time or more, else it is "compute".
    """
    cause, share = _longest_wait(times)
    return cause if share >= BOTTLENECK_SHARE else "compute"


def _longest_wait(times: Times) -> tuple[str, float]:
    """Return what the model waits for most, and its share of the time.

    If the device was idle for longer than the host waited, the copy to the device was late.
    """
    late = max(0.0, times.idle_s - times.wait_s - times.transfer_s)
    seconds = {"data": times.wait_s, "host-to-device": times.transfer_s + late}
    cause = max(seconds, key=lambda name: seconds[name])
    return cause, seconds[cause] / max(times.total_s, 1e-9)


def slowest(times: Times, process: TrainProcess) -> Times:
    """Return the times of the rank that waits longest for its data: the others wait for it."""
    if process.world_size == 1:
        return times
    own = torch.tensor(astuple(times), dtype=torch.float64, device=process.device)
    gathered = [torch.empty_like(own) for _ in range(process.world_size)]
    dist.all_gather(gathered, own)
    times_of_ranks = [Times(*values.tolist()) for values in gathered]
    return max(times_of_ranks, key=lambda rank_times: rank_times.wait_s + rank_times.transfer_s)


def summarize(times: Times, num_steps: int, num_samples: float, *, cuda: bool) -> list[str]:
    """Return lines: the speed and where the time went, then the bottleneck and what to do."""
    total = max(times.total_s, 1e-9)
    limit = bottleneck(times)
    idle = f", device idle between steps {times.idle_s / total:.0%}" if cuda else ""
    lines = [
        f"{count_text(num_steps, 'step')} in {times.total_s:.1f} s, "
        f"{num_samples / total:,.0f} samples/s; "
        f"waiting for data {times.wait_s / total:.0%}, moving it {times.transfer_s / total:.0%}, "
        f"computing {times.compute_s / total:.0%}{idle}",
        f"Bottleneck: {limit}: {ADVICE[limit]}",
    ]
    cause, share = _longest_wait(times)
    if limit == "compute" and share >= NOTABLE_SHARE:
        lines.append(f"Worth {share:.0%} of the time: {cause}: {ADVICE[cause]}")
    return lines
