"""Members of a tar, and samples from members.

Random access needs two things that the standard `tarfile` cannot do. One is to parse a sample from
a range of bytes. The other is to go from header to header without reading payloads.

Members are grouped into samples by the rules of WebDataset. The key is the path up to the first dot
of the file's name, and the field is the rest in lower case: ``train/0001.seg.PNG`` is the field
``seg.png`` of the sample ``train/0001``. Files named like ``__x__`` are left out, and so are those
that a Mac adds: ``._x``, and all of ``__MACOSX/``. Fields named like ``__x__`` are those that
mmstream adds itself, such as ``__key__``; a tar must not have them. The same holds for the fields
beside ``image`` in a batch, such as ``image_row``.

WebDataset leaves out ``._x`` only at the root of a tar. In a folder it stands between the files of
a sample and tears them apart, so it is left out everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from mmstream.errors import (
    ChecksumError,
    DecodeError,
    SampleError,
    ShardError,
    SkipSample,
    escaped,
)
from mmstream.tar.header import BLOCK, Member, padded, plain_file, read_member

__all__ = [
    "REFUSED_FIELD",
    "Member",
    "encode_refusal",
    "is_reserved",
    "iter_members",
    "parse_sample",
    "sample_of",
    "sample_offsets",
    "split_name",
]

IMAGE_COMPANIONS = frozenset({"image_row", "image_size", "image_tiles"})
"""Fields that say in a batch what belongs to which image. Only mmstream makes them."""

REFUSED_FIELD = "__refused__"
"""The one file of a sample that was refused when its dataset was baked: it says why."""

_REFUSALS = {kind.__name__: kind for kind in (ChecksumError, DecodeError, SkipSample)}

MAX_REASON_CHARACTERS = 2000

MAX_SAMPLES = 1 << 24
"""Most samples of a shard. An index of more is an attack, or needs more shards."""

MAX_MEMBERS = 1 << 14
"""Most files of a sample."""

MAX_NAME_CHARACTERS = 4096
"""Longest key with its field: the longest path of a file system."""

_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")
_APPLE = re.compile(r"(^|/)(__MACOSX/|\._[^/]*$)")
"""AppleDouble files: what a Mac knows about a file and a tar cannot hold. They are never data."""


def iter_members(
    read: Callable[[int, int], bytes | memoryview], size: int, start: int = 0
) -> Iterator[Member]:
    """Yield the members of a tar in order. Reads headers only.

    Args:
        read: Returns bytes [start, stop) of the tar.
        size: Of the tar in bytes.
        start: Where to begin: the first header of a member.

    Raises:
        ShardError: Not a tar, a damaged header, or a member that goes past the end.
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
            return  # a block of zeros ends the tar
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
    """Return where the first header of each sample starts, and the end of the last member.

    Folders, and files that are left out, belong to the range of the sample before them, as in the
    indexes of Megatron-Energon.

    Raises:
        ShardError: There are more than `MAX_SAMPLES`. And what `members` raises.
    """
    offsets: list[int] = []
    current_key, end = None, 0
    for member in members:
        end = member.end
        split = split_name(member.name) if member.is_file else None
        if split is not None and split[0] != current_key:
            current_key = split[0]
            offsets.append(member.offset)
            if len(offsets) > MAX_SAMPLES:
                raise ShardError(f"more than {MAX_SAMPLES:,} samples: pack them into more tars")
    return [*offsets, end]


def split_name(name: str) -> tuple[str, str] | None:
    """Return (key, field) of a member's name. None: the member belongs to no sample.

    Source: `base_plus_ext` of WebDataset, and its rules for metadata files.

    Examples:
        >>> split_name("train/0001.seg.PNG")
        ('train/0001', 'seg.png')
        >>> split_name("train/._0001.jpg") is None  # a Mac has added it
        True
    """
    key, dot, field = name.partition(".")
    if dot and key and key[:2] != "__" and "/" not in name:  # most names are KEY.FIELD
        return key, field.lower()
    if _META.match(name) or _APPLE.search(name):
        return None
    match = _NAME.match(name)
    return (match[1], match[2].lower()) if match else None


def is_reserved(field: str) -> bool:
    """Tell whether a field has a name of mmstream's own: ``__key__``, ``__x__``, ``image_row``."""
    return field in IMAGE_COMPANIONS or (field.startswith("__") and field.endswith("__"))


def parse_sample(data: bytes | memoryview, url: str, *, zero_copy: bool = False) -> dict[str, Any]:
    """Return the sample in a range of bytes.

    Args:
        data: The bytes from the first header of the sample to that of the next one.
        url: Of the shard.
        zero_copy: Fields are memoryviews of `data`, not bytes of their own.

    Returns:
        ``__key__``, ``__url__``, then the fields in the order of the tar.

    Raises:
        SampleError: There is no file in the range, a field comes twice or has a reserved name, a
            header is damaged, the range holds two samples (then the index is not this tar's), or
            there are more than `MAX_MEMBERS` files or a name beyond `MAX_NAME_CHARACTERS`. Or the
            sample was refused when its dataset was baked.
    """
    view = memoryview(data)

    def value_of(_field: str, start: int, size: int) -> bytes | memoryview:
        payload = view[start : start + size]
        return payload if zero_copy else bytes(payload)

    return sample_of(_files(view), url, value_of)


def sample_of(
    files: Iterable[tuple[str, int, int]], url: str, value_of: Callable[[str, int, int], Any]
) -> dict[str, Any]:
    """Return the sample that some files of a tar make, in their order.

    Args:
        files: (name, offset of the payload, size) of each file.
        url: Of the shard.
        value_of: Returns the value of a field, by its name, offset and size.

    Raises:
        SampleError: As `parse_sample` does.
    """
    sample: dict[str, Any] = {"__key__": "", "__url__": url}
    sample_key = ""
    try:
        for name, start, size in files:
            split = split_name(name)
            if split is None:
                continue
            key, field = split
            if not sample_key:
                sample_key = sample["__key__"] = key
            elif key != sample_key:
                raise SampleError(
                    f"{escaped(sample_key)}: {key!r} lies in the same range: the index is not this "
                    "tar's; run `mmstream index --overwrite`"
                )
            if len(name) > MAX_NAME_CHARACTERS or len(sample) - 2 >= MAX_MEMBERS:
                raise SampleError(
                    f"{escaped(key)}: a name of {len(name):,} characters, or more than "
                    f"{MAX_MEMBERS:,} files: no sample is like that"
                )
            if is_reserved(field):
                raise _error_of_reserved(key, field, value_of(field, start, size))
            if field in sample:
                raise SampleError(
                    f"{escaped(key)}.{escaped(field)}: this field comes twice in the sample"
                )
            sample[field] = value_of(field, start, size)
    except ShardError as error:
        raise SampleError(f"{escaped(sample_key)}: damaged tar header: {error}") from error
    if not sample_key:
        raise SampleError(
            "no file of a sample in this range of the tar; if a Mac made it, with files named "
            "._x, run `mmstream index --overwrite`"
        )
    return sample


def encode_refusal(kind: str, reason: str) -> bytes:
    """Return the content of `REFUSED_FIELD`.

    Args:
        kind: Name of the class of the error.
        reason: The error, with the address of the sample.
    """
    return msgspec.json.encode({"kind": kind, "reason": reason})


def _error_of_reserved(key: str, field: str, data: Any) -> SampleError:
    """Return the error of a sample with a field of mmstream's own."""
    if field == REFUSED_FIELD:
        return _refusal(bytes(data))
    return SampleError(
        f"{escaped(key)}.{escaped(field)}: fields named like __x__ are mmstream's own, "
        f"and so are {', '.join(sorted(IMAGE_COMPANIONS))}; rename this file in the tar"
    )


def _refusal(data: bytes) -> SampleError:
    """Return the error of a sample that was refused when its dataset was baked."""
    try:
        record = msgspec.json.decode(data, type=dict[str, str])
        kind, reason = record["kind"], record["reason"]
    except (ValueError, KeyError):
        return SampleError(f"{REFUSED_FIELD}: damaged")
    error = _REFUSALS.get(kind, SampleError)(escaped(reason, MAX_REASON_CHARACTERS))
    error.is_refused = True
    return error


def _files(view: memoryview) -> Iterator[tuple[str, int, int]]:
    """Yield (name, data_offset, size) of the files in a range; errors as `iter_members`."""
    offset, end = 0, len(view)
    while offset < end or not end:  # an empty range is an error of `iter_members`
        plain = plain_file(view, offset)
        if plain is not None:
            name, size = plain
            next_offset = offset + BLOCK + padded(size)
            if next_offset <= end:
                yield name, offset + BLOCK, size
                offset = next_offset
                continue
        member = next(iter_members(lambda start, stop: view[start:stop], end, offset), None)
        if member is None:
            return
        if member.is_file:
            yield member.name, member.data_offset, member.size
        offset = member.end
