"""Rows of a batch with a picture or video that cannot be decoded on the device, nor on the CPU.

Place in the flow: `nvjpeg.py` and `nvdec.py` decode when the batch is made already. So such a row
cannot show another sample. It becomes invalid, and its sample is recorded as a bad one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mmstream.bad_samples.quarantine import BadSample, shard_stamp
from mmstream.batching.valid import is_flat, mask_labels
from mmstream.dataset.source import ShardSource
from mmstream.errors import DecodeError, where
from mmstream.reading.step import BatchLineage
from mmstream.types import Batch

__all__ = ["BadMedium", "address_of_row", "mark_bad"]


class BadMedium(NamedTuple):
    """A picture or video that cannot be decoded."""

    row: int
    """Its row in the batch."""
    field: str
    """Its field in the sample."""
    error: DecodeError


def mark_bad(batch: Batch, media: Sequence[BadMedium], source: ShardSource | None) -> None:
    """Make the rows of these media invalid, and record the bad samples, in place.

    Rows are counted twice. For example, this rank has rows 8 to 15 of the global batch: then
    `start` is 8, and row 2 of the batch is row 10 of the global batch.

    Args:
        batch: a batch with its lineage. Its tensors do not change.
        media: what cannot be decoded. Of a row that is invalid already nothing is recorded.
        source: the dataset, which names the shards. None: they are named by their number.
    """
    if not media:
        return
    lineage: BatchLineage = batch["__lineage__"]
    valid = batch["__valid__"].clone()
    records = {record.row: record for record in lineage.bad}
    for medium in media:
        row = lineage.start + medium.row
        if not valid[medium.row]:
            continue  # padding, or another picture of the row is bad
        valid[medium.row] = False
        if row in records:  # the bad picture was a substitute's: its row has none now
            records[row] = replace(records[row], substitute=None)
            continue
        shard, index = lineage.planned[medium.row]
        name, stamp = _describe(shard, source)
        records[row] = BadSample(
            lineage.epoch,
            lineage.step,
            row,
            name,
            index,
            type(medium.error).__name__,
            f"{address_of_row(batch, medium.row, medium.field, source)}: {medium.error}",
            None,
            stamp,
        )
    batch["__valid__"] = valid
    batch["__lineage__"] = replace(
        lineage, valid=valid.tolist(), bad=tuple(records[row] for row in sorted(records))
    )
    mask_labels(batch)


def address_of_row(batch: Batch, row: int, field: str, source: ShardSource | None) -> str:
    """Return ``shard[index] key.field`` of a row of a batch, without the key where rows have none.

    A flat batch has a key for each document, and a row may have several.
    """
    shard, index = batch["__lineage__"].shown[row]
    key = "" if is_flat(batch) else batch["__key__"][row]
    return where(_describe(shard, source)[0], index, key, field)


def _describe(shard: int, source: ShardSource | None) -> tuple[str, str | None]:
    """Return the name and the stamp of a shard. Without a source, the stamp is not known."""
    if source is None:
        return f"shard {shard}", None
    location = source.locate(shard)
    info = location.dataset.manifest.shards[location.shard]
    return source.name_of(shard), shard_stamp(info)
