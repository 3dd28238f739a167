"""The samples of any past or future step of a run, from its state and the manifest alone.

    state -> order -> rows of a step [-> keys, one tar header per sample]

It reads no payload, so a step is known in milliseconds for a dataset of any size. Substitutes of
bad samples are not part of the plan: they are in the training logs and the quarantine file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from mmstream.dataset import keys
from mmstream.dataset.source import DatasetItems, ShardSource, by_dataset
from mmstream.order import AnyOrder
from mmstream.types import SampleRef


def read_keys(source: ShardSource, refs: Sequence[SampleRef]) -> list[str | None]:
    """Return the keys of samples, from their first tar headers alone.

    Reads as `mmstream.dataset.keys.read_keys`. The sources of a mixture are read side by side. A
    key that cannot be read is None and a warning.

    Raises:
        StorageError: storage failed after retries.
    """
    groups = by_dataset(source, [shard for shard, _ in refs])

    def read_one_dataset(group: DatasetItems) -> list[str | None]:
        local_refs = [
            (shard, refs[number][1])
            for shard, number in zip(group.shards, group.numbers, strict=True)
        ]
        prefix = f"{group.source}/" if group.source else ""
        return keys.read_keys(group.dataset.shards, local_refs, prefix=prefix)

    key_of_ref: dict[int, str | None] = {}
    with ThreadPoolExecutor(max(1, len(groups))) as pool:
        for group, keys_of_group in zip(groups, pool.map(read_one_dataset, groups), strict=True):
            key_of_ref |= zip(group.numbers, keys_of_group, strict=True)
    return [key_of_ref[number] for number in range(len(refs))]


class PlannedRow(NamedTuple):
    """One row of a step, as the order says."""

    epoch: int
    step: int
    row: int
    """Row of the global batch."""
    shard: str
    index: int  # type: ignore[assignment]  # the field's name wins over tuple.index
    valid: bool
    """False for the padding of a last, partial step."""
    key: str | None
    """None where it was not asked for or cannot be read."""


def replay(
    source: ShardSource,
    order: AnyOrder,
    epoch: int,
    steps: Iterable[int],
    rows: tuple[int, int] | None = None,
    *,
    keys: bool = False,
) -> Iterator[PlannedRow]:
    """Yield the samples of steps as planned, in the order of the global batch.

    Where rows are packs, a row comes once for each of its samples.

    Args:
        source: names the shards, and holds the keys.
        order: the order of the run, see `state.order_of_state`.
        epoch: any epoch, past or future.
        steps: steps of that epoch.
        rows: [start, stop), the rows of a rank (`ranks.rows_of_rank`). None: all rows.
        keys: whether to read the first tar header of each sample for its key.

    Raises:
        ConfigError: no such epoch or step.
        StorageError: storage failed after retries, with `keys`.
    """
    of_rank = rows or (0, order.global_batch_size)
    for step in steps:
        rows = order.rows_of(epoch, step, of_rank)
        shards, indexes, valid = (column.tolist() for column in order.refs(epoch, step, rows))
        refs = list(zip(shards, indexes, strict=True))
        key_of_row = read_keys(source, refs) if keys else [None] * len(refs)
        counts = order.document_counts(epoch, step, rows)
        row_of_sample = np.repeat(order.order_rows(epoch, step, rows), counts).tolist()
        for row, (shard, index), is_valid, key in zip(
            row_of_sample, refs, valid, key_of_row, strict=True
        ):
            yield PlannedRow(epoch, step, row, source.name_of(shard), index, is_valid, key)
