"""Several ranks on this machine: each is a process of its own, in one gloo process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mmstream.train.distributed import leave_group

RANKS_END_S = 500
"""Ranks that take longer hang."""


def run_ranks(function: Callable[..., None], *args: Any, num_ranks: int) -> None:
    """Call ``function(rank, *args)`` in so many processes, and wait for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("OMP_NUM_THREADS", "1")
        context = mp.spawn(function, args=args, nprocs=num_ranks, join=False)
        for process in context.processes:
            process.join(RANKS_END_S)
            process.kill()
        assert context.join(500), "the ranks did not end"


def join_group(rank: int, file: Path, num_ranks: int, timeout_s: float = 600) -> None:
    """Join a process group.

    Args:
        rank: of this process.
        file: in which the ranks meet; it does not exist yet.
        num_ranks: processes of the group.
        timeout_s: seconds after which a collective is an error.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def play_parts(rank: int, folder: Path, parts: Sequence[tuple[int, Callable[[], object]]]) -> None:
    """Play the parts of one process, one after another: each is of some ranks, in a new group.

    Args:
        rank: of this process. It has no part that is of fewer ranks.
        folder: in which the ranks meet.
        parts: (number of ranks, what each of them does).
    """
    for number, (num_ranks, part) in enumerate(parts):
        if rank >= num_ranks:
            continue
        if num_ranks > 1:
            join_group(rank, folder / f"meet-{number}", num_ranks)
        part()
        if num_ranks > 1:
            dist.barrier()
            leave_group()
