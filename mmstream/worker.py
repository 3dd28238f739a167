"""Part of the loader: what happens inside a worker process, and how a batch leaves it.

torch sends each tensor as shared memory of its own, an open file on both sides and a connection
between them. A list of tensors (pictures of different sizes) would need hundreds a batch, where a
process may often have 1,024 open files, so such a list crosses as one tensor.
"""

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
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from mmstream.batching import Batch
from mmstream.errors import ConfigError, MMStreamError
from mmstream.pipeline import Pipeline
from mmstream.processes import join_parent
from mmstream.reading import Job

__all__ = ["Steps", "check_picklable", "in_one_line", "pack_lists", "start_worker"]

logger = logging.getLogger(__name__)


class Steps(Dataset[Batch]):
    """Step -> batch, in a worker. The pipeline's generators live on from one job to the next."""

    def __init__(self, pipeline: Pipeline, num_threads: int) -> None:
        self._pipeline, self._num_threads = pipeline, num_threads
        self._waiting: deque[Job] = deque()
        self._batches: Iterator[Batch] | None = None

    def __getitem__(self, job: Job) -> Batch:
        self._waiting.append(job)
        if self._batches is None:
            self._batches = self._pipeline.batches(_drain(self._waiting), self._num_threads)
        try:
            return next(self._batches)
        except BaseException:
            self._batches = None  # an error ends a generator for good
            raise


def start_worker(environment: dict[str, str], _worker: int) -> None:
    """Belong to the main process, and leave a scheduler's SIGTERM to it.

    SIGTERM goes to all processes of a job at once. The main process decides; a worker that left by
    itself would fail the last step of a run that is about to be saved.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before any thread, so in all
    join_parent(environment)
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


class _Packed(list[torch.Tensor]):
    """Tensors of one type; on the other side, a plain list of views of one memory."""

    def __reduce__(self) -> tuple[Any, ...]:
        layouts = [_layout(tensor) for tensor in self]
        flat = [
            tensor.permute(order).reshape(-1) for tensor, order in zip(self, layouts, strict=True)
        ]
        return _unpack, (torch.cat(flat), [tensor.shape for tensor in self], layouts)


def pack_lists(batch: Any) -> Any:
    """Return a batch whose lists of tensors cross in one piece and arrive as lists."""
    return {
        name: _Packed(value)
        if isinstance(value, list)
        and all(isinstance(item, torch.Tensor) and item.device.type == "cpu" for item in value)
        and len({item.dtype for item in value}) == 1
        else value
        for name, value in batch.items()
    }


def _layout(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions in the order of memory, so that pictures stay channels_last."""
    return sorted(range(tensor.ndim), key=tensor.stride, reverse=True)


def _unpack(
    flat: torch.Tensor, shapes: list[torch.Size], layouts: list[list[int]]
) -> list[torch.Tensor]:
    found = []
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    for part, shape, order in zip(parts, shapes, layouts, strict=True):
        inverse = sorted(range(len(order)), key=order.__getitem__)
        found.append(part.view([shape[i] for i in order]).permute(inverse))
    return found


def in_one_line(error: MMStreamError) -> MMStreamError:
    """Return a worker's error without the worker's traceback, which torch puts into its message."""
    _, space, reason = str(error).rstrip().rpartition("\n")[2].partition(": ")
    return type(error)(reason) if space and "Original Traceback" in str(error) else error


def check_picklable(pipeline: Pipeline) -> None:
    """Refuse what a worker that starts afresh could not load, before it tries."""
    advice = 'or pass start_method="fork" or num_workers=0'
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
