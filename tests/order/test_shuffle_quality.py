"""What docs/benchmarks.md says of the order's quality, on 100,000 samples sorted by class."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from webdataset.filters import _shuffle

from tests.helpers.paths import DOCS
from tools.bench import mixing
from tools.bench.mixing import COST_CORPUS, Corpus, mmstream, webdataset

PAGE = DOCS / "benchmarks.md"
SORTED = Corpus(100, 1000, 100, 1_000_000, 256, world_size=8, num_workers=4)


def measure(stream):
    return mixing.compare(SORTED, stream(0), stream(1))


@pytest.fixture(scope="module")
def default():
    return measure(partial(mmstream, SORTED, SORTED.order()))


def test_a_batch_shows_most_of_the_classes_that_it_would_show_in_a_true_permutation(default):
    assert default["classes"] >= 0.75 * mixing.expected_classes(100, 256)
    assert default["64 steps"] == SORTED.num_classes


def test_a_rank_sees_no_long_runs_of_a_class_and_no_drift_through_the_corpus(default):
    assert default["longest"] <= 6
    assert abs(default["position"]) < 0.1
    assert abs(default["neighbour"]) < 0.15


def test_pairs_of_a_batch_seldom_meet_again_in_the_next_epoch(default):
    assert 0.9 < default["together"] < 2


def test_with_the_same_memory_it_mixes_more_than_a_sample_buffer_does(default):
    buffer = mixing.num_held(SORTED.order()) // (SORTED.world_size * SORTED.num_workers)
    other = measure(partial(webdataset, SORTED, buffer))
    assert default["classes"] > 3 * other["classes"]
    assert default["64 steps"] > 1.5 * other["64 steps"]
    assert default["together"] < other["together"] / 3


@pytest.mark.parametrize(("items", "size"), [(5000, 700), (50, 1000), (500, 1), (999, 100)])
def test_the_simulated_sample_buffer_gives_what_webdatasets_own_gives(items, size):
    class Draws:
        def __init__(self):
            self.uniforms = mixing.uniforms(np.random.default_rng(3))

        def randint(self, low, high):
            return low + int(next(self.uniforms) * (high - low + 1))

    ours = mixing.buffered(range(items), size, np.random.default_rng(3))
    assert list(ours) == list(_shuffle(iter(range(items)), size, 100, Draws()))


def test_ranks_that_divide_the_lanes_make_at_most_320_requests_a_gb_or_one_a_48_samples():
    for sample_bytes in (20_000, 110_000):
        corpus = replace(COST_CORPUS, sample_bytes=sample_bytes)
        order = corpus.order()
        for world_size in (1, 8, 64):
            per_gb = mixing.requests(corpus, order, world_size)
            assert per_gb <= max(320, 1e9 / sample_bytes / 48)
