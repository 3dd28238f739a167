"""Draws of one source to its samples, epoch after epoch."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mmstream.order import Corpus
from mmstream.order.mixture.source import Source, SourceSettings, is_small


def make_source(counts, *, num_lanes=4, window=6, chunk=3, interleave=2, seed=1, **others):
    lanes = np.random.default_rng(seed).permutation(num_lanes)
    return Source.lay_out(
        "text",
        Corpus(np.array(counts)),
        SourceSettings(window, chunk),
        seed,
        lanes_by_first_draw=lanes,
        rows_per_round=8,
        interleave=interleave,
        **{"shuffle": True, **others},
    )


@st.composite
def any_source(draw):
    shuffle = draw(st.booleans())
    return make_source(
        draw(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any)),
        num_lanes=draw(st.integers(1, 6)),
        window=draw(st.integers(1, 40)),
        chunk=draw(st.integers(1, 9)),
        interleave=draw(st.integers(1, 5)),
        shuffle=shuffle,
        reshuffle=draw(st.sampled_from(["global", "lanes"])) if shuffle else "global",
        seed=draw(st.integers(0, 3)),
    )


@pytest.mark.slow
@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=4).filter(lambda counts: sum(counts) >= 128),
    st.sampled_from([(1, 1), (1, 2), (1, 5), (2, 3), (3, 1)]),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(0, 3),
)
def test_a_lane_keeps_all_but_a_few_samples_of_a_large_source(counts, grid, window, chunk, seed):
    num_lanes = grid[0] * grid[1]
    source = make_source(
        counts,
        num_lanes=num_lanes,
        num_groups=grid[0],
        window=window,
        chunk=chunk,
        seed=seed,
        reshuffle="lanes",
    )
    corpus = {(s, i) for s, n in enumerate(counts) for i in range(n)}
    in_epochs = []
    for epoch in range(5):
        draws = np.arange(epoch * source.size, (epoch + 1) * source.size)
        shards, indexes = source.locate(draws, source.windows(draws))
        samples = zip(shards.tolist(), indexes.tolist(), strict=True)
        lane_rows = source.lanes_by_first_draw[draws % num_lanes] // grid[0]
        in_epochs.append(dict(zip(samples, lane_rows.tolist(), strict=True)))
        assert in_epochs[-1].keys() == corpus
    moved = {sample for sample in corpus if len({lane_of[sample] for lane_of in in_epochs}) > 1}
    assert len(moved) <= source.size % num_lanes
    assert list(in_epochs[0]) != list(in_epochs[1])


@pytest.mark.parametrize(
    ("interleave", "window", "num_segments"), [(4, 64, 4), (4, 47, 2), (4, 15, 1), (1, 64, 1)]
)
def test_a_window_takes_16_samples_or_more_from_each_segment(interleave, window, num_segments):
    source = make_source(
        [4000], num_lanes=1, window=window, chunk=4000, interleave=interleave, shuffle=True
    )
    *_, indexes = source.window(5)
    slots = np.sort((indexes - source.table.epoch(0, source.seed, True).rotations[0]) % 4000)
    assert (np.diff(slots) > 1).sum() == num_segments - 1


@settings(max_examples=100)
@given(any_source())
def test_a_small_source_is_one_permutation_after_another(source):
    draws = np.arange(3 * source.size)
    shards, indexes = source.locate(draws)
    samples = list(zip(shards.tolist(), indexes.tolist(), strict=True))
    corpus = [(s, i) for s, n in enumerate(source.corpus.counts.tolist()) for i in range(n)]
    for epoch in range(3):
        of_epoch = samples[epoch * source.size : (epoch + 1) * source.size]
        assert sorted(of_epoch) == corpus
        if source.reshuffle == "global" or source.small:
            of_table = source.table.epoch(epoch, source.seed, source.shuffle)
            slots = of_table.locate(0, np.arange(source.size))
            assert of_epoch == list(zip(*(column.tolist() for column in slots), strict=True))
        assert [source.pick(epoch, word) for word in range(source.size)] == of_epoch
        assert source.pick(epoch, source.size + 1) == source.pick(epoch, 1)


def test_a_source_is_small_below_16_rounds_of_rows():
    assert is_small(16 * 8 - 1, 8)
    assert not is_small(16 * 8, 8)
    assert make_source([127]).small
    assert not make_source([128]).small


@pytest.mark.parametrize(
    ("num_samples", "window", "chunk", "settings"),
    [
        (127, 0.2, 64, SourceSettings(1, 1)),  # small: single samples
        (128, 99.6, 64, SourceSettings(100, 2)),  # 16 chunks in each of 4 columns
        (64 * 63, 7, 64, SourceSettings(7, 63)),
        (64 * 63, 7, 152, SourceSettings(7, 63)),
        (10**6, 7.5, 152, SourceSettings(8, 152)),
        (10**9, 7, 1, SourceSettings(7, 1)),
    ],
)
def test_default_settings_give_16_chunks_per_column_and_single_samples_if_small(
    num_samples, window, chunk, settings
):
    assert SourceSettings.default(num_samples, 4, 8, window, chunk) == settings


def test_a_large_source_of_few_samples_per_lane_has_chunks_of_one():
    assert SourceSettings.default(40, 4, 2, 5, 40) == SourceSettings(5, 1)
