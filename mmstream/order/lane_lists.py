"""Lanes that keep their samples, for ``reshuffle="lanes"`` of `Order` and `Source`.

All chunks are laid end to end in one random order, the same in all epochs of a seed. This sequence
is cut into *lists*, one for each row of lanes: the P lanes that give the same rows to steps share
one. So a chunk at a border is cut in two *pieces*, and all other pieces are whole chunks. An epoch
permutes the pieces of each list anew, and rotates the list by a random offset of its own. No sample
moves to another list.

Without the rotation, windows would cut every chunk at the same samples in all epochs, and these
would meet again and again.

Example: three shards of 5 samples, C = 2, and lists of 9 and 6 samples. The sequence of seed 1 has
chunk 6, the samples (2,0) and (2,1), at positions 8 and 9. So each list has one of them::

    chunk            0   3   2  1   8   6   5   4    7
    first position   0   2   4  5   7   8   10  11   13
    first of piece   0   2   4  5   7   8 9 10  11   13
    list             0   0   0  0   0   0 1  1   1    1

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

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmstream.order.chunks import ChunkTable
from mmstream.order.permute import permutation, random_words
from mmstream.types import IntArray

LIST_BITS = 20
"""There are at most 2 ** 20 lists, as `checks.MAX_LANES` says. The other bits of a sorting key are
random."""


@dataclass(frozen=True, eq=False)
class LaneLists:
    """Which samples each section of the sequence has, in all epochs of a seed.

    A list has one section. A source of a mixture has a few sections more, of single samples, which
    belong to another list in another epoch.
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

    def epoch(self, epoch: int, list_of_section: IntArray | None = None) -> EpochLaneLists:
        """Permute the pieces of each list, and rotate the lists.

        Args:
            epoch: any epoch.
            list_of_section: list of each section in this epoch. None: each section is a list.
        """
        lists = self.sections if list_of_section is None else list_of_section[self.sections]
        words = random_words(lists.size, self.seed, epoch, "lanes", "pieces")
        keys = lists.astype(np.uint64) << np.uint64(64 - LIST_BITS) | words >> np.uint64(LIST_BITS)
        pieces = np.argsort(keys, kind="stable")
        piece_ends = np.cumsum(self.sizes[pieces])
        num_lists = int(lists.max()) + 1
        num_pieces = np.searchsorted(lists[pieces], np.arange(num_lists), side="right")
        list_ends = np.concatenate([[0], piece_ends])[num_pieces]
        list_sizes = np.diff(list_ends, prepend=0)
        words = random_words(num_lists, self.seed, epoch, "lanes", "rotations")
        rotations = words % np.maximum(list_sizes, 1).astype(np.uint64)
        return EpochLaneLists(
            self.table,
            self.chunks[pieces],
            piece_ends,
            self.first_offsets[pieces] - (piece_ends - self.sizes[pieces]),
            list_ends - list_sizes,
            list_sizes,
            rotations.astype(np.int64),
        )


@dataclass(frozen=True, eq=False)
class EpochLaneLists:
    """The samples of each list in the order of one epoch, list after list."""

    table: ChunkTable
    chunks: IntArray
    """[num_pieces] chunk of each piece."""
    piece_ends: IntArray
    """[num_pieces] where each piece ends, counted over all lists."""
    offsets_of_0: IntArray
    """[num_pieces] what to add to a position of each piece, for its offset in the chunk."""
    list_starts: IntArray
    """[num_lists] where each list starts."""
    list_sizes: IntArray
    """[num_lists] samples of each list."""
    rotations: IntArray
    """[num_lists] which sample of each list comes first."""

    def locate(self, lists: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray]:
        """Return (shards, indexes) of samples of lists.

        Args:
            lists: int64, any shape.
            offsets: int64 of that shape, each from 0 to the size of its list, without it.

        Returns:
            Two int64 arrays of that shape.
        """
        rotated = (offsets + self.rotations[lists]) % self.list_sizes[lists]
        positions = self.list_starts[lists] + rotated
        pieces = np.searchsorted(self.piece_ends, positions, side="right")
        return self.table.samples(self.chunks[pieces], positions + self.offsets_of_0[pieces])
