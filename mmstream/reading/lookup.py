"""Single samples, read when they are asked for: second reads and substitutes of bad samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmstream.dataset.keys import shard_stamp
from mmstream.dataset.shards import MAX_SAMPLE_READS
from mmstream.dataset.source import ShardSource
from mmstream.errors import ChecksumError
from mmstream.order import AnyOrder, Unit
from mmstream.reading.fetcher import Fetcher
from mmstream.reading.step import Outcome
from mmstream.types import SampleRef


class FixedDraws(NamedTuple):
    """What decoding asks a lookup or an order where samples have no row in an epoch."""

    seed: int
    epoch: int
    shard_name: Callable[[int], str]

    def stream(self, *_: int) -> tuple[int, int]:
        """Return the key of the random draws."""
        return self.seed, self.epoch


@dataclass(frozen=True)
class SampleLookup:
    """Answers what the decode stage asks about samples that its step does not hold."""

    source: ShardSource
    order: AnyOrder
    fetcher: Fetcher

    def read(self, ref: SampleRef) -> Outcome:
        """Read one sample from storage, now."""
        return self.fetcher.fetch([ref]).take(0)

    def read_all(self, refs: Sequence[SampleRef]) -> list[Outcome]:
        """Read samples from storage together, such as those of a pack."""
        return self.fetcher.fetch(refs).take_all(0, len(refs))

    def read_again(self, ref: SampleRef) -> Outcome:
        """Read one sample once more, past what this machine holds of its shard."""
        return self.fetcher.fetch([ref], past_caches=True).take(0)

    def read_until_right(self, ref: SampleRef) -> Outcome:
        """Read one sample whose bytes came unlike their checksum, until they fit it or for good."""
        outcome = self.read_again(ref)
        for _ in range(MAX_SAMPLE_READS - 2):
            if not isinstance(outcome, ChecksumError):
                break
            outcome = self.read_again(ref)
        return outcome

    def forget_index(self, shard: int) -> None:
        """Read the index of a shard again at its next use."""
        location = self.source.locate(shard)
        location.dataset.shards.forget_index(location.shard)

    def planned(self, epoch: int, step: int, position: int) -> tuple[int, Unit]:
        """Return the row of the order at a position of a step, and its planned samples."""
        rows = position, position + 1
        shards, indexes, _ = self.order.refs(epoch, step, rows)
        num_tokens = self.order.document_tokens(epoch, step, rows).tolist()
        row = int(self.order.order_rows(epoch, step, rows)[0])
        return row, Unit(list(zip(shards.tolist(), indexes.tolist(), strict=True)), num_tokens)

    def stream(self, epoch: int, step: int, row: int) -> tuple[int, int]:
        """Return (seed, epoch), the key of the random draws for a row."""
        return self.order.stream(epoch, step, row)

    def shard_name(self, shard: int) -> str:
        """Return the name of a shard, as messages show it."""
        return self.source.name_of(shard)

    def shard_stamp(self, shard: int) -> str:
        """Return what tells a shard from one of the same name in another dataset."""
        location = self.source.locate(shard)
        return shard_stamp(location.dataset.manifest.shards[location.shard])
