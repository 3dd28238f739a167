"""What a loader logs before its first batch: threads, files and requests that cost too much.

``media_advice.py``, ``remote_advice.py`` and ``lane_advice.py`` have the single subjects.
"""

from __future__ import annotations

import logging

from mmstream.display.markup import count_text
from mmstream.loader.lane_advice import advise_on_kept_lanes
from mmstream.loader.media_advice import advise_on_media
from mmstream.loader.remote_advice import log_cost, warn_of_patience
from mmstream.machine import num_cores
from mmstream.order.shared_lanes import request_factor
from mmstream.pipeline import Pipeline, large_files_of
from mmstream.reading.process import needs_reader_process
from mmstream.world import RowsPerRank, World, rows_of_rank

__all__ = ["log_advice"]

logger = logging.getLogger(__name__)


def log_advice(
    pipeline: Pipeline, world: World, shares: RowsPerRank, num_workers: int, num_threads: int
) -> None:
    """Log what a run could do better. Rank 0 speaks for what all ranks have in common.

    Args:
        pipeline: what the ranks run.
        world: this rank.
        shares: how the rows are shared out, as the Loader has it.
        num_workers: worker processes of this rank.
        num_threads: decode threads of each process.
    """
    cores, total_threads = num_cores(), max(1, num_workers) * num_threads
    if total_threads > cores:
        logger.info(
            "%d workers with %d decode threads on %d cores: more than one thread per core is "
            "not faster, and each worker holds windows and batches of its own",
            num_workers,
            num_threads,
            cores,
        )
    if needs_reader_process(pipeline.dataset):
        warn_of_patience()
    if world.rank == 0:
        advise_on_media(pipeline)
        _advise_on_requests(pipeline, world.world_size, shares)


def _advise_on_requests(pipeline: Pipeline, world_size: int, shares: RowsPerRank) -> None:
    """Log what an epoch costs, and what it costs more where ranks share lanes of the order."""
    order = pipeline.order
    num_rows, num_lanes = order.global_batch_size, order.grid[1]
    starts = [
        rows_of_rank(num_rows, World(rank, world_size), shares)[0] for rank in range(world_size)
    ]
    row_bounds = [*starts, num_rows]
    advise_on_kept_lanes(pipeline, starts)
    if needs_reader_process(pipeline.dataset):
        large_files = large_files_of(pipeline)
        least_large_bytes = None if large_files is None else large_files.least_bytes
        log_cost(pipeline.dataset, order, row_bounds, least_large_bytes)
    factor = request_factor(order.range_samples, num_lanes, row_bounds)
    if factor > 1:
        logger.info(
            "%d ranks share the %s of this order, so they make about %.1f times as many "
            "requests to storage as ranks that have whole lanes: %s makes the fewest",
            world_size,
            count_text(num_lanes, "lane"),
            factor,
            f"a number of ranks that divides {num_lanes}" if num_lanes > 1 else "one rank",
        )
