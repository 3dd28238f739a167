"""The processes that make a rank's batches: this one or workers, and the reader process.

    Loader.iter_undelivered -> `BatchMakers.batches` -> Workers or PipelineRunner

They start when they are first needed, and go on from one epoch to the next. After a jump or a
change of the pipeline they start anew. They know jobs and pipelines, but nothing of states and
counts. They belong to the process that started them; a forked child starts its own.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from mmstream.errors import ConfigError, MMStreamError, StorageError
from mmstream.loader.maker_settings import MakerSettings
from mmstream.loader.watchdog import Watchdog
from mmstream.loader.worker_group import ThisProcess
from mmstream.loader.worker_process import in_one_line, preload_server
from mmstream.loader.workers import Workers
from mmstream.pipeline import Pipeline, PipelineRunner, large_files_of
from mmstream.processes import keep_freed_memory
from mmstream.progress import Progress
from mmstream.reading.messages import ReaderEnded
from mmstream.reading.process import ReaderProcess, needs_reader_process, node_cache_settings
from mmstream.reading.step import Job, later_job
from mmstream.types import Batch
from mmstream.world import World


class BatchMakers:
    """The processes of one loader.

    Args:
        settings: how many processes make batches, and how.

    Attributes:
        settings: the same.
        workers: the worker processes; None while there are none.
        reader: the reader process; None while there is none.
    """

    def __init__(self, settings: MakerSettings) -> None:
        self.settings = settings
        self.workers: Workers | None = None
        self.reader: ReaderProcess | None = None
        self._reader_pipeline: Pipeline | None = None
        self._runner: PipelineRunner | None = None  # without workers
        self._progress = Progress()
        self._due_job: Job | None = None  # the next one of those who make batches
        self._pid = os.getpid()  # of the process that they belong to

    def start_early(self, pipeline: Pipeline) -> None:
        """Start what takes long and needs no position. It imports while the script goes on."""
        if self.settings.num_workers and self.settings.multiprocessing_context == "forkserver":
            preload_server(pipeline)
        # A node cache depends on the number of ranks, which `batches` is told.
        if pipeline.cache_dir is None and needs_reader_process(pipeline.dataset):
            self._start_reader(pipeline, None)

    def batches(self, pipeline: Pipeline, first: Job, stop: int, world: World) -> Iterator[Batch]:
        """Yield the batches from the first job to the step before `stop`.

        Args:
            pipeline: what the ranks run.
            first: the first job.
            stop: the step after the last one.
            world: this rank.

        Raises:
            ConfigError: this process was forked since the first batch.
        """
        keep_freed_memory()
        self._leave_to_parent()
        is_outdated = self.reader is not None and self.reader.lacks_variables
        if self._reader_pipeline is not pipeline or is_outdated:
            self.close()
        if self.reader is None and needs_reader_process(pipeline.dataset):
            self._start_reader(pipeline, world)
        self._reader_pipeline = pipeline
        due = self._due_job
        goes_on = due is not None and first._replace(iteration=due.iteration) == due
        if due is not None and goes_on:
            first = due
        elif self.reader is not None:
            iteration = self.reader.begin(first.epoch, first.step, (first.start, first.stop))
            first = first._replace(iteration=iteration)
        label = f"rank {world.rank}: " if world.world_size > 1 else ""
        if self.settings.num_workers == 0:
            batches = self._own_batches(pipeline, first, stop, label)
        else:
            batches = self._worker_batches(pipeline, first, stop, label, goes_on)
        with closing(batches):
            for step, batch in enumerate(batches, start=first.step):
                self._due_job = later_job(first._replace(step=step), 1, stop)
                yield batch
                if self._pid != os.getpid():
                    raise ConfigError(
                        "this loop began before this process was forked: begin another loop over "
                        "the loader here"
                    )

    def _leave_to_parent(self) -> None:
        """In a forked child, forget the processes and threads of the parent, which uses them."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self.reader = self.workers = self._runner = self._due_job = None

    def _start_reader(self, pipeline: Pipeline, world: World | None) -> None:
        """Start the reader process of a pipeline; does not wait for it.

        Args:
            pipeline: what the ranks run.
            world: this rank. It must be known where there is a node cache.
        """
        large_files, cache = large_files_of(pipeline), None
        if pipeline.cache_dir is not None and world is not None:
            cache = node_cache_settings(
                pipeline.dataset, pipeline.cache_dir, pipeline.max_cache_bytes, world.world_size
            )
        self.reader = ReaderProcess(
            pipeline.dataset,
            pipeline.order,
            max(1, self.settings.num_workers),
            None if large_files is None else large_files.least_bytes,
            cache,
        )
        self._reader_pipeline = pipeline

    def _worker_batches(
        self, pipeline: Pipeline, first: Job, stop: int, label: str, goes_on: bool
    ) -> Generator[Batch, None, None]:
        """Yield batches that workers make; `goes_on`: they make them already."""
        if self.workers is None:
            if self.settings.multiprocessing_context == "forkserver":
                preload_server(pipeline)  # it may have ended, or be that of the parent
            self.workers = Workers(pipeline, self.settings, self.reader)
        yield from self.workers.batches(first, stop, label, goes_on=goes_on)

    def _own_batches(
        self, pipeline: Pipeline, first: Job, stop: int, label: str
    ) -> Generator[Batch, None, None]:
        """Yield batches that this process makes itself."""
        if self._runner is None:
            self._progress = Progress()
            self._runner = PipelineRunner(
                pipeline,
                num_threads=self.settings.num_threads,
                progress=self._progress,
                connection=None if self.reader is None else self.reader.connections[0],
            )
        runner = self._runner
        process = ThisProcess(pipeline, self._progress, label, self.reader)
        with closing(Watchdog(process, self.settings.stall_limits, self.reader)) as watchdog:
            watchdog.start()
            for step in range(first.step, stop):
                job = first._replace(step=step)
                with watchdog.waiting_for(job):
                    batch = runner.batch(job)
                yield batch

    def explained(self, error: BaseException, state: str) -> MMStreamError | None:
        """Return a better error for an error of `batches`. None: it says enough.

        Args:
            error: what `batches` raised.
            state: where the state stands, in words.
        """
        if not isinstance(error, MMStreamError):
            return None
        if isinstance(error, ReaderEnded) and self.reader is not None:
            return MMStreamError(f"{self.reader.words_of_end()}; {state}")
        line = in_one_line(error) if self.settings.num_workers else error
        if isinstance(error, StorageError):
            return StorageError(f"{line}; {state}")
        return None if line is error else line

    def pids(self) -> dict[str, list[int]]:
        """Return the processes that run now: "workers" and "reader"."""
        self._leave_to_parent()
        return {
            "workers": [] if self.workers is None else self.workers.pids,
            "reader": [] if self.reader is None else [self.reader.pid],
        }

    def close(self) -> None:
        """End all of them. `batches` starts new ones."""
        self._leave_to_parent()
        self._due_job = None
        workers, self.workers = self.workers, None
        if workers is not None:
            workers.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the processes behind: a copy starts its own."""
        return self.__dict__ | {"workers": None, "reader": None, "_runner": None, "_due_job": None}
