"""The data-parallel ranks: which rows each delivers, and whether all have the same settings.

The loader asks once, at its start::

    resolve_world(None)              World(rank=1, world_size=4)
    rows_of_rank(16, that world)     rows 4 to 7 of every step
    check_consistency(settings)      nothing, or ConfigError on all ranks

The order of the samples does not depend on the ranks. They get different rows of the same steps.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.settings import NonNegativeInt, PositiveInt, checked

logger = logging.getLogger(__name__)

RowsPerRank: TypeAlias = Literal["balanced"] | Sequence[PositiveInt] | None
"""None: all ranks get equally many rows. "balanced": the numbers differ by at most one. A list: the
number of rows of each rank."""


@checked()
@dataclass(frozen=True)
class World:
    """The data-parallel rank of this process, and the number of data-parallel ranks.

    A `Loader` finds both by itself under ``torchrun`` and ``torch.distributed``. Where several
    processes need the same rows, as with tensor or pipeline parallelism, it takes them from a
    device mesh, or from a World that you pass.

    Attributes:
        rank: From 0 to `world_size` - 1.
        world_size: The number of data-parallel ranks, from 1.

    Raises:
        ConfigError: There is no such rank.

    Examples:
        Eight GPUs, where two at a time hold the halves of one model. GPU 5 passes this to
        `Loader`:

        >>> mm.World(rank=5 // 2, world_size=4)
        World(rank=2, world_size=4)
    """

    rank: NonNegativeInt = 0
    world_size: PositiveInt = 1

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise ConfigError(
                f"World: rank {self.rank} of world_size {self.world_size} does not exist; "
                "ranks count from 0 to world_size - 1"
            )


def resolve_world(world: World | None) -> World:
    """Return the World of this process.

    The first of these that is known: `world`, the process group of ``torch.distributed``, the
    environment variables RANK and WORLD_SIZE, a single rank.

    Raises:
        ConfigError: Only one of RANK and WORLD_SIZE is set, or they are not numbers.
    """
    if world is not None:
        return world
    torch = sys.modules.get("torch")  # if nobody imported torch, nobody initialised it
    if torch is not None:
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized():
            return World(dist.get_rank(), dist.get_world_size())
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and size is None:
        _warn_of_tasks_without_rank()
        return World()
    if rank is None or size is None or not (rank.isdecimal() and size.isdecimal()):
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={size}: set both (torchrun does) or neither, "
            "or pass Loader(world=mm.World(rank=, world_size=))"
        )
    return World(int(rank), int(size))


_TASKS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
"""Variables of srun and mpirun: the number of tasks, and which one this is.

They are never used by themselves: a batch script of Slurm has SLURM_PROCID=0 and SLURM_NTASKS=4
too, and runs once.
"""


@cache  # once in a process
def _warn_of_tasks_without_rank() -> None:
    """Warn if this is one of several tasks of srun or mpirun: each of them would read all rows."""
    for size, rank in _TASKS.items():
        number, count = os.environ.get(rank, ""), os.environ.get(size, "")
        if number.isdecimal() and (int(number) > 0 or (count.isdecimal() and int(count) > 1)):
            logger.warning(
                "%s=%s, and neither RANK nor torch.distributed: this task reads all rows, as every "
                "other one does; export RANK=$%s WORLD_SIZE=$%s in each task, start the tasks with "
                "torchrun, or pass Loader(world=mm.World(rank=, world_size=))",
                rank,
                number,
                rank,
                "SLURM_NTASKS" if rank == "SLURM_PROCID" else size,
            )
            return


@checked()
def rows_of_rank(
    global_batch_size: PositiveInt,
    world: World,
    rows_per_rank: RowsPerRank = None,
    repeat: PositiveInt = 1,
) -> tuple[int, int]:
    """Return [start, stop), the rows of every global batch that `world.rank` delivers.

    Args:
        global_batch_size: Rows of a step over all ranks.
        world: The rank, and the number of ranks.
        rows_per_rank: How the rows are shared out, see `RowsPerRank`.
        repeat: Rows of a batch for each of these rows, which stay on one rank. A list in
            `rows_per_rank` and messages count those of the batch.

    Raises:
        ConfigError: The rows cannot be shared out so. The message says which settings can.

    Examples:
        >>> [rows_of_rank(8, World(rank, 3), "balanced") for rank in range(3)]
        [(0, 2), (2, 5), (5, 8)]
    """
    size, rank, num_rows = world.world_size, world.rank, global_batch_size * repeat
    below = num_rows - num_rows % (size * repeat)
    of_repeat = "" if repeat == 1 else f" with repeat={repeat}"
    if rows_per_rank is None and global_batch_size % size:
        other = "another batch size"
        if repeat > 1:
            other = f"global_batch_size {f'{below} or ' * (below > 0)}{below + size * repeat}"
        raise ConfigError(
            f"global_batch_size {num_rows} is not a multiple of {size} ranks{of_repeat}: pass "
            f'rows_per_rank="balanced", a list with the rows of each rank, or {other}'
        )
    if rows_per_rank is None or rows_per_rank == "balanced":
        if global_batch_size < size:
            raise ConfigError(
                f"global_batch_size {num_rows} is too small for {size} ranks{of_repeat}: each rank "
                f"needs at least {'one row' if repeat == 1 else f'{repeat} rows'} per step"
            )
        start = rank * global_batch_size // size
        return start, (rank + 1) * global_batch_size // size
    rows = list(rows_per_rank)
    if len(rows) != size or sum(rows) != num_rows or any(number % repeat for number in rows):
        kind = "positive numbers" if repeat == 1 else f"multiples of repeat={repeat}"
        raise ConfigError(
            f"rows_per_rank {rows}: pass {size} {kind} (one per rank) that sum to "
            f"global_batch_size {num_rows}"
        )
    start = sum(rows[:rank])
    return start // repeat, (start + rows[rank]) // repeat


# -- all ranks compare their settings before they begin --------------------------------------------
#
# A rank with another seed or another copy of the corpus would train on other rows than those that
# are left to it: samples are lost and repeated, and nothing else fails.
#
# The ranks compare through the key-value store of their process group, and not by a collective. A
# Loader may begin in a thread beside the model's collectives, and NCCL would need CUDA tensors.
# Each rank writes its settings under its own key, and rank 0 reads them all and writes the verdict,
# which the others wait for. So W ranks make a few requests each, and rank 0 makes W of them::
#
#     mmstream/begun/3              how often rank 3 has compared: N
#     mmstream/comparison/N/3       the N-th settings of rank 3, removed when they are compared
#     mmstream/comparison/N         the verdict, removed at the next comparison
#     mmstream/comparison/N/3/read  rank 3 has read a verdict against the run

WARNING_S = 30.0
"""Seconds after which ranks that have not come are named in a warning, again and again."""

VERDICT_S = 60.0
"""Seconds that rank 0 has for its verdict beyond the time that it waits for the others."""

READ_S = 10.0
"""Seconds that rank 0 waits until all others have read a verdict against them.

Its process often holds the store. If it ended at once, the others would see a lost connection.
"""

MAX_PAUSE_S = 0.2
"""Longest pause between two looks at the store. It begins at `MIN_PAUSE_S` and grows by half."""

MIN_PAUSE_S = 0.001

MAX_NAMED = 4
"""Most groups of ranks, and most settings of a group, that a message names."""

SAME = "same"
"""The verdict when all ranks have the same settings."""


def check_consistency(
    settings: Mapping[str, str], world: World, *, beginning: str, advice: str, num_same: int = 1
) -> None:
    """Compare settings over all ranks of the process group of ``torch.distributed``.

    Every rank must call it, the same number of times. It does nothing for a single rank, without a
    process group, and where the group has another number of ranks than `world`: with tensor
    parallelism, several processes have the same rows. It takes a few milliseconds when all ranks
    come at once. It waits as long as the group's own time limit
    (``init_process_group(timeout=)``), and names in a warning who is missing.

    Args:
        settings: what must be the same on all ranks, as short texts by name.
        world: the data-parallel rank of this process.
        beginning: what begins now, for messages: "this iteration".
        advice: what to do about a rank that does not come, for messages.
        num_same: how many ranks have the same `world`, where a device mesh says it.

    Raises:
        ConfigError: on every rank, if one differs or does not come. Names the rank.
        MMStreamError: the store has failed, as it does when the process of rank 0 has ended.
    """
    dist: Any = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = _default_store()
    if world_size == 1 or world.world_size * num_same != world_size or store is None:
        return

    def missing(late: Sequence[int]) -> str:
        have = "has" if len(late) == 1 else "have"
        limit_s = f"{_limit_s(store):.0f}"
        return f"within {limit_s} s {_named(late)} {have} not begun {beginning}: {advice}"

    try:
        number = store.add(f"mmstream/begun/{rank}", 1)
        store.set(_key(number, rank), json.dumps([world.rank, dict(settings)]))
        if rank == 0:
            verdict = _judge(store, number, world_size, num_same, missing)
        else:
            verdict = _await_verdict(store, number, rank, missing)
    except RuntimeError as error:  # what torch raises for its stores
        raise MMStreamError(
            "the ranks cannot compare their settings: the store of the process group has failed "
            f"({escaped(str(error))}); the process of rank 0 may have ended"
        ) from error
    if verdict != SAME:
        raise ConfigError(f"{verdict}; no rank trains")


def _default_store() -> Any:
    """Return the key-value store of the default process group, or None: MPI has none.

    torch (2.13) has no public function for it; ``torch.distributed`` itself calls this one.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _key(number: int, rank: int | None = None) -> str:
    """Return the key of a rank's settings, or of the verdict."""
    return f"mmstream/comparison/{number}" + ("" if rank is None else f"/{rank}")


def group_limit_s() -> float:
    """Return the seconds after which the default process group gives up."""
    return _limit_s(_default_store())


def _limit_s(store: Any) -> float:
    """Return how long to wait for other ranks: as long as the process group does."""
    return float(store.timeout.total_seconds())


def _judge(
    store: Any,
    number: int,
    world_size: int,
    num_same: int,
    missing: Callable[[Sequence[int]], str],
) -> str:
    """Read the settings of all ranks and write the verdict: the part of rank 0."""
    keys = {rank: _key(number, rank) for rank in range(world_size)}
    late = _wait_for(store, keys, _limit_s(store))
    verdict = (
        missing(late)
        if late
        else _compare([json.loads(store.get(keys[rank])) for rank in keys], num_same)
    )
    store.set(_key(number), verdict)
    if verdict != SAME:
        readers = {rank: f"{key}/read" for rank, key in keys.items() if rank and rank not in late}
        _wait_for(store, readers, READ_S, warning_s=math.inf)
    if not late:  # the others look for the settings of rank 0 until they have read the verdict
        for key in (*list(keys.values())[1:], _key(number - 1, 0), _key(number - 1)):
            store.delete_key(key)
    return verdict


def _await_verdict(
    store: Any, number: int, rank: int, missing: Callable[[Sequence[int]], str]
) -> str:
    """Wait for the verdict of rank 0, and return it."""
    limit_s = _limit_s(store)
    if _wait_for(store, {0: _key(number, 0)}, limit_s):
        return missing([0])
    # Rank 0 may have come later than this rank, and still waits for others.
    if _wait_for(store, {0: _key(number)}, limit_s + VERDICT_S, warning_s=math.inf):
        return "rank 0 has not compared the settings of all ranks: see its messages"
    verdict = str(store.get(_key(number)).decode())
    if verdict != SAME:
        store.set(f"{_key(number, rank)}/read", "")
    return verdict


def _wait_for(
    store: Any, keys: Mapping[int, str], limit_s: float, *, warning_s: float | None = None
) -> list[int]:
    """Wait until the store has the keys of all ranks; return the ranks that are late.

    It looks again and again, with pauses. ``store.wait`` would hold the lock of the store, which
    other threads of the process need.

    Args:
        store: the key-value store.
        keys: a key for each rank that is waited for.
        limit_s: seconds to wait at most.
        warning_s: seconds between two warnings that name who is late. None: `WARNING_S`.
    """
    warning_s = WARNING_S if warning_s is None else warning_s
    started, next_warning_s, pause_s = time.monotonic(), warning_s, MIN_PAUSE_S
    while not store.check([*keys.values()]):
        waited_s = time.monotonic() - started
        if waited_s > min(limit_s, next_warning_s):
            late = [rank for rank, key in keys.items() if not store.check([key])]
            if waited_s > limit_s or not late:
                return late
            next_warning_s += warning_s
            logger.warning(
                "waiting for %s since %.0f s: every rank begins here, and they compare their "
                "settings first",
                _named(late),
                waited_s,
            )
        time.sleep(min(pause_s, max(0.0, limit_s - waited_s) + MIN_PAUSE_S))
        pause_s = min(1.5 * pause_s, MAX_PAUSE_S)
    return []


def _compare(contents: Sequence[tuple[int, dict[str, str]]], num_same: int) -> str:
    """Return the verdict about the world ranks and settings of ranks 0, 1, 2 and so on.

    The settings of most ranks are taken for the right ones; rank 0 decides between equally many.
    """
    kinds = [tuple(sorted(settings.items())) for _, settings in contents]
    (common, _), *others = Counter(kinds).most_common()  # of equal counts, the first seen
    complaints = []
    for kind, _ in others[:MAX_NAMED]:
        ranks = [rank for rank, other in enumerate(kinds) if other == kind]
        differ = "differs" if len(ranks) == 1 else "differ"
        differences = _differences(contents[ranks[0]][1], contents[kinds.index(common)][1])
        complaints.append(f"{_named(ranks)} {differ} from the other ranks: {differences}")
    if len(others) > MAX_NAMED:
        complaints.append(f"and {len(others) - MAX_NAMED} more kinds")
    if complaints:
        return "; ".join(complaints)
    world_ranks = [world_rank for world_rank, _ in contents]
    ((world_rank, count), *_) = Counter(world_ranks).most_common(1)
    if count > num_same:
        ranks = [rank for rank, other in enumerate(world_ranks) if other == world_rank]
        return (
            f"{_named(ranks)} all have World(rank={world_rank}), and so the same "
            "rows: give each rank its own, or a smaller world_size"
        )
    return SAME


def _differences(settings: Mapping[str, str], common: Mapping[str, str]) -> str:
    """Return what differs between the settings of a rank and those of most ranks, in words."""
    names = [
        name
        for name in dict.fromkeys([*common, *settings])
        if settings.get(name) != common.get(name)
    ]
    texts = [
        f"{name} is {settings.get(name, 'not set')} there and {common.get(name, 'not set')} "
        "elsewhere"
        for name in names[:MAX_NAMED]
    ]
    more = f", and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(texts) + more


def _named(ranks: Sequence[int]) -> str:
    """Return for example "rank 3", "ranks 1 and 2", or "ranks 0, 1, 2, 3 and 60 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    numbers = [str(rank) for rank in ranks]
    if len(ranks) > MAX_NAMED + 1:
        numbers = [*numbers[:MAX_NAMED], f"{len(ranks) - MAX_NAMED} more"]
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
