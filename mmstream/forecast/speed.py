"""How fast a pipeline was on this machine, what limited it, and what follows for a run.

    connections.py, stages.py, the loader -> bench.py -> SPEED -> the command's report

Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from mmstream.forecast.connections import ConnectionSpeed

__all__ = ["Limit", "LoaderSpeed", "SpeedForecast", "recommended", "settings_to_try", "with_limit"]

Limit: TypeAlias = Literal["storage", "cpu", "workers", "main process", "reader process", "none"]
"""What a loader waits for: bytes of storage, cores, its workers where cores are free, or a process
that runs on one core."""

FULL_SHARE = 0.8
"""Share of what is there from which it counts as the limit. Between stages, a little is idle."""

ABOUT_EQUAL = 0.9
"""Share of the highest speed from which a setting counts as equally fast: rounds differ by less."""


@dataclass(frozen=True)
class LoaderSpeed:
    """How fast a `Loader` was with one setting."""

    num_workers: int
    num_threads: int
    samples_per_s: float
    """Median of its rounds."""
    low_samples_per_s: float
    """Of ten rounds, one was slower."""
    high_samples_per_s: float
    """Of ten rounds, one was faster."""
    mb_per_s: float
    """10^6 bytes a second that were read from storage."""
    main_cores: float
    """CPU seconds a second of the main process."""
    worker_cores: float
    """CPU seconds a second of all workers."""
    reader_cores: float
    """CPU seconds a second of the reader process, where there is one."""
    other_cores: float
    """CPU seconds a second of all other programs of the machine."""
    mean_in_flight: float
    """Requests to remote storage that were under way, in the mean since the start; 0 on local
    disks."""
    num_throttled: int
    """Answers of the storage that asked for fewer requests."""
    start_s: float
    """Seconds from the first call to the first batch."""
    memory_bytes: int
    """Memory of the main process, the workers and the reader process (PSS)."""
    limit: Limit = "none"

    @property
    def cores(self) -> float:
        """CPU seconds a second of all processes of the loader."""
        return self.main_cores + self.worker_cores + self.reader_cores


@dataclass(frozen=True)
class SpeedForecast:
    """What was measured with a pipeline on this machine, and the speed that a run will have.

    Speeds are those of a loader in mid-epoch whose consumer does nothing but take batches.
    """

    url: str
    num_samples: int
    """Samples of an epoch, over all ranks."""
    num_steps: int
    """Steps of an epoch."""
    batch_size: int
    """Rows of a batch of this rank."""
    num_ranks: int
    cpu_limit: float
    """Cores that this process may use."""
    cached_share: float | None
    """Share of the local shards that was in the page cache; None where that is not known."""
    mean_range_bytes: float
    """Bytes of a range, as the client of `connections` has asked for them."""
    mean_sample_bytes: float
    """Bytes of a sample in its tar."""
    connections: tuple[ConnectionSpeed, ...]
    """Storage alone, by number of connections."""
    stage_s: dict[str, float]
    """CPU seconds of a sample by stage: "read", "text", "decode", "collate", then "transport",
    which is all that worker processes add, and "reader process"."""
    raw: LoaderSpeed
    """The recommended setting without decoders and functions."""
    settings: tuple[LoaderSpeed, ...]
    """All settings that were tried, each for a short time."""
    chosen: LoaderSpeed
    """The recommended setting, measured once more, for longer."""
    full_window_bytes: float
    """Bytes of all windows of this rank when they are full, as the pipeline has them; 0 on local
    disks. Those of the measurements may be smaller."""
    window_bytes: int | None
    """Recommended `Pipeline(window_bytes=)`. None: the pipeline's own windows fit in memory."""

    @property
    def start_s(self) -> float:
        """Seconds to the first batch of a run, at most: from the longest start that was seen."""
        has_workers = self.chosen.num_workers > 0
        same = [speed for speed in self.settings if (speed.num_workers > 0) == has_workers]
        return max(speed.start_s for speed in (self.chosen, *same))

    @property
    def samples_per_s(self) -> float:
        """Samples a second of this rank that are predicted for a run with `chosen`."""
        return self.chosen.samples_per_s

    @property
    def epoch_s(self) -> float:
        """Seconds that are predicted for an epoch with `chosen`, on `num_ranks` such ranks."""
        return self.start_s + self.num_samples / self.num_ranks / self.samples_per_s

    @property
    def batch_s(self) -> float:
        """Seconds that a batch of this rank takes. A loop with longer steps does not wait."""
        samples = self.num_samples / self.num_ranks
        return samples / self.samples_per_s / self.num_steps


def settings_to_try(cpu_limit: float) -> list[tuple[int, int]]:
    """Return the (num_workers, num_threads) that are tried on so many cores.

    Examples:
        >>> settings_to_try(2.0)
        [(2, 1), (1, 2), (0, 2)]
        >>> settings_to_try(16.0)
        [(16, 1), (8, 2), (8, 1), (0, 4)]
    """
    cores = max(1, int(cpu_limit))
    if cores < 4:
        return list(dict.fromkeys([(cores, 1), (1, cores), (0, cores)]))
    return [(cores, 1), (cores // 2, 2), (cores // 2, 1), (0, 4)]


def recommended(speeds: Sequence[LoaderSpeed]) -> LoaderSpeed:
    """Return the setting to use: of about the fastest ones, the one with the fewest processes.

    One without workers is left out where another is about as fast: it makes batches in the time of
    the training loop, and not beside it.

    Args:
        speeds: all settings that were tried.
    """
    fastest = max(speed.samples_per_s for speed in speeds)
    equal = [speed for speed in speeds if speed.samples_per_s >= ABOUT_EQUAL * fastest]
    beside = [speed for speed in equal if speed.num_workers > 0]
    return min(
        beside or equal,
        key=lambda speed: (speed.num_workers * speed.num_threads, speed.num_workers),
    )


def with_limit(
    speed: LoaderSpeed, free_cores: float, storage_mb_per_s: float | None
) -> LoaderSpeed:
    """Return the speed of a loader with what limits it.

    Of what is used to four fifths or more, it is that with the largest share. A process that runs
    on one core is a limit of its own, because further cores do not help it.

    Args:
        speed: of the loader.
        free_cores: cores that it may use, without those that other programs took meanwhile.
        storage_mb_per_s: 10^6 bytes a second that storage gives at most. None: the shards are in
            memory.
    """
    shares: dict[Limit, float] = {
        "cpu": speed.cores / max(free_cores, 1e-9),
        "reader process": speed.reader_cores,
    }
    if storage_mb_per_s is not None:
        shares["storage"] = speed.mb_per_s / storage_mb_per_s
    if speed.num_workers:
        shares["main process"] = speed.main_cores
        shares["workers"] = speed.worker_cores / (speed.num_workers * speed.num_threads)
    limit, share = max(shares.items(), key=lambda entry: entry[1])
    return replace(speed, limit=limit if share >= FULL_SHARE else "none")
