"""The plan of a conversion: which rows go into which shard.

It is made once, after the file of rows was scanned. It depends only on the rows and the options:

1. The rows are in the order of the file, or shuffled by `shuffle_seed`.
2. With splits, each split takes the rows whose id hashes into it.
3. Shard i of a dataset holds its rows [i*R, (i+1)*R), with R = `samples_per_shard`.

With R = 2, rows 0 to 4 make the shards (0, 1), (2, 3), (4). If row 1 is rejected, shard 0 has one
sample, and shard 1 still starts at row 2. So any process can write any shard, and an interrupted
conversion knows which shards are missing.
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
from mmstream.types import IntArray
from mmstream.wrong_arguments import refuse_bools

__all__ = ["Options", "plan_of", "select", "shard_name"]

CONVERTER_VERSION = 1
"""Saved in every plan. It must be raised when any byte of the output changes."""


@dataclass(frozen=True)
class Options:
    """The caller's options that change the output. Impossible ones raise ConfigError."""

    samples_per_shard: int
    format: str | None
    captions: str
    shuffle_seed: int | None
    splits: tuple[tuple[str, float], ...] | None

    def __post_init__(self) -> None:
        refuse_bools(samples_per_shard=self.samples_per_shard, shuffle_seed=self.shuffle_seed)
        if self.samples_per_shard < 1:
            raise ConfigError(f"samples_per_shard={self.samples_per_shard}: must be 1 or more")
        if self.format is not None and self.format not in FORMATS:
            raise ConfigError(f"format={self.format!r}: must be one of {', '.join(FORMATS)}")
        if self.captions not in ("all", "each"):
            raise ConfigError(f"captions={self.captions!r}: must be 'all' or 'each'")
        if self.splits is not None:
            _check_splits(self.splits)


def plan_of(rows: RowFile, options: Options, split: str | None, num_rows: int) -> dict[str, Any]:
    """Return all that the bytes of a dataset depend on, except for the media files.

    Paths and the number of workers are not part of it. The manifest saves it as its ``source``.
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


def select(rows: RowFile, options: Options) -> dict[str | None, IntArray | range]:
    """Return {split: 0-based row numbers, in the order of the shards}.

    They are int64 [n], or a range where nothing is shuffled and there are no splits.

    Without splits, the only key is None. With splits, every row is in exactly one of them. A hash
    of its id decides, or of its content if it has no id. So a row stays in its split when other
    rows are added.

    With {"train": 0.75, "val": 0.25} there is one bound, 0.75 * 2^64. A row goes to "train" if its
    hash is below the bound, otherwise to "val".
    """
    order: IntArray | range = range(rows.num_rows)
    if options.shuffle_seed is not None:
        order = permutation(rows.num_rows, "convert", options.shuffle_seed)
    if options.splits is None:
        return {None: order}
    order = np.asarray(order)
    hashes = _id_hashes(rows)[order]
    ends = np.cumsum([fraction for _, fraction in options.splits])[:-1]
    bounds = np.array([round(float(end) * 2**64) for end in ends], dtype=np.uint64)
    split_of_row = np.searchsorted(bounds, hashes, side="right")
    return {name: order[split_of_row == i] for i, (name, _) in enumerate(options.splits)}


def shard_name(index: int) -> str:
    """Return the file name of shard `index`."""
    return f"shard-{index:06d}.tar"


class _Ids(msgspec.Struct):
    id: Any = None
    image_id: Any = None


def _id_hashes(rows: RowFile) -> npt.NDArray[np.uint64]:
    """Return uint64 [num_rows]: the first 64 bits of the SHA-256 of every row's identity."""
    hashes = np.empty(rows.num_rows, dtype="<u8")
    for start in range(0, rows.num_rows, 4096):
        numbers = range(start, min(rows.num_rows, start + 4096))
        for number, (_, line) in zip(numbers, read_rows(rows.select(numbers)), strict=True):
            digest = hashlib.sha256(_identity(line or b"")).digest()
            hashes[number] = int.from_bytes(digest[:8], "little")
    return hashes


def _identity(line: bytes) -> bytes:
    """Return what decides the split of a row: its id (5 and "5" are the same), else its content."""
    try:
        ids = msgspec.json.decode(line, type=_Ids)
        row_id = ids.id if ids.id is not None else ids.image_id
        if row_id is None:
            return msgspec.json.format(line, indent=-1)  # without the white space of a JSON array
        return row_id.encode() if isinstance(row_id, str) else msgspec.json.encode(row_id)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return line  # it will be rejected, in the split that its bytes hash into


def _check_splits(splits: tuple[tuple[str, float], ...]) -> None:
    for name, fraction in splits:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name) or name == "reports":
            raise ConfigError(
                f"splits: {name!r} cannot name a folder; use letters, digits, _ and -"
            )
        refuse_bools(splits=[fraction])
        if not 0 < fraction <= 1:
            raise ConfigError(f"splits: {name}={fraction} is not a fraction above 0 and up to 1")
    if not splits:
        raise ConfigError(
            "splits is empty: name at least one split, or leave it out to write one dataset"
        )
    total = sum(fraction for _, fraction in splits)
    if abs(total - 1) > 1e-9:
        raise ConfigError(f"splits: the fractions sum to {total:g}; they must sum to 1")
