"""Several ranks on this machine: each is a process of its own, in one gloo process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mmstream.processes.workers import end_fork_server, start_fork_server
from mmstream.train.distributed import leave_group

RANKS_END_S = 500
"""Ranks that take longer hang."""

_server: Any = None
"""The process id of the last fork server, and what it has imported."""


def run_ranks(
    function: Callable[..., None], *args: Any, num_ranks: int, late_imports: Sequence[str] = ()
) -> None:
    """Call ``function(rank, *args)`` in so many processes, and wait for them."""
    context = start_ranks(function, *args, num_ranks=num_ranks, late_imports=late_imports)
    for process in context.processes:
        process.join(RANKS_END_S)
        process.kill()
    while not context.join():  # returns at the end of any rank, and raises the error of one
        pass


def start_ranks(
    function: Callable[..., None], *args: Any, num_ranks: int, late_imports: Sequence[str] = ()
) -> mp.ProcessContext:
    """Start ``function(rank, *args)`` in so many processes.

    A fork server imports torch and the module of the function once for all ranks.

    Args:
        function: of a module that can be imported.
        args: its other arguments.
        num_ranks: processes.
        late_imports: modules that the fork server imports, too.
    """
    global _server
    modules = ["tests.helpers.rank_imports", *late_imports, function.__module__]
    if _server != (forkserver._forkserver._forkserver_pid, modules):
        end_fork_server()
    start_fork_server(modules)
    _server = forkserver._forkserver._forkserver_pid, modules
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return mp.start_processes(
        _begin_rank, (environment, function, args), num_ranks, join=False, start_method="forkserver"
    )


def _begin_rank(
    rank: int, environment: dict[str, str], function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)  # the fork server has one of its own
    torch.set_num_threads(1)
    function(rank, *args)


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
