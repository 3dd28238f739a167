"""Order, first half: slots of an epoch to samples of shards.

Each shard is cut into chunks of at most C contiguous samples. An epoch permutes the chunks, lays
them end to end and rotates the whole by a random offset, so that what `drop_last` leaves out
differs each epoch. Slot s of the epoch is then position (s + rotation) mod N. Two int64 a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmstream.order.permute import permutation, random_words

__all__ = ["ChunkTable", "EpochChunks"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ChunkTable:
    """The chunks of a corpus, in its own order."""

    counts: Ints
    """[num_shards] samples of each shard."""
    chunk: int
    """C, samples of a chunk; the last one of a shard may be shorter."""
    first: Ints
    """[num_shards + 1] number of each shard's first chunk, and the number of all chunks."""

    @classmethod
    def cut(cls, counts: Ints, chunk: int) -> ChunkTable:
        """Cut shards of so many samples."""
        return cls(counts, chunk, np.concatenate([[0], np.cumsum(-(-counts // chunk))]))

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
    chunks: Ints
    """[num_chunks] chunk numbers in the order of this epoch."""
    ends: Ints
    """[num_chunks] position at which each of them ends."""
    rotation: int

    def find(self, slots: Ints) -> tuple[Ints, Ints]:
        """Return (shard, index), int64 like `slots`, of slots in [0, N)."""
        position = (slots + self.rotation) % int(self.ends[-1])
        at = np.searchsorted(self.ends, position, side="right")
        chunk = self.chunks[at]
        shard = np.searchsorted(self.table.first, chunk, side="right") - 1
        start = (chunk - self.table.first[shard]) * self.table.chunk
        size = np.minimum(self.table.chunk, self.table.counts[shard] - start)
        return shard, start + position - (self.ends[at] - size)
