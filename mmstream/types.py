"""What flows from stage to stage. Ground floor: everything may import it.

A raw sample is a dict: ``__key__``, ``__url__`` (of its shard), ``__source__`` (its name in a
mixture), then fields by extension (``jpg``, ``json``, ``0.png``) as bytes. Its lineage travels in
``__lineage__``. Any function written for WebDataset's ``.map`` takes and returns such a dict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]

Sample: TypeAlias = dict[str, Any]

Batch: TypeAlias = dict[str, Any]

SampleRef: TypeAlias = tuple[int, int]
"""(shard, index): the position of a shard in its dataset, and of a sample in the shard."""

IGNORED_LABEL = -100
"""The label that torch's cross entropy leaves out."""


class SampleLineage(NamedTuple):
    """Where a sample comes from, and when it is shown."""

    shard: int
    """Position of its shard in the manifest of its own dataset."""
    index: int  # type: ignore[assignment]  # the field's name wins over tuple.index
    """Position of the sample in its shard."""
    epoch: int = 0
    """Epoch of its own dataset: each source of a mixture has epochs of its own."""
    step: int = 0
    seed: int = 0


FILTERED = "SkipSample"
"""The kind of samples that a user's filter leaves out."""

TAKEN_DOWN = "TakenDownError"
"""The kind of samples that were taken down since their epoch was planned."""

NOT_BAD = frozenset((FILTERED, TAKEN_DOWN))
"""Kinds that no limit counts."""

TOO_LONG = "LengthError"
"""The kind of samples that are longer than measured, and do not fit in their pack."""

KINDS = (
    "SampleError",
    "DecodeError",
    "TimeoutError",
    "ChecksumError",
    "ShardError",
    TOO_LONG,
    FILTERED,
    TAKEN_DOWN,
)
"""Kinds of records: names of the error classes."""


@dataclass(frozen=True)
class BadSample:
    """One planned sample that was not shown: a line of the quarantine file."""

    epoch: int
    step: int
    row: int
    """Row of the global batch."""
    shard: str
    index: int
    kind: str
    """One of `KINDS`: SkipSample for a user's filter."""
    reason: str
    substitute: tuple[str, int] | None
    """(shard, index) of the sample that counts in its place; of the first one where a pack takes
    the whole row. None: the row is invalid, or the other samples of its pack go on without it."""
    stamp: str | None = None
    """`shard_stamp` of its shard. Files of old versions may have none."""
    document: int | None = None
    """Number of the sample in its pack, from 0. None: its row is this one sample."""
