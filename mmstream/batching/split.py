"""Cutting a delivered batch into micro-batches, for a device that cannot take it at once.

Between device and train: `split_rows` makes views of a batch, on whatever device it lies. So fewer
ranks can take the same global batch: they go through their rows in more, smaller parts.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from itertools import pairwise
from typing import Any

import torch

from mmstream.decoding.image.encoded import EncodedImages
from mmstream.errors import ConfigError
from mmstream.reading.step import BatchLineage
from mmstream.types import Batch

__all__ = ["split_rows"]


def split_rows(batch: Batch, num_parts: int) -> list[Batch]:
    """Cut a batch by rows into parts of equal size, give or take a row.

    Args:
        batch: from a loader or from `mmstream.to_device`.
        num_parts: how many parts; fewer come where there are fewer rows.

    Returns:
        The parts in the order of rows; joined they are the batch. Tensors are views, nothing is
        copied. What has one entry a row is cut by rows. A ragged field X, which has a companion
        ``X_row`` (such as ``image`` and ``image_row``), is cut where its rows end, and the
        companion counts from 0 in each part; on CUDA reading it makes the host wait. Dicts are cut
        field by field. Single numbers, strings and None go to each part. The lineage of a part is
        that of its rows, and its bytes and requests are counted in the first part.

    Raises:
        ConfigError: `num_parts` is below 1, or a field has neither an entry a row nor a companion.
    """
    if num_parts < 1:
        raise ConfigError(f"split_rows: num_parts is {num_parts}; it must be 1 or more")
    num_rows = len(batch["__valid__"])
    num_parts = max(1, min(num_parts, num_rows))
    cuts = [number * num_rows // num_parts for number in range(num_parts + 1)]
    return _split(batch, cuts)


def _split(fields: dict[str, Any], cuts: list[int]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{} for _ in cuts[1:]]
    for name, value in fields.items():
        companion = f"{name}_row"
        if name.endswith("_row") and name.removesuffix("_row") in fields:
            pieces = _slices(value, _ragged_cuts(name, value, cuts))
            pieces = [piece - start for piece, start in zip(pieces, cuts, strict=False)]
        elif companion in fields:
            pieces = _slices(value, _ragged_cuts(companion, fields[companion], cuts))
        else:
            pieces = _by_rows(name, value, cuts)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts


def _by_rows(name: str, value: Any, cuts: list[int]) -> list[Any]:
    if isinstance(value, BatchLineage):
        return [_lineage_of(value, start, stop) for start, stop in pairwise(cuts)]
    if isinstance(value, dict):
        return _split(value, cuts)
    has_rows = isinstance(value, list | EncodedImages) or (
        isinstance(value, torch.Tensor) and value.ndim > 0
    )
    if not has_rows:
        return [value] * (len(cuts) - 1)
    if len(value) != cuts[-1]:
        raise ConfigError(
            f"split_rows: {name} has {len(value)} entries for {cuts[-1]} rows; a ragged field "
            f"needs {name}_row, the row of each entry"
        )
    return _slices(value, cuts)


def _slices(value: Any, cuts: list[int]) -> list[Any]:
    return [value[start:stop] for start, stop in pairwise(cuts)]


def _ragged_cuts(companion: str, rows_of_entries: torch.Tensor, cuts: list[int]) -> list[int]:
    rows = rows_of_entries.tolist()
    if rows != sorted(rows):
        raise ConfigError(f"split_rows: {companion} does not rise from row to row")
    return [bisect_left(rows, cut) for cut in cuts]


def _lineage_of(lineage: BatchLineage, start: int, stop: int) -> BatchLineage:
    rows = range(lineage.start + start, lineage.start + stop)
    return dataclasses.replace(
        lineage,
        start=lineage.start + start,
        planned=lineage.planned[start:stop],
        valid=lineage.valid[start:stop],
        shown=lineage.shown[start:stop],
        bad=tuple(record for record in lineage.bad if record.row in rows),
        num_bytes=0 if start else lineage.num_bytes,
        num_requests=0 if start else lineage.num_requests,
    )
