"""What an order knows of a dataset: counts and names of its shards, and what to leave out.

Numbers and names only; where shards lie and what is in them is nobody's business here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mmstream.order.checks import require
from mmstream.types import IntArray

__all__ = ["Corpus"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """The shards of a dataset, as numbers.

    Raises:
        ConfigError: negative counts, or bad samples that are not in the corpus.
    """

    counts: IntArray
    """[num_shards] samples of each shard, known-bad ones included."""
    names: Sequence[str] | None = None
    num_bytes: int | None = None
    """Of all shards together."""
    bad: IntArray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    """[num_bad, 2] (shard, index) of samples that are never planned."""

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts, dtype=np.int64).reshape(-1)
        require(not counts.size or int(counts.min()) >= 0, "a shard has a negative count")
        names = self.names
        require(names is None or len(names) == counts.size, "as many names as counts, please")
        bad = np.unique(np.asarray(self.bad, dtype=np.int64).reshape(-1, 2), axis=0)
        inside = (bad[:, 0] >= 0) & (bad[:, 0] < counts.size) & (bad[:, 1] >= 0)
        inside[inside] &= bad[inside, 1] < counts[bad[inside, 0]]
        require(bool(inside.all()), f"bad sample {bad[~inside][:1].tolist()} is not in the corpus")
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "bad", bad)

    @cached_property
    def good(self) -> IntArray:
        """[num_shards] samples of each shard that an order plans."""
        return self.counts - np.bincount(self.bad[:, 0], minlength=self.counts.size)

    @property
    def num_samples(self) -> int:
        """Samples that an order plans."""
        return int(self.good.sum())

    def first(self, num_shards: int, *, keep_bad: bool = True) -> Corpus:
        """Return the corpus as it was before shards were appended to it."""
        bad = self.bad[self.bad[:, 0] < num_shards] if keep_bad else self.bad[:0]
        names = None if self.names is None else self.names[:num_shards]
        return Corpus(self.counts[:num_shards], names, None, bad)

    def identity(self) -> dict[str, Any]:
        """Return what a saved state says of the corpus, in plain JSON types."""
        return dict(self._identity)

    @cached_property
    def _identity(self) -> dict[str, Any]:  # states are made at every step
        digest = hashlib.sha256(self.counts.astype("<i8").tobytes())
        for name in self.names or ():
            digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
        listed = hashlib.sha256(self.bad.astype("<i8").tobytes()).hexdigest()[:32]
        return {
            "corpus": digest.hexdigest()[:32],
            "num_shards": int(self.counts.size),
            "bad": listed if self.bad.size else None,
        }
