"""What docs/order.md says of the order's quality, on 100,000 samples sorted by class."""

from functools import partial

import numpy as np
import pytest
from webdataset.filters import _shuffle

from tests.helpers.paths import DOCS
from tools.bench import lanes, shuffle_streams, windows
from tools.bench.shuffle import (
    CORPORA,
    QUICK,
    compare,
    expected_classes,
    measure,
    num_held,
    settings_of,
)
from tools.bench.shuffle_streams import make_order, mean_read, mmstream, py1e, uniform, webdataset

PAGE = DOCS / "order.md"
SORTED = QUICK[0]


@pytest.fixture(scope="module")
def default():
    return measure(SORTED, partial(mmstream, SORTED, make_order(SORTED)))


def test_a_batch_shows_most_of_the_classes_that_it_would_show_in_a_true_permutation(default):
    assert default["classes"] >= 0.75 * expected_classes(SORTED)
    assert default["64 steps"] == SORTED.num_classes


def test_a_rank_sees_no_long_runs_of_a_class_and_no_drift_through_the_corpus(default):
    assert default["longest"] <= 6
    assert default["run"] < 1.1
    assert abs(default["position"]) < 0.1
    assert abs(default["neighbour"]) < 0.15


def test_pairs_of_a_batch_seldom_meet_again_in_the_next_epoch(default):
    assert 0.9 < default["together"] < 2


def test_lanes_that_keep_their_samples_mix_as_well_and_their_rotation_is_what_parts_pairs():
    made = lanes.orders(lanes.SORTED_QUICK)
    figures = {
        name: measure(lanes.SORTED_QUICK, partial(mmstream, lanes.SORTED_QUICK, order))
        for name, order in made.items()
    }
    assert figures["lanes"]["together"] < 1.1 < figures["lanes, not rotated"]["together"]
    for column in ("classes", "64 steps"):
        assert figures["lanes"][column] > 0.99 * figures["global"][column]


@pytest.mark.parametrize("nodes", [1, 8])
def test_a_cache_that_is_filled_once_hits_as_much_as_it_holds(nodes):
    corpus = lanes.CACHED_QUICK
    order = lanes.orders(corpus)["lanes"]
    streams = [mmstream(corpus, order, epoch) for epoch in range(2)]
    for fraction in (0.06, 0.1, 0.25):
        room = round(fraction * corpus.num_samples)
        rate = lanes.hit_rate(lanes.filled_once, streams, nodes, room)
        assert rate >= 0.98 * min(1, fraction * nodes)


def test_with_the_same_memory_it_mixes_more_than_a_sample_buffer_or_blocks_do(default):
    held = num_held(make_order(SORTED))
    buffer = held // (SORTED.world_size * SORTED.num_workers)
    for stream in (partial(webdataset, SORTED, buffer), partial(py1e, SORTED, held)):
        other = measure(SORTED, stream)
        assert default["classes"] > 3 * other["classes"]
        assert default["64 steps"] > 1.5 * other["64 steps"]
        assert default["together"] < other["together"] / 3


def test_wider_windows_read_more_at_once_and_bring_fewer_pairs_together_again():
    orders = [
        make_order(SORTED, grid=(8, 8), interleave=32, chunk=64, window=window)
        for window in (32, 128, 1024)
    ]
    figures = [measure(SORTED, partial(mmstream, SORTED, order))["together"] for order in orders]
    reads = [mean_read(SORTED, order, 0) for order in orders]
    assert figures == sorted(figures, reverse=True)
    assert reads == sorted(reads)
    assert reads[-1] > 4 * reads[0]


def test_the_default_settings_are_those_of_the_published_figures():
    assert f"| {settings_of(make_order(CORPORA[0]))} |" in PAGE.read_text(), (
        "the defaults changed: put the tables of tools.bench.shuffle into docs/order.md"
    )


def test_the_figures_of_a_true_permutation_and_of_no_shuffle_are_the_known_ones():
    true = measure(SORTED, partial(uniform, SORTED))
    assert true["classes"] == pytest.approx(expected_classes(SORTED), rel=0.01)
    assert true["together"] == pytest.approx(1, abs=0.05)
    plain = mmstream(SORTED, make_order(SORTED, shuffle=False), 0)
    figures = compare(SORTED, plain, plain)
    assert figures["classes"] < 1.3
    assert figures["position"] == pytest.approx(1)
    chance = SORTED.global_batch_size / SORTED.num_samples
    assert figures["together"] == pytest.approx(1 / chance, rel=0.01)


@pytest.mark.parametrize(("items", "size"), [(5000, 700), (50, 1000), (500, 1), (999, 100)])
def test_the_simulated_sample_buffer_gives_what_webdatasets_own_gives(items, size):
    class Draws:
        def __init__(self):
            self.uniforms = shuffle_streams._uniforms(np.random.default_rng(3))

        def randint(self, low, high):
            return low + int(next(self.uniforms) * (high - low + 1))

    ours = shuffle_streams._buffered(range(items), size, np.random.default_rng(3))
    assert list(ours) == list(_shuffle(iter(range(items)), size, 100, Draws()))


def test_every_simulated_stream_shows_a_sample_at_most_once_an_epoch():
    for stream in (
        partial(uniform, SORTED),
        partial(webdataset, SORTED, 66),
        partial(py1e, SORTED, 4000),
        partial(mmstream, SORTED, make_order(SORTED)),
    ):
        ids = stream(1).ravel()
        assert np.unique(ids).size == ids.size > 0.9 * SORTED.num_samples


def test_the_costs_of_the_default_windows_are_those_of_the_page():
    for settings in ({}, windows.FORMER):
        order = windows.make_order(110_000, 256, **settings)
        assert f"| {windows.line(110_000, 256, order)} |" in PAGE.read_text(), (
            "the defaults changed: put the tables of tools.bench.windows into docs/order.md"
        )


def test_ranks_that_divide_the_lanes_make_at_most_320_requests_a_gb_or_one_a_48_samples():
    for sample_bytes in (20_000, 110_000):
        order = windows.make_order(sample_bytes, 256)
        for world_size in (1, 8, 64):
            per_gb, samples = windows.requests(order, sample_bytes, world_size)
            assert per_gb <= 320 or samples >= 48
