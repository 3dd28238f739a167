"""Bad samples: what is allowed, what is counted, what is written down.

A worker substitutes (see `decoding.stage`) and its records travel with the batch. This side runs in
the rank's main process, as batches are delivered, so counts come in the order of steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from mmstream.errors import ConfigError, SkipLimitError

__all__ = ["BadSample", "SkipPolicy", "Stats", "count_bad"]

logger = logging.getLogger(__name__)

MAX_WARNINGS = 10
"""Bad samples logged one by one; later ones only go to the quarantine file."""


@dataclass(frozen=True)
class SkipPolicy:
    """How many bad samples a run bears; each is replaced by a substitute and written down.

    A user's filter (`SkipSample`) is counted apart and outside these limits.
    """

    max_fraction: float = 0.01
    """Bad samples over delivered ones, of this rank since it started."""
    min_samples: int = 1000
    """The fraction is judged once so many samples were delivered."""
    max_consecutive: int = 100
    """Bad samples in a row: a whole bad shard, a wrong decoder."""
    shards: bool = False
    """True: the samples of an unreadable shard are bad samples; False: it stops the run."""
    quarantine: str | None = "."
    """Folder of ``quarantine-rank{r}.jsonl``, made when there is something to write; None: none."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_fraction <= 1:
            raise ConfigError(f"max_fraction {self.max_fraction}: a fraction lies in [0, 1]")
        if self.min_samples < 0 or self.max_consecutive < 0:
            raise ConfigError("min_samples and max_consecutive count from 0")


@dataclass(frozen=True)
class BadSample:
    """One planned sample that was not shown: a line of the quarantine file."""

    epoch: int
    step: int
    row: int
    """Of the global batch."""
    shard: str
    index: int
    kind: str
    """SampleError, DecodeError, ShardError; SkipSample for a user's filter."""
    reason: str
    substitute: tuple[str, int] | None
    """(shard, index) shown in its place; None: the row is marked invalid."""


@dataclass
class Stats:
    """What a loader has delivered since it was made."""

    num_steps: int = 0
    num_samples: int = 0
    """Rows of this rank, padding left out."""
    num_bad: int = 0
    num_skipped: int = 0
    """Left out by a user's filter."""
    bad: Counter[str] = field(default_factory=Counter)
    """Bad and filtered samples by kind."""
    num_bytes: int = 0
    """Read from storage."""
    num_requests: int = 0
    """Range reads of storage."""
    wait_s: float = 0.0
    """Time that the consumer spent waiting for batches."""
    num_consecutive: int = 0
    """Bad samples in a row, up to now."""


def count_bad(
    stats: Stats, policy: SkipPolicy, records: tuple[BadSample, ...], valid: list[bool], rank: int
) -> None:
    """Count the rows of a delivered batch and apply the limits. The one place that judges.

    Args:
        stats: changed in place.
        policy: the limits.
        records: what was bad, in the order of rows.
        valid: of each row of this rank.
        rank: names the quarantine file.

    Raises:
        SkipLimitError: a limit is passed; the records are written first.
    """
    stats.num_samples += sum(valid) + sum(record.substitute is None for record in records)
    for record in records:
        if record.kind == "SkipSample":
            stats.num_skipped += 1
        else:
            stats.num_bad += 1
        stats.bad[record.kind] += 1
        level = logging.WARNING if stats.bad.total() <= MAX_WARNINGS else logging.DEBUG
        logger.log(level, "%s: %s (epoch %d step %d row %d)", record.kind, record.reason,
                   record.epoch, record.step, record.row)  # fmt: skip
    if records and policy.quarantine is not None:
        _write(Path(policy.quarantine), rank, records)
    run = _longest_run(stats, records, len(valid))
    if policy.max_consecutive and run > policy.max_consecutive:
        raise SkipLimitError(
            f"{run} bad samples in a row (max_consecutive={policy.max_consecutive}), "
            f"the last: {records[-1].reason}"
        )
    if stats.num_samples >= policy.min_samples:
        allowed = policy.max_fraction * stats.num_samples
        if stats.num_bad > allowed:
            raise SkipLimitError(
                f"{stats.num_bad} of {stats.num_samples} samples are bad "
                f"(max_fraction={policy.max_fraction}), by kind: {dict(stats.bad)}; see "
                f"quarantine-rank{rank}.jsonl"
            )


def _longest_run(stats: Stats, records: tuple[BadSample, ...], num_rows: int) -> int:
    """Return the longest run of bad rows that ends in this batch, and carry the last one on."""
    bad = {record.row for record in records if record.kind != "SkipSample"}
    first = min((record.row for record in records), default=0)
    longest = stats.num_consecutive
    if not bad:
        stats.num_consecutive = 0
        return 0
    start = stats.num_consecutive if first in bad else 0
    run = start
    for row in range(first, first + num_rows):
        run = run + 1 if row in bad else 0
        longest = max(longest, run)
    stats.num_consecutive = run
    return longest


def _write(folder: Path, rank: int, records: tuple[BadSample, ...]) -> None:
    path = folder / f"quarantine-rank{rank}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    except OSError as error:  # a full disk must not end a run that can go on
        logger.error("%s: %s; bad samples are in the log only", path, error)
