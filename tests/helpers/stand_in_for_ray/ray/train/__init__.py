"""Stands in for ray.train: settings, and reports as lines on standard output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FailureConfig:
    max_failures: int = 0


@dataclass(frozen=True)
class RunConfig:
    failure_config: FailureConfig = field(default_factory=FailureConfig)


@dataclass(frozen=True)
class ScalingConfig:
    num_workers: int
    use_gpu: bool = False


def report(metrics: Mapping[str, Any]) -> None:
    print(f"reported: {dict(metrics)}", flush=True)  # noqa: T201
