"""Keys of samples without their payload: one tar header each, read side by side."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.mixture import Mixture
from mmstream.errors import ShardError, where
from mmstream.tar.header import BLOCK
from mmstream.tar.samples import iter_members, split_name
from mmstream.types import SampleRef

__all__ = ["read_keys"]

logger = logging.getLogger(__name__)


def read_keys(dataset: Dataset | Mixture, refs: Sequence[SampleRef]) -> list[str | None]:
    """Return the keys of samples, from their first headers alone.

    512 bytes a sample, and more only where a long name stands in front; besides them the index of
    each shard, once. A key that cannot be read (a missing shard, a damaged header) is None and a
    warning.

    Raises:
        StorageError: storage failed after retries.
    """
    found: dict[SampleRef, str | None] = {}
    wanted = dict.fromkeys(refs, BLOCK)
    while wanted:  # once; again for those whose name takes more than one header
        longer: dict[SampleRef, int] = {}
        for ref, head in _read_heads(dataset, wanted).items():
            try:
                found[ref] = _first_key(head, _size(dataset, ref))
            except _TooShort as short:
                longer[ref] = short.num_bytes
            except ShardError as error:
                found[ref] = None
                logger.warning("%s: no key: %s", where(dataset.name_of(ref[0]), ref[1]), error)
        wanted = longer
    return [found.get(ref) for ref in refs]


def _read_heads(
    dataset: Dataset | Mixture, wanted: Mapping[SampleRef, int]
) -> dict[SampleRef, bytes]:
    """Return the first bytes of samples; those of shards that cannot be read are left out."""
    ranges: dict[SampleRef, tuple[int, int, int]] = {}
    for (shard, index), num_bytes in wanted.items():
        try:
            start, stop = dataset.offsets(shard)[index : index + 2].tolist()
        except ShardError as error:
            logger.warning("no key: %s", error)
        else:
            ranges[shard, index] = shard, start, min(stop, start + num_bytes)
    heads: dict[SampleRef, bytes] = {}
    for ref, head in zip(ranges, dataset.read_ranges(list(ranges.values())), strict=True):
        if not isinstance(head, OSError):
            heads[ref] = head
            continue
        cause = dataset.explain(head, ref[0], ranges[ref][2])
        if not isinstance(cause, ShardError):
            raise cause
        logger.warning("no key: %s", cause)
    return heads


def _size(dataset: Dataset | Mixture, ref: SampleRef) -> int:
    start, stop = dataset.offsets(ref[0])[ref[1] : ref[1] + 2].tolist()
    return int(stop - start)


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
