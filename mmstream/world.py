"""Which rows of each global batch a data-parallel rank delivers.

The loader asks once, at its start::

    resolve_world(None)              World(rank=1, world_size=4)
    rows_of_rank(16, that world)     rows 4 to 7 of every step

The order of the samples does not depend on it. Other ranks only get other rows of the same steps.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

from mmstream.errors import ConfigError
from mmstream.wrong_arguments import NonNegativeInt, PositiveInt, checked

logger = logging.getLogger(__name__)

RowsPerRank: TypeAlias = Literal["balanced"] | Sequence[PositiveInt] | None
"""None: all ranks get equally many rows. "balanced": the numbers differ by at most one. A list: the
number of rows of each rank."""


@checked()
@dataclass(frozen=True)
class World:
    """The data-parallel rank of this process, and the number of data-parallel ranks.

    A `Loader` finds both by itself under ``torchrun`` and ``torch.distributed``. Pass a World where
    several processes need the same rows, as with tensor or pipeline parallelism.

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
    global_batch_size: PositiveInt, world: World, rows_per_rank: RowsPerRank = None
) -> tuple[int, int]:
    """Return [start, stop), the rows of every global batch that `world.rank` delivers.

    Args:
        global_batch_size: Rows of a step over all ranks.
        world: The rank, and the number of ranks.
        rows_per_rank: How the rows are shared out, see `RowsPerRank`.

    Raises:
        ConfigError: The rows cannot be shared out so. The message says which settings can.

    Examples:
        >>> [rows_of_rank(8, World(rank, 3), "balanced") for rank in range(3)]
        [(0, 2), (2, 5), (5, 8)]
    """
    size, rank = world.world_size, world.rank
    if rows_per_rank is None and global_batch_size % size:
        raise ConfigError(
            f"global_batch_size {global_batch_size} is not a multiple of {size} ranks: pass "
            'rows_per_rank="balanced", a list with the rows of each rank, or another batch size'
        )
    if rows_per_rank is None or rows_per_rank == "balanced":
        if global_batch_size < size:
            raise ConfigError(
                f"global_batch_size {global_batch_size} is too small for {size} ranks: each rank "
                "needs at least one row per step"
            )
        start = rank * global_batch_size // size
        return start, (rank + 1) * global_batch_size // size
    rows = list(rows_per_rank)
    if len(rows) != size or sum(rows) != global_batch_size:
        raise ConfigError(
            f"rows_per_rank {rows}: pass {size} positive numbers (one per rank) that sum to "
            f"global_batch_size {global_batch_size}"
        )
    start = sum(rows[:rank])
    return start, start + rows[rank]
