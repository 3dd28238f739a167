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

import posixpath
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

IMAGE_COMPANIONS = frozenset({"image_row", "image_size", "image_tiles"})
"""Fields that say in a batch what belongs to which image. Only mmstream makes them."""

REFUSED_FIELD = "__refused__"
"""The one file of a sample that was refused when its dataset was baked: it says why."""

_REFUSALS = {kind.__name__: kind for kind in (ChecksumError, DecodeError, SkipSample)}

MAX_REASON_CHARACTERS = 2000

LINK = -1
"""Stands for the size of a link, whose bytes lie elsewhere in the tar."""

MAX_ZEROS = 64 << 20
"""Most zeros that are read after the end of a tar, where another one may follow."""

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
    read: Callable[[int, int], bytes | memoryview],
    size: int,
    start: int = 0,
    on_junk: Callable[[int], object] = lambda _: None,
) -> Iterator[Member]:
    """Yield the members of a tar in order. Reads headers only.

    Zeros end a tar, and another may follow: ``cat a.tar b.tar``. So zeros are passed over, as GNU
    tar does with ``--ignore-zeros``. What follows them and is not a member ends the tar, because
    POSIX lets anything stand there.

    Args:
        read: Returns bytes [start, stop) of the tar.
        size: Of the tar in bytes.
        start: Where to begin: the first header of a member.
        on_junk: Called with where such bytes begin.

    Raises:
        ShardError: Not a tar, a damaged header, or a member that goes past the end.
    """
    offset, is_behind_zeros = start, False
    while offset + BLOCK <= size:
        header = read(offset, offset + BLOCK)
        plain = plain_file(header, 0)
        if plain is not None:
            member: Member | None = Member(plain[0], offset, offset + BLOCK, plain[1], True)
        else:
            member = _odd_member(read, bytes(header), offset, size, is_behind_zeros)
        if member is None:
            if is_behind_zeros:
                break
            offset, is_behind_zeros = _pass_zeros(read, offset + BLOCK, size), True
            continue
        end = member.end
        if end > size:
            raise ShardError(
                f"truncated: {member.name!r} at byte {offset} goes {end - size} bytes past the "
                "end; fetch or convert this tar again"
            )
        yield member
        offset, is_behind_zeros = end, False
    if start == 0 and offset == 0:
        raise ShardError(f"not a tar: only {size} bytes")
    if offset < size and not is_behind_zeros:
        raise ShardError(f"truncated: ends within the header at byte {offset}")
    if offset < size:
        on_junk(offset)


def _odd_member(
    read: Callable[[int, int], bytes | memoryview],
    header: bytes,
    offset: int,
    size: int,
    is_behind_zeros: bool,
) -> Member | None:
    """Return a member as `read_member` does; None, too, for what is none after zeros."""
    try:
        return read_member(read, header, offset, size)
    except ShardError:
        if not is_behind_zeros:
            raise
        return None


def _pass_zeros(read: Callable[[int, int], bytes | memoryview], offset: int, size: int) -> int:
    """Return the first block from `offset` on that is not of zeros, or the end of what is read."""
    stop, length = min(size, offset + MAX_ZEROS), BLOCK
    while offset < stop:
        data = bytes(read(offset, min(stop, offset + length)))
        num_zeros = len(data) - len(data.lstrip(b"\0"))
        if num_zeros < len(data):
            return offset + num_zeros // BLOCK * BLOCK
        offset, length = offset + len(data), min(2 * length, 1 << 20)
    return stop


def links_of(members: Iterable[Member]) -> dict[int, tuple[int, int]]:
    """Return {where a link starts: (start, stop) of the bytes that it stands for}.

    If several files have one name, the last one before the link counts, as in `tarfile`. A symbolic
    link may stand before its file. Links to what is not in the tar are missing.
    """
    spans: dict[str, tuple[int, int]] = {}
    links: dict[int, tuple[int, int]] = {}
    later = []
    for member in members:
        name = posixpath.normpath(member.name)
        if member.link is None and member.is_file:
            spans[name] = (member.data_offset, member.data_offset + member.size)
        elif member.link is not None:
            if (span := spans.get(posixpath.normpath(member.link))) is None:
                later.append(member)
            else:
                spans[name] = links[member.offset] = span
    for member in later:
        if (span := spans.get(posixpath.normpath(member.link or ""))) is not None:
            links[member.offset] = span
    return links


class InPiecesError(ShardError):
    """The files of a sample do not stand together."""


def sample_offsets(members: Iterable[Member]) -> list[int]:
    """Return where the first header of each sample starts, and the end of the last member.

    Folders, and files that are left out, belong to the range of the sample before them, as in the
    indexes of Megatron-Energon.

    Raises:
        InPiecesError: The files of a sample do not stand together.
        ShardError: There are more than `MAX_SAMPLES`. And what `members` raises.
    """
    offsets: list[int] = []
    current_key, end = "", 0
    fields: list[str] = []
    pieces: dict[str, tuple[str, ...]] = {}
    shapes: dict[tuple[str, ...], tuple[str, ...]] = {}

    def close() -> None:
        """Compare the sample that ends with an earlier one of its key."""
        shape = shapes.setdefault(shape := tuple(fields), shape)  # one object for many samples
        earlier = pieces.setdefault(current_key, shape)
        if earlier is not shape and not set(earlier) & set(shape):
            raise InPiecesError(
                f"{escaped(current_key)}.{escaped(shape[0])} does not stand beside "
                f"{escaped(current_key)}.{escaped(earlier[0])}, so a sample is in pieces; unpack "
                "this tar, and pack it with `tar --sort=name`"
            )

    for member in members:
        split = split_member(member)
        if split is not None:
            # Behind zeros another tar begins, whose samples are its own.
            if split[0] != current_key or member.offset != end:
                if offsets:
                    close()
                current_key, fields = split[0], []
                offsets.append(member.offset)
                if len(offsets) > MAX_SAMPLES:
                    raise ShardError(f"more than {MAX_SAMPLES:,} samples: pack them into more tars")
            fields.append(split[1])
        end = member.end
    if offsets:
        close()
    return [*offsets, end]


def split_member(member: Member) -> tuple[str, str] | None:
    """Return (key, field) of a file or link, as `split_name`. None: it belongs to no sample."""
    return split_name(member.name) if member.is_file or member.link is not None else None


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


class LinkError(SampleError):
    """The bytes that a link stands for are not known. The message begins with its field."""


def _no_links(field: str, _offset: int) -> bytes:
    raise LinkError(f"{escaped(field)}: is a link, whose bytes lie elsewhere in the tar")


def parse_sample(
    data: bytes | memoryview,
    url: str,
    *,
    is_viewed: Callable[[str], bool] | None = None,
    linked: Callable[[str, int], bytes] = _no_links,
    is_baked: bool = False,
) -> dict[str, Any]:
    """Return the sample in a range of bytes.

    Args:
        data: The bytes from the first header of the sample to that of the next one.
        url: Of the shard.
        is_viewed: Tells which fields are memoryviews of `data`, not copies. None: none.
        is_baked: ``mmstream bake`` wrote the dataset, so its samples may say why it refused them.
        linked: Returns the bytes that a link stands for, by its field and where it starts in
            `data`.

    Returns:
        ``__key__``, ``__url__``, then the fields in the order of the tar.

    Raises:
        SampleError: There is no file in the range, a field comes twice or has a reserved name, a
            header is damaged, the range holds two samples (then the index is not this tar's), or
            there are more than `MAX_MEMBERS` files or a name beyond `MAX_NAME_CHARACTERS`. Or the
            sample was refused when its dataset was baked.
    """
    view = memoryview(data)

    def value_of(field: str, start: int, size: int) -> bytes | memoryview:
        if size == LINK:
            return linked(field, start)
        payload = view[start : start + size]
        return payload if is_viewed is not None and is_viewed(field) else bytes(payload)

    return sample_of(_files(view), url, value_of, is_baked=is_baked)


def sample_of(
    files: Iterable[tuple[str, int, int]],
    url: str,
    value_of: Callable[[str, int, int], Any],
    *,
    is_baked: bool = False,
) -> dict[str, Any]:
    """Return the sample that some files of a tar make, in their order.

    Args:
        files: (name, offset of the payload, size) of each file. Of a link: (name, offset of its
            header, `LINK`).
        url: Of the shard.
        value_of: Returns the value of a field, by its name, offset and size.
        is_baked: As for `parse_sample`.

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
            _require_usual(key, name, len(sample) - 2)
            if is_reserved(field):
                data = value_of(field, start, size) if is_baked else None
                raise _error_of_reserved(key, field, data)
            if field in sample:
                raise SampleError(
                    f"{escaped(key)}.{escaped(field)}: this field comes twice in the sample"
                )
            sample[field] = value_of(field, start, size)
    except LinkError as error:
        raise SampleError(f"{escaped(sample_key)}.{error}") from error
    except ShardError as error:
        raise SampleError(f"{escaped(sample_key)}: damaged tar header: {error}") from error
    if not sample_key:
        raise SampleError(
            "no file of a sample in this range of the tar; if a Mac made it, with files named "
            "._x, run `mmstream index --overwrite`"
        )
    return sample


def _require_usual(key: str, name: str, num_fields: int) -> None:
    if len(name) > MAX_NAME_CHARACTERS or num_fields >= MAX_MEMBERS:
        raise SampleError(
            f"{escaped(key)}: a name of {len(name):,} characters, or more than "
            f"{MAX_MEMBERS:,} files: no sample is like that"
        )
    if "\0" in name:  # a pax header may say so, but no other header can
        raise SampleError(f"{escaped(key)}: a zero byte in the name {escaped(name)}; rename it")


def encode_refusal(kind: str, reason: str) -> bytes:
    """Return the content of `REFUSED_FIELD`.

    Args:
        kind: Name of the class of the error.
        reason: The error, with the address of the sample.
    """
    return msgspec.json.encode({"kind": kind, "reason": reason})


def _error_of_reserved(key: str, field: str, data: Any) -> SampleError:
    """Return the error of a sample with a field of mmstream's own; `data` in a baked dataset."""
    if field == REFUSED_FIELD and data is not None:
        return _refusal(key, bytes(data))
    return SampleError(
        f"{escaped(key)}.{escaped(field)}: fields named like __x__ are mmstream's own, "
        f"and so are {', '.join(sorted(IMAGE_COMPANIONS))}; rename this file in the tar"
    )


def _refusal(key: str, data: bytes) -> SampleError:
    """Return the error of a sample that was refused when its dataset was baked."""
    try:
        record = msgspec.json.decode(data, type=dict[str, str])
        kind, reason = record["kind"], record["reason"]
    except (ValueError, KeyError):
        return SampleError(f"{escaped(key)}.{REFUSED_FIELD}: damaged")
    error = _REFUSALS.get(kind, SampleError)(escaped(reason, MAX_REASON_CHARACTERS))
    error.is_refused = True
    return error


def file_of(member: Member) -> tuple[str, int, int] | None:
    """Return a member as `sample_of` takes it; None where it has no bytes, such as a folder."""
    if member.link is not None:
        return member.name, member.offset, LINK
    return (member.name, member.data_offset, member.size) if member.is_file else None


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
        if (file := file_of(member)) is not None:
            yield file
        offset = member.end
