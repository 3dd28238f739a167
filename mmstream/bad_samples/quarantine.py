"""The quarantine file: one JSON record per planned sample that was not shown.

A run appends to ``quarantine-rank{r}.jsonl``. ``mmstream verify --quarantine`` reads it, so that
later epochs leave the bad samples out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.keys import shard_stamp, stamps_agree
from mmstream.errors import ConfigError, where
from mmstream.types import IntArray

FILTERED = "SkipSample"
"""The kind of samples that a user's filter leaves out."""

TOO_LONG = "LengthError"
"""The kind of samples that are longer than measured, and do not fit in their pack."""

KINDS = (
    "SampleError",
    "DecodeError",
    "TimeoutError",
    "ChecksumError",
    "ShardError",
    TOO_LONG,
    FILTERED,
)
"""Kinds of records: names of the error classes."""


@dataclass(frozen=True)
class BadSample:
    """One planned sample that was not shown: a line of the quarantine file."""

    epoch: int
    step: int
    row: int
    """Row of the global batch."""
    shard: str
    index: int
    kind: str
    """One of `KINDS`: SkipSample for a user's filter."""
    reason: str
    substitute: tuple[str, int] | None
    """(shard, index) of the sample that counts in its place; of the first one where a pack takes
    the whole row. None: the row is invalid, or the other samples of its pack go on without it."""
    stamp: str | None = None
    """`shard_stamp` of its shard. Files of old versions may have none."""
    document: int | None = None
    """Number of the sample in its pack, from 0. None: its row is this one sample."""


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
    # ASCII: keys of foreign tars may hold bytes that are no text and have no UTF-8 form.
    lines = "".join(json.dumps(_line_of(record)) + "\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        _remove_cut_line(file)
        file.write(lines.encode("ascii"))


def _line_of(record: BadSample) -> dict[str, Any]:
    """Return the fields of a line."""
    line = asdict(record)
    if record.document is None:
        del line["document"]
    return line


def _remove_cut_line(file: BinaryIO) -> None:
    """Truncate a file behind its last line end; it is at its end afterwards."""
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
                    f"{path}:{line_number}: {address} is no sample of {dataset!r} (for a run on a "
                    "mixture say which source this is)"
                )
            stamp = shard_stamp(dataset.manifest.shards[shard])
            if record.stamp is not None and not stamps_agree(record.stamp, stamp):
                raise ConfigError(
                    f"{path}:{line_number}: belongs to another dataset: its {record.shard} is not "
                    f"the one of {dataset!r} (samples-bytes-checksum {record.stamp}, here {stamp})"
                )
            if record.kind != FILTERED:
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
