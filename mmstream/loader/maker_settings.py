"""How many processes make a rank's batches, and how: the user's settings, checked.

Loader -> `maker_settings` -> BatchMakers, Workers
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mmstream.errors import ConfigError
from mmstream.loader.watchdog import StallLimits
from mmstream.machine import default_threads, num_cores
from mmstream.pipeline import Pipeline, needs_no_worker, needs_one_thread

logger = logging.getLogger(__name__)

MultiprocessingContext: TypeAlias = Literal["forkserver", "spawn", "fork"]
"""How worker processes start."""

MIN_MOST_WORKERS = 64
"""A rank may have so many workers, or four per core where that is more."""


@dataclass(frozen=True)
class MakerSettings:
    """How many processes make batches, and how.

    Attributes:
        num_workers: worker processes; 0: this process makes batches itself.
        num_threads: decode threads of each process.
        prefetch_factor: batches that each worker makes ahead.
        multiprocessing_context: how workers start.
        stall_limits: when a batch that does not come is a warning, and when an error.
    """

    num_workers: int
    num_threads: int
    prefetch_factor: int
    multiprocessing_context: MultiprocessingContext
    stall_limits: StallLimits


def maker_settings(
    pipeline: Pipeline,
    *,
    num_workers: int,
    num_threads: int | None,
    prefetch_factor: int,
    multiprocessing_context: MultiprocessingContext,
    stall_limits: StallLimits,
) -> MakerSettings:
    """Check the settings of a user, and fit them to a pipeline.

    Raw samples of object storage get no workers. `num_threads` gets its default.

    Raises:
        ConfigError: impossible settings.
    """
    most = max(MIN_MOST_WORKERS, 4 * num_cores())
    if num_workers > most:  # a slip of the hand: so many starting processes stop a machine
        raise ConfigError(
            f"num_workers is {num_workers}, for each rank: at most {most} with {num_cores()} cores"
        )
    limits = stall_limits
    if limits.timeout_s is not None and num_workers == 0:
        raise ConfigError(
            "stall_timeout_s needs worker processes, which it can end: num_workers=1 or more"
        )
    if num_workers and limits.timeout_s is None and needs_no_worker(pipeline):
        logger.info(
            "num_workers=%d: nothing is made of raw samples from object storage, so no worker "
            "starts; the reader process hands them to this one",
            num_workers,
        )
        num_workers = 0
    is_one_enough = num_workers > 0 or needs_one_thread(pipeline)
    num_threads = num_threads or (1 if is_one_enough else default_threads())
    return MakerSettings(num_workers, num_threads, prefetch_factor, multiprocessing_context, limits)
