"""What a loader says once about a run on object storage: its cost, and time limits that do not fit.

The cost is an estimate from means, in less than a millisecond and without a request.
`mmstream info --plan` plans the reads themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise

import torch.distributed

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.source import ShardSource, datasets_of
from mmstream.display.markup import size_text
from mmstream.errors import escaped
from mmstream.order import AnyOrder, Order
from mmstream.order.shared_lanes import request_factor
from mmstream.packing.order import PackOrder
from mmstream.packing.plan import PackPlan
from mmstream.reading.window_memory import window_bytes
from mmstream.storage import is_remote
from mmstream.storage.patience import patience_limit_s
from mmstream.storage.transfer_limits import MAX_PREFIX_RATE

__all__ = ["log_cost", "samples_of_request", "warn_of_patience"]

logger = logging.getLogger(__name__)


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
    """Say what an epoch asks of object storage, or which command says it.

    Args:
        source: what is read.
        order: which samples, and when.
        row_bounds: where the rows of each rank begin, and G at the end.
        least_large_bytes: samples of this size are not read whole. None: all are.
    """
    if not all(is_remote(dataset.store.url) for dataset in datasets_of(source)):
        return
    num_ranks, num_rows = len(row_bounds) - 1, order.global_batch_size
    num_per_request = samples_of_request(order, row_bounds)
    mean_bytes = 0.0
    if isinstance(source, Dataset):
        mean_bytes = source.manifest.num_bytes / max(1, len(source))
    is_read_whole = least_large_bytes is None or mean_bytes < least_large_bytes
    if num_per_request is None or not (mean_bytes and is_read_whole):
        logger.info(
            "`mmstream info %s --plan %d --ranks %d%s` says what an epoch asks of object storage",
            "URL" if len(datasets_of(source)) > 1 else escaped(datasets_of(source)[0].store.url),
            num_rows,
            num_ranks,
            _pack_option(order),
        )
        return
    num_samples = order.steps_per_epoch * num_rows
    most_rows = max(stop - start for start, stop in pairwise(row_bounds))
    logger.info(
        "an epoch reads about %s from object storage, in about %s requests (%s a GB); the windows "
        "take up to %s on a rank; a prefix of S3 answers %s requests/s, which is about %s "
        "samples/s; `mmstream info %s --plan %d --ranks %d` says more, with prices",
        size_text(num_samples * mean_bytes),
        f"{num_samples / num_per_request:,.0f}",
        f"{1e9 / mean_bytes / num_per_request:,.0f}",
        size_text(window_bytes(source, order, most_rows)),
        f"{MAX_PREFIX_RATE:,}",
        f"{MAX_PREFIX_RATE * num_per_request:,.0f}",
        escaped(datasets_of(source)[0].store.url),
        num_rows,
        num_ranks,
    )


def _pack_option(order: AnyOrder) -> str:
    """Return the option of `mmstream info` that names the packs, where rows are packs."""
    if not isinstance(order, PackOrder):
        return ""
    url = order.plan.url if isinstance(order.plan, PackPlan) else None
    return f" --pack-plan {escaped(url or 'NAME')}"


def samples_of_request(order: AnyOrder, row_bounds: Sequence[int]) -> float | None:
    """Return how many samples a request brings, about.

    A window takes r neighbouring samples of a lane. There a chunk of C samples ends with a
    probability of (r - 1) / C, and the samples come in two ranges.

    Args:
        order: which samples, and when.
        row_bounds: where the rows of each rank begin, and G at the end.

    Returns:
        The samples. None for mixtures and packs, and for a corpus that fits in its windows.
    """
    if not isinstance(order, Order):
        return None
    identity = order.identity()
    num_lanes, num_read = order.stride, order.range_samples
    if not identity["shuffle"] or num_lanes * identity["window"] >= order.num_samples:
        return None
    num_ranges = 1 + (num_read - 1) / identity["chunk"]
    factor = request_factor(num_read, order.grid[1], row_bounds)
    return float(num_read / num_ranges / factor)


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
