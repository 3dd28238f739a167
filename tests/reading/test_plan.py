"""The plan of a rank: every sample lies in one range, and ranges keep to their limits."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mmstream.dataset.index import SampleBounds
from mmstream.errors import ShardError
from mmstream.order import Order
from mmstream.reading.fetcher import SampleRange
from mmstream.reading.plan import (
    MAX_HEAD_BYTES,
    MAX_HEAD_STEPS,
    MAX_RUN_BYTES,
    NO_RANGE,
    PlannedRange,
    RankPlan,
    epoch_reads,
    merge,
    num_head_steps,
)
from mmstream.storage import Access, RemoteStore
from mmstream.types import IntArray
from tests.helpers.corpora import equal_samples

ACCESS = Access(256 << 10, 8 << 20, 1, 1, concurrent=True)
SAMPLE_BYTES = 110_000 // 512 * 512


class Corpus:
    """Samples of one size; the shards of `broken` have no index."""

    def __init__(self, counts: list[int], sample_bytes: int, broken: int | None = None) -> None:
        self.counts, self.sample_bytes, self.broken = counts, sample_bytes, broken

    def plan(self, order: Order, rows: tuple[int, int], first: int, **settings) -> RankPlan:
        return RankPlan(order, rows, first, bounds=self.bounds, access=lambda _: ACCESS, **settings)

    def bounds(self, shard: int, index: np.ndarray) -> SampleBounds:
        if shard == self.broken:
            raise ShardError("no index")
        start = index * self.sample_bytes
        return SampleBounds(start, start + self.sample_bytes, None)


def planned(plan: RankPlan, num_steps: int) -> list[PlannedRange]:
    return [one_range for _ in range(num_steps) for one_range in plan.plan_step()]


@given(data=st.data())
@settings(max_examples=30)
def test_each_row_of_each_step_lies_in_a_range_that_is_read_in_time(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any), "counts")
    rows = data.draw(st.integers(1, sum(counts)), "rows")
    order = Order.from_counts(
        counts,
        global_batch_size=rows,
        window=data.draw(st.sampled_from([None, 1, 7, 40]), "window"),
        shuffle=data.draw(st.booleans(), "shuffle"),
        drop_last=data.draw(st.booleans(), "drop_last"),
    )
    start = data.draw(st.integers(0, rows), "start")
    stop = data.draw(st.integers(start, rows), "stop")
    steps = order.steps_per_epoch
    first = data.draw(st.integers(0, steps - 1), "first")
    broken = data.draw(st.sampled_from([None, 0]), "broken")
    corpus = Corpus(counts, data.draw(st.sampled_from([512, SAMPLE_BYTES]), "bytes"), broken)
    single = data.draw(st.booleans(), "single")
    plan = corpus.plan(order, (start, stop), first, single_samples=single)
    for clock in range(first, 2 * steps):
        plan.shards_ahead(2)
        plan.plan_step()
        step_plan = plan.steps.pop(clock)
        refs = order.refs(*divmod(clock, steps))
        assert step_plan.valid.tolist() == refs.valid[start:stop].tolist()
        expected = list(zip(refs.shard[start:stop], refs.index[start:stop], strict=True))
        delivered = {}
        for window, span in step_plan.spans:
            for position in range(span.start, span.stop):
                ref = window.shard[position], window.index[position]
                delivered[int(window.row[position])] = ref
                number = window.range_number[position]
                assert (number == NO_RANGE) == (ref[0] == broken)
                if number != NO_RANGE:
                    one_range = window.ranges[number]
                    shard, begin, end = one_range.samples.bounds
                    assert shard == ref[0]
                    assert begin <= window.start[position] < window.stop[position] <= end
                    assert one_range.first_use <= clock
        assert [delivered[row] for row in range(stop - start)] == expected


def large_order() -> Order:
    return Order.from_counts(
        [2_000] * 20, global_batch_size=256, num_bytes=20 * 2_000 * SAMPLE_BYTES
    )


def test_runs_are_long_and_nothing_is_read_twice() -> None:
    order, corpus = large_order(), Corpus([2_000] * 20, SAMPLE_BYTES)
    plan = corpus.plan(order, (0, 256), 0)
    steps = order.steps_per_epoch
    ranges = planned(plan, steps)
    later = [one_range for one_range in ranges if one_range.first_use >= MAX_HEAD_STEPS]
    used = order.num_samples * SAMPLE_BYTES
    assert sum(one_range.samples.num_bytes for one_range in ranges) < 1.15 * used
    assert max(one_range.samples.num_bytes for one_range in ranges) <= MAX_RUN_BYTES
    mean_bytes = np.mean([one_range.samples.num_bytes for one_range in later])
    assert mean_bytes > 2_000_000
    wanted = Counter(
        (one_range.samples.shard, index)
        for one_range in ranges
        for index in one_range.samples.index.tolist()
    )
    assert set(wanted.values()) == {1}


def test_first_steps_are_read_in_small_ranges_and_single_samples_alone() -> None:
    corpus = Corpus([2_000] * 20, SAMPLE_BYTES)
    end = 50 + num_head_steps(256, 256)
    ranges = planned(corpus.plan(large_order(), (0, 256), 50), 1)
    heads = [one for one in ranges if one.first_use < end]
    assert max(one_range.samples.num_bytes for one_range in heads) <= MAX_HEAD_BYTES
    assert sum(one_range.first_use == 50 for one_range in heads) > 150
    singles = planned(corpus.plan(large_order(), (0, 256), 0, single_samples=True), 3)
    assert {one_range.samples.position.size for one_range in singles} == {1}


@pytest.mark.parametrize(
    ("gap", "num_ranges"), [(0, 1), (10, 1), (11, 2)], ids=["none", "short", "long"]
)
def test_no_gap_is_merged_that_is_longer_than_the_sample_behind_it(
    gap: int, num_ranges: int
) -> None:
    start = np.array([0, 30 + gap])
    number = np.arange(2)
    samples = SampleRange(0, number, start, np.array([30, 40 + gap]), number, number)
    assert len(merge(samples, 1000, 1000)) == num_ranges


@pytest.mark.slow
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
