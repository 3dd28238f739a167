"""The worker processes of a conversion: jobs in, reports out. A job is one shard.

    plan -> POOL of `write_shard` -> manifest

The workers share nothing, and each holds one sample in memory. They come from a fork server, so
they inherit no threads and no open connections from the caller. What they write does not depend on
their number.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.process import BaseProcess

from mmstream.converting.shard import ShardJob, ShardReport, write_shard
from mmstream.errors import MMStreamError
from mmstream.processes import join_parent, start_fork_server, words_of_exit

__all__ = ["run_jobs"]

UNKNOWN = 255
"""The exit code of a worker whose own could not be read, for Python's multiprocessing."""


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
    earlier_children = set(multiprocessing.active_children())
    workers: list[BaseProcess] = []
    context = multiprocessing.get_context("forkserver")
    start_fork_server([])
    pool = ProcessPoolExecutor(num_workers, context, join_parent, (dict(os.environ),))
    try:
        yield from _drain(pool, iter(jobs), num_workers, workers)
    except BrokenProcessPool:
        pool.shutdown()  # joins the workers, so that each has an exit code
        raise MMStreamError(
            f"convert: a worker process {_death(workers)}. Finished shards are kept; "
            "to continue, run the same command again. In a script, call convert under "
            "`if __name__ == '__main__':`"
        ) from None
    except BaseException:
        # Ctrl-C, or a job failed: nobody waits for the other workers' shards.
        for child in set(multiprocessing.active_children()) - earlier_children:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _drain(
    pool: ProcessPoolExecutor,
    jobs: Iterator[ShardJob],
    num_workers: int,
    workers: list[BaseProcess],
) -> Iterator[tuple[str, ShardReport]]:
    # Submit two jobs per worker, not all of them: each job holds the offsets of its rows.
    running: dict[Future[ShardReport], str] = {}
    while True:
        for job in islice(jobs, 2 * num_workers - len(running)):
            running[pool.submit(write_shard, job)] = job.store.url
        if len(workers) < num_workers:
            workers[:] = multiprocessing.active_children()
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(future), future.result()


def _death(workers: list[BaseProcess]) -> str:
    """Say how the worker ended that died first; the pool ends the others by SIGTERM."""
    by_itself = [
        worker for worker in workers if worker.exitcode not in (None, 0, -signal.SIGTERM, UNKNOWN)
    ]
    if not by_itself:
        return "died (killed, or out of memory)"
    words = words_of_exit(by_itself[0].exitcode or 0)
    hint = ", for lack of memory?" if by_itself[0].exitcode == -signal.SIGKILL else ""
    return f"(pid {by_itself[0].pid}) {words}{hint}"
