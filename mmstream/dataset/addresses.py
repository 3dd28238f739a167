"""The address of a sample, ``shard[index]``, from any line that a log shows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mmstream.dataset.keys import KeySource, read_keys
from mmstream.dataset.manifest import ShardInfo
from mmstream.errors import ConfigError, escaped
from mmstream.types import SampleRef

MAX_LINE_CHARACTERS = 20_000
"""Longest line that is searched. Messages are shorter."""

_INDEX = re.compile(r"\[(\d{1,12})\]", re.ASCII)

_STARTS = re.compile(r"^|(?<=[\s/'\"`(=:,])")
"""Where a name may begin: after a space, a slash, a quote, and the like."""

_URL = re.compile(r"\((?:epoch \d+ step \d+ row \d+ )?of (.+?)\)(?:; the next errors|\s*$)")
"""What the line of a bad sample says of its dataset."""


class _Record(msgspec.Struct):
    """The fields of a quarantine record that name its sample."""

    shard: str
    index: int
    stamp: str | None = None


def parse_address(text: str, shards: Mapping[str, int], counts: Sequence[int] | Any) -> SampleRef:
    """Return (shard, index) of the first sample that a text names.

    Args:
        text: ``shard[index]``, or a whole line that holds it: of a log, of `mmstream replay`, or of
            a quarantine file.
        shards: Position of each shard by its name.
        counts: Samples of each shard.

    Raises:
        ConfigError: The text names no sample, or one that is not in the dataset.

    Examples:
        >>> line = "W [rank 0] shard-000000.tar[175] 000000176.jpg: truncated"
        >>> parse_address(line, {"shard-000000.tar": 0}, [480])
        (0, 175)
    """
    named = list(_named(text[:MAX_LINE_CHARACTERS]))
    if not named:
        raise ConfigError(
            f"find: {escaped(text, 80)!r} names no sample; write shard[index], for example "
            f"{escaped(next(iter(shards), 'shard-000000.tar'))}[0]"
        )
    escaped_shards: dict[str, int] | None = None
    for before, index in named:
        for names in (shards, None):
            if names is None:  # messages show names escaped
                escaped_shards = escaped_shards or {escaped(n): i for n, i in shards.items()}
                names = escaped_shards
            starts = (match.start() for match in _STARTS.finditer(before))
            shard = next((names[before[i:]] for i in starts if before[i:] in names), None)
            if shard is None:
                continue
            if not 0 <= index < counts[shard]:
                raise ConfigError(f"find: {before[-200:]}[{index}]: it has {counts[shard]} samples")
            return shard, index
    before, index = named[0]
    name = before.rpartition(" ")[2]
    raise ConfigError(
        f"find: {escaped(name)}[{index}]: no such shard in this dataset; it has {len(shards):,}, "
        f"such as {escaped(next(iter(shards), 'none'))}"
    )


def _named(text: str) -> Iterator[tuple[str, int]]:
    """Yield (the text up to an index, the index) of all that looks like an address."""
    if (record := _record(text)) is not None:
        yield record.shard, record.index
        return
    for match in _INDEX.finditer(text):
        yield text[: match.start()], int(match[1])


def _record(text: str) -> _Record | None:
    """Return the record of a quarantine file that a text is, or None."""
    try:
        return msgspec.json.decode(text, type=_Record) if text.lstrip()[:1] == "{" else None
    except (msgspec.MsgspecError, UnicodeError):
        return None


def require_own(text: str, name: str, ref: SampleRef, url: str, dataset: KeySource) -> None:
    """Raise a ConfigError if a line is of another dataset, as far as it says so.

    A line of a loader names the URL, a record of a quarantine file the stamp of the shard, and most
    lines the key of the sample. The header of the sample is read for it.

    Args:
        text: The line.
        name: Of the shard, as lines show it.
        ref: The sample that it would be.
        url: Of the dataset.
        dataset: Where to look.
    """
    record, line, other = _record(text), _URL.search(text), None
    if line is not None:
        own_folder, folder = Path(escaped(url)).resolve(), Path(line[1]).resolve()
        other = line[1] if own_folder not in (folder, *folder.parents) else None
    if record is not None and record.stamp is not None:
        is_own = stamps_agree(record.stamp, shard_stamp(dataset.manifest.shards[ref[0]]))
        other = None if is_own else "another dataset"
    elif key := re.search(re.escape(f"{escaped(name)}[{ref[1]}] ") + r"(\S+): ", text):
        (own,) = read_keys(dataset, [ref])  # a folder in a key may hold a dot
        if own is not None and not f"{key[1]}.".startswith(f"{escaped(own)}."):
            other = f"another dataset, where {escaped(name)}[{ref[1]}] is {key[1]}"
    if other is not None:
        raise ConfigError(
            f"find: this line is of {other}, and not of {escaped(url)}; open the dataset of the "
            "line; where this is a copy of it, give shard[index] alone"
        )


def shard_stamp(info: ShardInfo) -> str:
    """Return what tells a shard from one of the same name in another dataset."""
    return f"{info.num_samples}-{info.num_bytes}-{(info.sha256 or '')[:16]}"


def stamps_agree(stamp: str, other: str) -> bool:
    """Tell whether two stamps can be of one shard; an unknown checksum agrees with any."""
    (*counts, checksum), (*other_counts, other_checksum) = stamp.split("-"), other.split("-")
    return counts == other_counts and (
        checksum == other_checksum or not (checksum and other_checksum)
    )
