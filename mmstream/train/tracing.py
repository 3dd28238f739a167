"""Optional tools of a run: profiler traces and deterministic algorithms.

loop.fit -> `traced`, `deterministic`
"""

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

NUM_WARMUP_STEPS = 2
"""Steps before the traced ones. The first steps of a run are slower than the others."""


@contextmanager
def traced(num_steps: int, folder: str | None, rank: int) -> Iterator[Callable[[], None]]:
    """Trace some steps with torch.profiler, and yield a function to call after each step.

    The trace is ``trace-rank{r}.json`` in `folder`. https://ui.perfetto.dev opens it. The first two
    steps of the run are not traced.

    Args:
        num_steps: steps to trace; 0: none.
        folder: folder of the trace; None: no trace.
        rank: number of this rank.
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
            wait=NUM_WARMUP_STEPS - 1, warmup=1, active=num_steps, repeat=1
        ),
        on_trace_ready=write,
    ) as profiler:
        yield profiler.step


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Let torch use only deterministic algorithms, which give the same bits at each call.

    torch raises RuntimeError for an operation that has none. cuBLAS reads CUBLAS_WORKSPACE_CONFIG
    at its first call in a process, so it is set before, unless the environment has it.

    Args:
        enabled: False: do nothing.
    """
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    was_benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warn_only)
        torch.backends.cudnn.benchmark = was_benchmark
