"""The address of a sample, ``shard[index]``, from any line that a log shows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from mmstream.errors import ConfigError, escaped
from mmstream.types import SampleRef

__all__ = ["parse_address"]

MAX_LINE_CHARACTERS = 20_000
"""Longest line that is searched. Messages are shorter."""

_INDEX = re.compile(r"\[(\d{1,12})\]", re.ASCII)

_STARTS = re.compile(r"^|(?<=[\s/'\"`(=:,])")
"""Where a name may begin: after a space, a slash, a quote, and the like."""


class _Record(msgspec.Struct):
    """The fields of a quarantine record that name its sample."""

    shard: str
    index: int


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
    if text.lstrip().startswith("{"):
        try:
            record = msgspec.json.decode(text, type=_Record)
        except (msgspec.MsgspecError, UnicodeError):
            pass
        else:
            yield record.shard, record.index
            return
    for match in _INDEX.finditer(text):
        yield text[: match.start()], int(match[1])
