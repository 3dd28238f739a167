"""The default grid, window, interleave and chunk: functions of the corpus and G alone."""

import hashlib
from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mmstream.errors import ConfigError
from mmstream.order import Corpus, MixtureOrder, Order, Recipe
from mmstream.order.settings import (
    MIN_SHARE,
    OrderSettings,
    RowShape,
    WindowBudget,
    default_settings,
    mixture_settings,
)

MIB = 1 << 20
GIB = 1 << 30
KB = 1000


def defaults(samples, mean_bytes, rows, **chosen):
    return default_settings(samples, samples * mean_bytes, rows, **chosen)


@pytest.mark.parametrize(
    ("mean_bytes", "rows", "expected"),
    [
        (5 * KB, 256, ((1, 64), 3360, 32, 420)),
        (5 * KB, 1024, ((1, 256), 1575, 15, 420)),
        (5 * KB, 4096, ((1, 1024), 1575, 15, 420)),
        (20 * KB, 256, ((1, 64), 1664, 26, 256)),
        (20 * KB, 1024, ((1, 256), 384, 6, 256)),
        (20 * KB, 4096, ((1, 1024), 384, 6, 256)),
        (110 * KB, 256, ((1, 64), 304, 8, 152)),
        (110 * KB, 1024, ((1, 256), 76, 2, 152)),
        (110 * KB, 4096, ((1, 1024), 76, 2, 152)),
        (1000 * KB, 256, ((1, 64), 32, 8, 16)),
        (1000 * KB, 4096, ((1, 1024), 8, 2, 16)),
        (20_000 * KB, 256, ((1, 64), 1, 1, 1)),
        (20_000 * KB, 4096, ((1, 256), 1, 1, 1)),
    ],
)
def test_the_defaults_of_large_corpora_are_those_that_the_docs_state(mean_bytes, rows, expected):
    assert defaults(4 * 10**6, mean_bytes, rows) == OrderSettings(*expected)


@pytest.mark.parametrize(
    ("samples", "rows", "lanes"),
    [
        (100, 16, 1),
        (2 * 1024 - 1, 16, 1),
        (2 * 1024, 16, 2),
        (10_000, 16, 8),
        (10_000, 256, 8),
        (10_000, 6, 6),
        (10_000, 7, 7),
        (10_000, 9, 9 // 3),
        (10_000, 22, 2),
        (10_000, 1, 1),
    ],
)
def test_a_corpus_that_fits_in_its_windows_has_few_lanes_and_a_window_is_a_whole_lane(
    samples, rows, lanes
):
    expected = OrderSettings((1, lanes), -(-samples // lanes), 32, 64)
    assert defaults(samples, 100 * KB, rows) == expected


def test_samples_of_unknown_size_count_as_64_kib():
    assert default_settings(10**6, None, 256) == defaults(10**6, 1 << 16, 256)
    assert default_settings(10**6, 0, 256) == defaults(10**6, 1 << 16, 256)
    sizes = [(None, 10**6), (10**9, 10**5)]
    known = [(10**6 << 16, 10**6), (10**9, 10**5)]
    assert mixture_settings([1, 2], sizes, 64) == mixture_settings([1, 2], known, 64)


def test_chunks_grow_when_the_corpus_would_have_more_than_4_mi_of_them():
    chunks = {n: defaults(n, 110 * KB, 256).chunk for n in (152 << 22, (152 << 22) + 152, 10**10)}
    assert list(chunks.values()) == [152, 304, 152 * 16]
    # A true permutation of so many samples would need too much memory: windows take turns.
    assert defaults(10**7, 4 * MIB, 256) == OrderSettings((1, 64), 1, 32, 4)


def test_what_was_chosen_is_kept_and_the_rest_fits_to_it():
    assert defaults(10**7, 110 * KB, 256, grid=(8, 8)) == OrderSettings((8, 8), 304, 8, 152)
    assert defaults(10**7, 110 * KB, 256, grid=(8, 256)).window == 513 * 38 // 2048
    assert defaults(10**7, 110 * KB, 256, window=1000) == OrderSettings((1, 64), 1000, 26, 152)
    more = defaults(10**7, 110 * KB, 256, window_bytes=8 * GIB)
    assert more == OrderSettings((1, 64), 32 * 38, 32, 152)
    less = defaults(10**7, 110 * KB, 256, window_bytes=64 * MIB)
    assert less == OrderSettings((1, 16), 38, 1, 152)


@pytest.mark.parametrize(
    ("packs", "mean_bytes", "rows", "row_shape", "expected"),
    [
        # LLaVA-like packs of 4,096 and 8,192 tokens: ranges of 3 x 8 and 3 x 2 packs.
        (10**5, 480 * KB, 2048, RowShape(4.3, 8), ((1, 256), 48, 2, 96)),
        (10**5, 980 * KB, 512, RowShape(8.8, 2), ((1, 256), 30, 5, 24)),
        (10**5, 1400 * KB, 512, RowShape(12.3, 5), ((1, 256), 18, 2, 36)),  # 12 MiB
        (10**5, 1400 * KB, 32, RowShape(12.3, 5), ((1, 32), 45, 5, 36)),
        (10**5, 1400 * KB, 64, RowShape(12.3, 1), ((1, 64), 21, 7, 12)),  # as single samples
        (10**5, 5600 * KB, 512, RowShape(50, 2), ((1, 256), 1, 1, 1)),
        # A small corpus has more than 8 lanes, and chunks of several packs.
        (1200, 500 * KB, 64, RowShape(84, 2), ((1, 16), 75, 32, 4)),
        (6000, 300 * KB, 64, RowShape(20, 3), ((1, 64), 94, 32, 5)),
        (40, 500 * KB, 8, RowShape(84, 2), ((1, 1), 40, 32, 2)),
    ],
)
def test_ranges_of_packs_are_as_long_as_their_spread_asks_for(
    packs, mean_bytes, rows, row_shape, expected
):
    assert defaults(packs, mean_bytes, rows, row_shape=row_shape) == OrderSettings(*expected)


corpora = st.tuples(
    st.integers(1, 10**10),
    st.one_of(st.integers(1, 10**5), st.integers(10**5, 10**10)),
    st.integers(1, 10**5),
    st.one_of(st.none(), st.integers(1, 1 << 40)),
    st.one_of(st.just(RowShape()), st.builds(RowShape, st.floats(1.01, 2000), st.integers(1, 50))),
)


@given(corpora)
def test_lanes_divide_the_batch_and_windows_stay_within_their_bytes(corpus):
    samples, mean_bytes, rows, window_bytes, row_shape = corpus
    chosen = defaults(samples, mean_bytes, rows, window_bytes=window_bytes, row_shape=row_shape)
    groups, lanes = chosen.grid
    assert groups == 1
    assert rows % lanes == 0
    assert lanes <= max(256 if row_shape.are_packs else 8, min(1024, rows // 4))
    assert lanes == 1 or lanes * (64 if row_shape.are_packs else 1024) <= samples
    assert min(chosen.window, chosen.interleave, chosen.chunk) >= 1
    assert samples // chosen.chunk <= 1 << 22
    if mean_bytes < 2 * MIB:
        limit = WindowBudget.of_samples(mean_bytes, rows, window_bytes, row_shape).num_bytes
        held = lanes * min(chosen.window, -(-samples // lanes)) * mean_bytes
        assert held <= max(1.1 * limit, lanes * mean_bytes)


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 10**8)), min_size=1, max_size=12),
    st.integers(1, 10**7),
    st.integers(1, 5000),
)
def test_a_mixture_has_fewer_lanes_where_a_source_is_rare(sources, mean_bytes, rows):
    shares = [share for share, _ in sources]
    shares[0] += 1
    sizes = [(mean_bytes * samples, samples) for _, samples in sources]
    chosen = mixture_settings(shares, sizes, rows)
    lanes = chosen.grid[1]
    assert chosen.grid[0] == 1
    assert rows % lanes == 0
    budget = WindowBudget.of_samples(mean_bytes, rows)
    rarest = min((p / sum(shares) for p in shares if p / sum(shares) > MIN_SHARE), default=0)
    assert lanes <= max(8, budget.num_ranges * max(rarest, MIN_SHARE))
    assert lanes * chosen.window * mean_bytes <= 1.1 * max(budget.num_bytes, lanes * mean_bytes)


def test_a_mixture_of_one_source_has_the_defaults_of_a_dataset():
    for mean_bytes in (20 * KB, 110 * KB, 5_000 * KB):
        sizes = [(10**7 * mean_bytes, 10**7)]
        assert mixture_settings([3], sizes, 256) == defaults(10**7, mean_bytes, 256)


def test_the_window_of_a_mixture_is_that_of_its_mean_sample():
    expected = defaults(20 * 10**6, 10**6, 256)
    # 1 of 4 samples has 3 MB, 3 of 4 have 1/3 MB: 1 MB on average.
    sizes = [(3 * 10**13, 10**7), (10**13 // 3, 10**7)]
    chosen = mixture_settings([1, 3], sizes, 256)
    assert (chosen.grid, chosen.window, chosen.chunk) == (
        expected.grid,
        expected.window,
        expected.chunk,
    )
    assert chosen.interleave == expected.interleave // 2  # each source has a part of the ranges
    assert mixture_settings([1, 0], [sizes[0], (None, 9)], 256) == mixture_settings(
        [1], sizes[:1], 256
    )


def test_window_bytes_take_the_place_of_a_window():
    settings_of = {"global_batch_size": 256, "num_bytes": 10**7 * 110 * KB}
    order = Order.from_counts([10**7], window_bytes=8 * GIB, **settings_of)
    assert order.identity()["window"] == 32 * 38
    assert "window_bytes" not in order.identity()
    with pytest.raises(ConfigError, match="window 5 and window_bytes 9: give one of the two"):
        Order.from_counts([10**7], window=5, window_bytes=9, **settings_of)
    with pytest.raises(ConfigError, match="window_bytes 0: needs at least 1"):
        Order.from_counts([10**7], window_bytes=0, **settings_of)
    corpora_by_name = {"web": Corpus(np.array([10**7]), num_bytes=10**7 * 110 * KB)}
    mixed = MixtureOrder(
        Recipe.from_weights(
            corpora_by_name,
            {0: {"web": 1}},
            epoch_steps=5,
            global_batch_size=256,
            window_bytes=8 * GIB,
        )
    )
    assert mixed.recipe.settings["web"].window == 32 * 38
    assert mixed.recipe.grid == order.grid


SHAPES = (RowShape(), RowShape(4, 2), RowShape(20, 8), RowShape(3, 40))


def test_golden_digest_of_many_defaults():
    """A default that changes gives new runs another order: it must be meant, and in the changelog.

    Corpora of 10 to 10^7 samples of 500 bytes to 3 MB, steps of 1 to 4,096 rows, packs, mixtures.
    """
    sizes = tuple(product((10, 3000, 10**5, 10**7), (500, 5 * KB, 110 * KB, 3000 * KB)))
    settings = [
        default_settings(num_samples, num_samples * mean, rows, row_shape=shape)
        for (num_samples, mean), rows, shape in product(sizes, (1, 64, 1000, 4096), SHAPES)
    ]
    settings += [
        mixture_settings(shares, sources, rows, row_shape=shape)
        for shares, rows, shape in product(((1, 1), (60, 1), (70, 1), (900, 1)), (64, 4096), SHAPES)
        for sources in (
            [(num_samples * mean, num_samples), (10**6 * 110 * KB, 10**6)]
            for num_samples, mean in sizes
        )
    ]
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()
    assert digest[:16] == "36497dfc7d9c96c0"


@pytest.mark.parametrize("rows", [None, (2, 5)])
def test_a_row_that_is_no_pack_is_one_document_of_unknown_length(rows):
    order = Order.from_counts([500], global_batch_size=8)
    num_rows = 8 if rows is None else 3
    assert order.document_counts(0, 0, rows).tolist() == [1] * num_rows
    assert order.document_tokens(0, 0, rows).tolist() == [0] * num_rows
    assert order.order_rows(0, 0, rows).tolist() == list(range(*(rows or (0, 8))))
