"""Who fetches what: the data-parallel rank, and the rows of a step that are its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mmstream.errors import ConfigError

__all__ = ["RowsPerRank", "World", "resolve_world", "rows_of_rank"]

RowsPerRank: TypeAlias = Literal["balanced"] | Sequence[int] | None
"""None: equal shares; "balanced": shares that differ by one; a list: rows of each rank."""


@dataclass(frozen=True)
class World:
    """A data-parallel rank among `world_size`; a trainer with tensor parallelism passes its own."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} of world size {self.world_size} does not exist")


def resolve_world(world: World | None) -> World:
    """Return `world`, else torch.distributed's, else RANK and WORLD_SIZE's, else one rank.

    Raises:
        ConfigError: only one of RANK and WORLD_SIZE is set, or they are no numbers.
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
        return World()
    if rank is None or size is None or not (rank.isdigit() and size.isdigit()):
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={size}: set both (torchrun does), neither, "
            "or pass Loader(world=mm.World(rank=, world_size=))"
        )
    return World(int(rank), int(size))


def rows_of_rank(
    global_batch_size: int, world: World, rows_per_rank: RowsPerRank = None
) -> tuple[int, int]:
    """Return [start, stop): the rows of every step that `world.rank` delivers.

    Raises:
        ConfigError: the rows cannot be cut so; says which settings would do.
    """
    size, rank = int(world.world_size), int(world.rank)
    global_batch_size = int(global_batch_size)
    if rows_per_rank is None and global_batch_size % size:
        raise ConfigError(
            f"global_batch_size {global_batch_size} is no multiple of {size} ranks: pass "
            'rows_per_rank="balanced", a list of rows for each rank, or another batch size'
        )
    if rows_per_rank is None or rows_per_rank == "balanced":
        if global_batch_size < size:
            raise ConfigError(f"{size} ranks cannot share {global_batch_size} rows a step")
        start = rank * global_batch_size // size
        return start, (rank + 1) * global_batch_size // size
    if isinstance(rows_per_rank, str):
        raise ConfigError(f'rows_per_rank {rows_per_rank!r}: pass None, "balanced" or a list')
    rows = [int(number) for number in rows_per_rank]
    if len(rows) != size or sum(rows) != global_batch_size or min(rows) < 1:
        raise ConfigError(
            f"rows_per_rank {rows}: needs {size} positive numbers that sum to "
            f"global_batch_size {global_batch_size}"
        )
    start = sum(rows[:rank])
    return start, start + rows[rank]
