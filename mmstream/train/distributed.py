"""This process among the ranks that train together: device, process group, threads, signals.

loop.run -> `process_group` gives a `TrainProcess`, which the whole run passes on
loop.fit -> `note_signals` gives a `StopRequest`, which each step looks at
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from mmstream.errors import ConfigError
from mmstream.processes.machine import cpu_limit, num_local_ranks
from mmstream.ranks import World, check_consistency

logger = logging.getLogger(__name__)

ECHO_S = 1.0
"""Seconds within which a repeated signal counts as the same one.

After Ctrl-C the terminal signals all processes, and torchrun passes the signal on once more.
"""

SPREAD_S = 0.2
"""Seconds within which a signal to all ranks has reached each of them."""


@dataclass(frozen=True)
class TrainProcess:
    """One rank of a training run.

    Attributes:
        device: the device of this rank.
        rank: number of this rank, from 0.
        world_size: number of ranks.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1

    def sum_over_ranks(self, *values: Tensor | float) -> Tensor:
        """Return the sum of each value over the ranks: float64 [len(values)], on the device.

        All ranks must call it together, and all get the same sums.
        """
        sums = torch.stack([float64_scalar(value, self.device) for value in values])
        if self.world_size > 1:
            dist.all_reduce(sums)
        return sums

    def wait_for_all(self) -> None:
        """Wait until all ranks have called it."""
        if self.world_size > 1:
            self.sum_over_ranks(0.0).item()  # on CUDA, the sum alone would not wait

    def check_consistency(self, settings: Mapping[str, str]) -> None:
        """Compare settings over the ranks; ConfigError on all of them where one differs."""
        check_consistency(
            settings,
            World(self.rank, self.world_size),
            beginning="to train",
            advice="start every rank with the same command",
        )


def float64_scalar(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a number as float64 [] on a device. On CUDA the host does not wait for the device.

    ``torch.tensor`` would copy the number from the host, after all kernels before it have ended.
    """
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


@contextmanager
def process_group(device: str | None) -> Iterator[TrainProcess]:
    """Join the other ranks and yield this one; leave the process group at the end.

    RANK and WORLD_SIZE announce the ranks; torchrun sets both. Without them there is one rank and
    no process group. CUDA devices use nccl, CPUs use gloo. A process group that the caller has
    initialised is used, and stays open.

    Args:
        device: as in `TrainConfig`.

    Raises:
        ConfigError: torch does not have this device.
    """
    torch_device = _open_device(device)
    if dist.is_initialized():
        yield TrainProcess(torch_device, dist.get_rank(), dist.get_world_size())
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if torch_device.type == "cuda":
            dist.init_process_group("nccl", device_id=torch_device)
        else:
            dist.init_process_group("gloo")
        try:
            yield TrainProcess(torch_device, dist.get_rank(), dist.get_world_size())
        finally:
            leave_group()
    else:
        yield TrainProcess(torch_device)


def _open_device(device: str | None) -> torch.device:
    """Return the device of this process, and make a CUDA device the current one."""
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        torch_device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r}: give cpu, cuda or cuda:N") from None
    if torch_device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device={name!r}: this torch finds no CUDA device; use cpu")
        num_devices = torch.cuda.device_count()
        if (torch_device.index or 0) >= num_devices:
            raise ConfigError(
                f"device={name!r}: this process sees {num_devices} CUDA devices, from cuda:0 on; "
                'start no more processes than devices, or give "cuda:0" where the launcher shows '
                "each process its own device"
            )
        torch.cuda.set_device(torch_device)
    return torch_device


def is_of_lost_rank(error: RuntimeError) -> bool:
    """Return whether a collective has failed because of another rank, in gloo or NCCL."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def leave_group() -> None:
    """End the process group and its threads.

    DDP objects are in reference cycles and hold the process group, so they are collected first.
    Otherwise a thread of gloo sometimes outlives the interpreter, and the process aborts (seen with
    torch 2.13).
    """
    gc.collect()
    dist.destroy_process_group()


def share_threads(num_workers: int) -> None:
    """Share the cores of this machine among its ranks and their loader workers.

    By default torch starts one thread per core in each process. Its threads wait by spinning: with
    one core too few, a step takes ten times as long. When OMP_NUM_THREADS is set, nothing changes;
    torchrun sets it to 1 for several ranks.

    For example, 16 cores, 2 ranks and 3 workers per rank give each rank 16 / 2 - 3 = 5 threads.

    Args:
        num_workers: loader workers of each rank.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    num_cores = int(cpu_limit())  # a container may have fewer than the machine
    torch.set_num_threads(max(1, num_cores // num_local_ranks() - num_workers))


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    """Handle a signal by ending the process, as Python and the shell expect."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], Any], *numbers: int) -> Iterator[None]:
    """Handle signals by this function. Handlers that the caller has set stay as they are.

    It does nothing outside the main thread, where Python does not allow signal handlers.
    """
    replaced = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler, _leave):
                replaced[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in replaced.items():
            signal.signal(number, previous)


def leave_on_sigterm() -> AbstractContextManager[None]:
    """Turn SIGTERM into SystemExit(143), so that the workers and the process group end properly."""
    return _handling(_leave, signal.SIGTERM)


@dataclass
class StopRequest:
    """The signals that this process has received."""

    times: dict[int, float] = field(default_factory=dict)
    """Signal number -> seconds of the monotonic clock when it first came."""
    _is_saving: bool = False
    _is_repeated: bool = False

    def flags(self) -> tuple[float, float]:
        """Return 1.0 or 0.0 for SIGTERM and for SIGINT, to sum over the ranks."""
        return float(signal.SIGTERM in self.times), float(signal.SIGINT in self.times)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: note the first one, and leave at once at the second one."""
        now = time.monotonic()
        if now - self.times.setdefault(number, now) <= ECHO_S:
            return
        if self._is_saving and number == signal.SIGTERM:
            self._is_repeated = True
        else:
            _leave(number, frame)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Finish what is in this block before a second SIGTERM ends the process.

        A scheduler may send SIGTERM again and again. What must end at once gets SIGKILL from it.
        """
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False
        if self._is_repeated:
            _leave(signal.SIGTERM, None)


def received_by_all(stop: StopRequest, process: TrainProcess) -> bool:
    """Tell whether all ranks have received a signal. All must call it together.

    A signal to all of them does not come to all at the same moment, so late ones are waited for.
    """
    if process.world_size > 1:
        time.sleep(SPREAD_S)
    return bool(process.sum_over_ranks(max(stop.flags())).item() == process.world_size)


@contextmanager
def note_signals() -> Iterator[StopRequest]:
    """Note SIGTERM and Ctrl-C instead of ending the process, so that the step is saved first."""
    request = StopRequest()
    with _handling(request.note, signal.SIGTERM, signal.SIGINT):
        yield request
