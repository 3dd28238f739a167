"""What a loader logs before its first batch: undecoded files, and what storage is asked for.

The cost on object storage is an estimate from means, in less than a millisecond and without a
request, as `mmstream info --plan` prints it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import torch.distributed

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.source import ShardSource, datasets_of
from mmstream.decoding.decode import Decode
from mmstream.decoding.fields import audio_fields, undecoded_media, video_fields
from mmstream.decoding.stored import baked_content
from mmstream.display.markup import count_text, size_text
from mmstream.errors import escaped
from mmstream.order import AnyOrder
from mmstream.order.lanes import request_factor
from mmstream.pipeline import Pipeline, large_files_of
from mmstream.reading.plan import epoch_reads, window_bytes
from mmstream.reading.process import needs_reader_process
from mmstream.storage import is_remote
from mmstream.storage.patience import patience_limit_s
from mmstream.storage.transfers import MAX_PREFIX_RATE
from mmstream.world import RowsPerRank, World, rows_of_rank

logger = logging.getLogger(__name__)


def log_advice(pipeline: Pipeline, world: World, shares: RowsPerRank) -> None:
    """Log what a run could do better. Rank 0 speaks for what all ranks have in common.

    Args:
        pipeline: what the ranks run.
        world: this rank.
        shares: how the rows are shared out, as the Loader has it.
    """
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


def advise_on_media(pipeline: Pipeline) -> None:
    """Log which videos and recordings reach the batches as bytes, though other fields are decoded.

    So do all files of a baked dataset that is not read with `Decode.baked`.

    A pipeline with functions of its own may decode them there.
    """
    decode = pipeline.decode
    if pipeline.before or pipeline.transforms or (decode is not None and decode.is_baked):
        return
    datasets = datasets_of(pipeline.dataset)
    for dataset in datasets:
        if baked_content(dataset) is not None:
            logger.warning(
                "%s: was written by `mmstream bake`, and batches hold the bytes of its files: "
                "decode=mm.Decode.baked() reads them",
                escaped(dataset.store.url),
            )
            return
    if decode is None:
        return
    counts: Counter[str] = Counter()
    for dataset in datasets:
        counts.update(dataset.manifest.fields)
    media = undecoded_media({name: counts[name] for name in _left_alone(counts, decode)})
    if media:
        logger.info(
            "not decoded: %s; batches hold their bytes: decode them by mm.Decode(video=, audio=), "
            "or remove the fields in Pipeline(before=)",
            media,
        )


def _left_alone(names: Counter[str], decode: Decode) -> list[str]:
    """Return the fields of videos and recordings that no decoder takes."""
    videos = [] if decode.video is not None else video_fields(names)
    recordings = [] if decode.audio is not None else audio_fields(names)
    named = decode.plan.named_sources
    return [name for name in (*videos, *recordings) if name not in named]


def warn_of_patience() -> None:
    """Warn where a rank that waits for storage could end the others by their time-out."""
    timeout_s = _group_timeout_s()
    if timeout_s is not None and patience_limit_s() > timeout_s / 2:
        logger.warning(
            "a rank waits up to %g s for storage, and torch.distributed gives up after %g s: "
            "set MMSTREAM_STORAGE_PATIENCE_S to less than half of that, or raise the time-out of "
            "init_process_group",
            patience_limit_s(),
            timeout_s,
        )


def log_cost(
    source: ShardSource, order: AnyOrder, row_bounds: Sequence[int], least_large_bytes: int | None
) -> None:
    """Say what an epoch asks of object storage, where means tell it.

    Args:
        source: what is read.
        order: which samples, and when.
        row_bounds: where the rows of each rank begin, and G at the end.
        least_large_bytes: samples of this size are not read whole. None: all are.
    """
    if not (isinstance(source, Dataset) and is_remote(source.store.url)):
        return
    reads = epoch_reads(source, order, row_bounds)
    if reads is None or (least_large_bytes is not None and reads.mean_bytes >= least_large_bytes):
        return
    most_rows = max(stop - start for start, stop in pairwise(row_bounds))
    logger.info(
        "an epoch reads about %s from object storage, in about %s requests (%s a GB); the windows "
        "take up to %s on a rank; a prefix of S3 answers %s requests/s, which is about %s "
        "samples/s",
        size_text(reads.num_bytes),
        f"{reads.num_requests:,.0f}",
        f"{reads.requests_per_gb:,.0f}",
        size_text(window_bytes(source, order, most_rows)),
        f"{MAX_PREFIX_RATE:,}",
        f"{MAX_PREFIX_RATE * reads.num_samples / reads.num_requests:,.0f}",
    )


def _group_timeout_s() -> float | None:
    """Return the time-out of the default process group; None: there is none, or it is unknown."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    try:  # torch has no public way to ask for it
        group = torch.distributed.distributed_c10d._get_default_group()
        options = group._get_backend(torch.device("cpu")).options
        return float(options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return None
