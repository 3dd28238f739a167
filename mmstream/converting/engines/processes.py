"""The worker processes of a conversion: jobs in, reports out. A job is one shard.

    plan -> POOL of `write_shard` -> manifest

Each worker holds one sample in memory. What the workers write does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mmstream.converting.shard import ShardJob, ShardReport, write_shard
from mmstream.process_pool import run_in_processes

__all__ = ["run_jobs"]


def run_jobs(jobs: Iterable[ShardJob], num_workers: int) -> Iterator[tuple[str, ShardReport]]:
    """Write shards. Yield (URL of the store, report) for each job, when it is done.

    With `num_workers` 0 or 1, this process writes them.

    Raises:
        MMStreamError: A worker process died. Finished shards are kept.
        Exception: Whatever `write_shard` raises. The other workers are stopped.
    """
    for job, report in run_in_processes(write_shard, jobs, num_workers, command="convert"):
        yield job.store.url, report
