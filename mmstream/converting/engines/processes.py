"""The worker processes of a conversion: jobs in, reports out. A job is one shard.

    plan -> POOL of `write_shard` -> manifest

Each worker holds one sample in memory. What the workers write does not depend on their number.

When no shard is left to begin, the CPUs of idle workers go to the shards that are still written:
their processes check media in threads, because decoders and encoders release Python's lock.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from mmstream.converting.media.check import Answer, MediaBatch
from mmstream.converting.shard import ShardJob, ShardReport, write_shard
from mmstream.processes import num_cores, run_in_processes


def run_jobs(jobs: Iterable[ShardJob], num_workers: int) -> Iterator[tuple[str, ShardReport]]:
    """Write shards. Yield (URL of the store, report) for each job, when it is done.

    With `num_workers` 0 or 1, this process writes them.

    Raises:
        MMStreamError: A worker process died. Finished shards are kept.
        Exception: Whatever `write_shard` raises. The other workers are stopped.
    """
    if num_workers <= 1:
        yield from ((job.store.url, write_shard(job)) for job in jobs)
        return
    num_cpus = min(num_workers, num_cores())
    cpus_per_shard = multiprocessing.get_context("forkserver").RawValue("i", 1)
    num_unfinished, all_begun = 0, False

    def begun() -> Iterator[ShardJob]:
        nonlocal num_unfinished, all_begun
        for job in jobs:
            num_unfinished += 1
            yield job
        all_begun = True
        share_cpus()

    def share_cpus() -> None:
        cpus_per_shard.value = max(1, num_cpus // max(1, num_unfinished))

    for job, report in run_in_processes(
        _write_shard,
        begun(),
        num_workers,
        command="convert",
        prepare=_Worker.begin,
        prepare_args=(cpus_per_shard,),
    ):
        num_unfinished -= 1
        if all_begun:
            share_cpus()
        yield job.store.url, report


class _Worker:
    """What a worker process knows of the others."""

    cpus_per_shard: ClassVar[Any]
    """An int in memory that the main process shares. Only it writes there."""

    @classmethod
    def begin(cls, cpus_per_shard: Any) -> None:
        cls.cpus_per_shard = cpus_per_shard


class _IdleCpus:
    """The CPUs of idle workers, for the threads of this process. A context manager."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> _IdleCpus:
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads is not None:
            # After an error, nobody waits for a video that is still decoded.
            self._threads.shutdown(wait=False, cancel_futures=True)

    def count(self) -> int:
        return int(_Worker.cpus_per_shard.value) - 1

    def submit(self, batch: MediaBatch) -> Answer:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(num_cores(), "mmstream-check")
        return self._threads.submit(batch.check)


def _write_shard(job: ShardJob) -> ShardReport:
    with _IdleCpus() as idle_cpus:
        return write_shard(job, idle_cpus)
