"""Where the time of a run goes: measured in every step, judged at the end, in words.

A step's time on the host has three parts: waiting for the loader, moving the batch to the device
(on a CPU: normalising it), and the rest, computing. On CUDA the host runs ahead, so events on the
stream say in addition how long the device stood still between two steps.
"""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from mmstream.train.distributed import TrainProcess

__all__ = ["Clock", "Times", "bottleneck", "slowest", "summarize"]

LIMITS = 1 / 3
"""A share of the time from which waiting is what limits a run: without it, half as fast again."""

MATTERS = 0.1
"""A share of the time that is worth a word."""

ADVICE = {
    "data": "the step waits for batches: raise num_workers, or make a sample cheaper (smaller "
    "images in the shards, fewer transforms, local shards)",
    "host-to-device": "batches reach the device late: keep images uint8 until they are there "
    "(to_device normalises them), crop smaller, leave out fields that the model does not read",
    "compute": "the model is the limit, the data keeps up: bf16, compile, a larger batch for each "
    "device, or more devices",
}


@dataclass(frozen=True)
class Times:
    """Seconds of some steps."""

    wait_s: float = 0.0
    """The loader had no batch yet."""
    transfer_s: float = 0.0
    """The host copied, pinned and normalised."""
    compute_s: float = 0.0
    """The step itself, as the host sees it."""
    idle_s: float = 0.0
    """CUDA: between two steps the device had no kernel to run."""

    @property
    def total_s(self) -> float:
        """All of it; idle time lies within the other parts."""
        return self.wait_s + self.transfer_s + self.compute_s

    def __add__(self, other: Times) -> Times:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Times(*(mine + theirs for mine, theirs in pairs))


class Clock:
    """Measures the steps of one rank; `lap` gives the times since the last lap.

    Args:
        device: on CUDA the device's own time is measured too.
        stats: the loader's, whose ``wait_s`` tells waiting from moving; without it all is waiting.
    """

    def __init__(self, device: torch.device, stats: Any) -> None:
        self._lap = Times()
        self._stats = stats
        self._cuda = device.type == "cuda"
        self._gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._step_end: torch.cuda.Event | None = None
        self.start(paused=True)

    def start(self, *, paused: bool) -> None:
        """Begin to wait for data; what was since the last step is no step's time.

        Args:
            paused: it was long (saving, validating): the device's idle time is not counted either.
        """
        self._mark = time.perf_counter()
        self._waited = self._loader_wait()
        if paused:
            self._step_end = None

    def arrived(self) -> None:
        """The step's data is here."""
        now = time.perf_counter()
        took = now - self._mark
        wait = took if self._waited is None else (self._loader_wait() or 0.0) - self._waited
        wait = min(wait, took)
        self._lap += Times(wait_s=wait, transfer_s=took - wait)
        self._mark = now
        if self._cuda and self._step_end is not None:
            self._gaps.append((self._step_end, self._event()))

    def done(self) -> None:
        """The step is done, or on CUDA: given to the device."""
        self._lap += Times(compute_s=time.perf_counter() - self._mark)
        if self._cuda:
            self._step_end = self._event()

    def lap(self) -> Times:
        """Return the times since the last lap; the device must have done its steps."""
        idle = sum(before.elapsed_time(after) for before, after in self._gaps) / 1000
        self._gaps.clear()
        lap, self._lap = replace(self._lap, idle_s=idle), Times()
        return lap

    def _loader_wait(self) -> float | None:
        return getattr(self._stats, "wait_s", None)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def bottleneck(times: Times) -> str:
    """Return what limits a run: "data", "host-to-device" or "compute".

    Data and transfer only from a third of the time on.
    """
    worst, share = _worst(times)
    return worst if share >= LIMITS else "compute"


def _worst(times: Times) -> tuple[str, float]:
    """Return what the model waits for most, and its share of the time.

    The device's idle time that the host did not wait for is a copy's that came late.
    """
    late = max(0.0, times.idle_s - times.wait_s - times.transfer_s)
    seconds = {"data": times.wait_s, "host-to-device": times.transfer_s + late}
    worst = max(seconds, key=lambda name: seconds[name])
    return worst, seconds[worst] / max(times.total_s, 1e-9)


def slowest(times: Times, process: TrainProcess) -> Times:
    """Return the times of the rank that waits most for its data: all others wait for it."""
    if process.world_size == 1:
        return times
    mine = torch.tensor(astuple(times), dtype=torch.float64, device=process.device)
    every = [torch.empty_like(mine) for _ in range(process.world_size)]
    dist.all_gather(every, mine)
    found = [Times(*rank.tolist()) for rank in every]
    return max(found, key=lambda rank: rank.wait_s + rank.transfer_s)


def summarize(times: Times, num_steps: int, num_samples: float, *, cuda: bool) -> str:
    """Return the end of a run in words: speed, where the time went, the bottleneck, what to do."""
    total = max(times.total_s, 1e-9)
    name = bottleneck(times)
    idle = f", device idle between steps {times.idle_s / total:.0%}" if cuda else ""
    worst, share = _worst(times)
    also = f". Worth {share:.0%} of the time: {worst}: {ADVICE[worst]}"
    return (
        f"{num_steps:,} steps in {times.total_s:.1f} s, {num_samples / total:,.0f} samples/s; "
        f"waiting for data {times.wait_s / total:.0%}, moving it {times.transfer_s / total:.0%}, "
        f"computing {times.compute_s / total:.0%}{idle}. Bottleneck: {name}: {ADVICE[name]}"
        + also
        * (name == "compute" and share >= MATTERS)
    )
