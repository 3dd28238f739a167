"""Who trains: this process's rank, device, process group and threads, and its way out."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

__all__ = ["Place", "leave_on_sigterm", "process_group", "share_threads"]


@dataclass(frozen=True)
class Place:
    """This process among those that train together."""

    device: torch.device
    rank: int = 0
    world_size: int = 1


@contextmanager
def process_group(device: str | None) -> Iterator[Place]:
    """Join the group that RANK and WORLD_SIZE announce (torchrun sets them), or stand alone.

    nccl between CUDA devices, gloo between CPUs. A group that the caller has initialised is used
    and left as it is.

    Args:
        device: as in `TrainConfig`.
    """
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    here = torch.device(name)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    if dist.is_initialized():
        yield Place(here, dist.get_rank(), dist.get_world_size())
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if here.type == "cuda":
            dist.init_process_group("nccl", device_id=here)
        else:
            dist.init_process_group("gloo")
        try:
            yield Place(here, dist.get_rank(), dist.get_world_size())
        finally:
            dist.destroy_process_group()
    else:
        yield Place(here)


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


@contextmanager
def leave_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit(143), so that workers and process group are ended in order.

    Left alone outside the main thread, where Python allows no handlers, and where the caller has
    a handler of their own.
    """

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
