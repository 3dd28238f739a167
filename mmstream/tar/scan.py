"""Ground floor: the headers of many samples at once, as arrays.

Of nearly every sample all members are plain files with short names. Those are found here: the first
header of all samples together, then the second of those that have one, and so on, a few array
operations for hundreds of headers. Whatever is not plain is left to `tar.parse_sample`, which knows
the rest of the format and says what is wrong. What is found here is what it would find.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.tar.header import BLOCK
from mmstream.tar.samples import split_name
from mmstream.types import IntArray

__all__ = ["Members", "Scan", "blocks_of", "scan_samples"]

Blocks = npt.NDArray[np.uint8]
Objects = npt.NDArray[np.object_]

MIN_HEADERS = 16
"""Fewer headers than this are read sooner one by one."""

MAX_MEMBERS = 64
"""Samples of more members are read alone: for the few that have them, columns would be long."""

_SIZE_DIGITS, _SUM_DIGITS = 11, 6
_RESERVED = ("__key__", "__url__")
_NAME, _SIZE, _SUM, _KIND, _PREFIX = 0, 124, 148, 156, 345  # where fields of a header start


class Members(NamedTuple):
    """The k-th members of samples; all columns have one entry a sample."""

    field: Objects
    """None: the sample has no such member."""
    start: IntArray
    """Where its payload starts in the range."""
    stop: IntArray


class Scan(NamedTuple):
    """What was found in some samples."""

    keys: Objects
    members: list[Members]
    """First members, second members, and so on."""
    odd: npt.NDArray[np.bool_]
    """Which samples are not plain: what the others say of them means nothing."""


def blocks_of(data: Any) -> Blocks:
    """Return bytes, or a view or map of them, as an array of whole blocks."""
    return np.frombuffer(data, np.uint8, len(data) // BLOCK * BLOCK).reshape(-1, BLOCK)


def scan_samples(blocks: Sequence[Blocks], of: IntArray, starts: IntArray, stops: IntArray) -> Scan:
    """Find the members of samples; fastest for a few hundred, whose headers fit in a cache.

    Args:
        blocks: of some ranges of tars.
        of: which range each sample lies in; rising.
        starts: where in the range the sample's first header starts.
        stops: where in the range the sample ends.
    """
    keys = np.full(starts.size, None, dtype=np.object_)
    members: list[Members] = []
    odd = (starts % BLOCK != 0) | (stops % BLOCK != 0) | (starts >= stops)
    here = np.flatnonzero(~odd)
    offset = starts[here]
    while here.size >= MIN_HEADERS and len(members) < MAX_MEMBERS:
        headers = _blocks(blocks, of[here], offset // BLOCK)
        plain, sizes = _plain_files(headers)
        begin = offset + BLOCK
        end = begin + (sizes + BLOCK - 1) // BLOCK * BLOCK
        found, fields = _names(headers)
        if not members:
            keys[here] = found
        plain &= (end <= stops[here]) & (found != None) & (found == keys[here])  # noqa: E711
        for before in members:  # no field may come twice
            plain &= before.field[here] != fields
        column = Members(np.full_like(keys, None), np.zeros_like(starts), np.zeros_like(stops))
        column.field[here], column.start[here], column.stop[here] = fields, begin, begin + sizes
        members.append(column)
        odd[here[~plain]] = True
        more = plain & (end < stops[here])
        here, offset = here[more], end[more]
    odd[here] = True  # where it was not worth going on
    return Scan(keys, members, odd)


def _blocks(blocks: Sequence[Blocks], of: IntArray, numbers: IntArray) -> Blocks:
    """Return blocks by their numbers in the range that each is of."""
    bounds = np.searchsorted(of, np.arange(len(blocks) + 1)).tolist()
    return np.concatenate(
        [
            one.take(numbers[first:end], axis=0)
            for one, (first, end) in zip(blocks, pairwise(bounds), strict=True)
            if first < end
        ]
    )


def _plain_files(headers: Blocks) -> tuple[npt.NDArray[np.bool_], IntArray]:
    """Return which headers are good ones of plain files, and the sizes of these files.

    Numbers must be written as nearly all programs do it, the names are not looked at.
    """
    size, good = _octal(headers[:, _SIZE : _SIZE + 12], _SIZE_DIGITS)
    stated, sum_good = _octal(headers[:, _SUM : _SUM + 8], _SUM_DIGITS)
    own = headers[:, _SUM : _SUM + 8].sum(axis=1, dtype=np.uint32)
    total = headers.sum(axis=1, dtype=np.uint32) - own + 8 * ord(" ")
    good &= sum_good & (stated == total)
    good &= (headers[:, _KIND] == ord("0")) & (headers[:, _PREFIX] == 0)
    return good, size


def _octal(text: Blocks, num_digits: int) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return numbers of so many octal digits, and which are such, with only NUL or space behind."""
    digits, rest = text[:, :num_digits] - ord("0"), text[:, num_digits:]
    good = (digits < 8).all(axis=1) & ((rest == 0) | (rest == ord(" "))).all(axis=1)
    return digits @ 8 ** np.arange(num_digits - 1, -1, -1), good


def _names(headers: Blocks) -> tuple[Objects, Objects]:
    """Return the key and the field of each member; None where that is not the whole truth."""
    found = np.ascontiguousarray(headers[:, _NAME : _NAME + 100]).view("S100")[:, 0].tolist()
    if b"\0" in b"".join(found):
        found = [name.partition(b"\0")[0] for name in found]
    names = [name.decode("utf-8", "surrogateescape") for name in found]
    keys, dots, fields = zip(*[name.partition(".") for name in names], strict=True)
    text = "".join(names)
    if "/" in text or "__" in text or "" in keys or "" in dots:  # not all are KEY.FIELD
        keys, fields = zip(*map(_split, names), strict=True)
    else:
        lower = {field: field.lower() for field in set(fields)}
        fields = tuple(map(lower.__getitem__, fields))
    return np.fromiter(keys, np.object_, len(keys)), np.fromiter(fields, np.object_, len(keys))


def _split(name: str) -> tuple[str, str] | tuple[None, None]:
    split = split_name(name)
    return (None, None) if split is None or split[1] in _RESERVED else split
