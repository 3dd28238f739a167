"""Rows of steps to slots, against lanes that are filled step by step; and slots to samples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmstream.order import Corpus
from mmstream.order.chunks import ChunkTable
from mmstream.order.lanes import Lanes, interleaved
from mmstream.order.permute import permutation


@st.composite
def any_lanes(draw):
    lanes_per_group = draw(st.integers(1, 4))
    return Lanes(
        num_steps=draw(st.integers(0, 25)),
        global_batch_size=lanes_per_group * draw(st.integers(1, 4)),
        grid=(draw(st.integers(1, 5)), lanes_per_group),
        window=draw(st.integers(1, 30)),
        interleave=draw(st.integers(1, 9)),
        shuffle=True,
    )


def rows_of_lanes(lanes):
    """(step, row) of each position of each lane."""
    groups, lanes_per_group = lanes.grid
    rows_per_lane = lanes.global_batch_size // lanes_per_group
    rows = [[] for _ in range(groups * lanes_per_group)]
    for step in range(lanes.num_steps):
        for row in range(lanes.global_batch_size):
            lane = row // rows_per_lane * groups + step % groups
            rows[lane].append((step, row))
    return rows


def windows_of_lanes(lanes):
    """The positions of each window, by number."""
    windows = {}
    for lane, rows in enumerate(rows_of_lanes(lanes)):
        positions = list(range(len(rows)))
        size = 1 + lane * lanes.window // lanes.num_lanes
        number = lane
        while positions:
            windows[number] = positions[:size]
            positions = positions[size:]
            size = lanes.window
            number += lanes.num_lanes
    return windows


@pytest.mark.slow
@settings(max_examples=200)
@given(any_lanes(), st.integers(0, 4), st.sampled_from([slice(None), slice(1), slice(-2, None)]))
def test_lanes_deliver_their_positions_step_by_step_and_window_by_window(lanes, epoch, rows_asked):
    rows = rows_of_lanes(lanes)
    sizes = list(map(len, rows))
    assert lanes.sizes.tolist() == sizes
    assert lanes.starts.tolist() == [sum(sizes[:lane]) for lane in range(len(sizes))]
    number_of_row = {}
    slot_of_row = {}
    for number, positions in windows_of_lanes(lanes).items():
        lane = number % lanes.num_lanes
        named = [rows[lane][position] for position in positions]
        steps_and_rows = (column.tolist() for column in lanes.steps_and_rows(number))
        assert list(zip(*steps_and_rows, strict=True)) == named
        number_of_row |= dict.fromkeys(named, number)
        drawn = positions[0] + permutation(len(positions), 3, epoch, "window", number)
        offsets = interleaved(drawn, sizes[lane], lanes.interleave)
        slots = lanes.slots(number, lanes.mixed_positions(number, 3, epoch)).tolist()
        assert slots == (sum(sizes[:lane]) + offsets).tolist()
        slot_of_row |= dict(zip(named, slots, strict=True))

    def mixed_positions(number):
        return lanes.mixed_positions(number, 3, epoch)

    for step in range(lanes.num_steps):
        rows = range(lanes.global_batch_size)[rows_asked]
        expected = [number_of_row[step, row] for row in rows]
        assert lanes.windows_of_step(step, np.array(rows)).tolist() == expected
        expected = [slot_of_row[step, row] for row in rows]
        assert lanes.slots_of_step(step, np.array(rows), mixed_positions).tolist() == expected


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
    shards, indexes = epoch.locate(slots)
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
    assert 0 <= shuffled.rotation < len(flat)
    assert located(shuffled, slots) == flat[shuffled.rotation :] + flat[: shuffled.rotation]


def test_epochs_are_rotated_by_any_number_of_samples():
    table = ChunkTable.cut(Corpus(np.array([3, 2])), 2)
    rotations = {table.epoch(epoch, 0, shuffle=True).rotation for epoch in range(100)}
    assert rotations == {0, 1, 2, 3, 4}
