"""A selection: which samples of a corpus take part, one bit each.

Everything else counts stored samples: addresses in logs, substitutes, random draws, the bad list.
An order counts the chosen samples of each shard, and asks here which stored ones they are.

The bits of a shard begin at a byte, so that those of the first shards stay when others are
appended. Example: shards of 5 and 9 samples, of which 1, 4 and 0, 8 are chosen::

    shard           0          1
    bits            01001000   10000000 10000000
    chosen counts   2          2
    number 1        index 4    index 8

The n-th set bit is found in two moves. How many bits are set before each block of 512 is known, and
the bits of one block are counted. So a selection of 10^9 samples takes 141 MB.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mmstream.types import IntArray

BLOCK_BYTES = 64
"""Bytes of a block."""

BLOCK_BITS = 8 * BLOCK_BYTES

PIECE_BLOCKS = 1 << 14
"""Blocks whose bits are counted at once: 1 MB."""

PIECE_SAMPLES = 1 << 12
"""Samples that are looked up at once: 2 MB of bits."""

Bits = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Selection:
    """The chosen samples of a corpus.

    Examples:
        >>> masks = [False, True, False, False, True], [True, False, False]
        >>> selection = Selection.of_shards(map(np.array, masks), np.array([5, 3]))
        >>> selection.chosen_counts.tolist()
        [2, 1]
        >>> selection.locate(np.array([0, 0, 1]), np.array([0, 1, 0])).tolist()
        [1, 4, 0]
        >>> selection.numbers(np.array([0, 1]), np.array([4, 0])).tolist()
        [1, 0]
    """

    counts: IntArray
    """[num_shards] stored samples of each shard."""
    bits: Bits
    """The bits of each shard, padded to whole bytes, and zeros up to the end of a block. There is
    at least one such zero byte."""
    reopen: Callable[[], Selection] | None = None
    """Opens the same selection in another process, where its bits are a file's. None: they are sent
    along."""

    @classmethod
    def of_shards(cls, masks: Iterable[Mask], counts: IntArray) -> Selection:
        """Make a selection.

        Args:
            masks: for each shard, bool [its samples], whether each of them is chosen.
            counts: int64 [num_shards], samples of each shard.
        """
        starts, bits = _starts(counts), np.zeros(num_bit_bytes(counts), dtype=np.uint8)
        for mask, start, stop in zip(masks, starts, starts[1:], strict=False):
            bits[start:stop] = np.packbits(mask)
        return cls(counts, bits)

    @classmethod
    def of_all(cls, counts: IntArray) -> Selection:
        """Return the selection of all samples."""
        return cls.of_shards((np.ones(count, dtype=np.bool_) for count in counts), counts)

    @classmethod
    def joined(cls, parts: Sequence[Selection]) -> Selection:
        """Return a selection of the shards of several, one after the other."""
        counts = np.concatenate([part.counts for part in parts])
        bits = np.zeros(num_bit_bytes(counts), dtype=np.uint8)
        own = [part.bits[: part.starts[-1]] for part in parts]
        bits[: sum(map(len, own))] = np.concatenate(own)
        is_mapped = any(part.reopen is not None for part in parts)
        return cls(counts, bits, partial(cls.joined, parts) if is_mapped else None)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.reopen is None:
            return Selection, (self.counts, self.bits)
        return self.reopen, ()

    def mask(self, shard: int) -> Mask:
        """Return bool [its samples], whether each sample of a shard is chosen."""
        bits = self.bits[self.starts[shard] : self.starts[shard + 1]]
        mask: Mask = np.unpackbits(bits, count=int(self.counts[shard])).astype(np.bool_)
        return mask

    @cached_property
    def starts(self) -> IntArray:
        """[num_shards + 1] the first byte of each shard, and the number of all bytes."""
        return _starts(self.counts)

    @cached_property
    def chosen_counts(self) -> IntArray:
        """[num_shards] chosen samples of each shard."""
        return np.diff(self._set_before(8 * self.starts))

    @property
    def num_chosen(self) -> int:
        """Chosen samples of all shards."""
        return int(self._blocks_before[-1])

    @property
    def is_whole(self) -> bool:
        """Whether no bit is set that is of no sample: those that a stranger wrote may be."""
        ends, used = self.starts[1:], self.counts % 8
        last = self.bits[ends[used > 0] - 1]
        has_spare = bool((last & (0xFF >> used[used > 0])).any())
        return not has_spare and not self.bits[self.starts[-1] :].any()

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits of a SHA-256 of the counts and the bits."""
        content = hashlib.sha256(self.counts.astype("<i8").tobytes())
        content.update(self.bits.data)
        return content.hexdigest()[:32]

    def has(self, shards: IntArray, indexes: IntArray) -> Mask:
        """Return whether each of these samples is chosen."""
        places, bit = self.starts[shards] + indexes // 8, 7 - indexes % 8
        is_chosen: Mask = (self.bits[places] >> bit.astype(np.uint8) & 1).astype(np.bool_)
        return is_chosen

    def numbers(self, shards: IntArray, indexes: IntArray) -> IntArray:
        """Return how many chosen samples of its shard lie before each of these samples."""
        places = 8 * self.starts[shards] + indexes
        return self._set_before(places) - self._before_shards[shards]

    def locate(self, shards: IntArray, numbers: IntArray) -> IntArray:
        """Return the indexes of chosen samples: the inverse of `numbers`.

        Args:
            shards: int64, any shape, the shard of each sample.
            numbers: int64, how many chosen samples of the shard lie before it.
        """
        ranks = np.atleast_1d(self._before_shards[shards] + numbers)
        places = np.empty_like(ranks)
        for start in range(0, ranks.size, PIECE_SAMPLES):
            wanted = ranks[start : start + PIECE_SAMPLES]
            blocks = np.searchsorted(self._blocks_before, wanted, side="right") - 1
            ordinals = wanted - self._blocks_before[blocks] + 1  # 1: the first set bit of a block
            counted = np.cumsum(self._bits_of(blocks), axis=1, dtype=np.int16)
            offsets = np.argmax(counted == ordinals[:, None], axis=1)
            places[start : start + PIECE_SAMPLES] = blocks * BLOCK_BITS + offsets
        return places.reshape(np.shape(shards)) - 8 * self.starts[shards]

    @property
    def gap_share(self) -> float:
        """Share of the chosen samples whose left neighbour is not chosen; no shard's first ones."""
        left = self.bits >> 1  # the bit of each sample is now that of its left neighbour
        left[1:] |= self.bits[:-1] << 7
        left[self.starts[:-1]] &= 127
        num_firsts = int(np.bitwise_count(self.bits & ~left).sum())
        num_shards = int(np.count_nonzero(self.chosen_counts))
        return float((num_firsts - num_shards) / max(1, self.num_chosen - num_shards))

    def first_shards(self, num_shards: int) -> Selection:
        """Return the selection of the first shards alone: of all, where there are no more."""
        if num_shards >= self.counts.size:
            return self
        return Selection.of_shards(map(self.mask, range(num_shards)), self.counts[:num_shards])

    def __and__(self, other: Selection) -> Selection:
        return Selection(self.counts, self.bits & other.bits)

    def __or__(self, other: Selection) -> Selection:
        return Selection(self.counts, self.bits | other.bits)

    def __sub__(self, other: Selection) -> Selection:
        return Selection(self.counts, self.bits & ~other.bits)

    @cached_property
    def _before_shards(self) -> IntArray:
        return np.cumsum(self.chosen_counts) - self.chosen_counts

    @cached_property
    def _blocks_before(self) -> IntArray:
        """[num_blocks + 1] bits that are set before each block, and in all of them."""
        blocks = self.bits.reshape(-1, BLOCK_BYTES)
        of_blocks = np.zeros(len(blocks) + 1, dtype=np.int64)
        for start in range(0, len(blocks), PIECE_BLOCKS):
            counted = np.bitwise_count(blocks[start : start + PIECE_BLOCKS])
            of_blocks[start + 1 : start + 1 + len(counted)] = counted.sum(axis=1, dtype=np.int64)
        return np.cumsum(of_blocks, out=of_blocks)

    def _set_before(self, places: IntArray) -> IntArray:
        """Return how many bits are set before each place."""
        counted = np.empty_like(places)
        for start in range(0, places.size, PIECE_SAMPLES):
            blocks, offsets = np.divmod(places[start : start + PIECE_SAMPLES], BLOCK_BITS)
            is_before = np.arange(BLOCK_BITS) < offsets[:, None]
            in_block = (self._bits_of(blocks) & is_before).sum(axis=1)
            counted[start : start + PIECE_SAMPLES] = self._blocks_before[blocks] + in_block
        return counted

    def _bits_of(self, blocks: IntArray) -> Bits:
        """Return uint8 [n, 512], the bits of blocks."""
        return np.unpackbits(self.bits.reshape(-1, BLOCK_BYTES)[blocks], axis=1)


def num_bit_bytes(counts: IntArray) -> int:
    """Return how many bytes `Selection.bits` has for shards with these numbers of samples."""
    return int(_starts(counts)[-1] // BLOCK_BYTES + 1) * BLOCK_BYTES


def _starts(counts: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(-(-counts // 8))])
