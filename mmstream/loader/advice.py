"""What a loader logs before its first batch: undecoded files, and what costs requests or ranks."""

from __future__ import annotations

import logging
from collections import Counter

import torch.distributed

from mmstream.dataset.source import datasets_of
from mmstream.decoding.decode import Decode
from mmstream.decoding.stored import baked_content
from mmstream.display.text import count_text
from mmstream.errors import escaped
from mmstream.media.fields import audio_fields, undecoded_media, video_fields
from mmstream.order.lanes import request_factor
from mmstream.pipeline import Pipeline
from mmstream.ranks import RowsPerRank, World, rows_of_rank
from mmstream.reading.process import needs_reader_process
from mmstream.storage.retry import patience_limit_s

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
    """Log what an epoch costs more where ranks share lanes of the order."""
    order = pipeline.order
    num_rows, num_lanes = order.global_batch_size, order.grid[1]
    starts = [
        rows_of_rank(num_rows, World(rank, world_size), shares, order.repeat)[0]
        for rank in range(world_size)
    ]
    factor = request_factor(order.range_samples, num_lanes, [*starts, num_rows])
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
    named = decode.table.named_files
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
