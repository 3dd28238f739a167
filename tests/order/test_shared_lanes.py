"""The estimate of what shared lanes cost, beside counted reads."""

import numpy as np
import pytest

from mmstream.order import Order
from mmstream.order.lanes import request_factor


def num_reads(order, row_bounds, max_gap):
    """Ranges that ranks read out of windows, over an epoch, with gaps of so many samples."""
    reads = 0
    numbers = np.concatenate([order.windows(0, s) for s in range(order.steps_per_epoch)])
    for number in np.unique(numbers):
        window = order.window(0, int(number))
        rank = np.searchsorted(row_bounds, window.row, side="right")
        by_rank = np.lexsort((window.index, window.shard, rank))
        columns = [column[by_rank] for column in (rank, window.shard, window.index)]
        steps = [np.diff(column) for column in columns]
        reads += int(((steps[0] != 0) | (steps[1] != 0) | (steps[2] > 1 + max_gap)).sum()) + 1
    return reads


@pytest.mark.parametrize(("range_samples", "max_gap"), [(16, 1), (8, 0)])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 16, 32])
def test_the_estimate_is_near_the_counted_reads(ranks, range_samples, max_gap):
    settings = {"grid": (1, 8), "window": 64, "interleave": 64 // range_samples, "chunk": 64}
    order = Order.from_counts([1000] * 40, global_batch_size=96, **settings)
    bounds = [96 * rank // ranks for rank in range(ranks + 1)]
    counted = num_reads(order, bounds, max_gap) / num_reads(order, [0, 96], max_gap)
    estimated = request_factor(order.range_samples, 8, bounds)
    assert order.range_samples == range_samples
    assert estimated == pytest.approx(counted, rel=0.25)
