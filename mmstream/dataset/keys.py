"""Samples by their key. Keys stand in the sidecars, and in the headers of the tars.

    Dataset[key] -> find_key -> keys_of_shard -> a column of a sidecar, or a tar header per sample

The first search reads the keys of all samples, and remembers 8 bytes of each.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mmstream.dataset.manifest import ShardInfo
from mmstream.dataset.shards import ShardReader
from mmstream.errors import ConfigError, ShardError, escaped, where
from mmstream.tar.header import BLOCK
from mmstream.tar.samples import iter_members, split_member
from mmstream.types import IntArray, SampleRef

logger = logging.getLogger(__name__)

NUM_THREADS = 16
"""Shards whose keys or columns are read side by side."""

MANY_SAMPLES = 1_000_000
"""From this number of samples on, a line of the log says that reading their keys takes long."""

MAX_NAMED = 3
"""Samples of the same key, or unknown keys, that a message names."""


def key_hashes(dataset: Any) -> IntArray:
    """Return the hash of every key of a dataset, in the order of its samples: 8 bytes a sample."""
    num_samples = int(dataset.counts.sum())
    if num_samples >= MANY_SAMPLES:
        logger.info("%s: reading the keys of all samples", escaped(dataset.store.url))
    hashes = np.zeros(num_samples, dtype=np.int64)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        of_shards = pool.map(partial(_hashes, dataset), range(dataset.num_shards))
        for stop, of_shard in zip(np.cumsum(dataset.counts), of_shards, strict=True):
            hashes[stop - of_shard.size : stop] = of_shard
    return hashes


def _hashes(dataset: Any, shard: int) -> IntArray:
    return np.array([hash(key) for key in keys_of_shard(dataset, shard)], dtype=np.int64)


def keys_of_shard(dataset: Any, shard: int) -> list[Any]:
    """Return the keys of the stored samples of a shard. None: it cannot be read; a warning says so.

    Raises:
        StorageError: The storage failed after retries.
    """
    from mmstream.dataset.columns import read_columns

    try:
        keys: list[Any] = read_columns(dataset, shard, ["key"])["key"].to_pylist()
    except (ConfigError, ShardError):  # no sidecar that can be used
        keys = [None]
    if all(keys):  # a damaged sample has none in the sidecar
        return keys
    return read_keys(dataset.shards, [(shard, index) for index in range(dataset.counts[shard])])


def find_key(shards: ShardReader, key: str, hashes: IntArray) -> SampleRef:
    """Return the sample with a key.

    Args:
        shards: Where to look.
        key: The whole key, as ``sample["__key__"]`` is.
        hashes: What `key_hashes` returned. Samples with other keys may have the same one.

    Raises:
        KeyError: No sample has the key, or several have it. Or a header could not be read that may
            hold it, which the log names.
        StorageError: The storage failed after retries.
    """
    candidates = refs_at(np.cumsum(shards.counts), np.flatnonzero(hashes == hash(key)))
    keys = read_keys(shards, candidates)
    refs = [ref for ref, name in zip(candidates, keys, strict=True) if name == key]
    if not refs:
        hint = "; dataset.find takes shard[index]" if re.search(r"\[\d+\]", key) else ""
        url = escaped(shards.store.url)
        raise KeyError(f"no sample of {url} has the key {escaped(key)!r}{hint}")
    if len(refs) > 1:
        names = [where(shards.name_of(shard), index) for shard, index in refs[:MAX_NAMED]]
        raise KeyError(
            f"{len(refs):,} samples have the key {escaped(key)!r}: {', '.join(names)}"
            f"{', ...' * (len(refs) > MAX_NAMED)}; take one with dataset.find({names[0]!r})"
        )
    return refs[0]


def read_keys(
    shards: ShardReader, refs: Sequence[SampleRef], *, prefix: str = ""
) -> list[str | None]:
    """Return the keys of samples, from their first tar headers alone.

    Reads 512 bytes per sample, more where a long name stands in front, and the index of each shard
    once. Remote headers are read side by side. A key that cannot be read (a missing shard, a
    damaged header) is None and a warning.

    Args:
        shards: Hold the samples.
        refs: (shard, index) of each sample.
        prefix: What stands in front of a shard's name in warnings.

    Raises:
        StorageError: The storage failed after retries.
    """
    spans = _spans(shards, refs, prefix)
    keys: dict[SampleRef, str | None] = {}
    head_bytes = dict.fromkeys(spans, BLOCK)
    faults: dict[int, str] = {}
    while head_bytes:  # once, and again for those whose name takes more than one header
        ranges = [
            (ref[0], spans[ref][0], min(spans[ref][1], spans[ref][0] + num_bytes))
            for ref, num_bytes in head_bytes.items()
        ]
        responses = zip(head_bytes, shards.read_ranges(ranges), ranges, strict=True)
        head_bytes = {}
        for ref, head, (shard, _, stop) in responses:
            if isinstance(head, OSError):
                if shard not in faults:
                    cause = shards.explain(head, shard, stop)
                    if not isinstance(cause, ShardError):
                        raise cause
                    faults[shard] = str(cause)
                    logger.warning("no key: %s", cause)
                continue
            try:
                keys[ref] = _first_key(head, spans[ref][1] - spans[ref][0])
            except _TooShort as short:
                head_bytes[ref] = short.num_bytes
            except ShardError as error:
                name = where(prefix + shards.name_of(shard), ref[1])
                logger.warning("%s: no key: %s", name, error)
    return [keys.get(ref) for ref in refs]


def _spans(
    shards: ShardReader, refs: Sequence[SampleRef], prefix: str
) -> dict[SampleRef, tuple[int, int]]:
    """Return [start, stop) of each sample; those of shards without an index are left out."""
    by_shard: dict[int, list[int]] = {}
    for shard, index in dict.fromkeys(refs):
        by_shard.setdefault(shard, []).append(index)
    spans: dict[SampleRef, tuple[int, int]] = {}
    for shard, indexes in by_shard.items():
        try:
            bounds = shards.bounds(shard, np.array(indexes, dtype=np.int64))
        except ShardError as error:
            logger.warning("no key: %s%s", prefix, error)
            continue
        starts, stops = bounds.start.tolist(), bounds.stop.tolist()
        for index, start, stop in zip(indexes, starts, stops, strict=True):
            spans[shard, index] = start, stop
    return spans


class _TooShort(Exception):  # noqa: N818 - a request for more, not a failure
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def _first_key(head: bytes, size: int) -> str:
    """Return the key of the sample that begins with `head` and has `size` bytes in all."""

    def read(start: int, stop: int) -> bytes:
        if stop > len(head):
            raise _TooShort(stop)
        return head[start:stop]

    for member in iter_members(read, size):
        if (name := split_member(member)) is not None:
            return name[0]
    raise ShardError("no file of a sample in this range of the tar")


def refs_at(ends: IntArray, positions: IntArray) -> list[SampleRef]:
    """Return (shard, index) of the samples at these positions.

    Args:
        ends: int64 [num_shards], cumulative sums of the samples of each shard.
        positions: int64 [n], each at least 0 and below ``ends[-1]``.

    Examples:
        Shards with 2, 0 and 3 samples hold the positions 0-1, none and 2-4.

        >>> import numpy as np
        >>> refs_at(np.cumsum([2, 0, 3]), np.array([1, 2, 4]))
        [(0, 1), (2, 0), (2, 2)]
    """
    shards = np.searchsorted(ends, positions, side="right")
    starts = np.where(shards > 0, ends[shards - 1], 0)
    return list(zip(shards.tolist(), (positions - starts).tolist(), strict=True))


# -- samples by shard[index], as logs name them ----------------------------------------------------

MAX_LINE_CHARACTERS = 20_000
"""Longest line that is searched. Messages are shorter."""

_INDEX = re.compile(r"\[(\d{1,12})\]", re.ASCII)

_STARTS = re.compile(r"^|(?<=[\s/'\"`(=:,])")
"""Where a name may begin: after a space, a slash, a quote, and the like."""

_URL = re.compile(r"\((?:epoch \d+ step \d+ row \d+ )?of (.+?)\)(?:; the next errors|\s*$)")
"""The dataset, as the line of a bad sample names it."""


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
    escaped_names: dict[str, int] = {}
    for before, index in named:
        names = [before[match.start() :] for match in _STARTS.finditer(before)]
        shard = next((shards[name] for name in names if name in shards), None)
        if shard is None:  # messages show names escaped
            escaped_names = escaped_names or {escaped(name): i for name, i in shards.items()}
            shard = next((escaped_names[name] for name in names if name in escaped_names), None)
        if shard is not None:
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


def require_own(text: str, name: str, ref: SampleRef, shards: ShardReader) -> None:
    """Raise a ConfigError if a line is of another dataset, as far as it says so.

    A line of a loader names the URL, a record of a quarantine file the stamp of the shard, and most
    lines the key of the sample. The header of the sample is read for it.

    Args:
        text: The line.
        name: Of the shard, as lines show it.
        ref: The sample that it would be.
        shards: Where to look.
    """
    record, line, other = _record(text), _URL.search(text), None
    url = shards.store.url
    if line is not None:
        own_folder, folder = Path(escaped(url)).resolve(), Path(line[1]).resolve()
        other = line[1] if own_folder not in (folder, *folder.parents) else None
    if record is not None and record.stamp is not None:
        is_own = stamps_agree(record.stamp, shard_stamp(shards.manifest.shards[ref[0]]))
        other = None if is_own else "another dataset"
    elif key := re.search(re.escape(f"{escaped(name)}[{ref[1]}] ") + r"(\S+): ", text):
        (own,) = read_keys(shards, [ref])  # a folder in a key may hold a dot
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
