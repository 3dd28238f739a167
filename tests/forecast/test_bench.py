"""Measuring a pipeline from storage to the batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.forecast import bench as module
from mmstream.forecast.speed import SpeedForecast
from mmstream.forecast.stages import measure_stages
from tests.helpers.corpora import captioned, write_corpus
from tests.helpers.media_files import video_file
from tests.helpers.packed_texts import pack_pipeline, write_texts
from tests.helpers.stores import far

SECONDS = 0.2


@pytest.fixture(autouse=True)
def main_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take seconds to start. One test of the command line has them."""
    monkeypatch.setattr(module, "settings_to_try", lambda _: [(0, 1), (0, 2)])
    for name in ("LEAST_ROUND_S", "LEAST_SETTLE_S", "MOST_FILL_S"):
        monkeypatch.setattr(module, name, 0.01)


def decoding(dataset: Any, **settings: Any) -> mm.Pipeline:
    decode = mm.Decode(image=mm.ImageDecoder(size=32))
    return mm.Pipeline(dataset, **{"global_batch_size": 8, "decode": decode, **settings})


def check(forecast: SpeedForecast) -> None:
    assert forecast.samples_per_s == forecast.chosen.samples_per_s > 0
    assert forecast.epoch_s > 0
    assert [speed.num_connections for speed in forecast.connections] == [1, 2, 4, 8, 16, 32, 64]
    assert forecast.stage_s.keys() == {
        *("read", "text", "decode", "collate", "transport", "reader process")
    }
    assert min(forecast.stage_s.values()) >= 0
    assert forecast.stage_s["decode"] > 0
    for speed in (*forecast.settings, forecast.raw, forecast.chosen):
        assert speed.low_samples_per_s <= speed.samples_per_s <= speed.high_samples_per_s
        assert speed.mb_per_s >= 0  # all may have been read ahead
        assert speed.memory_bytes > 0
    assert forecast.raw.samples_per_s > 0


def test_a_local_corpus_is_measured_and_nothing_is_written(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    forecast = mm.bench(decoding(mm.open_dataset(corpus)), seconds=SECONDS)
    check(forecast)
    assert [(s.num_workers, s.num_threads) for s in forecast.settings] == [(0, 1), (0, 2)]
    assert (forecast.num_samples, forecast.batch_size) == (96, 8)
    assert forecast.window_bytes is None
    assert forecast.chosen.mean_in_flight == 0
    assert list(tmp_path.iterdir()) == []


def test_a_baked_corpus_is_measured_with_one_thread(corpus: str, tmp_path: Path) -> None:
    mm.bake(decoding(mm.open_dataset(corpus)), tmp_path / "baked", progress=False)
    dataset = mm.open_dataset(tmp_path / "baked")
    baked = mm.Pipeline(dataset, global_batch_size=8, decode=mm.Decode.baked())
    forecast = mm.bench(baked, seconds=SECONDS)
    check(forecast)
    assert [(s.num_workers, s.num_threads) for s in forecast.settings] == [(0, 1)]


def test_bad_samples_are_not_put_into_quarantine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fields_of(number: int) -> dict[str, bytes]:
        return {"jpg": b"no picture"} if number == 3 else captioned(number)

    folder = write_corpus(tmp_path / "shards", [40], fields_of)
    monkeypatch.chdir(tmp_path)
    policy = mm.BadSamplePolicy(max_fraction=1.0)
    check(mm.bench(decoding(mm.open_dataset(folder), bad_samples=policy), seconds=SECONDS))
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


def test_a_reader_process_is_measured_too(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "settings_to_try", lambda _: [(0, 1)])
    dataset = mm.open_dataset(corpus, storage_kind="shared")
    pipeline = decoding(dataset, cache_dir=str(tmp_path / "cache"), max_cache_bytes=1 << 20)
    forecast = mm.bench(pipeline, seconds=SECONDS)
    check(forecast)
    assert list(tmp_path.iterdir()) == []  # the node cache is left alone
    assert forecast.full_window_bytes > 0
    assert forecast.chosen.mean_in_flight > 0


def test_a_rank_of_several_has_its_rows_only(corpus: str) -> None:
    forecast = mm.bench(decoding(mm.open_dataset(corpus)), seconds=SECONDS, num_ranks=4)
    check(forecast)
    assert (forecast.batch_size, forecast.num_ranks) == (2, 4)


def test_a_mixture_is_measured(corpus: str) -> None:
    dataset = mm.open_dataset(corpus)
    mixture = mm.Mixture({"a": (dataset, 3), "b": (dataset, 1)}, epoch_steps=6)
    forecast = mm.bench(decoding(mixture), seconds=SECONDS)
    check(forecast)
    assert forecast.num_samples == 48


def test_a_corpus_of_one_step_is_measured_over_many_epochs(tmp_path: Path) -> None:
    dataset = mm.open_dataset(write_corpus(tmp_path, [3]))
    forecast = mm.bench(decoding(dataset, global_batch_size=2), seconds=SECONDS)
    check(forecast)
    assert forecast.num_steps == 1


def test_packs_are_measured_by_their_samples(tmp_path: Path) -> None:
    pipeline = pack_pipeline(write_texts(tmp_path, [60, 40]), rows=4)
    forecast = mm.bench(pipeline, seconds=SECONDS)
    assert forecast.samples_per_s > 0
    assert forecast.stage_s["text"] > 0
    assert (forecast.batch_size, forecast.num_steps) == (4, pipeline.order.steps_per_epoch)
    assert 80 < forecast.num_samples <= 100  # of four rows a step, each of several texts


def test_videos_are_measured(tmp_path: Path) -> None:
    clip = video_file(num_frames=4)
    folder = write_corpus(tmp_path, [6], lambda number: {"mp4": clip, "txt": b"%d" % number})
    decode = mm.Decode(video=mm.VideoDecoder(size=32, num_frames=2))
    pipeline = mm.Pipeline(mm.open_dataset(folder), global_batch_size=2, decode=decode)
    forecast = mm.bench(pipeline, seconds=SECONDS)
    assert forecast.samples_per_s > 0
    assert forecast.stage_s["decode"] > 0


@pytest.mark.parametrize("is_far", [False, True], ids=["views", "raw from storage"])
def test_what_starts_no_worker_is_measured_without(corpus: str, is_far: bool) -> None:
    dataset = mm.open_dataset(corpus)
    pipeline = mm.Pipeline(
        far(dataset) if is_far else dataset, global_batch_size=8, zero_copy=not is_far
    )
    forecast = mm.bench(pipeline, seconds=SECONDS)
    assert [(s.num_workers, s.num_threads) for s in forecast.settings] == [(0, 1)]


def test_the_stages_are_told_apart(corpus: str) -> None:
    dataset = mm.open_dataset(corpus)

    def slow(sample: dict[str, Any]) -> dict[str, Any]:
        sum(range(200_000))  # some milliseconds
        return sample

    quick = measure_stages(decoding(dataset), (0, 8), 0, seconds=0)
    slowed = measure_stages(decoding(dataset, transforms=(slow,)), (0, 8), 5, seconds=0)
    assert slowed["decode"] > quick["decode"] + 0.0005
    assert slowed["collate"] < slowed["decode"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": 0}, "seconds is 0; it must be more than 0"),
        ({"num_ranks": 0}, "num_ranks is 0; it must be 1 or more"),
    ],
)
def test_impossible_settings_are_refused(
    corpus: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(mm.ConfigError, match=f"^{re.escape(message)}$"):
        mm.bench(decoding(mm.open_dataset(corpus)), **arguments)


def test_a_server_has_no_page_cache_to_empty() -> None:
    dataset = mm.open_dataset(write_corpus("memory://bench-cold", [20]))
    with pytest.raises(mm.ConfigError, match="cold=True is for folders"):
        mm.bench(decoding(dataset), cold=True)


def test_windows_that_would_not_fill_in_time_are_smaller_while_measured(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = mm.open_dataset(corpus, storage_kind="shared")
    pipeline = decoding(dataset)
    measuring = module._Measuring(pipeline, mm.World(0, 2), False, None)
    assert measuring.with_small_windows(pipeline) is pipeline
    assert measuring.window_bytes_that_fit(pipeline) is None
    monkeypatch.setattr(module, "window_bytes", lambda *_: 1 << 40)
    small = measuring.with_small_windows(pipeline)
    assert small.window_bytes == 2 * module.MEASURED_WINDOW_BYTES  # of both ranks
    assert measuring.window_bytes_that_fit(pipeline) > 0
    chosen = decoding(dataset, window=16)
    assert measuring.with_small_windows(chosen) is chosen
    local = mm.open_dataset(corpus)
    measuring = module._Measuring(decoding(local), mm.World(0, 1), False, None)
    assert measuring.with_small_windows(decoding(local)).window_bytes is None
    assert measuring.window_bytes_that_fit(decoding(local)) is None
