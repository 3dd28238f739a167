"""From the slots of an epoch to samples of shards. `Order` and `Source` use it after their lanes.

Each shard is cut into chunks: at most C consecutive samples each. An epoch permutes the chunks,
lays them end to end, and rotates the whole by a random offset. The rotation makes `drop_last`
leave out other samples in each epoch. Slot s of the epoch is position (s + rotation) mod N of the
permuted chunks. The table needs two int64 per chunk.

Known bad samples are never planned: chunks are cut from the good samples and count only those. For
``reshuffle="lanes"`` they are cut at multiples of C instead, and a chunk has its good samples. So a
chunk keeps its number when a bad list comes, and its lane.

Example: three shards of 5 samples, C = 2. Each shard has chunks of 2, 2 and 1 samples::

    chunk            0    1   2   3    4   5   6    7   8
    shard            0    0   0   1    1   1   2    2   2
    indexes         0 1  2 3  4  0 1  2 3  4  0 1  2 3  4

An epoch that permutes the chunks to 4 0 8 1 ... and rotates by 3 is laid out like this::

    chunk              4       0     8     1    ...
    (shard, index)  1,2 1,3 0,0 0,1 2,4 0,2 0,3 ...
    position         0   1   2   3   4   5   6  ...
    slot            12  13  14   0   1   2   3  ...

>>> import numpy as np
>>> from mmstream.order.corpus import Corpus
>>> table = ChunkTable.cut(Corpus(np.array([5, 5, 5])), chunk_size=2)
>>> table.first_chunks.tolist()  # of each shard, then the number of all chunks
[0, 3, 6, 9]
>>> chunks = np.array([4, 0, 8, 1, 2, 3, 5, 6, 7])
>>> chunk_ends = np.cumsum(table.chunk_sizes()[chunks])
>>> chunk_ends.tolist()
[2, 4, 5, 7, 8, 10, 11, 13, 15]
>>> epoch = EpochChunks(table, chunks, chunk_ends, rotation=3)
>>> shards, indexes = epoch.locate(np.array([0, 1, 2, 3, 12]))
>>> list(zip(shards.tolist(), indexes.tolist()))
[(0, 1), (2, 4), (0, 2), (0, 3), (1, 2)]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmstream.order.corpus import Corpus
from mmstream.order.permute import permutation, random_words
from mmstream.types import IntArray


@dataclass(frozen=True)
class ChunkTable:
    """The chunks of a corpus, in the order of its shards."""

    counts: IntArray
    """[num_shards] samples that the chunks of each shard are cut from: good ones, or all."""
    chunk_size: int
    """C, samples of a chunk. The last chunk of a shard may be shorter."""
    first_chunks: IntArray
    """[num_shards + 1] number of each shard's first chunk, then the number of all chunks."""
    gaps: Gaps | None
    """Where bad samples lie; None if there are none."""
    bad_of_chunks: IntArray | None = None
    """[num_chunks + 1] bad samples in all chunks before each one, then in all chunks; None where
    chunks count good samples only."""

    @classmethod
    def cut(cls, corpus: Corpus, chunk_size: int, *, count_bad: bool = False) -> ChunkTable:
        """Cut the shards of a corpus into chunks.

        Args:
            corpus: the shards, and which samples are bad.
            chunk_size: C.
            count_bad: cut at multiples of C. False: each C good samples are a chunk.
        """
        counts = corpus.counts if count_bad else corpus.good_counts
        chunks_per_shard = -(-counts // chunk_size)
        first_chunks = np.concatenate([[0], np.cumsum(chunks_per_shard)])
        if not corpus.bad.size:
            return cls(counts, chunk_size, first_chunks, None)
        gaps = Gaps.from_corpus(corpus)
        if not count_bad:
            return cls(counts, chunk_size, first_chunks, gaps)
        shards, indexes = corpus.bad.T
        chunk_of_bad = first_chunks[shards] + indexes // chunk_size
        bad_of_chunks = np.searchsorted(chunk_of_bad, np.arange(int(first_chunks[-1]) + 1))
        return cls(counts, chunk_size, first_chunks, gaps, bad_of_chunks)

    def chunk_sizes(self) -> IntArray:
        """Return int64 [num_chunks]: samples of each chunk. Shards without samples have none."""
        sizes = np.full(int(self.first_chunks[-1]), self.chunk_size, dtype=np.int64)
        has_chunks = self.counts > 0
        last_chunks = self.first_chunks[1:][has_chunks] - 1
        sizes[last_chunks] = (self.counts[has_chunks] - 1) % self.chunk_size + 1
        return sizes if self.bad_of_chunks is None else sizes - np.diff(self.bad_of_chunks)

    def samples(self, chunks: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray]:
        """Return (shards, indexes) of the samples at offsets in chunks, bad ones not counted."""
        shards = np.searchsorted(self.first_chunks, chunks, side="right") - 1
        indexes = (chunks - self.first_chunks[shards]) * self.chunk_size + offsets
        if self.gaps is None:
            return shards, indexes
        if self.bad_of_chunks is not None:  # as if only good samples were counted
            indexes -= self.bad_of_chunks[chunks] - self.bad_of_chunks[self.first_chunks[shards]]
        return shards, self.gaps.step_over(shards, indexes)

    def epoch(self, epoch: int, seed: int, shuffle: bool) -> EpochChunks:
        """Lay out one epoch. Without shuffle, every epoch is the corpus in its own order."""
        sizes = self.chunk_sizes()
        if not shuffle:
            return EpochChunks(self, np.arange(sizes.size), np.cumsum(sizes), rotation=0)
        chunks = permutation(sizes.size, seed, epoch, "chunks")
        chunk_ends = np.cumsum(sizes[chunks])
        rotation = int(random_words(1, seed, epoch, "rotation")[0]) % int(chunk_ends[-1])
        return EpochChunks(self, chunks, chunk_ends, rotation)


@dataclass(frozen=True)
class EpochChunks:
    """The chunks of one epoch, laid end to end."""

    table: ChunkTable
    chunks: IntArray
    """[num_chunks] chunk numbers in the order of this epoch."""
    chunk_ends: IntArray
    """[num_chunks] position at which each of these chunks ends."""
    rotation: int
    """Position of slot 0."""

    def locate(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Return (shards, indexes) of slots.

        Args:
            slots: int64, any shape, each from 0 to N-1.

        Returns:
            Two int64 arrays of the shape of `slots`.
        """
        positions = (slots + self.rotation) % int(self.chunk_ends[-1])
        chunk_ranks = np.searchsorted(self.chunk_ends, positions, side="right")
        starts = np.where(chunk_ranks > 0, self.chunk_ends[chunk_ranks - 1], 0)
        return self.table.samples(self.chunks[chunk_ranks], positions - starts)


@dataclass(frozen=True)
class Gaps:
    """Where known bad samples lie between the good ones.

    Example: shards of 5 and 4 samples. Samples 1 and 2 of shard 0 and sample 0 of shard 1 are bad,
    so the good samples of shard 0 have the indexes 0, 3, 4, those of shard 1 have 1, 2, 3.

    >>> import numpy as np
    >>> gaps = Gaps.from_corpus(Corpus(np.array([5, 4]), bad=np.array([(0, 1), (0, 2), (1, 0)])))
    >>> gaps.good_before_bad.tolist()  # shard 0 has 3 good samples, all before (1, 0)
    [1, 1, 3]
    >>> gaps.step_over(np.array([0, 0, 0, 1, 1, 1]), np.array([0, 1, 2, 0, 1, 2])).tolist()
    [0, 3, 4, 1, 2, 3]
    """

    good_before_shard: IntArray
    """[num_shards] good samples in all earlier shards."""
    bad_before_shard: IntArray
    """[num_shards] bad samples in all earlier shards."""
    good_before_bad: IntArray
    """[num_bad] good samples before each bad one, over all shards; never falls."""

    @classmethod
    def from_corpus(cls, corpus: Corpus) -> Gaps:
        """Find the gaps of a corpus."""
        good = corpus.good_counts
        bad = corpus.counts - good
        good_before_shard = np.cumsum(good) - good
        bad_before_shard = np.cumsum(bad) - bad
        shards, indexes = corpus.bad.T
        bad_before_in_shard = np.arange(shards.size) - bad_before_shard[shards]
        good_before_bad = good_before_shard[shards] + indexes - bad_before_in_shard
        return cls(good_before_shard, bad_before_shard, good_before_bad)

    def step_over(self, shards: IntArray, good_indexes: IntArray) -> IntArray:
        """Return the indexes of good samples in their shards.

        Args:
            shards: shard of each sample.
            good_indexes: how many good samples of the same shard lie before each sample.
        """
        good_before = self.good_before_shard[shards] + good_indexes
        bad_before = np.searchsorted(self.good_before_bad, good_before, side="right")
        return good_indexes + bad_before - self.bad_before_shard[shards]
