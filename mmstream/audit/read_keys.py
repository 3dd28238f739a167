"""Keys of samples without their payload: one tar header each, read side by side."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from mmstream.dataset.source import ShardRange, ShardSource, read_ranges
from mmstream.errors import ShardError, where
from mmstream.tar.header import BLOCK
from mmstream.tar.samples import iter_members, split_name
from mmstream.types import SampleRef

__all__ = ["read_keys"]

logger = logging.getLogger(__name__)


def read_keys(source: ShardSource, refs: Sequence[SampleRef]) -> list[str | None]:
    """Return the keys of samples, from their first tar headers alone.

    Reads 512 bytes per sample, more where a long name stands in front, and the index of each shard
    once. A key that cannot be read (a missing shard, a damaged header) is None and a warning.

    Raises:
        StorageError: storage failed after retries.
    """
    keys: dict[SampleRef, str | None] = {}
    head_bytes = dict.fromkeys(refs, BLOCK)
    while head_bytes:  # once, and again for those whose name takes more than one header
        longer: dict[SampleRef, int] = {}
        for ref, head in _read_heads(source, head_bytes).items():
            try:
                keys[ref] = _first_key(head, _sample_bytes(source, ref))
            except _TooShort as short:
                longer[ref] = short.num_bytes
            except ShardError as error:
                keys[ref] = None
                logger.warning("%s: no key: %s", where(source.name_of(ref[0]), ref[1]), error)
        head_bytes = longer
    return [keys.get(ref) for ref in refs]


def _read_heads(source: ShardSource, head_bytes: Mapping[SampleRef, int]) -> dict[SampleRef, bytes]:
    """Return the first bytes of samples; those of shards that cannot be read are left out."""
    ranges: dict[SampleRef, ShardRange] = {}
    for ref, num_bytes in head_bytes.items():
        try:
            start, stop = _sample_range(source, ref)
        except ShardError as error:
            logger.warning("no key: %s", error)
        else:
            ranges[ref] = ref[0], start, min(stop, start + num_bytes)
    heads: dict[SampleRef, bytes] = {}
    answers = read_ranges(source, list(ranges.values()))
    for ref, head in zip(ranges, answers, strict=True):
        if not isinstance(head, OSError):
            heads[ref] = head
            continue
        location = source.locate(ref[0])
        cause = location.dataset.explain(head, location.shard, ranges[ref][2])
        if not isinstance(cause, ShardError):
            raise cause
        logger.warning("no key: %s", cause)
    return heads


def _sample_range(source: ShardSource, ref: SampleRef) -> tuple[int, int]:
    location = source.locate(ref[0])
    start, stop = location.dataset.offsets(location.shard)[ref[1] : ref[1] + 2].tolist()
    return start, stop


def _sample_bytes(source: ShardSource, ref: SampleRef) -> int:
    start, stop = _sample_range(source, ref)
    return stop - start


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
        name = split_name(member.name) if member.is_file else None
        if name is not None:
            return name[0]
    raise ShardError("no file of a sample in this range of the tar")
