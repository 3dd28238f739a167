"""Convert's plan: which rows go into which shard. A function of the rows and the options alone.

Shard i of a dataset holds rows [i*R, (i+1)*R) of its selection, which is the file's order, or a
permutation of it, or with splits the rows whose id falls into the split. Rejects change no
boundary. So any process can write any shard, and a killed run goes on where it stood.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from mmstream.converting.formats import FORMATS
from mmstream.converting.rows import RowFile, read_rows
from mmstream.errors import ConfigError
from mmstream.order.permute import permutation

__all__ = ["Options", "plan_of", "select", "shard_name"]

CONVERTER_VERSION = 1
"""Part of every plan; a change of any byte of the output must raise it."""


@dataclass(frozen=True)
class Options:
    """What the caller asked for. Raises ConfigError for the impossible."""

    samples_per_shard: int
    format: str | None
    captions: str
    shuffle_seed: int | None
    splits: tuple[tuple[str, float], ...] | None

    def __post_init__(self) -> None:
        if self.samples_per_shard < 1:
            raise ConfigError(f"samples_per_shard={self.samples_per_shard}: must be 1 or more")
        if self.format is not None and self.format not in FORMATS:
            raise ConfigError(f"format={self.format!r}: must be one of {', '.join(FORMATS)}")
        if self.captions not in ("all", "each"):
            raise ConfigError(f"captions={self.captions!r}: must be 'all' or 'each'")
        if self.splits is not None:
            _check_splits(self.splits)


def plan_of(rows: RowFile, options: Options, split: str | None, num_rows: int) -> dict[str, Any]:
    """Return all that the bytes of a dataset depend on, but for the media files.

    Where things lie and who converts them is no part of it. It is the manifest's `source`.
    """
    return {
        "converter": CONVERTER_VERSION,
        "rows": rows.name,
        "rows_sha256": rows.sha256,
        "rows_total": rows.num_rows,
        "samples_per_shard": options.samples_per_shard,
        "format": options.format,
        "captions": options.captions,
        "shuffle_seed": options.shuffle_seed,
        "splits": None if options.splits is None else [list(pair) for pair in options.splits],
        "split": split,
        "num_rows": num_rows,
    }


def select(rows: RowFile, options: Options) -> dict[str | None, npt.NDArray[np.int64]]:
    """Return {split: int64 [n] 0-based row numbers in the order of the shards}.

    Without splits the one key is None. With splits every row is in exactly one of them, by a hash
    of its id, or of its content when it has none: a row stays where it is when others are added.
    """
    order = np.arange(rows.num_rows)
    if options.shuffle_seed is not None:
        order = permutation(rows.num_rows, "convert", options.shuffle_seed)
    if options.splits is None:
        return {None: order}
    words = _words(rows)[order]
    ends = np.cumsum([fraction for _, fraction in options.splits])[:-1]
    bounds = np.array([round(float(end) * 2**64) for end in ends], dtype=np.uint64)
    place = np.searchsorted(bounds, words, side="right")
    return {name: order[place == i] for i, (name, _) in enumerate(options.splits)}


def shard_name(index: int) -> str:
    """Return the file name of shard `index`."""
    return f"shard-{index:06d}.tar"


class _Ids(msgspec.Struct):
    id: Any = None
    image_id: Any = None


def _words(rows: RowFile) -> npt.NDArray[np.uint64]:
    """Return uint64 [num_rows], the hash of every row's identity."""
    everything = rows.select(np.arange(rows.num_rows))
    digests = (
        hashlib.sha256(_identity(line or b"")).digest()[:8] for _, line in read_rows(everything)
    )
    return np.frombuffer(b"".join(digests), dtype="<u8")


def _identity(line: bytes) -> bytes:
    """Return what a row is split by: its id (5 and "5" are one), else its content."""
    try:
        ids = msgspec.json.decode(line, type=_Ids)
        own = ids.id if ids.id is not None else ids.image_id
        if own is None:
            return msgspec.json.format(line, indent=-1)  # a JSON array's white space is no content
        return own.encode() if isinstance(own, str) else msgspec.json.encode(own)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return line  # it will be a reject, of the split that its bytes fall into


def _check_splits(splits: tuple[tuple[str, float], ...]) -> None:
    for name, fraction in splits:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name) or name == "reports":
            raise ConfigError(f"splits: {name!r} cannot name a folder; use letters and digits")
        if not 0 < fraction <= 1:
            raise ConfigError(f"splits: {name}={fraction} is not a fraction in (0, 1]")
    if not splits:
        raise ConfigError("splits: none is named; leave it out for one dataset")
    total = sum(fraction for _, fraction in splits)
    if abs(total - 1) > 1e-9:
        raise ConfigError(f"splits: the fractions sum to {total:g}, not to 1")
