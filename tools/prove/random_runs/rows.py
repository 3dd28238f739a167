"""What a batch holds, row by row, whichever kind of batch it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import mmstream as mm
from mmstream.types import Batch, Sample
from tools.prove.random_runs.corpus import Ref


class Content(NamedTuple):
    """What a batch holds of one sample."""

    key: str
    shard: str
    source: str
    number: int
    text: str | None
    tokens: tuple[int, ...] | None
    draw: int
    """A random number that a function has drawn for the sample."""
    epoch: int
    """The epoch of the sample's source."""
    wav: tuple[int, ...] | None
    """The first and the last sample of the recording, and their number."""


class Record(NamedTuple):
    """A bad sample of a row."""

    planned: Ref
    kind: str
    substitute: Ref | None


class Row(NamedTuple):
    """One row of a global batch; compares whole."""

    planned: tuple[Ref, ...]
    shown: tuple[Ref, ...]
    """() for a row that is not valid: where nothing fills it, it repeats a row of its step."""
    valid: bool
    records: tuple[Record, ...]
    contents: tuple[Content, ...]
    """Of all that is shown; () for a row that is not valid."""
    repeat: int = 1
    """Rows of the batch that show it."""


def marked(sample: Sample) -> Sample:
    """Refuse or filter a sample as it asks for, and add what `Content` tells."""
    row = sample["json"]
    if row["fault"] == "refused":
        raise ValueError("refused by a function")
    if row["fault"] == "filtered":
        raise mm.SkipSample("filtered")
    lineage = sample["__lineage__"]
    draw = int(mm.sample_rng(sample).integers(1 << 31))
    return sample | {"number": row["number"], "draw": draw, "stream_epoch": lineage.epoch}


def rows_of(batch: Batch, shard_of: Callable[[str], int]) -> dict[int, Row]:
    """Return the rows of a batch by their number in the global batch.

    Args:
        batch: of a loader, or a micro-batch of `mm.split_rows`.
        shard_of: the number of a shard, from its name in a record.
    """
    lineage = batch["__lineage__"]
    repeat, entries = lineage.repeat, len(batch["__key__"])
    assert batch["__valid__"].equal(torch.tensor(lineage.valid).repeat_interleave(repeat)), (
        "__valid__ is not that of the lineage"
    )
    contents = [_content(batch, entry) for entry in range(entries)]
    if repeat > 1:
        numbers = [*range(repeat)] * lineage.num_rows
        assert batch["__repeat__"].tolist() == numbers, "__repeat__ has other numbers"
        assert contents == [contents[entry - entry % repeat] for entry in range(entries)], (
            "rows of one sample differ"
        )
        contents, entries = contents[::repeat], entries // repeat
    assert len(lineage.shown) == entries, "the lineage shows another number of samples"
    planned_rows = lineage.planned_rows or list(range(len(lineage.planned)))
    entry_rows = lineage.rows or list(range(entries))
    records: dict[int, list[Record]] = {}
    for bad in lineage.bad:
        substitute = bad.substitute and (shard_of(bad.substitute[0]), bad.substitute[1])
        planned = (shard_of(bad.shard), bad.index)
        records.setdefault(bad.row, []).append(Record(planned, bad.kind, substitute))
    rows = {}
    for row in range(lineage.num_rows):
        number, valid = lineage.order_row(row), lineage.valid[row]
        of_row = [entry for entry in range(entries) if entry_rows[entry] == row]
        rows[number] = Row(
            tuple(r for r, of in zip(lineage.planned, planned_rows, strict=True) if of == row),
            tuple(lineage.shown[entry] for entry in of_row) if valid else (),
            valid,
            tuple(records.pop(number, ())),
            tuple(contents[entry] for entry in of_row) if valid else (),
            repeat,
        )
    assert not records, f"records of rows that are not here: {records}"
    return rows


def _content(batch: Batch, entry: int) -> Content:
    text = batch["txt"][entry] if "txt" in batch else None
    if isinstance(text, bytes):
        text = text.decode(errors="surrogateescape")
    return Content(
        batch["__key__"][entry],
        batch["__url__"][entry].rpartition("/")[2],
        batch["__source__"][entry] if "__source__" in batch else "",
        int(batch["number"][entry]),
        text,
        _tokens(batch, entry),
        int(batch["draw"][entry]),
        int(batch["stream_epoch"][entry]),
        _wav(batch, entry),
    )


def _tokens(batch: Batch, entry: int) -> tuple[int, ...] | None:
    if "input_ids" not in batch:
        return None
    ids = batch["input_ids"]
    if "document_sample" not in batch:
        return tuple(ids[entry][batch["attention_mask"][entry].bool()].tolist())
    (document,) = torch.nonzero(batch["document_sample"] == entry).flatten().tolist()
    return tuple(ids[batch["document_ids"] == document].tolist())


def _wav(batch: Batch, entry: int) -> tuple[int, ...] | None:
    audio: Any = batch.get("audio")
    if audio is None:
        return None
    count = int(batch["audio_length"][entry])
    samples = (audio[entry, :count] * 32768).round().int()
    return int(samples[0]), int(samples[-1]), count
