"""One disturbance of `tools.prove.resume`: what is killed, when, and what becomes of the rest."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.prove.attempt import Attempt, wait_until

__all__ = ["Kill", "Limits", "Told", "all_kinds", "draw_kill", "kill_and_watch"]

VICTIMS = ("rank", "worker", "everything")
MOMENTS = ("start-up", "workers start", "checkpoint", "after steps", "any time")

ALONE_S = 3
"""Ranks may go on so long when one of them is gone; then they are sent SIGTERM."""
STOP_S, NOTICE_S, GRACE_S = 20, 60, 10
"""A fault if it takes longer: to end at SIGTERM; to notice that a worker is dead; for workers and
shared memory to be gone after their rank."""

MISSED_STEPS = 40
"""After so many it no longer waits to see a checkpoint being written."""


@dataclass(frozen=True)
class Limits:
    """What topologies and times are drawn from."""

    max_ranks: int
    max_workers: int
    step_s: float
    start_up_s: float
    """Of one rank, until its first step."""


@dataclass(frozen=True)
class Kill:
    """What is killed in one start, and when."""

    victim: str
    moment: str
    world_size: int
    num_workers: int
    num_steps: int
    """Delivered steps after which it happens at the latest."""
    delay_s: float


@dataclass(frozen=True)
class Told:
    """What happened to one start."""

    kill: Kill
    num_steps: int
    """Delivered when it was killed."""
    rest: str
    """How the ranks that were not killed ended."""
    left: list[str]
    """Processes and shared memory that were still there after the grace time."""
    num_semaphores: int
    """Names of semaphores that only the killed tracker of Python would have removed."""
    torn: bool
    """A checkpoint was being written when it was killed."""
    failed: bool
    """It ended before it was killed, or did not end after it."""


def all_kinds(draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (victim, moment), all of them in random order, again and again."""
    kinds = list(itertools.product(VICTIMS, MOMENTS))
    while True:
        draw.shuffle(kinds)
        yield from kinds


def draw_kill(draw: random.Random, kind: tuple[str, str], limits: Limits, most_steps: int) -> Kill:
    """Return a kill of some kind, on a random topology, at a random time."""
    victim, moment = kind
    needs_worker = victim == "worker" or moment == "workers start"
    world_size = draw.randint(1, limits.max_ranks)
    start_up_s = limits.start_up_s * (1 + world_size) / 2  # ranks share the cores
    longest = {"start-up": start_up_s, "any time": 2 * start_up_s, "workers start": 0.5}
    return Kill(
        victim,
        moment,
        world_size,
        draw.randint(int(needs_worker), limits.max_workers),
        draw.randint(1, most_steps),
        draw.uniform(0, longest.get(moment, limits.step_s)),
    )


def kill_and_watch(attempt: Attempt, kill: Kill, checkpoints: Path, draw: random.Random) -> Told:
    """Kill what is to be killed when it is time, and see what becomes of the rest."""
    before = _half_written(checkpoints)
    failed = not _wait_for_moment(attempt, kill, lambda: bool(_half_written(checkpoints) - before))
    num_steps = attempt.num_steps()
    if kill.victim == "everything":
        attempt.kill_all()
        rest = ""
    else:
        ranks = [rank.pid for rank in attempt.ranks]
        victims = attempt.workers() if kill.victim == "worker" else ranks
        attempt.kill(victims and [draw.choice(victims)])
        # One of the ranks is gone at once, or as soon as it notices that its worker is.
        failed |= not wait_until(attempt.lost_a_rank, NOTICE_S)
        rest = _end_of_others(attempt)
    failed |= not wait_until(attempt.ended, STOP_S)
    wait_until(lambda: not attempt.left(), GRACE_S)
    torn = bool(_half_written(checkpoints) - before)
    return Told(kill, num_steps, rest, attempt.left(), attempt.num_semaphores(), torn, failed)


def _half_written(checkpoints: Path) -> set[tuple[str, int]]:
    """Return (name, time of the last write) of checkpoints that are not whole."""
    found = set()
    for path in checkpoints.glob(".step-*"):
        with suppress(FileNotFoundError):  # it has just become whole
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def _wait_for_moment(attempt: Attempt, kill: Kill, is_writing: Callable[[], bool]) -> bool:
    """Wait until it is time to kill; return False when the run has ended before."""
    began = time.monotonic()

    def due() -> bool:
        if kill.moment in ("start-up", "any time") and time.monotonic() - began >= kill.delay_s:
            return True
        if kill.moment == "workers start" and attempt.workers():
            return True
        return attempt.num_steps() >= kill.num_steps

    def possible() -> bool:
        return kill.victim != "worker" or bool(attempt.workers())

    def writing() -> bool:
        missed = attempt.num_steps() > kill.num_steps + MISSED_STEPS
        return kill.moment != "checkpoint" or missed or is_writing()

    for condition, every_s in ((due, 0.005), (possible, 0.02), (writing, 0.0005)):
        while not condition():
            if attempt.lost_a_rank():
                return False
            time.sleep(every_s)
    if kill.moment in ("workers start", "after steps"):
        time.sleep(kill.delay_s)
    return not attempt.lost_a_rank()


def _end_of_others(attempt: Attempt) -> str:
    """Let the remaining ranks end, and say how they did."""
    if len(attempt.ranks) == 1:
        return ""
    if wait_until(attempt.ended, ALONE_S):
        return "by themselves"
    attempt.terminate()
    return "at SIGTERM"
