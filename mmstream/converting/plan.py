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

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmstream.converting.options import Options
from mmstream.converting.rows.samples import SampleSource
from mmstream.converting.rows.source import RowSource
from mmstream.errors import ConfigError
from mmstream.order.permute import permutation
from mmstream.types import IntArray

__all__ = ["num_shards", "plan_of", "select", "shard_name"]

CONVERTER_VERSION = 4
"""Saved in every plan. It must be raised when any byte of the output changes."""


def plan_of(rows: RowSource, options: Options, split: str | None, num_rows: int) -> dict[str, Any]:
    """Return all that the bytes of a dataset depend on, except for the media files.

    Paths and the number of workers are not part of it. The manifest saves it as its ``source``.
    """
    reading = options.reading
    split_by = None if options.splitting is None else options.splitting.split_by
    return {
        "converter": CONVERTER_VERSION,
        "rows": rows.name,
        "rows_sha256": rows.sha256,
        "rows_total": rows.num_rows,
        "samples_per_shard": options.samples_per_shard,
        "format": options.format.name,
        **options.format.plan(),
        "captions": reading.captions,
        "shuffle_seed": options.shuffle_seed,
        "media": options.media.plan(),
        "splits": _splits(rows, options),
        **({"split_by": split_by} if split_by is not None else {}),
        **({"keys": "kept"} if isinstance(rows, SampleSource) else {}),
        **({"limit": reading.limit} if reading.limit is not None else {}),
        **({"group_spans": True} if reading.group_spans else {}),
        "split": split,
        "sidecar": options.sidecar,
        "duplicates": options.duplicates.exact,
        "near_duplicates": options.duplicates.near,
        "num_rows": num_rows,
    }


def _splits(rows: RowSource, options: Options) -> list[list[Any]] | None:
    """Return [name, fraction] of each split in order; no fraction where the rows come in splits."""
    if options.splitting is not None:
        return [list(pair) for pair in options.splitting.splits.items()]
    return [[name, None] for name in rows.splits] if rows.splits else None


def select(rows: RowSource, options: Options) -> dict[str | None, IntArray | range]:
    """Return {split: 0-based row numbers, in the order of the shards}.

    They are int64 [n], or a range where nothing is shuffled and there are no splits.

    Without splits, the only key is None. With splits, every row is in exactly one of them. A hash
    of its id decides, or of its content if it has no id. So a row stays in its split when other
    rows are added. With `split_by`, a hash of this field decides. Rows that come in splits already,
    such as the folders train and val, stay in these.

    With {"train": 0.75, "val": 0.25} there is one bound, 0.75 * 2^64. A row goes to "train" if its
    hash is below the bound, otherwise to "val".
    """
    order: IntArray | range = range(rows.num_rows)
    if options.shuffle_seed is not None:
        order = permutation(rows.num_rows, "convert", options.shuffle_seed)
    if rows.splits:
        return _own_splits(rows, options, order)
    if options.splitting is None:
        return {None: order}
    splits = options.splitting.splits
    order = np.asarray(order)
    hashes = rows.id_hashes(options.splitting.split_by)[order]
    ends = np.cumsum(list(splits.values()))[:-1]
    bounds = np.array([round(float(end) * 2**64) for end in ends], dtype=np.uint64)
    split_of_row = np.searchsorted(bounds, hashes, side="right")
    return {name: order[split_of_row == i] for i, name in enumerate(splits)}


def _own_splits(
    rows: RowSource, options: Options, order: IntArray | range
) -> dict[str | None, IntArray | range]:
    """Return the rows of each split that the source has."""
    if options.splitting is not None:
        raise ConfigError(
            f"{rows.name}: has the splits {', '.join(rows.splits)} already; convert them as they "
            "are, or name the files of one of them"
        )
    selected: dict[str | None, IntArray | range] = {}
    for split, own in rows.splits.items():
        if isinstance(order, range):
            selected[split] = own
        else:
            selected[split] = order[(order >= own.start) & (order < own.stop)]
    return selected


def shard_name(index: int) -> str:
    """Return the file name of shard `index`."""
    return f"shard-{index:06d}.tar"


def num_shards(plan: Mapping[str, Any]) -> int:
    """Return the number of shards of a plan, those included whose rows will all be rejected."""
    return -(-int(plan["num_rows"]) // int(plan["samples_per_shard"]))
