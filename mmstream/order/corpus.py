"""The input of an order: how many samples each shard has, and which of them are known to be bad.

A `Corpus` holds numbers and names only. `Dataset.corpus` makes one from a manifest and a bad list;
`Order` and `MixtureOrder` plan from it without reading any shard.
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

    `counts`, `names` and `bad` are the identity of a corpus. A saved state stores a hash of them,
    and a run that resumes in the middle of an epoch must have the same ones. `num_bytes` is not
    part of the identity.

    Raises:
        ConfigError: a negative count, more or fewer names than counts, or a bad sample that is not
            in the corpus.

    Examples:
        >>> corpus = Corpus(np.array([5, 5, 5]), bad=np.array([(0, 1)]))
        >>> corpus.num_samples
        14
        >>> corpus.identity()["num_shards"]
        3
        >>> corpus.identity() == Corpus(corpus.counts).identity()  # the bad lists differ
        False
    """

    counts: IntArray
    """[num_shards] samples of each shard, including known bad ones."""
    names: Sequence[str] | None = None
    """Names of the shards, in the same order."""
    num_bytes: int | None = None
    """Size of all shards together, in bytes. It only sets the default window."""
    bad: IntArray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    """[num_bad, 2] (shard, index) of the samples that are never planned, sorted."""

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts, dtype=np.int64).reshape(-1)
        require(not counts.size or int(counts.min()) >= 0, "a shard has a negative count")
        require(
            self.names is None or len(self.names) == counts.size,
            f"{len(self.names or ())} names for {counts.size} counts: give one name for each count",
        )
        bad = np.unique(np.asarray(self.bad, dtype=np.int64).reshape(-1, 2), axis=0)
        shards, indexes = bad.T
        inside = (shards >= 0) & (shards < counts.size) & (indexes >= 0)
        inside[inside] &= indexes[inside] < counts[shards[inside]]
        require(
            bool(inside.all()),
            f"the bad list has (shard, index) {bad[~inside][:1].tolist()}, which is not in the "
            "corpus: remove it from the list",
        )
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "bad", bad)

    @cached_property
    def good_counts(self) -> IntArray:
        """[num_shards] samples of each shard that an order plans: all but the known bad ones."""
        return self.counts - np.bincount(self.bad[:, 0], minlength=self.counts.size)

    @property
    def num_samples(self) -> int:
        """Number of samples that an order plans."""
        return int(self.good_counts.sum())

    def first_shards(self, num_shards: int, *, keep_bad: bool = True) -> Corpus:
        """Return the first shards alone: the corpus as it was before others were appended.

        Args:
            num_shards: how many shards to keep.
            keep_bad: False: return them without a bad list.
        """
        bad = self.bad[self.bad[:, 0] < num_shards] if keep_bad else self.bad[:0]
        names = None if self.names is None else self.names[:num_shards]
        return Corpus(self.counts[:num_shards], names, None, bad)

    def identity(self) -> dict[str, Any]:
        """Return what a saved state stores about the corpus, in plain JSON types.

        ``corpus`` is a hash of the counts and names, ``bad`` a hash of the bad list or None.
        """
        return dict(self._identity)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        # Cached: a state is made at every step, and a corpus may have 100,000 names.
        corpus_hash = hashlib.sha256(self.counts.astype("<i8").tobytes())
        for name in self.names or ():
            corpus_hash.update(name.encode("utf-8", "surrogateescape") + b"\0")
        bad_hash = hashlib.sha256(self.bad.astype("<i8").tobytes()).hexdigest()[:32]
        return {
            "corpus": corpus_hash.hexdigest()[:32],
            "num_shards": int(self.counts.size),
            "bad": bad_hash if self.bad.size else None,
        }
