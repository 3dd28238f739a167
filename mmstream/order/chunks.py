"""Order, first half: slots of an epoch to samples of shards.

Each shard is cut into chunks of at most C contiguous samples. An epoch permutes the chunks, lays
them end to end and rotates the whole by a random offset, so that what `drop_last` leaves out
differs each epoch. Slot s of the epoch is then position (s + rotation) mod N. Two int64 a chunk.

Samples on the bad list are stepped over: chunks are cut from the others, counted without them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmstream.order.corpus import Corpus
from mmstream.order.permute import permutation, random_words
from mmstream.types import IntArray

__all__ = ["ChunkTable", "EpochChunks"]


@dataclass(frozen=True)
class ChunkTable:
    """The chunks of a corpus, in its own order."""

    counts: IntArray
    """[num_shards] samples of each shard, without those on the bad list."""
    chunk: int
    """C, samples of a chunk; the last one of a shard may be shorter."""
    first: IntArray
    """[num_shards + 1] number of each shard's first chunk, and the number of all chunks."""
    gaps: Gaps | None

    @classmethod
    def cut(cls, corpus: Corpus, chunk: int) -> ChunkTable:
        """Cut the shards of a corpus."""
        first = np.concatenate([[0], np.cumsum(-(-corpus.good // chunk))])
        return cls(corpus.good, chunk, first, Gaps.of(corpus) if corpus.bad.size else None)

    def epoch(self, epoch: int, seed: int, shuffle: bool) -> EpochChunks:
        """Lay out one epoch; without shuffle, every epoch is the corpus in its own order."""
        total = int(self.first[-1])
        sizes = np.full(total, self.chunk, dtype=np.int64)
        filled = self.counts > 0
        sizes[self.first[1:][filled] - 1] = (self.counts[filled] - 1) % self.chunk + 1
        if not shuffle:
            return EpochChunks(self, np.arange(total), np.cumsum(sizes), 0)
        chunks = permutation(total, seed, epoch, "chunks")
        ends = np.cumsum(sizes[chunks])
        rotation = int(random_words(1, seed, epoch, "rotation")[0]) % int(ends[-1])
        return EpochChunks(self, chunks, ends, rotation)


@dataclass(frozen=True)
class EpochChunks:
    """The chunks of one epoch, laid end to end."""

    table: ChunkTable
    chunks: IntArray
    """[num_chunks] chunk numbers in the order of this epoch."""
    ends: IntArray
    """[num_chunks] position at which each of them ends."""
    rotation: int

    def find(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Return (shard, index), int64 like `slots`, of slots in [0, N)."""
        position = (slots + self.rotation) % int(self.ends[-1])
        at = np.searchsorted(self.ends, position, side="right")
        chunk = self.chunks[at]
        shard = np.searchsorted(self.table.first, chunk, side="right") - 1
        start = (chunk - self.table.first[shard]) * self.table.chunk
        size = np.minimum(self.table.chunk, self.table.counts[shard] - start)
        index = start + position - (self.ends[at] - size)
        gaps = self.table.gaps
        return shard, index if gaps is None else gaps.step_over(shard, index)


@dataclass(frozen=True)
class Gaps:
    """Where known-bad samples lie between the others of their shards."""

    starts: IntArray
    """[num_shards] good samples before each shard."""
    first: IntArray
    """[num_shards] bad samples before each shard."""
    passed: IntArray
    """[num_bad] good samples before each bad one, over all shards; rises."""

    @classmethod
    def of(cls, corpus: Corpus) -> Gaps:
        """Find the gaps of a corpus."""
        starts = np.cumsum(corpus.good) - corpus.good
        first = np.cumsum(corpus.counts - corpus.good) - (corpus.counts - corpus.good)
        shard, index = corpus.bad.T
        before = np.arange(shard.size) - first[shard]  # bad ones of the same shard
        return cls(starts, first, starts[shard] + index - before)

    def step_over(self, shard: IntArray, position: IntArray) -> IntArray:
        """Return the index in its shard of each good sample, of its position among good ones."""
        before = np.searchsorted(self.passed, self.starts[shard] + position, side="right")
        return position + before - self.first[shard]
