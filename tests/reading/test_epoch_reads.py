"""The estimate of what an epoch asks of object storage is near what the ranks plan to read."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mmstream.dataset.dataset import SampleBounds
from mmstream.reading.plan import RankPlan, epoch_reads
from mmstream.storage.remote import RemoteStore
from mmstream.types import IntArray
from tests.helpers.corpora import equal_samples


@pytest.mark.parametrize(
    ("num_samples", "sample_bytes", "num_ranks"),
    [
        (200_000, 20_480, 4),
        (60_000, 110_080, 1),
        (60_000, 110_080, 8),
        (60_000, 110_080, 12),  # ranks share lanes
        (10_000, 110_080, 4),  # it fits in its windows
        (1_000, 20_000_256, 4),  # each sample is a range
    ],
)
def test_requests_and_bytes_are_about_those_of_the_plans(
    num_samples: int, sample_bytes: int, num_ranks: int
) -> None:
    dataset = equal_samples(num_samples, sample_bytes)
    order = dataset.plan_order(global_batch_size=256)
    row_bounds = [256 * rank // num_ranks for rank in range(num_ranks + 1)]

    def bounds(_: int, index: IntArray) -> SampleBounds:
        return SampleBounds(index * sample_bytes, (index + 1) * sample_bytes, None)

    epoch = 1  # what a start reads one by one is over
    windows = {number for step in range(order.steps_per_epoch) for number in order.windows(1, step)}
    num_requests = num_bytes = 0
    for rows in pairwise(row_bounds):
        plan = RankPlan(order, rows, 0, bounds=bounds, access=lambda _: RemoteStore.access)
        ranges = [one for number in windows for one in plan.plan_window(epoch, number).ranges]
        num_requests += len(ranges)
        num_bytes += sum(planned.samples.num_bytes for planned in ranges)
    reads = epoch_reads(dataset, order, row_bounds)
    assert reads is not None
    assert reads.num_samples == order.steps_per_epoch * 256
    assert reads.num_requests == pytest.approx(num_requests, rel=0.2)
    assert reads.num_bytes == pytest.approx(num_bytes, rel=0.2)
    assert np.isclose(reads.requests_per_gb * reads.num_bytes / 1e9, reads.num_requests)
