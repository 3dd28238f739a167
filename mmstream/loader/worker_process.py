"""Part of the loader: what happens inside a worker process; a batch leaves it as a `Parcel`."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from mmstream.batching.collate import Batch
from mmstream.errors import ConfigError, MMStreamError
from mmstream.loader.batch_memory import Memory
from mmstream.loader.batch_transport import Parcel
from mmstream.pipeline import Pipeline
from mmstream.processes import join_parent
from mmstream.reading.reader import Job

__all__ = ["Steps", "in_one_line", "pickle_pipeline", "preload_server", "start_worker"]

logger = logging.getLogger(__name__)


class Steps(Dataset[Batch]):
    """Step -> batch, as a `Parcel`, in a worker; None -> None, as soon as it is up.

    The pipeline's generators live on from one job to the next.

    Args:
        pipeline: what to run.
        num_threads: decode threads.
        pickled: the pipeline as it is sent to workers; None: they are forked, and have it.
    """

    def __init__(self, pipeline: Pipeline, num_threads: int, pickled: bytes | None = None) -> None:
        if pipeline.zero_copy:
            raise ConfigError("zero_copy=True: views stay in their process; num_workers=0")
        self._pipeline, self._num_threads, self._pickled = pipeline, num_threads, pickled
        self._waiting: deque[Job] = deque()
        self._batches: Iterator[Batch] | None = None
        self._memory: Memory | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self._pickled, self._num_threads)

    def __getitem__(self, job: Job | None) -> Any:
        if job is None:
            return None  # a greeting: this process is up
        self._waiting.append(job)
        if self._memory is None:  # made here, in the worker
            self._memory = Memory(shared=True)
        if self._batches is None:
            jobs = _drain(self._waiting)
            self._batches = self._pipeline.batches(jobs, self._num_threads, self._memory)
        try:
            return Parcel(next(self._batches), self._memory)
        except BaseException:
            self._batches = None  # an error ends a generator for good
            raise


def _load(pickled: bytes, num_threads: int) -> Steps:
    return Steps(pickle.loads(pickled), num_threads)


def preload_server(pipeline: Pipeline) -> None:
    """Start the process that workers are forked from, without waiting for it.

    It imports what is slow to import once, while this process goes on: torch, and the library of
    the tokenizer.
    """
    _check_main_guard()
    modules = ["mmstream.loader.forkserver_preload", "mmstream.loader"]
    if pipeline.decode is not None and pipeline.decode.text is not None:
        modules.append(type(pipeline.decode.text.tokenizer).__module__)
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [name for name in modules if name != "__main__"]
    )
    # It begins with the mask of this thread: signals to the group wait until they can be ignored.
    resource_tracker.ensure_running()  # which would lift the mask when it starts
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_worker(environment: dict[str, str], num_threads: int, _worker: int) -> None:
    """Belong to the main process, leave a scheduler's SIGTERM to it, and keep to some threads.

    SIGTERM goes to all processes of a job at once. The main process decides; a worker that left by
    itself would fail the last step of a run that is about to be saved.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before any thread, so in all
    join_parent(environment)
    # A tokenizer's own threads would be as many as there are cores, in each worker.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if num_threads > 1 else "false")
    os.environ.setdefault("RAYON_NUM_THREADS", str(num_threads))
    threading.Thread(target=_obey_parent, name="mmstream-obey", daemon=True).start()


def _obey_parent() -> None:
    """End at a SIGTERM of the main process' own."""
    parent = multiprocessing.parent_process()
    while parent is not None and signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        logger.info("a worker leaves SIGTERM to the main process")
    os._exit(128 + signal.SIGTERM)


def _drain(waiting: deque[Job]) -> Iterator[Job]:
    while True:
        yield waiting.popleft()


def in_one_line(error: MMStreamError) -> MMStreamError:
    """Return a worker's error without the worker's traceback, which torch puts into its message."""
    _, space, reason = str(error).rstrip().rpartition("\n")[2].partition(": ")
    return type(error)(reason) if space and "Original Traceback" in str(error) else error


def pickle_pipeline(pipeline: Pipeline) -> bytes:
    """Return a pipeline as it is sent to workers; refuse what they could not load."""
    _check_main_guard()
    advice = 'or pass multiprocessing_context="fork" or num_workers=0'
    try:
        data = pickle.dumps(pipeline)
    except Exception as error:
        raise ConfigError(
            f"the pipeline cannot be sent to worker processes ({error}): define transforms and "
            f"collate at the top of a module, {advice}"
        ) from error
    source = getattr(sys.modules.get("__main__"), "__file__", None)
    if (source is None and b"__main__" in data) or (source and not Path(source).is_file()):
        raise ConfigError(
            "workers cannot import what a notebook, a prompt or standard input defines: "
            f"put transforms and collate into a module, {advice}"
        )
    return data


def _check_main_guard() -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "this script would start its workers again in each worker: put what it runs under "
            '`if __name__ == "__main__":`'
        )
