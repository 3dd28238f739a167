"""The parent's side of worker processes.

The transport is a torch DataLoader over a map-style dataset of steps. Its sampler yields jobs, so
torch's own round-robin means "worker k takes every w-th step". Batches come back in step order.
Persistent workers, the next epoch and a resume need no messages.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.data import DataLoader, Sampler

from mmstream.errors import ConfigError, MMStreamError
from mmstream.loader.worker_process import StepDataset, start_worker
from mmstream.pipeline import Pipeline
from mmstream.reading.step import Job
from mmstream.types import Batch

__all__ = ["MultiprocessingContext", "Workers"]

MultiprocessingContext: TypeAlias = Literal["forkserver", "spawn", "fork"]


class Workers:
    """The worker processes that run one pipeline. They start at the first batch.

    Args:
        pipeline: what they run.
        num_workers: number of processes.
        num_threads: decode threads of each.
        prefetch_factor: batches that each makes ahead.
        multiprocessing_context: how they are started.

    Raises:
        ConfigError: the pipeline cannot be sent to workers, or this process is itself a worker that
            imports an unguarded script.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        num_workers: int,
        num_threads: int,
        prefetch_factor: int,
        multiprocessing_context: MultiprocessingContext,
    ) -> None:
        self.pipeline = pipeline
        self._num_workers = num_workers
        self._jobs = _JobSampler()
        self._transport: DataLoader[Batch] = DataLoader(
            StepDataset(pipeline, num_threads, is_forked=multiprocessing_context == "fork"),
            sampler=self._jobs,
            batch_size=None,
            collate_fn=_unchanged,  # torch's own would turn tuples into lists, arrays into tensors
            num_workers=num_workers,
            multiprocessing_context=multiprocessing.get_context(multiprocessing_context),
            persistent_workers=True,
            prefetch_factor=prefetch_factor,
            worker_init_fn=partial(start_worker, dict(os.environ), num_threads),
            pin_memory=torch.cuda.is_available(),
            # Without one, torch draws a seed from the generator that a model draws from.
            generator=torch.Generator().manual_seed(torch.initial_seed()),
        )
        self._are_up = False

    def batches(self, first: Job, stop: int) -> Iterator[Batch]:
        """Yield the batches of steps `first.step` to `stop` - 1, in order.

        Args:
            first: the first job.
            stop: the step after the last one.

        Raises:
            ConfigError, MMStreamError: workers could not start.
            Exception: what `PipelineRunner.batch` raises.
        """
        self._jobs.first = first._replace(stride=self._num_workers)
        self._jobs.stop = stop
        try:
            for batch in self._transport:
                self._are_up = True
                yield batch
        except Exception as error:
            explanation = None if self._are_up else _start_error(error)
            if explanation is None:
                raise
            raise explanation from error

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run."""
        iterator = getattr(self._transport, "_iterator", None)
        return [worker.pid for worker in getattr(iterator, "_workers", ())]

    def close(self) -> None:
        """End the processes."""
        iterator = getattr(self._transport, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()


class _JobSampler(Sampler[Job]):
    """Yields the jobs of the present iteration: from `first` to the step before `stop`."""

    def __init__(self) -> None:
        self.first = Job(0, 0, 0, 0)
        self.stop = 0

    def __iter__(self) -> Iterator[Job]:
        first, stop = self.first, self.stop
        return (first._replace(step=step) for step in range(first.step, stop))

    def __len__(self) -> int:
        return self.stop - self.first.step


def _unchanged(batch: Any) -> Any:
    return batch


def _start_error(error: Exception) -> Exception | None:
    """Return what to raise where workers could not start. None: `error` says it."""
    if isinstance(error, EOFError | ConnectionError):
        return MMStreamError(
            "the fork server of the workers has ended; its own message is printed above. "
            'Start again, or with multiprocessing_context="spawn"'
        )
    if "exited unexpectedly" in str(error):
        return ConfigError(
            "workers ended before their first batch; their own messages are printed above. For a "
            "missing import, or an error about this script itself: put what the script runs under "
            '`if __name__ == "__main__":`. Without any message, the system may have ended them '
            "for lack of memory: use fewer workers or a smaller window"
        )
    return None
