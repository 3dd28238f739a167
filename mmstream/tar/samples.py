"""Ground floor: the tar format. Members of a tar, samples from members, and a writer of shards.

The stdlib's `tarfile` can do neither of the two things that random access needs: parse one sample
out of a range of bytes, and hop over headers without touching payloads. So headers are parsed here
(`tarheader`). Grouping into samples is WebDataset's: the key is the path up to the first dot of the
file's name, the field is the rest in lower case, files named ``__x__`` are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mmstream.errors import SampleError, ShardError
from mmstream.tar.header import BLOCK, Member, padded, plain_file, read_member

__all__ = ["Member", "iter_members", "parse_sample", "sample_offsets", "split_name"]

_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")


def iter_members(
    read: Callable[[int, int], bytes | memoryview], size: int, start: int = 0
) -> Iterator[Member]:
    """Yield the members of a tar in order, touching headers only.

    Args:
        read: returns bytes [start, stop) of the tar.
        size: of the tar in bytes.
        start: where to begin; the start of some member.

    Raises:
        ShardError: not a tar, a damaged header, or a member that goes past the end.
    """
    offset = start
    while offset + BLOCK <= size:
        header = read(offset, offset + BLOCK)
        plain = plain_file(header, 0)
        if plain is not None:
            member: Member | None = Member(plain[0], offset, offset + BLOCK, plain[1], True)
        else:
            member = read_member(read, bytes(header), offset, size)
        if member is None:
            return  # a zero block ends the archive
        if member.end > size:
            raise ShardError(
                f"truncated: {member.name!r} at byte {offset} goes {member.end - size} bytes "
                "past the end; fetch or convert this tar again"
            )
        yield member
        offset = member.end
    if start == 0 and offset == 0:
        raise ShardError(f"not a tar: only {size} bytes")
    if offset < size:
        raise ShardError(f"truncated: ends within the header at byte {offset}")


def sample_offsets(members: Iterable[Member]) -> list[int]:
    """Return where each sample's first header starts, and the end of the last member.

    Folders and skipped files behind a sample lie in its range, as in Energon's indexes.
    """
    offsets: list[int] = []
    known, end = None, 0
    for member in members:
        end = member.end
        split = split_name(member.name) if member.is_file else None
        if split is not None and split[0] != known:
            known = split[0]
            offsets.append(member.offset)
    return [*offsets, end]


def split_name(name: str) -> tuple[str, str] | None:
    """Return (key, field) of a member's name, or None for a name that belongs to no sample.

    Source: WebDataset's `base_plus_ext` and its rules for metadata files.
    """
    key, dot, field = name.partition(".")
    if dot and key and key[:2] != "__" and "/" not in name:  # most are KEY.FIELD
        return key, field.lower()
    if _META.match(name):
        return None
    match = _NAME.match(name)
    return (match[1], match[2].lower()) if match else None


def parse_sample(data: bytes | memoryview, url: str, *, zero_copy: bool = False) -> dict[str, Any]:
    """Return the sample in a byte range: ``__key__``, ``__url__``, then its fields.

    Args:
        data: the bytes from the sample's first header to the next sample's.
        url: of the shard.
        zero_copy: fields are memoryviews of `data` instead of bytes.

    Raises:
        SampleError: no file in the range, two samples in it (the index is not this tar's), a field
            twice, or a damaged header.
    """
    view = memoryview(data)
    sample: dict[str, Any] = {"__key__": "", "__url__": url}
    found = ""
    try:
        for name, start, size in _files(view):
            split = split_name(name)
            if split is None:
                continue
            key, field = split
            if not found:
                found = sample["__key__"] = key
            elif key != found:
                raise SampleError(
                    f"{found}: {key!r} lies in the same range: the index is not this "
                    "tar's; run `mmstream index --overwrite`"
                )
            if field in sample:
                raise SampleError(f"{key}.{field}: this field comes twice in the sample")
            part = view[start : start + size]
            sample[field] = part if zero_copy else bytes(part)
    except ShardError as error:
        raise SampleError(f"{found}: damaged tar header: {error}") from error
    if not found:
        raise SampleError("no file of a sample in this range of the tar")
    return sample


def _files(view: memoryview) -> Iterator[tuple[str, int, int]]:
    """Yield (name, data_offset, size) of the files in a range; errors as `iter_members`."""
    offset, end = 0, len(view)
    while offset < end or not end:
        plain = plain_file(view, offset)
        if plain is not None and offset + BLOCK + padded(plain[1]) <= end:
            yield plain[0], offset + BLOCK, plain[1]
            offset += BLOCK + padded(plain[1])
            continue
        member = next(iter_members(lambda start, stop: view[start:stop], end, offset), None)
        if member is None:
            return
        if member.is_file:
            yield member.name, member.data_offset, member.size
        offset = member.end
