"""Who trains: this process's rank, device, process group and threads, and its way out."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from mmstream.errors import ConfigError

__all__ = [
    "StopRequest",
    "TrainProcess",
    "leave_group",
    "leave_on_sigterm",
    "note_signals",
    "process_group",
    "share_threads",
]

ECHO_S = 1.0
"""torchrun passes on what the terminal has sent to all: a signal again so soon is the same one."""


@dataclass(frozen=True)
class TrainProcess:
    """This process among those that train together."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    def sum_over_ranks(self, *values: Tensor | float) -> Tensor:
        """Return the sums of scalars over the ranks, float64 [len(values)], the same on all."""
        sums = torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values]
        )
        if self.world_size > 1:
            dist.all_reduce(sums)
        return sums


@contextmanager
def process_group(device: str | None) -> Iterator[TrainProcess]:
    """Join the group that RANK and WORLD_SIZE announce (torchrun sets them), or stand alone.

    nccl between CUDA devices, gloo between CPUs. A group that the caller has initialised is used
    and left as it is.

    Args:
        device: as in `TrainConfig`.
    """
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        here = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r}: cpu, cuda or cuda:N") from None
    if here.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device {name!r}: this torch finds no CUDA device; use cpu")
        torch.cuda.set_device(here)
    if dist.is_initialized():
        yield TrainProcess(here, dist.get_rank(), dist.get_world_size())
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if here.type == "cuda":
            dist.init_process_group("nccl", device_id=here)
        else:
            dist.init_process_group("gloo")
        try:
            yield TrainProcess(here, dist.get_rank(), dist.get_world_size())
        finally:
            leave_group()
    else:
        yield TrainProcess(here)


def leave_group() -> None:
    """End the process group, and its threads with it.

    DDP lies in reference cycles and holds the group: left to the interpreter's end, a thread of
    gloo now and then meets an interpreter that is gone, and the process aborts (torch 2.13).
    """
    gc.collect()
    dist.destroy_process_group()


def share_threads(num_workers: int) -> None:
    """Share this machine's cores among its ranks and their loader workers.

    torch alone gives every process as many threads as there are cores; its threads wait for each
    other by spinning, so with one core too few a step takes ten times as long. OMP_NUM_THREADS,
    where it is set (torchrun sets 1 for several ranks), has the last word.

    Args:
        num_workers: loader workers of each rank.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    num_cores = len(os.sched_getaffinity(0))  # those that this container may use
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, num_cores // num_ranks - num_workers))


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@contextmanager
def leave_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit(143), so that workers and process group are ended in order.

    Left alone outside the main thread, where Python allows no handlers, and where the caller has
    a handler of their own.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass
class StopRequest:
    """The signals that have asked this process to stop."""

    times: dict[int, float] = field(default_factory=dict)
    """Signal -> when it came first, by the monotonic clock."""

    def flags(self) -> tuple[float, float]:
        """Return 1.0 or 0.0 for SIGTERM and for SIGINT, to be summed over the ranks."""
        return float(signal.SIGTERM in self.times), float(signal.SIGINT in self.times)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal; a second one, Ctrl-C again, leaves at once."""
        now = time.monotonic()
        if now - self.times.setdefault(number, now) > ECHO_S:
            _leave(number, frame)


@contextmanager
def note_signals() -> Iterator[StopRequest]:
    """Note SIGTERM and Ctrl-C instead of leaving, so that a step can end and be saved.

    Handlers that the caller has set are left alone, as are those outside the main thread.
    """
    request = StopRequest()
    replaced = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            before = signal.getsignal(number)
            if before in (signal.SIG_DFL, signal.default_int_handler, _leave):
                replaced[number] = before
                signal.signal(number, request.note)
    try:
        yield request
    finally:
        for number, before in replaced.items():
            signal.signal(number, before)
