"""Rows of several samples: which seats of a step each row has, where rows are packs.

A step of packs holds its samples in the order of rows, those of a row side by side. A sample's
*seat* is its number among the samples of the step that this process reads. Without packs the seat
is the row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mmstream.order import AnyOrder
from mmstream.types import IntArray


class PackedRows(NamedTuple):
    """The rows of a step of this rank."""

    counts: IntArray
    """[rows] samples of each row. 0: padding."""
    order_rows: IntArray
    """[rows] row of the global batch."""
    num_tokens: IntArray
    """[N] measured tokens of each sample."""

    @classmethod
    def of_step(
        cls, order: AnyOrder, epoch: int, step: int, rows: tuple[int, int]
    ) -> PackedRows | None:
        """Return the rows [start, stop) of a step. None: each row is one sample."""
        if not order.is_packed:
            return None
        return cls(
            order.document_counts(epoch, step, rows),
            order.order_rows(epoch, step, rows),
            order.document_tokens(epoch, step, rows),
        )

    @property
    def num_samples(self) -> int:
        """Samples of all rows."""
        return int(self.counts.sum())

    @property
    def first_seats(self) -> IntArray:
        """[rows] the seat of the first sample of each row."""
        return np.cumsum(self.counts) - self.counts

    def lineage_fields(self) -> dict[str, Any]:
        """Return what the `BatchLineage` of the step has beside its samples."""
        rows = np.arange(self.counts.size)
        return {
            "valid": (self.counts > 0).tolist(),
            "planned_rows": np.repeat(rows, self.counts).tolist(),
            "order_rows": self.order_rows.tolist(),
            "num_planned_tokens": int(self.num_tokens.sum()),
        }


def seats_of(rows: IntArray, first_seats: IntArray) -> IntArray:
    """Return the seat of each sample of one window and step.

    Args:
        rows: [n] row of each sample. Samples of a row are side by side, and all of them are there.
        first_seats: [rows] as `PackedRows` has them.

    Examples:
        >>> seats_of(np.array([2, 2, 0]), first_seats=np.array([0, 1, 3]))  # 1, 2 and 2 samples
        array([3, 4, 0])
    """
    numbers = np.arange(rows.size)
    is_first = np.diff(rows, prepend=-1) != 0
    return first_seats[rows] + numbers - np.maximum.accumulate(np.where(is_first, numbers, 0))
