"""Bad samples: what a run does about them, what is counted, what is written down.

Place in the flow: `rows.py` replaces bad samples, and their records travel with the batch. The main
process of a rank counts them as batches are delivered, in the order of steps. It writes them to
``quarantine-rank{r}.jsonl``, and stops a run that has too many. ``mmstream verify --quarantine``
reads these files, so that later epochs leave the bad samples out (``dataset/bad_list.py``).
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

import msgspec
import numpy as np

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.keys import shard_stamp, stamps_agree
from mmstream.errors import (
    BadSampleLimitError,
    ChecksumError,
    ConfigError,
    DecodeError,
    ShardError,
    escaped,
    where,
)
from mmstream.settings import Fraction, NonNegativeInt, checked
from mmstream.storage.transfers import TransferCounts
from mmstream.types import FILTERED, NOT_BAD, TOO_LONG, BadSample, IntArray

logger = logging.getLogger(__name__)

# -- what a run does about them --------------------------------------------------------------------

Action: TypeAlias = Literal["substitute", "mask", "raise"]


@checked()
@dataclass(frozen=True)
class BadSamplePolicy:
    """How bad samples are handled, and how many a run tolerates before it stops.

    A sample that fails is read again. It is bad if two reads gave the same bytes, or after eight
    reads. ``decoding/rows.py`` carries this policy out.

    Samples that a user's filter leaves out (`SkipSample`) are not bad. They are counted apart and
    no limit applies to them. Their rows are masked under "mask" and substituted otherwise.

    Each rank counts its own samples, and each new Loader starts at zero, also after a resume.

    Attributes:
        action: What happens to the row of a bad sample.

            "substitute": the row shows another sample of its window, the same one on every
            topology. "mask": the row shows that sample too, but ``__valid__`` is False, so that no
            sample counts twice. The loss must leave such rows out. "raise": the error of the first
            bad sample stops the run. The state stays before its batch, so a run with another policy
            continues there.
        max_fraction: Limit on bad samples as a share of the delivered ones.
        min_samples: Delivered samples from which on `max_fraction` is judged.
        max_consecutive: Limit on bad samples one after another. Many in a row usually mean a bad
            shard or a wrong decoder. Each source of a mixture is counted by itself. 0 means no
            limit.
        max_length_error_fraction: Limit on samples of packs that are longer than measured and do
            not fit (LengthError), as a share of the delivered ones. It is judged as `max_fraction`
            is, and tight: a measure that is out of date concerns all samples.
        max_samples: Limit on the number of bad samples. None means no limit.
        shards: Whether the samples of an unreadable shard count as bad samples. False: such a shard
            stops the run.
        quarantine: Folder of ``quarantine-rank{r}.jsonl``, made at the first bad sample. None
            writes nothing.

    Raises:
        ConfigError: an unknown action, or a limit out of range.
    """

    action: Action = "substitute"
    max_fraction: Fraction = 0.01
    min_samples: NonNegativeInt = 1000
    max_consecutive: NonNegativeInt = 100
    max_length_error_fraction: Fraction = 0.001
    max_samples: NonNegativeInt | None = None
    shards: bool = False
    quarantine: str | None = "."


# -- all counts of a loader ------------------------------------------------------------------------

MAX_DAMAGED = 3
"""So many samples of one shard that do not fit their checksums are hardly random: a warning
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
    read_s: float = 0.0
    """Seconds that the processes which made these batches waited for samples. Workers run side by
    side, so this and the next two may be longer than the run."""
    decode_s: float = 0.0
    """Seconds that they decoded and transformed samples."""
    collate_s: float = 0.0
    """Seconds that they made batches of samples."""
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

    def wait_quantile_s(self, percent: int) -> float:
        """Return how long so many percent of the last `MAX_WAITS` batches were waited for at most.

        It is in seconds.
        """
        ordered = sorted(self.waits)
        return ordered[percent * (len(ordered) - 1) // 100] if ordered else 0.0

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
    bad = [record for record in records if record.kind not in NOT_BAD]
    if numbers is None:
        numbers = [record.row - start for record in records]
    bad_numbers = set(numbers)
    stats.num_samples += sum(
        is_valid or number in bad_numbers for number, is_valid in enumerate(valid)
    )
    stats.num_skipped += sum(record.kind == FILTERED for record in records)
    stats.bad.update(record.kind for record in records)
    for number, record in zip(numbers, records, strict=True):
        if record.kind in NOT_BAD:
            continue
        stats.num_bad += 1
        logger.log(
            logging.WARNING if stats.num_bad <= MAX_WARNINGS else logging.DEBUG,
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
        try:
            append_records(path, records)
        except OSError as error:  # a full disk must not end a run that can continue
            logger.error("%s: %s; bad samples are in the log only", path, error)
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
            f"max_length_error_fraction={policy.max_length_error_fraction}: measure and plan again"
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
        if number in records and records[number].kind not in NOT_BAD:
            stats.consecutive[source] += 1
            longest = max(longest, stats.consecutive[source])
        elif number in records or is_valid:
            stats.consecutive[source] = 0
    return longest


# -- the quarantine file ---------------------------------------------------------------------------


class _Line(msgspec.Struct):
    """The fields of a `BadSample` that a reader needs; others are ignored."""

    shard: str
    index: int
    kind: str
    stamp: str | None = None


def append_records(path: Path, records: Sequence[BadSample]) -> None:
    """Append records to a quarantine file; its folder is made where it is missing.

    A last line without its end is removed first: it was cut off when an earlier run was killed, and
    the resumed run writes that record again.

    Raises:
        OSError: the file cannot be written.
    """
    # ASCII: keys of foreign tars may hold bytes that are not text and have no UTF-8 form.
    lines = ""
    for record in records:
        line = asdict(record)
        if record.document is None:
            del line["document"]
        lines += json.dumps(line) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        _remove_cut_line(file)
        file.write(lines.encode("ascii"))


def _remove_cut_line(file: BinaryIO) -> None:
    """Truncate a file after its last line end; it is at its end afterwards."""
    end = file.seek(0, os.SEEK_END)
    if not end:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)


def quarantined_refs(
    paths: Iterable[str | os.PathLike[str]], dataset: Dataset, source: str | None = None
) -> IntArray:
    """Return int64 [n, 2]: the sorted (shard, index) of all bad samples in quarantine files.

    Samples that a user's filter left out are not among them. No shard is read.

    Args:
        paths: ``quarantine-rank{r}.jsonl`` files.
        dataset: the dataset of those runs.
        source: for runs on a mixture, the name of `dataset` in it. Other sources are ignored.

    Raises:
        ConfigError: no such file, a malformed line, or a record of another dataset.
    """
    prefix = "" if source is None else f"{source}/"
    shards = {prefix + info.name: number for number, info in enumerate(dataset.manifest.shards)}
    refs: list[tuple[int, int]] = []
    for path in paths:
        for line_number, record in _read_records(path):
            if not record.shard.startswith(prefix):
                continue
            shard = shards.get(record.shard, -1)
            address = where(record.shard, record.index)
            if shard < 0 or not 0 <= record.index < dataset.counts[shard]:
                raise ConfigError(
                    f"{path}:{line_number}: {address} is not a sample of {dataset!r} (for a run on "
                    "a mixture say which source this is)"
                )
            stamp = shard_stamp(dataset.manifest.shards[shard])
            if record.stamp is not None and not stamps_agree(record.stamp, stamp):
                raise ConfigError(
                    f"{path}:{line_number}: belongs to another dataset: its {record.shard} is not "
                    f"the one of {dataset!r} (samples-bytes-checksum {record.stamp}, here {stamp})"
                )
            if record.kind not in NOT_BAD:
                refs.append((shard, record.index))
    return np.unique(np.array(refs, dtype=np.int64).reshape(-1, 2), axis=0)


def _read_records(path: str | os.PathLike[str]) -> Iterator[tuple[int, _Line]]:
    """Yield (1-based line number, record)."""
    try:
        lines = Path(path).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; runs with bad samples write quarantine-rank0.jsonl, ..."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: not a quarantine file: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            continue  # cut off when its run was killed; the resumed run wrote it again
        try:
            yield number, msgspec.json.decode(line, type=_Line)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ConfigError(f"{path}:{number}: not a quarantine record: {error}") from None
