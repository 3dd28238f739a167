"""What a process holds, and whether that grows when something is done again and again."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

NUM_LOOKS = 10

MEMORY_SLACK = 20_000_000
"""Bytes by which memory may grow: allocators keep what they once had."""

SETTLE_S = 120.0
"""How long processes and threads may take to end; a busy machine needs seconds for it."""


@dataclass(frozen=True)
class Resources:
    """What this process and all its descendants hold at one moment."""

    open_files: int
    threads: int
    child_processes: int
    shared_memory: int
    """Maps of files in /dev/shm and of memory files."""
    memory_bytes: int
    """Resident memory."""


def resources() -> Resources:
    """Return what this process and its descendants hold, after a garbage collection."""
    gc.collect()
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return Resources(
        open_files=sum(num_entries(process.pid, "fd") for process in family),
        threads=sum(num_entries(process.pid, "task") for process in family),
        child_processes=len(family) - 1,
        shared_memory=sum(num_shared_maps(process.pid) for process in family),
        memory_bytes=sum(resident_bytes(process) for process in family),
    )


def assert_no_growth(cycle: Callable[[], object], *, warm_up: int, cycles: int) -> None:
    """Run `cycle` again and again; fail and name what the process holds more and more of.

    The process is looked at up to ten times. A leak makes every look of the second half larger than
    all looks of the first half. Pools that fill and empty do not, even if they are large. A pool
    may grow for good once, so a process that has grown is looked at again: a leak goes on.

    Args:
        cycle: what is repeated; its first runs may start what stays, such as a fork server.
        warm_up: cycles before the first look.
        cycles: cycles that are looked at, an even number.
    """
    for _ in range(warm_up):
        cycle()
    gc.collect()
    gc.freeze()  # a look collects garbage: not among the million objects of torch and of pytest
    try:
        grown = _growth_over(cycle, cycles) and _growth_over(cycle, cycles)
    finally:
        gc.unfreeze()
    assert not grown, f"in {cycles} cycles: {'; '.join(grown)}"


def _growth_over(cycle: Callable[[], object], cycles: int) -> list[str]:
    """Run `cycle` so many times, and say what has grown and does not shrink soon."""
    looks: list[Resources] = []
    for number in range(1, cycles + 1):
        cycle()
        if number % max(1, cycles // NUM_LOOKS) == 0:
            looks.append(resources())
    half = len(looks) // 2
    deadline = time.monotonic() + SETTLE_S
    while True:
        grown = growth(looks[:half], looks[half:], memory_bytes=MEMORY_SLACK)
        if not grown or time.monotonic() >= deadline:
            return grown
        time.sleep(0.1)
        looks.append(resources())


def growth(before: Sequence[Any], after: Sequence[Any], **slack: int) -> list[str]:
    """Say which numbers are larger in all of `after` than in any of `before`.

    Args:
        before: looks, a dataclass of integers each.
        after: later looks.
        slack: by field: how much larger a number may be.
    """
    slacks = dict.fromkeys(asdict(before[0]), 0) | slack
    bounds = {
        name: (
            max(getattr(look, name) for look in before),
            min(getattr(look, name) for look in after),
        )
        for name in slacks
    }
    return [
        f"{name} grew from {largest:,} to {smallest:,} and more"
        for name, (largest, smallest) in bounds.items()
        if smallest > largest + slacks[name]
    ]


def num_entries(pid: int, folder: str) -> int:
    """Return how many entries a folder of a process in /proc has; 0 when the process has ended."""
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/{folder}").iterdir())
    except OSError:
        return 0


def num_shared_maps(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return 0
    return sum("/dev/shm/" in line or "/memfd:" in line for line in lines)


def resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
