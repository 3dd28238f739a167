"""Who writes the shards of a conversion: jobs in, reports out. A job is one shard.

    plan -> jobs -> ENGINE of `write_shard` -> reports -> manifest

Worker processes: each holds one sample in memory. What they write does not depend on their number.
When no shard is left to begin, the CPUs of idle workers go to the shards that are still written:
their processes check media in threads, because decoders and encoders release Python's lock.

Tasks of a Ray cluster: a task of a worker or node that died runs again on another one. A shard that
was committed is not written twice. Ray gives each task to the next free CPU: a slow shard holds one
CPU, and the others go on.

All nodes must see the destination and the media under the same paths. Rows need not be there: they
go with their job, where they lie on this machine.

"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from traceback import format_exc
from typing import Any, ClassVar, Literal, TypeAlias

from mmstream.converting.media.load import LoadedRow
from mmstream.converting.media.references import MediaAccess, folder_stamp
from mmstream.converting.options import MediaOptions
from mmstream.converting.shard import ShardJob, ShardReport, missing_file, write_shard
from mmstream.errors import ConfigError, MMStreamError, StorageError
from mmstream.processes.machine import num_cores
from mmstream.processes.run import run_in_processes
from mmstream.storage import is_remote, open_store, require_shared

EngineName: TypeAlias = Literal["processes", "ray"]

Engine: TypeAlias = Callable[[Iterable[ShardJob]], Iterator[tuple[str, ShardReport]]]
"""Writes shards. Yields (URL of the store, report) for each job, when it is done."""


def require_engine(name: str, num_workers: int | None, dest: str) -> None:
    """Raise a ConfigError where an engine cannot write to a destination."""
    require_shared([dest], 2 if name == "ray" else num_workers or 0)


def engine_of(name: str, num_workers: int | None) -> Engine:
    """Return an engine.

    Args:
        name: "processes" or "ray". Ray is imported only if it is named.
        num_workers: Processes, or tasks of Ray at a time. Default: 1 process, or two tasks for each
            CPU of the cluster.
    """
    if name == "ray":
        return lambda jobs: _run_on_ray(jobs, num_workers)
    return lambda jobs: _run_in_workers(jobs, num_workers or 1)


def _run_in_workers(
    jobs: Iterable[ShardJob], num_workers: int
) -> Iterator[tuple[str, ShardReport]]:
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
        _write_shard_in_worker,
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


class _WorkerCpus:
    """The CPUs of idle workers, for the threads of this process."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(num_cores(), "mmstream-check")

    def close(self) -> None:
        """Give up: after an error, nobody waits for a video that is still decoded."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def count(self) -> int:
        return int(_Worker.cpus_per_shard.value) - 1

    def submit(self, check: Callable[[], list[LoadedRow]]) -> Future[list[LoadedRow]]:
        return self._threads.submit(check)


def _write_shard_in_worker(job: ShardJob) -> ShardReport:
    with closing(_WorkerCpus()) as idle_cpus:
        return write_shard(job, idle_cpus)


MAX_RETRIES = 5
"""Deaths of a worker or node that a task survives."""

TASKS_PER_CPU = 2
"""Tasks in flight. One of them waits, so that a CPU never does. Each holds the rows of a shard."""


def _run_on_ray(
    jobs: Iterable[ShardJob], num_workers: int | None = None
) -> Iterator[tuple[str, ShardReport]]:
    """Write shards. Yield (URL of the store, report) for each job, when it is done.

    It uses the Ray that this process has started, or the cluster of ``RAY_ADDRESS``. Otherwise it
    starts Ray on this machine, and ends it afterwards.

    Args:
        jobs: One for each shard.
        num_workers: Most tasks at a time. Default: two for each CPU of the cluster.

    Raises:
        ConfigError: Ray is not installed.
        MMStreamError: A task died again and again. Finished shards are kept.
        StorageError: This machine does not see what a node wrote.
        Exception: Whatever `write_shard` raises. The other tasks are cancelled.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("engine='ray': Ray is not installed; pip install 'ray[train]'") from None

    is_own = not ray.is_initialized()
    if is_own:
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    try:
        yield from _drain(ray, iter(jobs), num_workers)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().partition("\n")[0]
        raise MMStreamError(
            f"convert: a task of Ray died {MAX_RETRIES + 1} times ({reason}). Finished shards are "
            "kept; to continue, run the same command again"
        ) from None
    finally:
        if is_own:
            ray.shutdown()


def _drain(
    ray: Any, jobs: Iterator[ShardJob], num_workers: int | None
) -> Iterator[tuple[str, ShardReport]]:
    task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(_write_shard_on_ray)
    running: dict[Any, ShardJob] = {}
    try:
        while True:
            # The cluster may grow and shrink.
            num_cpus = int(ray.cluster_resources().get("CPU", 1))
            limit = num_workers or max(2, TASKS_PER_CPU * num_cpus)
            for job in islice(jobs, max(0, limit - len(running))):
                running[task.remote(_portable(job), job.options.media.plan())] = job
            if not running:
                return
            for reference in ray.wait(list(running), num_returns=1)[0]:
                job, report = running.pop(reference), ray.get(reference)
                if isinstance(report, Exception):
                    raise report
                _require_visible(job, report)
                yield job.store.url, report
    finally:
        # Ctrl-C, or a task failed: nobody waits for the other shards.
        for reference in running:
            ray.cancel(reference, force=True)


def _portable(job: ShardJob) -> ShardJob:
    """Return a job that any node can do: with its rows, and without relative paths."""
    store, lock = job.store, job.lock
    if store.local_path("") is not None:
        store = open_store(str(Path(store.url).absolute()))
        lock = replace(lock, store=store)
    return replace(job, store=store, lock=lock, rows=job.rows.detached())


def _write_shard_on_ray(job: ShardJob, media_plan: dict[str, Any]) -> ShardReport | Exception:
    """Write a shard. An error is returned: Ray would wrap it in a traceback."""
    try:
        _require_same_libraries(job.options.media, media_plan)
        return write_shard(replace(job, access=_on_this_node(job.access)))
    except Exception as error:
        error.add_note(format_exc())  # a traceback does not travel; a function of the user needs it
        return error


def _require_same_libraries(media: MediaOptions, media_plan: dict[str, Any]) -> None:
    """Refuse to change images with other libraries than the machine that made the plan."""
    own = media.plan()
    if own != media_plan:
        raise ConfigError(
            f"a node of Ray would write other images: it has {own}, and this machine has "
            f"{media_plan}; install the same versions on all nodes"
        )


def _on_this_node(access: MediaAccess) -> MediaAccess:
    """Return the access to media with what identifies their folder on this node."""
    if access.root is None or is_remote(access.root):
        return access
    stamp = folder_stamp(access.root)
    if stamp is None:
        raise StorageError(
            f"{access.root}: a node of Ray does not see this folder of media; share it with all "
            "nodes, or name an s3:// prefix"
        )
    return replace(access, root_stamp=stamp)


def _require_visible(job: ShardJob, report: ShardReport) -> None:
    name = missing_file(job, report)
    if name is not None:
        raise StorageError(
            f"{job.store.url_of(name)}: a node of Ray wrote it, and this machine does not see it; "
            "write to a folder that all nodes share, or to s3://"
        )
