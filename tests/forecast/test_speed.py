"""What follows from measured speeds: the setting to use, its limit, the length of an epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmstream.forecast.speed import recommended, settings_to_try, with_limit
from tests.helpers.forecasts import forecast_of, speed


def test_of_about_equal_settings_the_one_with_the_fewest_processes_is_recommended() -> None:
    speeds = [speed(8, 1, 1000), speed(4, 1, 950), speed(2, 1, 800), speed(4, 2, 1010)]
    assert recommended(speeds) == speeds[1]


def test_a_setting_without_workers_is_recommended_only_where_it_is_much_faster() -> None:
    speeds = [speed(2, 1, 950), speed(0, 2, 1000)]
    assert recommended(speeds).num_workers == 2
    assert recommended([speed(2, 1, 500), speed(0, 2, 1000)]).num_workers == 0


def test_a_single_core_has_one_thread_in_each_setting() -> None:
    assert settings_to_try(0.5) == settings_to_try(1.0) == [(1, 1), (0, 1)]


@pytest.mark.parametrize(
    ("more", "free_cores", "storage", "limit"),
    [
        ({"worker_cores": 1.9}, 2.0, 1000.0, "cpu"),
        ({"worker_cores": 0.9}, 1.1, 1000.0, "cpu"),  # others have the rest
        ({}, 2.0, 110.0, "storage"),
        ({}, 2.0, None, "none"),  # in the page cache
        ({"main_cores": 0.95}, 8.0, 1000.0, "main process"),
        ({"reader_cores": 0.95}, 8.0, 1000.0, "reader process"),
        ({}, 2.0, 1000.0, "none"),
        ({"reader_cores": 0.9, "mb_per_s": 99.0}, 8.0, 100.0, "storage"),
    ],
)
def test_the_limit_is_what_is_used_most(
    more: dict[str, float], free_cores: float, storage: float | None, limit: str
) -> None:
    assert with_limit(speed(4, 1, 1000, **more), free_cores, storage).limit == limit


def test_workers_that_are_all_busy_are_the_limit_though_cores_are_free() -> None:
    busy = speed(1, 1, 1000, worker_cores=1.0, main_cores=0.0)
    assert with_limit(busy, 64.0, 1e4).limit == "workers"
    assert with_limit(busy, 1.0, 1e4).limit == "cpu"


def test_without_workers_the_main_process_is_not_held_against_one_core() -> None:
    decoding = speed(0, 4, 1000, main_cores=3.9, worker_cores=0.0)
    assert with_limit(decoding, 4.0, 1e4).limit == "cpu"
    assert with_limit(decoding, 64.0, 1e4).limit == "none"


def test_an_epoch_is_its_samples_and_the_longest_start() -> None:
    chosen = speed(2, 1, 100.0, start_s=0.5)
    forecast = forecast_of(
        chosen,
        settings=(speed(2, 1, 90.0, start_s=3.0), speed(0, 2, 50.0, start_s=9.0)),
        num_samples=6400,
        batch_size=16,
        num_ranks=4,
    )
    assert forecast.start_s == 3.0  # not that of a loader without workers
    assert forecast.epoch_s == pytest.approx(3.0 + 6400 / 4 / 100)
    assert forecast.batch_s == pytest.approx(16 / 100)
    alone = replace(forecast, chosen=replace(chosen, num_workers=0))
    assert alone.start_s == 9.0
