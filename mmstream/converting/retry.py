"""Rejected rows that are tried again: extra shards behind the last one.

    a finished dataset -> rows of its rejects -> RETRY -> jobs -> engines -> destination

The shards of a dataset come in rounds. Round 0 holds the shards of the plan. Each retry adds a
round: the rows that the round before rejected, in their order, cut into shards as in the plan. The
manifest's ``retried_shards`` gives the number of shards of each retry. Nothing else is stored: the
rejects of a round's shards (``reports/``) never change, so they name the rows of the next round.

Example: 10 rows in shards of 4 are shards 0 to 2. Rows 1, 5 and 8 were rejected. The first retry
writes shard 3 with these rows. If row 5 is rejected again, the second retry writes it to shard 4.

The dataset stays open for readers meanwhile. The new manifest is the only commit: a killed retry
leaves files that the next one takes over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from mmstream.converting.plan import num_shards, shard_name
from mmstream.converting.rejects import REPORTS, rejects_name
from mmstream.errors import ManifestError
from mmstream.storage import Store, open_store
from mmstream.storage.side_by_side import map_requests
from mmstream.types import IntArray

__all__ = ["RETRIED_SHARDS", "next_round", "rounds"]

RETRIED_SHARDS = "retried_shards"
"""Key of the manifest's ``source``: the number of shards of each retry."""


_CURE = f"bring {REPORTS}/ back, or convert again with rerun=mm.Rerun(overwrite=True)"


class _Rejected(msgspec.Struct):
    key: str


def rounds(store: Store, source: Mapping[str, Any]) -> Iterator[dict[str, IntArray]]:
    """Yield {name of a shard: 0-based rows} of each retry of a finished dataset.

    Args:
        store: The dataset.
        source: What its manifest says of the conversion: the plan and the retries.

    Raises:
        ManifestError: The rejects that name the rows are lost or damaged.
    """
    first, count = 0, num_shards(source)
    for next_count in source.get(RETRIED_SHARDS, []):
        rows = _rejected_rows(store, range(first, first + count), source)
        first, count = first + count, next_count
        yield _cut(rows, first, count, source)


def next_round(store: Store, source: Mapping[str, Any]) -> dict[str, IntArray]:
    """Return {name of a shard: 0-based rows} of the next retry. Arguments as `rounds`."""
    counts = [num_shards(source), *source.get(RETRIED_SHARDS, [])]
    rows = _rejected_rows(store, range(sum(counts[:-1]), sum(counts)), source)
    count = -(-len(rows) // source["samples_per_shard"])
    return _cut(rows, sum(counts), count, source)


def _cut(rows: IntArray, first: int, count: int, source: Mapping[str, Any]) -> dict[str, IntArray]:
    """Cut rows into shards. Shard `first` gets the first of them."""
    num_rows = source["samples_per_shard"]
    if count != -(-len(rows) // num_rows):
        raise ManifestError(
            f"{len(rows)} rejected rows in {REPORTS}/ are not those that the manifest's retry had; "
            f"{_CURE}"
        )
    return {shard_name(first + i): rows[i * num_rows : (i + 1) * num_rows] for i in range(count)}


def _rejected_rows(store: Store, shards: range, source: Mapping[str, Any]) -> IntArray:
    """Return int64 [n]: the 0-based rows that some shards rejected, in the order of the shards."""
    reports = open_store(store.url_of(REPORTS))
    present = reports.list()
    every_name = (rejects_name(shard_name(i)).rpartition("/")[2] for i in shards)
    names = [name for name in every_name if name in present]
    decoder = msgspec.json.Decoder(_Rejected)
    rows: list[int] = []
    for name, data in zip(names, map_requests(reports, reports.read, names), strict=True):
        try:
            keys = [reject.key for reject in decoder.decode_lines(data)]
            rows += [int(key) - 1 for key in keys]
        except ValueError as error:  # also msgspec's
            raise ManifestError(f"{reports.url_of(name)}: {error}; {_CURE}") from None
    if rows and not 0 <= min(rows) <= max(rows) < source["rows_total"]:
        raise ManifestError(f"{reports.url}: names rows that the plan does not have; {_CURE}")
    return np.array(rows, np.int64)
