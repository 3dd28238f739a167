"""The forecast says what the plans of all ranks read, and what a server then counts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import mmstream as mm
from mmstream.forecast.equal_samples import equal_samples
from mmstream.forecast.reads import LargeReads, Reads, forecast_reads
from mmstream.order import AnyOrder
from mmstream.packing.mixture_order import MixturePackOrder
from mmstream.packing.mixture_plan import MixturePlan
from mmstream.reading.plan import RankPlan
from mmstream.storage.remote import RemoteStore
from tests.helpers.corpora import write_corpus
from tests.helpers.mixtures import mixed
from tests.helpers.packed_texts import pack_pipeline, plan_texts, write_texts

COUNTS = [300, 200, 0, 300]


def of_random_size(number: int) -> dict[str, bytes]:
    return {"bin": bytes(500 + number * 7919 % 20_000)}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> mm.Dataset:
    return mm.open_dataset(write_corpus(tmp_path_factory.mktemp("sizes"), COUNTS, of_random_size))


def bounds_of(num_rows: int, world_size: int) -> list[int]:
    return [rank * num_rows // world_size for rank in range(world_size + 1)]


def planned(
    source: mm.Dataset | mm.Mixture, order: AnyOrder, row_bounds: list[int], **settings: object
) -> Reads:
    """What the ranks of a run plan for its first epoch."""
    total = Reads()
    for rows in pairwise(row_bounds):
        plan = RankPlan(
            order,
            rows,
            0,
            bounds=lambda shard, index: source.locate(shard).dataset.bounds(
                source.locate(shard).shard, index
            ),
            access=lambda _: RemoteStore.access,
            **settings,
        )
        for _ in range(order.steps_per_epoch):
            for one in plan.plan_step():
                total += Reads(1, one.samples.num_bytes)
    return total


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("drop_last", [True, False])
def test_an_epoch_with_few_windows_is_told_exactly(dataset, world_size, drop_last):
    order = dataset.plan_order(
        global_batch_size=24, grid=(1, 8), window=40, interleave=4, chunk=16, drop_last=drop_last
    )
    row_bounds = bounds_of(24, world_size)
    forecast = forecast_reads(dataset, order, row_bounds)
    assert forecast.is_exact
    assert forecast.epoch + forecast.start == planned(dataset, order, row_bounds)
    assert forecast.start.num_requests > 0
    assert forecast.num_samples == order.steps_per_epoch * 24


def test_without_shuffle_and_with_single_samples_too(dataset):
    for settings, order_settings in (
        ({"single_samples": True}, {}),
        ({}, {"shuffle": False}),
    ):
        order = dataset.plan_order(global_batch_size=24, **order_settings)
        forecast = forecast_reads(dataset, order, [0, 24], **settings)
        assert forecast.epoch + forecast.start == planned(dataset, order, [0, 24], **settings)


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_mixture_is_told_exactly(datasets, world_size):
    mixture = mixed(datasets)
    order = mixture.plan_order(global_batch_size=12, grid=(2, 3), window=24)
    row_bounds = bounds_of(12, world_size)
    forecast = forecast_reads(mixture, order, row_bounds)
    assert forecast.epoch + forecast.start == planned(mixture, order, row_bounds)
    assert forecast.num_prefixes == 3
    assert 1 / 3 < forecast.busiest_prefix < 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_packs_are_told_exactly(tmp_path, world_size):
    pipeline = pack_pipeline(write_texts(tmp_path, [300, 300]), rows=8)
    row_bounds = bounds_of(8, world_size)
    forecast = forecast_reads(pipeline.dataset, pipeline.order, row_bounds)
    assert forecast.epoch + forecast.start == planned(pipeline.dataset, pipeline.order, row_bounds)
    assert forecast.num_samples == sum(
        pipeline.order.refs(0, step).shard.size for step in range(pipeline.order.steps_per_epoch)
    )


def test_packs_of_a_mixture_are_told_exactly(tmp_path):
    datasets = {
        name: mm.open_dataset(write_texts(tmp_path / name, counts))
        for name, counts in {"web": [200, 100], "books": [150]}.items()
    }
    mixture = mm.Mixture({name: (each, 1) for name, each in datasets.items()}, epoch_steps=20)
    plan = MixturePlan({name: plan_texts(each) for name, each in datasets.items()}, [2, 1])
    shares = plan.shares_by_step(mixture.weights, "tokens")
    order = MixturePackOrder.from_plans(
        plan, mixture.corpora, shares, epoch_steps=20, global_batch_size=8
    )
    forecast = forecast_reads(mixture, order, [0, 4, 8])
    assert forecast.epoch + forecast.start == planned(mixture, order, [0, 4, 8])
    assert forecast.num_samples == sum(order.refs(0, step).shard.size for step in range(20))


def test_large_samples_come_with_their_first_bytes_and_what_a_decoder_reads(dataset):
    order = dataset.plan_order(global_batch_size=24)
    least = 16_384
    large = LargeReads(least, Reads(3, 1000))
    forecast = forecast_reads(dataset, order, [0, 24], large=large)
    indexes = [(shard, index) for shard, count in enumerate(COUNTS) for index in range(count)]
    refs = [order.refs(0, step) for step in range(order.steps_per_epoch)]
    delivered = {
        (shard, index)
        for step in refs
        for shard, index in zip(step.shard.tolist(), step.index.tolist(), strict=True)
    }
    sizes = {
        ref: int((bounds.stop - bounds.start)[0])
        for ref in indexes
        if ref in delivered
        for bounds in [dataset.bounds(ref[0], np.array([ref[1]]))]
    }
    num_large = sum(size >= least for size in sizes.values())
    expected = planned(dataset, order, [0, 24], least_large_bytes=least)
    assert num_large > 0
    assert forecast.epoch + forecast.start == expected + Reads(3, 1000).times(num_large)
    assert forecast.num_sample_bytes == sum(sizes.values())
    whole = forecast_reads(dataset, order, [0, 24], large=LargeReads(least))
    assert whole.epoch.num_bytes >= whole.num_sample_bytes


@pytest.mark.parametrize(
    ("sample_bytes", "rows", "world_size"),
    [(20_000, 256, 3), (110_000, 256, 8), (110_000, 256, 12)],
)
def test_drawn_windows_say_about_what_all_windows_say(sample_bytes, rows, world_size):
    dataset = equal_samples(100_000, sample_bytes)
    order = dataset.plan_order(global_batch_size=rows)
    row_bounds = bounds_of(rows, world_size)
    drawn = forecast_reads(dataset, order, row_bounds, uses_index=False, max_shares=400)
    exact = forecast_reads(dataset, order, row_bounds, uses_index=False, max_shares=1 << 20)
    assert drawn.epoch.num_requests == pytest.approx(exact.epoch.num_requests, rel=0.05)
    assert drawn.epoch.num_bytes == pytest.approx(exact.epoch.num_bytes, rel=0.01)
    assert drawn.num_samples == pytest.approx(exact.num_samples, rel=0.001)
