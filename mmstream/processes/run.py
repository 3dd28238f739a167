"""Jobs in worker processes.

The workers share nothing. They come from a fork server, so they inherit no threads and no open
connections from the caller. They end with the main process, however that ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from mmstream.errors import MMStreamError
from mmstream.processes.machine import words_of_exit
from mmstream.processes.workers import join_parent, start_fork_server

Job = TypeVar("Job")

Result = TypeVar("Result")

UNKNOWN = 255
"""The exit code of a worker whose own could not be read, for Python's multiprocessing."""


def run_in_processes(
    function: Callable[[Job], Result],
    jobs: Iterable[Job],
    num_workers: int,
    *,
    command: str,
    prepare: Callable[..., object] | None = None,
    prepare_args: tuple[Any, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[Job, Result]]:
    """Do jobs. Yield each job with its result, when it is done.

    Args:
        function: Does one job. It and the jobs are pickled.
        jobs: Taken two for each worker at a time.
        num_workers: Number of processes. 0 or 1: this process does the jobs.
        command: For messages, such as "convert".
        prepare: Called once in each process, before its first job.
        prepare_args: Its arguments. They are pickled once for each process.
        environment: Variables of the workers, beside those of this process.

    Raises:
        MMStreamError: A worker process died.
        Exception: Whatever `function` raises. The other workers are stopped.
    """
    if num_workers <= 1:
        if prepare is not None:
            prepare(*prepare_args)
        yield from ((job, function(job)) for job in jobs)
        return
    earlier_children = set(multiprocessing.active_children())
    workers: list[BaseProcess] = []
    context = multiprocessing.get_context("forkserver")
    start_fork_server([function.__module__])
    variables = {**os.environ, **(environment or {})}
    pool = ProcessPoolExecutor(
        num_workers, context, _start_worker, (variables, prepare, prepare_args)
    )
    try:
        yield from _drain(pool, function, iter(jobs), num_workers, workers)
    except BrokenProcessPool:
        pool.shutdown()  # joins the workers, so that each has an exit code
        raise MMStreamError(
            f"{command}: a worker process {_death(workers)}. Finished shards are kept; "
            f"to continue, run the same command again. In a script, call {command} under "
            "`if __name__ == '__main__':`"
        ) from None
    except BaseException:
        # Ctrl-C, or a job failed: nobody waits for the other workers' results.
        for child in set(multiprocessing.active_children()) - earlier_children:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(
    environment: dict[str, str],
    prepare: Callable[..., object] | None,
    prepare_args: tuple[Any, ...],
) -> None:
    join_parent(environment)
    if prepare is not None:
        prepare(*prepare_args)


def _drain(
    pool: ProcessPoolExecutor,
    function: Callable[[Job], Result],
    jobs: Iterator[Job],
    num_workers: int,
    workers: list[BaseProcess],
) -> Iterator[tuple[Job, Result]]:
    # Submit two jobs per worker, not all of them: a job may be large.
    running: dict[Future[Result], Job] = {}
    while True:
        for job in islice(jobs, 2 * num_workers - len(running)):
            running[pool.submit(function, job)] = job
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
    description = words_of_exit(by_itself[0].exitcode or 0)
    hint = ", for lack of memory?" if by_itself[0].exitcode == -signal.SIGKILL else ""
    return f"(pid {by_itself[0].pid}) {description}{hint}"
