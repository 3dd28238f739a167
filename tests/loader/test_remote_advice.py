"""What a loader says at its start about a run on object storage."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.forecast.equal_samples import equal_samples
from mmstream.forecast.reads import forecast_reads
from mmstream.loader.remote_advice import log_cost
from mmstream.packing.order import PackOrder
from tests.helpers.corpora import write_corpus
from tests.helpers.packed_texts import plan_texts, write_texts

COMMAND = "`mmstream info {} --plan 256 --ranks 4` says what an epoch asks of object storage"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="mmstream")
    return caplog


def bounds_of(num_ranks: int) -> list[int]:
    return [256 * rank // num_ranks for rank in range(num_ranks + 1)]


@pytest.mark.parametrize(("sample_bytes", "num_ranks"), [(20_480, 4), (110_080, 8), (110_080, 12)])
def test_the_estimate_is_near_what_the_plan_says(
    log: pytest.LogCaptureFixture, sample_bytes: int, num_ranks: int
) -> None:
    dataset = equal_samples(1_000_000, sample_bytes)
    order = dataset.plan_order(global_batch_size=256)
    log_cost(dataset, order, bounds_of(num_ranks), None)
    (message,) = log.messages
    forecast = forecast_reads(
        dataset, order, bounds_of(num_ranks), uses_index=False, max_shares=400, has_start=False
    )
    said = re.fullmatch(
        r"an epoch reads about ([\d,.]+) GB from object storage, in about ([\d,]+) requests "
        r"\(([\d,]+) a GB\); the windows take up to ([\d,.]+) MB on a rank; a prefix of S3 answers "
        r"5,500 requests/s, which is about ([\d,]+) samples/s; `mmstream info s3://planned/corpus "
        rf"--plan 256 --ranks {num_ranks}` says more, with prices",
        message,
    )
    assert said is not None, message
    figures = [float(text.replace(",", "")) for text in said.groups()]
    expected = [
        forecast.num_sample_bytes / 1e9,
        forecast.epoch.num_requests,
        forecast.requests_per_gb,
        forecast.window_bytes / 1e6,
        forecast.max_samples_per_s,
    ]
    assert figures == pytest.approx(expected, rel=0.2)


def test_where_means_say_little_the_command_is_named(log: pytest.LogCaptureFixture) -> None:
    corpus, videos = equal_samples(1_000_000, 110_080), equal_samples(10_000, 20_000_256)
    small = equal_samples(1000, 110_080)  # it fits in its windows
    mixture = mm.Mixture({"a": (corpus, 1), "b": (videos, 1)}, epoch_steps=100)
    for source, least_large_bytes in ((mixture, None), (videos, 8 << 20), (small, None)):
        url = "URL" if source is mixture else "s3://planned/corpus"
        order = source.plan_order(global_batch_size=256)
        log_cost(source, order, bounds_of(4), least_large_bytes)
        assert log.messages == [COMMAND.format(url)]
        log.clear()


def test_with_packs_the_command_names_their_plan(
    log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    dataset = mm.open_dataset(write_texts(tmp_path, [60]))
    plan = plan_texts(dataset)
    remote = equal_samples(60, 2048)
    for url in ("s3://planned/plans/mmstream.plan.a", None):
        order = PackOrder.from_plan(replace(plan, url=url), dataset.corpus, global_batch_size=4)
        log_cost(remote, order, [0, 4], None)
    command = "`mmstream info s3://planned/corpus --plan 4 --ranks 1 --pack-plan "
    assert [message[: message.index("` says")] for message in log.messages] == [
        f"{command}s3://planned/plans/mmstream.plan.a",
        f"{command}NAME",
    ]


def test_a_folder_costs_no_requests(log: pytest.LogCaptureFixture, tmp_path) -> None:
    local = mm.open_dataset(write_corpus(tmp_path / "local", [300]))
    log_cost(local, local.plan_order(global_batch_size=256), bounds_of(4), None)
    remote = equal_samples(1000, 110_080)
    mixture = mm.Mixture({"a": (local, 1), "b": (remote, 1)}, epoch_steps=100)
    log_cost(mixture, mixture.plan_order(global_batch_size=256), bounds_of(4), None)
    assert log.messages == []
