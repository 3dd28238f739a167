"""Tasks of a Ray cluster: jobs in, reports out. A task is one shard.

    plan -> jobs -> RAY TASKS of `write_shard` -> manifest

A task of a worker or node that died runs again on another one. A shard that was committed is
not written twice. Ray gives each task to the next free CPU: a slow shard holds one CPU, and the
others go on. While CPUs have no shard, tasks on them check media of those that are still written.
Such a task gets the bytes of media and returns others, so it needs no storage.

All nodes must see the destination and the media under the same paths. Rows need not be there: they
go with their job, where they lie on this machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from traceback import format_exc
from typing import Any, NamedTuple

from mmstream.converting.media.check import Answer, MediaBatch, Outcome
from mmstream.converting.media.options import MediaOptions
from mmstream.converting.media.references import MediaAccess, folder_stamp
from mmstream.converting.shard import ShardJob, ShardReport, missing_file, write_shard
from mmstream.errors import ConfigError, MMStreamError, StorageError
from mmstream.storage import is_remote, open_store

MAX_RETRIES = 5
"""Deaths of a worker or node that a task survives."""

TASKS_PER_CPU = 2
"""Tasks in flight. One of them waits, so that a CPU never does. Each holds the rows of a shard."""

MAX_IDLE_CPUS = 8
"""Most CPUs that check media for one shard, beside its own, which reads and writes for them."""
LOOK_S = 0.25
"""Seconds between two looks for an idle CPU. With each look a shard takes one, so that several
shards get as many."""


def run_jobs(
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
    task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(_write_shard)
    running: dict[Any, ShardJob] = {}
    try:
        while True:
            limit = num_workers or _default_limit(ray)
            for job in islice(jobs, max(0, limit - len(running))):
                task_of_job = task.remote(_portable(job), job.media.plan(), num_workers is None)
                running[task_of_job] = job
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


def _default_limit(ray: Any) -> int:
    """Return the tasks in flight for the cluster as it is now. It may grow and shrink."""
    return max(2, TASKS_PER_CPU * int(ray.cluster_resources().get("CPU", 1)))


def _portable(job: ShardJob) -> ShardJob:
    """Return a job that any node can do: with its rows, and without relative paths."""
    store, lock = job.store, job.lock
    if store.local_path("") is not None:
        store = open_store(str(Path(store.url).absolute()))
        lock = replace(lock, store=store)
    return replace(job, store=store, lock=lock, rows=job.rows.detached(), progress_folder=None)


def _write_shard(
    job: ShardJob, media_plan: dict[str, Any], takes_idle_cpus: bool
) -> ShardReport | Exception:
    """Write a shard. An error is returned: Ray would wrap it in a traceback."""
    try:
        _require_same_libraries(job.media, media_plan)
        job = replace(job, access=_on_this_node(job.access))
        if not takes_idle_cpus:
            return write_shard(job)
        with _IdleCpus(media_plan) as idle_cpus:
            return write_shard(job, idle_cpus)
    except Exception as error:
        error.add_note(format_exc())  # a traceback does not travel; a function of the user needs it
        return error


class _IdleCpus:
    """CPUs of the cluster that no task asked for. A context manager, in the task of a shard.

    Their number only grows. Where a CPU is gone, or has got a shard, a batch waits for another one:
    at worst for that of the shard's task, which has it while the task waits.
    """

    def __init__(self, media_plan: dict[str, Any]) -> None:
        import ray

        self._ray: Any = ray
        self._task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(_check)
        self._media_plan = media_plan
        self._count = 0
        self._next_look = 0.0
        self._thread = ThreadPoolExecutor(1, "mmstream-check")
        self._own: Future[list[Outcome]] | None = None

    def __enter__(self) -> _IdleCpus:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def count(self) -> int:
        if self._count < MAX_IDLE_CPUS and time.monotonic() >= self._next_look:
            self._count += self._ray.available_resources().get("CPU", 0) >= 1
            self._next_look = time.monotonic() + LOOK_S
        return self._count

    def submit(self, batch: MediaBatch) -> Answer:
        """Let a thread check the batch, on the shard's own CPU, if it is free; else a task."""
        if self._own is None or self._own.done():
            self._own = self._thread.submit(batch.check)
            return self._own
        return _Answer(self._ray, self._task.remote(batch, self._media_plan))


class _Answer(NamedTuple):
    ray: Any
    reference: Any

    def result(self) -> list[Outcome]:
        # While `get` waits, Ray gives the CPU of this task to others. So the batch is also checked
        # where its node is gone, and all other CPUs have tasks that wait like this one.
        value: list[Outcome] | Exception = self.ray.get(self.reference)
        if isinstance(value, Exception):
            raise value
        return value


def _check(batch: MediaBatch, media_plan: dict[str, Any]) -> list[Outcome] | Exception:
    """Check media on any node. An error is returned, as by `_write_shard`."""
    try:
        _require_same_libraries(batch.options, media_plan)
        return batch.check()
    except Exception as error:
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
