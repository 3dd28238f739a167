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
>>> epoch = EpochChunks.in_one_list(table, chunks, chunk_ends, rotation=3)
>>> shards, indexes = epoch.locate(0, np.array([0, 1, 2, 3, 12]))
>>> list(zip(shards.tolist(), indexes.tolist()))
[(0, 1), (2, 4), (0, 2), (0, 3), (1, 2)]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmstream.order.corpus import Corpus
from mmstream.order.permute import permutation, random_words
from mmstream.order.selection import Selection
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
    selection: Selection | None = None
    """The chosen samples, which everything else here counts. None: all."""

    @classmethod
    def cut(cls, corpus: Corpus, chunk_size: int, *, count_bad: bool = False) -> ChunkTable:
        """Cut the shards of a corpus into chunks.

        Args:
            corpus: the shards, and which samples are bad.
            chunk_size: C.
            count_bad: cut at multiples of C. False: each C good samples are a chunk.
        """
        chosen, selection = corpus.chosen, corpus.selection
        counts = chosen.counts if count_bad else chosen.good_counts
        chunks_per_shard = -(-counts // chunk_size)
        first_chunks = np.concatenate([[0], np.cumsum(chunks_per_shard)])
        if not chosen.bad.size:
            return cls(counts, chunk_size, first_chunks, None, selection=selection)
        gaps = Gaps.from_corpus(chosen)
        if not count_bad:
            return cls(counts, chunk_size, first_chunks, gaps, selection=selection)
        shards, indexes = chosen.bad.T
        chunk_of_bad = first_chunks[shards] + indexes // chunk_size
        bad_of_chunks = np.searchsorted(chunk_of_bad, np.arange(int(first_chunks[-1]) + 1))
        return cls(counts, chunk_size, first_chunks, gaps, bad_of_chunks, selection)

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
        if self.bad_of_chunks is not None:  # as if only good samples were counted
            indexes -= self.bad_of_chunks[chunks] - self.bad_of_chunks[self.first_chunks[shards]]
        if self.gaps is not None:
            indexes = self.gaps.step_over(shards, indexes)
        if self.selection is not None:
            indexes = self.selection.locate(shards, indexes)
        return shards, indexes

    def epoch(self, epoch: int, seed: int, shuffle: bool) -> EpochChunks:
        """Lay out one epoch. Without shuffle, every epoch is the corpus in its own order."""
        sizes = self.chunk_sizes()
        if not shuffle:
            return EpochChunks.in_one_list(self, np.arange(sizes.size), np.cumsum(sizes), 0)
        chunks = permutation(sizes.size, seed, epoch, "chunks")
        chunk_ends = np.cumsum(sizes[chunks])
        rotation = int(random_words(1, seed, epoch, "rotation")[0]) % int(chunk_ends[-1])
        return EpochChunks.in_one_list(self, chunks, chunk_ends, rotation)


@dataclass(frozen=True, eq=False)
class EpochChunks:
    """The chunks of one epoch, laid end to end. Each list of them is rotated by itself.

    There is one list, of whole chunks. Lanes that keep their samples have a list for each row of
    lanes, and a chunk at the border of two lists is cut in two pieces.
    """

    table: ChunkTable
    chunks: IntArray
    """[num_pieces] chunk of each piece, in the order of this epoch."""
    piece_ends: IntArray
    """[num_pieces] position at which each piece ends, counted over all lists."""
    first_offsets: IntArray
    """[num_pieces] at which sample of its chunk each piece begins."""
    list_starts: IntArray
    """[num_lists] position at which each list starts."""
    list_sizes: IntArray
    """[num_lists] samples of each list."""
    rotations: IntArray
    """[num_lists] which sample of each list comes first."""

    @classmethod
    def in_one_list(
        cls, table: ChunkTable, chunks: IntArray, chunk_ends: IntArray, rotation: int
    ) -> EpochChunks:
        """Return whole chunks as one list. Its first sample is that at position `rotation`."""
        no_offsets = np.broadcast_to(np.int64(0), chunks.size)  # takes no memory
        start, rotations = np.zeros(1, dtype=np.int64), np.array([rotation], dtype=np.int64)
        return cls(table, chunks, chunk_ends, no_offsets, start, chunk_ends[-1:], rotations)

    def locate(self, lists: IntArray | int, offsets: IntArray) -> tuple[IntArray, IntArray]:
        """Return (shards, indexes) of samples of lists.

        Args:
            lists: int64, the list of each sample, or the one list of all of them.
            offsets: int64, any shape, each from 0 to the size of its list, without it. In the one
                list of an epoch these are the slots.

        Returns:
            Two int64 arrays of the shape of `offsets`.
        """
        rotated = (offsets + self.rotations[lists]) % self.list_sizes[lists]
        positions = self.list_starts[lists] + rotated
        pieces = np.searchsorted(self.piece_ends, positions, side="right")
        starts = np.where(pieces > 0, self.piece_ends[pieces - 1], 0)
        offsets_in_chunks = positions - starts + self.first_offsets[pieces]
        return self.table.samples(self.chunks[pieces], offsets_in_chunks)


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


# -- lanes that keep their samples -----------------------------------------------------------------
#
# Lanes that keep their samples, for ``reshuffle="lanes"`` of `Order` and `Source`.
#
# All chunks are laid end to end in one random order, the same in all epochs of a seed. This
# sequence is cut into *lists*, one for each row of lanes: the P lanes that give the same rows to
# steps share one. So a chunk at a border is cut in two *pieces*, and all other pieces are whole
# chunks. An epoch permutes the pieces of each list again, and rotates the list by a random offset
# of its own. No sample moves to another list.
#
# Without the rotation, windows would cut every chunk at the same samples in all epochs, and these
# would meet again and again.
#
# Example: three shards of 5 samples, C = 2, and lists of 9 and 6 samples. The sequence of seed 1
# has chunk 6, the samples (2,0) and (2,1), at positions 8 and 9. So each list has one of them::
#
#     chunk            0   3   2  1   8   6   5   4    7
#     first position   0   2   4  5   7   8   10  11   13
#     first of piece   0   2   4  5   7   8 9 10  11   13
#     list             0   0   0  0   0   0 1  1   1    1

LIST_BITS = 20
"""There are at most 2 ** 20 lists, as `settings.MAX_GRID_LANES` says. The other bits of a sorting
key are random."""


@dataclass(frozen=True, eq=False)
class LaneLists:
    """The samples of each section of the sequence, in all epochs of a seed.

    A list has one section. A source of a mixture has a few sections more, of single samples, which
    belong to another list in another epoch. The example from above:

    >>> from mmstream.order.corpus import Corpus
    >>> table = ChunkTable.cut(Corpus(np.array([5, 5, 5])), chunk_size=2)
    >>> lists = LaneLists.cut(table, np.array([9, 6]), seed=1)
    >>> lists.chunks.tolist()
    [0, 3, 2, 1, 8, 6, 6, 5, 4, 7]
    >>> lists.first_offsets.tolist(), lists.sizes.tolist()
    ([0, 0, 0, 0, 0, 0, 1, 0, 0, 0], [2, 2, 1, 2, 1, 1, 1, 1, 2, 2])
    >>> for epoch in (0, 1):
    ...     shards, indexes = lists.epoch(epoch).locate(np.zeros(9, np.int64), np.arange(9))
    ...     print(*zip(shards.tolist(), indexes.tolist()))
    (1, 0) (1, 1) (2, 0) (2, 4) (0, 2) (0, 3) (0, 0) (0, 1) (0, 4)
    (0, 2) (0, 3) (0, 4) (1, 0) (1, 1) (2, 4) (0, 0) (0, 1) (2, 0)
    """

    table: ChunkTable
    seed: int
    chunks: IntArray
    """[num_pieces] chunk of each piece, in the order of the sequence."""
    first_offsets: IntArray
    """[num_pieces] at which sample of its chunk each piece begins."""
    sizes: IntArray
    """[num_pieces] samples of each piece."""
    sections: IntArray
    """[num_pieces] section of each piece."""

    @classmethod
    def cut(cls, table: ChunkTable, section_sizes: IntArray, seed: int) -> LaneLists:
        """Lay out the chunks of a corpus, and cut the sequence into sections.

        Args:
            table: the chunks.
            section_sizes: samples of each section; their sum is the number of all samples.
            seed: of the sequence and of all epochs.
        """
        sizes = table.chunk_sizes()
        chunks = permutation(sizes.size, seed, "lanes", "chunks")
        sizes = sizes[chunks]
        chunk_ends = np.cumsum(sizes)
        section_ends = np.cumsum(section_sizes)
        borders = np.unique(section_ends[section_ends > 0])
        ranks = np.searchsorted(chunk_ends, borders)
        is_inside = chunk_ends[ranks] > borders
        ranks, borders = ranks[is_inside], borders[is_inside]  # of the chunks that are cut
        piece_ends = np.insert(chunk_ends, ranks, borders)
        chunk_starts = np.insert(chunk_ends - sizes, ranks, (chunk_ends - sizes)[ranks])
        piece_starts = np.concatenate([[0], piece_ends[:-1]])
        is_piece = piece_ends > piece_starts  # and no chunk of bad samples only
        return cls(
            table,
            seed,
            np.insert(chunks, ranks, chunks[ranks])[is_piece],
            (piece_starts - chunk_starts)[is_piece],
            (piece_ends - piece_starts)[is_piece],
            np.searchsorted(section_ends, piece_starts[is_piece], side="right"),
        )

    def epoch(self, epoch: int, list_of_section: IntArray | None = None) -> EpochChunks:
        """Permute the pieces of each list, and rotate the lists.

        Args:
            epoch: any epoch.
            list_of_section: list of each section in this epoch. None: each section is a list.
        """
        lists = self.sections if list_of_section is None else list_of_section[self.sections]
        draws = random_words(lists.size, self.seed, epoch, "lanes", "pieces")
        keys = lists.astype(np.uint64) << np.uint64(64 - LIST_BITS) | draws >> np.uint64(LIST_BITS)
        pieces = np.argsort(keys, kind="stable")
        piece_ends = np.cumsum(self.sizes[pieces])
        num_lists = int(lists.max()) + 1
        num_pieces = np.searchsorted(lists[pieces], np.arange(num_lists), side="right")
        list_ends = np.concatenate([[0], piece_ends])[num_pieces]
        list_sizes = np.diff(list_ends, prepend=0)
        draws = random_words(num_lists, self.seed, epoch, "lanes", "rotations")
        rotations = draws % np.maximum(list_sizes, 1).astype(np.uint64)
        return EpochChunks(
            self.table,
            self.chunks[pieces],
            piece_ends,
            self.first_offsets[pieces],
            list_ends - list_sizes,
            list_sizes,
            rotations.astype(np.int64),
        )
