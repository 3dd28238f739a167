"""What happens inside a worker process, and how a pipeline gets there.

A batch leaves the worker as a `SentBatch`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from mmstream.decoding.batch_memory import BatchMemory
from mmstream.decoding.media import audio_decoders, video_decoders
from mmstream.errors import ConfigError, MMStreamError
from mmstream.loader.batch_transport import SentBatch
from mmstream.pipeline import Pipeline, PipelineRunner
from mmstream.processes import join_parent, keep_freed_memory, start_fork_server
from mmstream.progress import Progress, Stage
from mmstream.reading.messages import StepConnection
from mmstream.reading.step import Job
from mmstream.types import Batch

logger = logging.getLogger(__name__)


class StepDataset(Dataset[Batch]):
    """A map-style dataset of steps: ``dataset[job]`` is the batch of a job, as a `SentBatch`.

    The runner is made at the first job and lives on from one job to the next.

    Args:
        pipeline: what to run.
        num_threads: decode threads.
        progress: memory in which each worker writes down what it works on (`shared_progress`).
        receiver: number of the `BatchReceiver` of their batches.
        is_forked: whether workers inherit the pipeline; else it is pickled for them.
        connections: to the reader process of the rank, one for each worker; empty without one.

    Raises:
        ConfigError: the pipeline cannot be sent to workers.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        num_threads: int,
        progress: Any,
        receiver: int,
        *,
        is_forked: bool,
        connections: Sequence[StepConnection] = (),
    ) -> None:
        if pipeline.zero_copy:
            raise ConfigError("zero_copy=True: views stay in their process; num_workers=0")
        self._pipeline = pipeline
        self._num_threads = num_threads
        self._progress = progress
        self._receiver = receiver
        self._connections = list(connections)
        self._pickled = None if is_forked else _pickled(pipeline)
        self._memory: BatchMemory | None = None
        self._runner: PipelineRunner | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        settings = self._num_threads, self._progress, self._receiver
        return _load, (dict(os.environ), self._pickled, *settings, self._connections)

    def __getitem__(self, job: Job) -> Any:
        if self._memory is None:  # made here, in the worker
            self._memory = BatchMemory(shared=True)
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        progress = Progress(self._progress, number)
        if self._runner is None:
            self._runner = PipelineRunner(
                self._pipeline,
                num_threads=self._num_threads,
                memory=self._memory,
                progress=progress,
                connection=self._connections[number] if self._connections else None,
            )
        try:
            sent = SentBatch(self._runner.batch(job), self._memory, self._receiver)
        except BaseException:
            self._runner.close()
            self._runner = None
            raise
        progress.begin_stage(Stage.IDLE, job.epoch, job.step)
        return sent


def _load(
    environment: dict[str, str],
    pickled: bytes,
    num_threads: int,
    progress: Any,
    receiver: int,
    connections: list[StepConnection],
) -> StepDataset:
    """Return the dataset in a worker, before `start_worker` is called there.

    A plan of packs opens its files again here. In object storage they need credentials, which may
    have been set since the fork server began.
    """
    os.environ.clear()
    os.environ.update(environment)
    return StepDataset(
        pickle.loads(pickled),
        num_threads,
        progress,
        receiver,
        is_forked=True,
        connections=connections,
    )


def preload_server(pipeline: Pipeline) -> None:
    """Start the process that workers are forked from, without waiting for it.

    It imports the slow modules once, while this process goes on: torch, the library of the
    tokenizer, and FFmpeg where videos or recordings are decoded.
    """
    _check_main_guard()
    modules = ["mmstream.loader.loader"]
    if pipeline.decode is not None and pipeline.decode.text is not None:
        modules.append(type(pipeline.decode.text.tokenizer).__module__)
    if pipeline.decode is not None and video_decoders(pipeline.decode):
        modules.append("mmstream.decoding.video.file")
    if pipeline.decode is not None and audio_decoders(pipeline.decode):
        modules.append("mmstream.decoding.audio.decoder")
    start_fork_server(modules)


def start_worker(environment: dict[str, str], num_threads: int, _worker: int) -> None:
    """Set up a worker: its environment, its signals and its number of threads.

    SIGTERM goes to all processes of a job at once. The main process decides what to do. A worker
    that ended by itself would fail the last step of a run that is about to be saved.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before any thread, so for all
    join_parent(environment)
    keep_freed_memory()
    # A tokenizer would start one thread per core in every worker.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if num_threads > 1 else "false")
    os.environ.setdefault("RAYON_NUM_THREADS", str(num_threads))
    threading.Thread(target=_obey_parent, name="mmstream-obey", daemon=True).start()


def _obey_parent() -> None:
    """End this process at a SIGTERM that the main process itself has sent."""
    parent = multiprocessing.parent_process()
    while parent is not None and signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        logger.info("a worker leaves SIGTERM to the main process")
    os._exit(128 + signal.SIGTERM)


def in_one_line(error: MMStreamError) -> MMStreamError:
    """Return a worker's error with the worker's traceback as its cause.

    torch puts it into the message. It tells where a function of the user failed.
    """
    text = str(error.args[0]) if error.args else ""  # `str(error)` would be one line already
    _, space, reason = text.rstrip().rpartition("\n")[2].partition(": ")
    if not space or "Original Traceback" not in text:
        return error
    line = type(error)(reason)
    line.__cause__ = RuntimeError(text)
    return line


def _pickled(pipeline: Pipeline) -> bytes:
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
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    is_interactive = main_file is None and b"__main__" in data
    if is_interactive or (main_file and not Path(main_file).is_file()):
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
