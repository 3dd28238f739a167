"""Forecasts of speed that nobody measured, for what follows from them."""

from __future__ import annotations

from typing import Any

from mmstream.forecast.connections import ConnectionSpeed
from mmstream.forecast.speed import LoaderSpeed, SpeedForecast


def speed(num_workers: int, num_threads: int, samples_per_s: float, **more: Any) -> LoaderSpeed:
    settings: dict[str, Any] = {
        "low_samples_per_s": samples_per_s,
        "high_samples_per_s": samples_per_s,
        "mb_per_s": 100.0,
        "main_cores": 0.1,
        "worker_cores": 0.5,
        "reader_cores": 0.0,
        "other_cores": 0.0,
        "mean_in_flight": 0.0,
        "num_throttled": 0,
        "start_s": 1.0,
        "memory_bytes": 1,
        **more,
    }
    return LoaderSpeed(num_workers, num_threads, samples_per_s, **settings)


def forecast_of(chosen: LoaderSpeed, **more: Any) -> SpeedForecast:
    """A forecast whose chosen setting was measured so."""
    values: dict[str, Any] = {
        "url": "shards",
        "num_samples": 1000,
        "num_steps": 100,
        "batch_size": 10,
        "num_ranks": 1,
        "cpu_limit": 2.0,
        "cached_share": None,
        "mean_range_bytes": 4.2e6,
        "mean_sample_bytes": 110e3,
        "connections": (ConnectionSpeed(1, 40.0, 0.05, 0.06, 0.07, 10, 0, 0),),
        "stage_s": {"read": 1e-6, "decode": 1e-3},
        "raw": chosen,
        "settings": (chosen,),
        "chosen": chosen,
        "full_window_bytes": 0.0,
        "window_bytes": None,
        **more,
    }
    return SpeedForecast(**values)
