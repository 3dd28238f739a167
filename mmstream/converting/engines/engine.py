"""The engine of a name: a function that takes jobs and yields reports.

plan -> jobs -> ENGINE -> reports -> manifest
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeAlias, get_args

from mmstream.converting.engines import processes
from mmstream.converting.shard import ShardJob, ShardReport
from mmstream.errors import ConfigError

EngineName: TypeAlias = Literal["processes", "ray"]

ENGINES = get_args(EngineName)

Engine: TypeAlias = Callable[[Iterable[ShardJob]], Iterator[tuple[str, ShardReport]]]
"""Writes shards. Yields (URL of the store, report) for each job, when it is done."""


def require_engine(name: str, num_workers: int | None, dest: str) -> None:
    """Raise a ConfigError where an engine cannot write to a destination."""
    if dest.startswith("memory://") and (name == "ray" or (num_workers or 0) > 1):
        raise ConfigError(f"{dest}: only this process has its memory://; use num_workers=1")


def engine_of(name: str, num_workers: int | None) -> Engine:
    """Return an engine.

    Args:
        name: "processes" or "ray". Ray is imported only if it is named.
        num_workers: Processes, or tasks of Ray at a time. Default: 1 process, or two tasks for each
            CPU of the cluster.
    """
    if name == "ray":
        from mmstream.converting.engines import ray

        return lambda jobs: ray.run_jobs(jobs, num_workers)
    return lambda jobs: processes.run_jobs(jobs, num_workers or 1)
