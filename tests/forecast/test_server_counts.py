"""What the forecast says is what a real server is asked for."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.source import datasets_of
from mmstream.forecast.large_reads import measure_large_reads
from mmstream.forecast.reads import Reads, forecast_reads
from mmstream.forecast.run import forecast_run
from mmstream.lazy_bytes import LazyBytes
from mmstream.reading.messages import MAX_AHEAD
from mmstream.storage import open_store
from tests.helpers.corpora import write_corpus
from tests.helpers.http_fault_proxy import Counts, FaultProxy, fault_proxy
from tests.helpers.packed_texts import fields_of, pack_pipeline

pytestmark = pytest.mark.s3

QUIET_S = 0.3
"""Without a request for so long, a reader process has read all that it plans."""

MOST_S = 500.0


def small(number: int) -> dict[str, bytes]:
    return {"bin": bytes(1000 + number * 7919 % 8000)}


def large(number: int) -> dict[str, bytes]:
    return {"bin": bytes(500_000 + number * 79_190_011 % 1_000_000)}


def film(number: int) -> dict[str, bytes]:
    return {"mp4": bytes(1_000_000 + number * 79_190_011 % 1_000_000), "txt": b"a film"}


def tenth_of(data: bytes | LazyBytes) -> bytes:
    """Decodes a film from a tenth of it, in its middle."""
    middle = len(data) // 2
    return data[middle : middle + len(data) // 10]


tenth_of.reads_ranges = True

CORPORA = {
    "small": ([400, 300], small),
    "large": ([20, 12], large),
    "texts": ([300, 200], fields_of),
    "films": ([13, 9], film),
}


@pytest.fixture(scope="module")
def urls(s3, tmp_path_factory) -> dict[str, str]:
    """The corpora with parts of an index on the server, by name."""
    bucket = s3.removeprefix("s3://").partition("/")[0]
    addresses = {}
    for name, (counts, fields) in CORPORA.items():
        folder = Path(write_corpus(tmp_path_factory.mktemp(name), counts, fields, checksums=True))
        index_tars(folder, overwrite=True, checksums=True, progress=False)
        addresses[name] = f"s3://{bucket}/forecast-{name}"
        store = open_store(addresses[name])
        for path in folder.iterdir():
            store.write(path.name, path.read_bytes())
    return addresses


@pytest.fixture
def proxy(s3, monkeypatch, tmp_path) -> Iterator[FaultProxy]:
    """A proxy before the server, and a machine that has no index yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with fault_proxy(os.environ["AWS_ENDPOINT_URL"]) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield server


def pipeline_of(name: str, urls: dict[str, str]) -> mm.Pipeline:
    if name == "packs":
        return pack_pipeline(urls["texts"], 8)
    if name == "mixture":
        sources = {name: (mm.open_dataset(urls[name]), weight) for name, weight in WEIGHTS.items()}
        return mm.Pipeline(mm.Mixture(sources, epoch_steps=20), global_batch_size=24, window=240)
    settings = {
        "small": {"global_batch_size": 24, "grid": (1, 8), "window": 64},
        "large": {"global_batch_size": 2},
    }
    return mm.Pipeline(mm.open_dataset(urls[name]), seed=3, **settings[name])


WEIGHTS = {"small": 0.97, "large": 0.03}


def counts_at_the_end(proxy: FaultProxy, least: Reads) -> Counts:
    """Return the counts when 95 % of so much was asked for, and then nothing for a while."""
    end, before, since = time.monotonic() + MOST_S, -1, time.monotonic()
    while time.monotonic() < end:
        counts = proxy.counts()
        if counts.num_requests != before or counts.num_in_flight:
            before, since = counts.num_requests, time.monotonic()
        elif (
            time.monotonic() - since > QUIET_S
            and counts.gets_by_suffix["tar"] >= 0.95 * least.num_requests
            and counts.num_bytes >= 0.95 * least.num_bytes
        ):
            break
        time.sleep(0.02)
    return counts


def most_bytes(source, num_again):
    """Return what so many hedges and retries may have brought once more."""
    return num_again * max(each.store.access.max_range_bytes for each in datasets_of(source))


@pytest.mark.parametrize(
    ("name", "world_size"),
    [("small", 1), ("small", 3), ("large", 1), ("mixture", 1), ("packs", 2)],
)
def test_requests_and_bytes_are_those_that_the_server_counts(
    urls, proxy, tmp_path, caplog, name, world_size
):
    pipeline = pipeline_of(name, urls)
    source, order = pipeline.dataset, pipeline.order
    bounds = [rank * order.global_batch_size // world_size for rank in range(world_size + 1)]
    first, second = (forecast_reads(source, order, bounds, epoch=epoch) for epoch in (0, 1))
    shards = first.epoch + first.start + second.epoch
    run = forecast_run(source, order, first, bounds)
    assert first.is_exact
    caplog.set_level(logging.INFO, logger="mmstream")
    proxy.reset_counts()

    (Path(os.environ["XDG_CACHE_HOME"]) / "mmstream").rename(tmp_path / "unused")
    pipelines = [pipeline_of(name, urls) for _ in range(world_size)]
    loaders = [
        mm.Loader(each, world=mm.World(rank, world_size)) for rank, each in enumerate(pipelines)
    ]
    iterators = [iter(loader) for loader in loaders]
    # Some steps are asked for ahead. With one more left, two epochs are read, and no more.
    num_left = MAX_AHEAD + 1
    for iterator in iterators:
        for _ in range(order.steps_per_epoch - num_left):
            next(iterator)
    counts = counts_at_the_end(proxy, shards)
    for iterator in iterators:  # the last batch has the counts of all that was read
        for _ in range(num_left):
            next(iterator)
    transfers = [loader.stats.transfers for loader in loaders]
    num_again = sum(each.num_retries + each.num_hedges for each in transfers)
    for loader in loaders:
        loader.close()

    num_gets = counts.gets_by_suffix["tar"]
    # A request that was sent again may have been given up before it came to the server.
    assert 0.95 * shards.num_requests <= num_gets <= 1.05 * shards.num_requests + num_again
    # Ranks that begin side by side may each read what the first one leaves in the cache.
    opening = run.opening.num_requests
    assert opening <= counts.num_gets - num_gets <= world_size * opening
    (advice,) = [message for message in caplog.messages if "`mmstream info " in message]
    assert advice.startswith("an epoch reads about ") == (name == "small")
    expected_bytes = (shards + run.opening).num_bytes
    assert 0.95 * shards.num_bytes <= counts.num_bytes
    assert counts.num_bytes - most_bytes(source, num_again) <= 1.05 * expected_bytes


def test_what_decoders_read_of_films_is_what_the_server_counts(urls, proxy):
    decode = mm.Decode({"mp4": tenth_of}, min_lazy_bytes=1 << 18)
    pipeline = mm.Pipeline(mm.open_dataset(urls["films"]), global_batch_size=2, decode=decode)
    source, order = pipeline.dataset, pipeline.order
    large, num_measured = measure_large_reads(pipeline, order, num_samples=8)
    films = forecast_reads(source, order, [0, 2], large=large)
    heads = forecast_reads(source, order, [0, 2], large=replace(large, reads=Reads()), epoch=1)
    proxy.reset_counts()
    with closing(mm.Loader(pipeline)) as loader:
        for _ in loader:
            pass
        # First bytes are read ahead, of two epochs.
        expected = films.start + films.epoch + heads.epoch.times(2)
        counts = counts_at_the_end(proxy, expected)
        transfers = loader.stats.transfers
    num_again = transfers.num_retries + transfers.num_hedges
    num_gets = counts.gets_by_suffix["tar"]
    assert num_measured == 8
    assert 0.95 * expected.num_requests <= num_gets <= 1.05 * expected.num_requests + num_again
    assert 0.95 * expected.num_bytes <= counts.num_bytes
    assert counts.num_bytes - most_bytes(source, num_again) <= 1.05 * expected.num_bytes
    assert films.epoch.num_bytes < films.num_sample_bytes / 4
