"""Counts samples as batches are delivered, and stops a run that has too many bad ones.

Runs in the main process of a rank, in the order of steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmstream.bad_samples.policy import BadSamplePolicy
from mmstream.bad_samples.quarantine import FILTERED, TOO_LONG, BadSample, append_records
from mmstream.bad_samples.stats import MAX_DAMAGED, Stats
from mmstream.errors import (
    BadSampleLimitError,
    ChecksumError,
    DecodeError,
    ShardError,
    escaped,
)

logger = logging.getLogger(__name__)

_MAY_BE_DAMAGED = {kind.__name__ for kind in (ChecksumError, DecodeError, ShardError)}
"""Kinds of bad samples whose bytes may be the reason, and not a function of the user."""

MAX_WARNINGS = 10
"""Bad samples that are logged as warnings; later ones go to the quarantine file only."""


def count_samples(
    stats: Stats,
    policy: BadSamplePolicy,
    records: Sequence[BadSample],
    valid: Sequence[bool],
    sources: Sequence[str],
    *,
    start: int,
    rank: int,
    numbers: Sequence[int] | None = None,
    urls: Sequence[str] = (),
) -> None:
    """Count the planned samples of a batch, write its records, and apply the limits.

    This is the only place that judges whether a run has too many bad samples.

    Args:
        stats: changed in place.
        policy: the limits.
        records: bad and filtered samples of the batch, in the order of rows.
        valid: of each row of this rank; True for each planned sample of packs.
        sources: the source of each planned sample, "" for a single dataset.
        start: this rank's first row in the global batch.
        rank: names the quarantine file.
        numbers: of the record's samples among the planned ones, where rows are packs. None: they
            are the rows of the records, from `start` on.
        urls: of the dataset of each planned sample, for the log. Empty: it does not say them.

    Raises:
        BadSampleLimitError: a limit is exceeded. Rows are counted and records written before.
    """
    bad = [record for record in records if record.kind != FILTERED]
    if numbers is None:
        numbers = [record.row - start for record in records]
    bad_numbers = set(numbers)
    stats.num_samples += sum(
        is_valid or number in bad_numbers for number, is_valid in enumerate(valid)
    )
    num_logged = stats.num_bad
    stats.num_bad += len(bad)
    stats.num_skipped += len(records) - len(bad)
    stats.bad.update(record.kind for record in records)
    for number, record in zip(numbers, records, strict=True):
        if record.kind == FILTERED:
            continue
        num_logged += 1
        logger.log(
            logging.WARNING if num_logged <= MAX_WARNINGS else logging.DEBUG,
            "%s: %s (epoch %d step %d row %d%s)",
            record.kind,
            record.reason,
            record.epoch,
            record.step,
            record.row,
            f" of {escaped(urls[number])}" if urls else "",
        )
    _warn_of_damaged_shards(stats, bad)
    path = None
    if policy.quarantine is not None:
        path = Path(policy.quarantine, f"quarantine-rank{rank}.jsonl")
    if records and path is not None:
        _write(path, records)
    longest = _longest_run(stats, dict(zip(numbers, records, strict=True)), valid, sources)
    if policy.max_consecutive and longest > policy.max_consecutive:
        raise BadSampleLimitError(
            f"{longest} bad samples in a row (max_consecutive={policy.max_consecutive}), "
            f"the last: {bad[-1].reason}"
        )
    limit = _exceeded_limit(stats, policy)
    if limit is not None:
        raise BadSampleLimitError(
            f"{stats.num_bad} of {stats.num_samples} samples are bad ({limit}), "
            f"by kind: {dict(stats.bad)}; {_advice(path, stats)}"
        )


def _warn_of_damaged_shards(stats: Stats, bad: Sequence[BadSample]) -> None:
    """Name each shard once, when its third sample does not fit its checksum."""
    for record in bad:
        if record.kind != ChecksumError.__name__:
            continue
        indexes = stats.damaged.setdefault(record.shard, set())
        if len(indexes) == MAX_DAMAGED or record.index in indexes:
            continue
        indexes.add(record.index)
        if len(indexes) == MAX_DAMAGED:
            logger.warning(
                "%d samples of %s have other bytes than their checksums say: the shard was "
                "replaced or is damaged; run `mmstream verify` on its dataset",
                MAX_DAMAGED,
                record.shard,
            )


def _advice(path: Path | None, stats: Stats) -> str:
    """Say what to do. Only damaged bytes are bad for everybody, and so for a bad list."""
    advice = "where functions, decoders or limits of this run refuse good bytes, mend those"
    if _MAY_BE_DAMAGED & stats.bad.keys():
        advice = (
            "`mmstream verify URL --decode --write-bad` leaves out those whose bytes are damaged; "
            + advice
        )
    return f"see {path or 'the log'}; {advice}"


def _exceeded_limit(stats: Stats, policy: BadSamplePolicy) -> str | None:
    if policy.max_samples is not None and stats.num_bad > policy.max_samples:
        return f"max_samples={policy.max_samples}"
    is_judged = stats.num_samples >= policy.min_samples
    if is_judged and stats.num_bad > policy.max_fraction * stats.num_samples:
        return f"max_fraction={policy.max_fraction}"
    if is_judged and stats.bad[TOO_LONG] > policy.max_length_error_fraction * stats.num_samples:
        return (
            f"max_length_error_fraction={policy.max_length_error_fraction}: measure and plan anew"
        )
    return None


def _longest_run(
    stats: Stats,
    records: Mapping[int, BadSample],
    valid: Sequence[bool],
    sources: Sequence[str],
) -> int:
    """Return the longest run of bad samples that reaches into this batch; keep the last run's.

    Padding rows are ignored. A filtered sample was readable, so it ends a run.
    """
    longest = 0
    for number, (is_valid, source) in enumerate(zip(valid, sources, strict=True)):
        if number in records and records[number].kind != FILTERED:
            stats.consecutive[source] += 1
            longest = max(longest, stats.consecutive[source])
        elif number in records or is_valid:
            stats.consecutive[source] = 0
    return longest


def _write(path: Path, records: Sequence[BadSample]) -> None:
    try:
        append_records(path, records)
    except OSError as error:  # a full disk must not end a run that can continue
        logger.error("%s: %s; bad samples are in the log only", path, error)
