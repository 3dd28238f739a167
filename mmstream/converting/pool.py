"""Convert's processes: jobs in, reports out. What they write does not depend on how many there are.

A job is one shard, so a process holds one sample in memory and shares nothing. Workers come from a
fork server: they inherit no threads and no open connections of the caller.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice

from mmstream.converting.shard import ShardJob, ShardReport, write_shard
from mmstream.errors import MMStreamError
from mmstream.processes import join_parent

__all__ = ["run_jobs"]


def run_jobs(jobs: Iterable[ShardJob], num_workers: int) -> Iterator[tuple[str, ShardReport]]:
    """Yield (URL of the store, report) of every job, as they finish.

    Up to one worker means: in this process.

    Raises:
        MMStreamError: a worker process died; finished shards are kept.
        Exception: whatever `write_shard` raises; the other workers are stopped.
    """
    if num_workers <= 1:
        yield from ((job.store.url, write_shard(job)) for job in jobs)
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mmstream.loader.forkserver_preload"])
    pool = ProcessPoolExecutor(num_workers, context, join_parent, (dict(os.environ),))
    try:
        yield from _drain(pool, iter(jobs), num_workers)
    except BrokenProcessPool:
        raise MMStreamError(
            "convert: a worker process died (killed, or out of memory). Finished shards are kept: "
            "run the same command again. A script must call convert under "
            "`if __name__ == '__main__':`"
        ) from None
    except BaseException:
        # Ctrl-C, or a failed job: the other workers' shards are not wanted any more.
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _drain(
    pool: ProcessPoolExecutor, jobs: Iterator[ShardJob], num_workers: int
) -> Iterator[tuple[str, ShardReport]]:
    # Two jobs a worker are in flight, not all: a job carries the offsets of its rows.
    running: dict[Future[ShardReport], str] = {}
    while True:
        for job in islice(jobs, 2 * num_workers - len(running)):
            running[pool.submit(write_shard, job)] = job.store.url
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(future), future.result()
