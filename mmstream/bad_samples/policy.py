"""Bad samples: what is allowed, what is counted, what is written down.

A worker substitutes or masks (see `decoding.filling`) and its records travel with the batch. This
side runs in the rank's main process, as batches are delivered: counts come in the order of steps.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from mmstream.errors import BadSampleLimitError, ConfigError, DecodeError

__all__ = ["FILTERED", "KINDS", "Action", "BadSample", "BadSamplePolicy", "Stats", "count_bad"]

logger = logging.getLogger(__name__)

Action: TypeAlias = Literal["substitute", "mask", "raise"]

FILTERED = "SkipSample"
"""The kind of what a user's filter left out."""

KINDS = ("SampleError", "DecodeError", "ShardError", FILTERED)
"""Of all that a sample can be left out for."""

MAX_WARNINGS = 10
"""Bad samples logged one by one; later ones only go to the quarantine file."""


@dataclass(frozen=True)
class BadSamplePolicy:
    """What becomes of a bad sample's row, and how many a run bears; those are written down.

    A user's filter (`SkipSample`) finds no fault: what it leaves out is counted apart and outside
    these limits, and under "raise" it is substituted. Counters are those of one rank and start anew
    with each Loader, also after a resume.
    """

    action: Action = "substitute"
    """"substitute": the row shows another sample of its window, the same on every topology. "mask":
    it shows that one too, but ``__valid__`` is False, so that no sample counts twice; the loss must
    leave such rows out. "raise": the error of the first bad sample stops the run, and the state
    stays before its batch; a run with another policy goes on from there."""
    max_fraction: float = 0.01
    """Bad samples over delivered ones, of this rank since it started."""
    min_samples: int = 1000
    """The fraction is judged once so many samples were delivered."""
    max_consecutive: int = 100
    """Bad samples in a row: a whole bad shard, a wrong decoder; in a mixture, of one source in a
    row. 0 switches this limit off."""
    max_samples: int | None = None
    """Bad samples in all; None: no such limit."""
    shards: bool = False
    """True: the samples of an unreadable shard are bad samples; False: it stops the run."""
    quarantine: str | None = "."
    """Folder of ``quarantine-rank{r}.jsonl``, made when there is something to write; None: none."""

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ConfigError(f"action {self.action!r}: substitute, mask or raise")
        if not 0 <= self.max_fraction <= 1:
            raise ConfigError(f"max_fraction {self.max_fraction}: a fraction lies in [0, 1]")
        if min(self.min_samples, self.max_consecutive, self.max_samples or 0) < 0:
            raise ConfigError("min_samples, max_consecutive and max_samples count from 0")


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
    """(shard, index) that counts in its place; None: the row is marked invalid."""


@dataclass
class Stats:
    """What a loader has delivered since it was made, and a batch that a limit held back."""

    num_steps: int = 0
    num_samples: int = 0
    """Planned samples of this rank: bad and filtered ones included, padding left out."""
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
    consecutive: Counter[str] = field(default_factory=Counter)
    """Bad samples in a row, up to now, of each source of a mixture; of one dataset under ""."""


def count_bad(
    stats: Stats,
    policy: BadSamplePolicy,
    records: Sequence[BadSample],
    valid: Sequence[bool],
    *,
    start: int,
    rank: int,
    sources: Sequence[str] | None = None,
    stamps: Sequence[str] | None = None,
) -> None:
    """Count the rows of a batch and apply the limits. The one place that judges.

    Args:
        stats: changed in place.
        policy: the limits.
        records: what was bad, in the order of rows.
        valid: of each row of this rank.
        start: this rank's first row in the global batch.
        rank: names the quarantine file.
        sources: of a mixture, the planned source of each row: else a source that is all bad would
            hide among the others.
        stamps: `badlist.stamps_of` the planned shard of each record: written with it, so that
            `verify --quarantine` knows a file of another corpus.

    Raises:
        BadSampleLimitError: a limit is passed; the rows are counted and the records written first.
        DecodeError: one that the GPU was left with is bad, and `policy` is to raise.
    """
    bad = [record for record in records if record.kind != FILTERED]
    if bad and policy.action == "raise":  # found behind the workers, which raise by themselves
        raise DecodeError(bad[0].reason)
    stats.num_samples += sum(valid) + sum(record.substitute is None for record in records)
    stats.num_bad += len(bad)
    stats.num_skipped += len(records) - len(bad)
    stats.bad.update(record.kind for record in records)
    for number, record in enumerate(bad, start=stats.num_bad - len(bad)):
        level = logging.WARNING if number < MAX_WARNINGS else logging.DEBUG
        logger.log(level, "%s: %s (epoch %d step %d row %d)", record.kind, record.reason,
                   record.epoch, record.step, record.row)  # fmt: skip
    if records and policy.quarantine is not None:
        _write(Path(policy.quarantine), rank, records, stamps)
    run = _longest_run(stats, records, valid, start, sources or [""] * len(valid))
    if policy.max_consecutive and run > policy.max_consecutive:
        raise BadSampleLimitError(
            f"{run} bad samples in a row (max_consecutive={policy.max_consecutive}), "
            f"the last: {bad[-1].reason}"
        )
    passed = _passed(stats, policy)
    if passed is not None:
        seen = "see the log"
        if policy.quarantine is not None:
            path = Path(policy.quarantine, f"quarantine-rank{rank}.jsonl")
            which, of = (" --source NAME", " of new runs") if sources else ("", "")
            command = f"mmstream verify URL --quarantine {path}{which}"
            seen = f"see {path}; `{command}` leaves them out{of}"
        raise BadSampleLimitError(
            f"{stats.num_bad} of {stats.num_samples} samples are bad ({passed}), "
            f"by kind: {dict(stats.bad)}; {seen}"
        )


def _passed(stats: Stats, policy: BadSamplePolicy) -> str | None:
    """Return the limit of bad samples that is passed, if one is."""
    if policy.max_samples is not None and stats.num_bad > policy.max_samples:
        return f"max_samples={policy.max_samples}"
    judged = stats.num_samples >= policy.min_samples
    if judged and stats.num_bad > policy.max_fraction * stats.num_samples:
        return f"max_fraction={policy.max_fraction}"
    return None


def _longest_run(
    stats: Stats,
    records: Sequence[BadSample],
    valid: Sequence[bool],
    start: int,
    sources: Sequence[str],
) -> int:
    """Return the longest run of bad rows that reaches into this batch, and carry the last ones on.

    Padding is passed over. What a filter left out was readable, so it ends a run.
    """
    kinds = {record.row - start: record.kind for record in records}
    longest, runs = 0, stats.consecutive
    for row, (shown, source) in enumerate(zip(valid, sources, strict=True)):
        if row in kinds and kinds[row] != FILTERED:
            runs[source] += 1
            longest = max(longest, runs[source])
        elif row in kinds or shown:
            runs[source] = 0
    return longest


def _write(
    folder: Path, rank: int, records: Sequence[BadSample], stamps: Sequence[str] | None
) -> None:
    path = folder / f"quarantine-rank{rank}.jsonl"
    told = [asdict(record) for record in records]
    for line, stamp in zip(told, stamps or (), strict=stamps is not None):
        line["stamp"] = stamp
    # In ASCII: keys of strangers' tars may hold bytes that are no text and cannot be UTF-8.
    lines = "".join(json.dumps(line) + "\n" for line in told)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="ascii") as file:
            file.write(lines)
    except OSError as error:  # a full disk must not end a run that can go on
        logger.error("%s: %s; bad samples are in the log only", path, error)
