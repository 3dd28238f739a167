"""Counts samples as batches are delivered, and stops a run that has too many bad ones.

Runs in the main process of a rank, in the order of steps.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from mmstream.bad_samples.policy import BadSamplePolicy
from mmstream.bad_samples.quarantine import FILTERED, TOO_LONG, BadSample, append_records
from mmstream.errors import (
    BadSampleLimitError,
    ChecksumError,
    DecodeError,
    ShardError,
    escaped,
)
from mmstream.storage.transfer_counts import TransferCounts

logger = logging.getLogger(__name__)


# -- all counts of a loader ------------------------------------------------------------------------
#
# The loader and ``limits.py`` count as batches are delivered, in the main process of a rank.

MAX_DAMAGED = 3
"""So many samples of one shard that do not fit their checksums are more than a chance: a warning
names the shard."""

MAX_WAITS = 1000
"""Waits for batches that are kept for their quantiles."""


@dataclass
class Stats:
    """What a loader has delivered since it was made.

    If a limit stops the run, the batch that it stopped is counted.
    """

    num_steps: int = 0
    num_samples: int = 0
    """Planned samples of this rank, bad and filtered ones included, padding left out."""
    num_bad: int = 0
    num_skipped: int = 0
    """Samples that a user's filter left out."""
    bad: Counter[str] = field(default_factory=Counter)
    """Bad and filtered samples by kind."""
    num_cut_texts: int = 0
    """Delivered texts that `max_length` has cut."""
    num_dropped_parts: int = 0
    """Parts of delivered conversations that their texts lack, with ``undecoded_parts="drop"`` or
    "keep"."""
    num_longer: int = 0
    """Samples of packs that have more tokens than were measured. Those that did not fit count as
    bad, too."""
    num_shorter: int = 0
    """Samples of packs that have fewer tokens than were measured."""
    num_documents: int = 0
    """Documents of delivered batches without padding (`mm.Flat`, `mm.Pack`). Other batches do not
    count here, nor in the next fields."""
    num_tokens: int = 0
    """Tokens of these documents."""
    num_label_tokens: int = 0
    """Tokens of these documents that have a label."""
    num_token_slots: int = 0
    """Tokens that their rows have room for: of packs, ``max_tokens`` of each row that is valid."""
    num_planned_tokens: int = 0
    """Tokens of all samples that were planned for packs, as measured."""
    num_modelled_steps: int = 0
    """Steps of which the cost of each rank was modelled (`mm.Pack(cost=...)`)."""
    total_imbalance: float = 0.0
    """The largest cost of a rank over the mean of all ranks, summed over these steps."""
    num_bytes: int = 0
    """Bytes read from storage."""
    num_requests: int = 0
    """Ranges read from storage."""
    num_wrong_reads: int = 0
    """Samples and indexes that came with bytes unlike their checksums. Each was read again, and
    each of its reads counts."""
    transfers: TransferCounts = field(default_factory=TransferCounts)
    """What the reader process of a rank has counted on remote storage: requests, retries,
    stalls and more."""
    wait_s: float = 0.0
    """Seconds that the consumer has waited for batches."""
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_WAITS), repr=False)
    """The last `MAX_WAITS` of these waits, in seconds."""
    consecutive: Counter[str] = field(default_factory=Counter)
    """Bad samples in a row up to now, by source of a mixture; "" for a single dataset."""
    damaged: dict[str, set[int]] = field(default_factory=dict)
    """The first `MAX_DAMAGED` samples of each shard that do not fit their checksums."""

    def __repr__(self) -> str:
        """Leave out what is 0: of most runs, that is most."""
        empty = Stats()
        values = ((f.name, getattr(self, f.name)) for f in fields(self) if f.repr)
        counted = [f"{name}={v!r}" for name, v in values if v != getattr(empty, name)]
        return f"Stats({', '.join(counted)})"

    @property
    def fill(self) -> float:
        """Tokens of documents, as a share of what their rows have room for; 0 without documents."""
        return self.num_tokens / self.num_token_slots if self.num_token_slots else 0.0

    @property
    def planned_fill(self) -> float:
        """The same as the plan of packs has it; 0 without packs."""
        return self.num_planned_tokens / self.num_token_slots if self.num_token_slots else 0.0

    @property
    def modelled_imbalance(self) -> float:
        """Largest modelled cost of a rank over the mean, as the mean of the steps. 0: unknown."""
        steps = self.num_modelled_steps
        return self.total_imbalance / steps if steps else 0.0

    @property
    def wait_p99_s(self) -> float:
        """Seconds that 99 % of the last `MAX_WAITS` batches were waited for, at most."""
        ordered = sorted(self.waits)
        return ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0

    @property
    def mb_per_s(self) -> float:
        """10^6 bytes a second of remote storage, while requests were under way; else 0."""
        counts = self.transfers
        return counts.num_bytes / 1e6 / counts.busy_s if counts.busy_s else 0.0

    @property
    def num_cache_hit_bytes(self) -> int:
        """Bytes of samples that came from the node cache; `num_bytes` does not count them."""
        return self.transfers.num_cache_hit_bytes

    @property
    def num_cached_bytes(self) -> int:
        """Bytes of samples that were written into the node cache."""
        return self.transfers.num_cached_bytes

    @property
    def cache_hit_fraction(self) -> float:
        """Share of the bytes that came from the node cache; 0 without one."""
        num_bytes = self.num_bytes + self.num_cache_hit_bytes
        return self.num_cache_hit_bytes / num_bytes if num_bytes else 0.0

    def count_wait(self, seconds: float) -> None:
        """Count the wait for a batch."""
        self.wait_s += seconds
        self.waits.append(seconds)


# -- limits ----------------------------------------------------------------------------------------

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
