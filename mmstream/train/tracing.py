"""Looking closer at a run, on request: a profiler's trace, and deterministic algorithms."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["deterministic", "traced"]

logger = logging.getLogger(__name__)

NUM_SKIPPED = 2
"""Steps before the traced ones: the first ones are not like the others."""


@contextmanager
def traced(num_steps: int, folder: str | None, rank: int) -> Iterator[Callable[[], None]]:
    """Trace steps with torch.profiler; gives the function to call after each step.

    The trace, ``trace-rank{r}.json`` in `folder`, opens in https://ui.perfetto.dev. A run of fewer
    steps than the two that are passed over writes none.

    Args:
        num_steps: steps to trace; 0: none.
        folder: where the trace goes.
        rank: this process's.
    """
    if num_steps == 0 or folder is None:
        yield lambda: None
        return
    path = Path(folder, f"trace-rank{rank}.json")

    def write(profiler: Any) -> None:
        profiler.export_chrome_trace(str(path))
        logger.info("trace of %d steps: %s", num_steps, path)

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(
            wait=NUM_SKIPPED - 1, warmup=1, active=num_steps, repeat=1
        ),
        on_trace_ready=write,
    ) as profiler:
        yield profiler.step


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Let torch use only algorithms that give the same bits each time, or raise RuntimeError.

    cuBLAS needs CUBLAS_WORKSPACE_CONFIG, set here if it is not, before its first call in a process.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]
