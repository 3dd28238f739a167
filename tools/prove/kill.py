"""One kill of `tools.prove.resume`: its victim, its moment, and the end of the other processes."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.prove.attempt import Attempt, wait_until

VICTIMS = ("rank", "worker", "everything")
MOMENTS = ("start-up", "workers start", "checkpoint", "after steps", "any time")

SIGTERM_DELAY_S = 3
"""After the end of a rank, the others may run so long; then they get SIGTERM."""

STOP_S = 120
"""Longest time from SIGTERM to the end of a rank. More is a fault, as with the next two."""
NOTICE_S = 60
"""Longest time from the death of a worker to the end of its rank."""
GRACE_S = 60
"""Longest time from the end of a rank to the end of its workers and shared memory."""

MAX_MISSED_STEPS = 40
"""After so many steps it no longer waits for a checkpoint that is being written."""


@dataclass(frozen=True)
class Limits:
    """The limits of random topologies and times."""

    max_ranks: int
    max_workers: int
    step_s: float
    start_up_s: float
    """From the start of a single rank to its first step."""


@dataclass(frozen=True)
class Kill:
    """The kill of one start."""

    victim: str
    moment: str
    world_size: int
    num_workers: int
    num_steps: int
    """The kill happens after these delivered steps at the latest."""
    delay_s: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of one start."""

    kill: Kill
    num_steps: int
    """Steps delivered before the kill."""
    end_of_others: str
    """How the ranks that were not killed ended."""
    remains: list[str]
    """Processes and shared memory that still existed after the grace time."""
    num_semaphores: int
    """Named semaphores that only Python's resource tracker, which was killed, would remove."""
    torn: bool
    """Whether a checkpoint was being written at the kill."""
    failed: bool
    """Whether it ended before the kill, or did not end after it."""


def draw_kinds(draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (victim, moment): all of them in random order, again and again."""
    kinds = list(itertools.product(VICTIMS, MOMENTS))
    while True:
        draw.shuffle(kinds)
        yield from kinds


def draw_kill(draw: random.Random, kind: tuple[str, str], limits: Limits, most_steps: int) -> Kill:
    """Return a kill of this (victim, moment) on a random topology at a random time."""
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


def kill_and_watch(attempt: Attempt, kill: Kill, checkpoints: Path, draw: random.Random) -> Outcome:
    """Wait for the moment, kill the victim, and observe the end of the other processes."""
    before = _incomplete(checkpoints)
    failed = not _wait_for_moment(attempt, kill, lambda: bool(_incomplete(checkpoints) - before))
    num_steps = attempt.num_steps()
    if kill.victim == "everything":
        attempt.kill_all()
        end_of_others = ""
    else:
        ranks = [rank.pid for rank in attempt.ranks]
        victims = attempt.workers() if kill.victim == "worker" else ranks
        attempt.kill(victims and [draw.choice(victims)])
        # A rank ends at once, or as soon as it notices the death of its worker.
        failed |= not wait_until(attempt.any_ended, NOTICE_S)
        end_of_others = _wait_for_others(attempt)
    failed |= not wait_until(attempt.all_ended, STOP_S)
    wait_until(lambda: not attempt.remains(), GRACE_S)
    return Outcome(
        kill,
        num_steps,
        end_of_others,
        attempt.remains(),
        attempt.num_semaphores(),
        torn=bool(_incomplete(checkpoints) - before),
        failed=failed,
    )


def _incomplete(checkpoints: Path) -> set[tuple[str, int]]:
    """Return (name, time of the last write) of incomplete checkpoints."""
    files = set()
    for path in checkpoints.glob(".step-*"):
        with suppress(FileNotFoundError):  # it has just become complete
            files.add((path.name, path.stat().st_mtime_ns))
    return files


def _wait_for_moment(attempt: Attempt, kill: Kill, is_writing: Callable[[], bool]) -> bool:
    """Wait for the moment of the kill; return False if the run ends before."""
    started = time.monotonic()

    def due() -> bool:
        if kill.moment in ("start-up", "any time") and time.monotonic() - started >= kill.delay_s:
            return True
        if kill.moment == "workers start" and attempt.workers():
            return True
        return attempt.num_steps() >= kill.num_steps

    def possible() -> bool:
        return kill.victim != "worker" or bool(attempt.workers())

    def writing() -> bool:
        missed = attempt.num_steps() > kill.num_steps + MAX_MISSED_STEPS
        return kill.moment != "checkpoint" or missed or is_writing()

    for condition, every_s in ((due, 0.005), (possible, 0.02), (writing, 0.0005)):
        while not condition():
            if attempt.any_ended():
                return False
            time.sleep(every_s)
    if kill.moment in ("workers start", "after steps"):
        time.sleep(kill.delay_s)
    return not attempt.any_ended()


def _wait_for_others(attempt: Attempt) -> str:
    """Wait for the end of the remaining ranks, and return how they ended."""
    if len(attempt.ranks) == 1:
        return ""
    if wait_until(attempt.all_ended, SIGTERM_DELAY_S):
        return "by themselves"
    attempt.terminate()
    return "at SIGTERM"
