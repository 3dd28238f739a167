"""Rows of steps to slots, and slots to samples; and what lanes cost that ranks share."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mmstream.order import Corpus, Order
from mmstream.order.chunks import ChunkTable
from mmstream.order.lanes import Lanes, interleaved, request_factor
from mmstream.order.permute import permutation


def test_without_shuffle_one_lane_is_cut_into_equal_windows():
    lanes = Lanes(
        num_steps=5, global_batch_size=2, grid=(1, 1), window=4, interleave=1, shuffle=False
    )
    positions = [lanes.mixed_positions(number, 0, 0) for number in range(3)]
    assert [lanes.slots(number, positions[number]).tolist() for number in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert [lanes.windows_of_step(step, np.arange(2)).tolist() for step in range(5)] == [
        [0, 0],
        [0, 0],
        [1, 1],
        [1, 1],
        [2, 2],
    ]


@pytest.mark.parametrize(
    ("size", "num_segments"), [(7, 3), (6, 3), (12, 5), (2, 5), (1, 1), (9, 1)]
)
def test_consecutive_positions_come_from_segments_in_turn(size, num_segments):
    segments = np.array_split(np.arange(size), num_segments)
    longest = len(segments[0])
    in_turn = [
        int(segment[depth])
        for depth in range(longest)
        for segment in segments
        if depth < len(segment)
    ]
    assert interleaved(np.arange(size), size, num_segments).tolist() == in_turn


# -- slots to samples, against a list that is laid out by hand ------------------------------------


@st.composite
def corpora(draw):
    counts = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any))
    samples = [(shard, index) for shard, count in enumerate(counts) for index in range(count)]
    bad = draw(st.sets(st.sampled_from(samples), max_size=len(samples) - 1))
    return Corpus(np.array(counts), bad=np.array(sorted(bad)))


def chunks_of(corpus, chunk_size):
    """Lists of (shard, index)."""
    bad = {tuple(sample) for sample in corpus.bad.tolist()}
    chunks = []
    for shard, count in enumerate(corpus.counts.tolist()):
        good = [(shard, index) for index in range(count) if (shard, index) not in bad]
        chunks += [good[i : i + chunk_size] for i in range(0, len(good), chunk_size)]
    return chunks


def located(epoch, slots):
    shards, indexes = epoch.locate(0, slots)
    assert shards.dtype == indexes.dtype == np.int64
    return list(zip(shards.tolist(), indexes.tolist(), strict=True))


@settings(max_examples=100)
@given(corpora(), st.integers(1, 9), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_is_its_chunks_permuted_end_to_end_and_rotated(corpus, chunk_size, seed, epoch):
    table = ChunkTable.cut(corpus, chunk_size)
    chunks = chunks_of(corpus, chunk_size)
    assert table.chunk_sizes().tolist() == [len(chunk) for chunk in chunks]
    plain = [sample for chunk in chunks for sample in chunk]
    slots = np.arange(corpus.num_samples)
    assert located(table.epoch(epoch, seed, shuffle=False), slots) == plain

    shuffled = table.epoch(epoch, seed, shuffle=True)
    order = permutation(len(chunks), seed, epoch, "chunks").tolist()
    flat = [sample for number in order for sample in chunks[number]]
    (rotation,) = shuffled.rotations.tolist()
    assert 0 <= rotation < len(flat)
    assert located(shuffled, slots) == flat[rotation:] + flat[:rotation]


def test_epochs_are_rotated_by_any_number_of_samples():
    table = ChunkTable.cut(Corpus(np.array([3, 2])), 2)
    rotations = {int(table.epoch(epoch, 0, shuffle=True).rotations[0]) for epoch in range(100)}
    assert rotations == {0, 1, 2, 3, 4}


# -- the estimate of what shared lanes cost, beside counted reads ----------------------------------


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
@pytest.mark.parametrize("ranks", [2, 3, 8, 32])
def test_the_estimate_is_near_the_counted_reads(ranks, range_samples, max_gap):
    settings = {"grid": (1, 8), "window": 64, "interleave": 64 // range_samples, "chunk": 64}
    order = Order.from_counts([1000] * 20, global_batch_size=96, **settings)
    bounds = [96 * rank // ranks for rank in range(ranks + 1)]
    counted = num_reads(order, bounds, max_gap) / num_reads(order, [0, 96], max_gap)
    estimated = request_factor(range_samples, 8, bounds)
    assert estimated == pytest.approx(counted, rel=0.25)
