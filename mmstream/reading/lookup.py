"""Single samples, read when they are asked for: second reads and substitutes of bad samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmstream.bad_samples.quarantine import shard_stamp
from mmstream.dataset.dataset import MAX_SAMPLE_READS
from mmstream.dataset.source import ShardSource
from mmstream.errors import ChecksumError
from mmstream.order import AnyOrder, Unit
from mmstream.reading.fetcher import Fetcher
from mmstream.reading.step import Outcome
from mmstream.types import SampleRef

__all__ = ["SampleLookup"]


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
        location.dataset.forget_index(location.shard)

    def substitute(self, epoch: int, step: int, row: int, attempt: int) -> SampleRef:
        """Return the sample that takes the row of a bad one; see `Order.substitute`."""
        (ref,) = self.order.substitute_unit(epoch, step, row, attempt).refs
        return ref

    def substitute_unit(self, epoch: int, step: int, row: int, attempt: int) -> Unit:
        """Return the pack that takes the row of one without a good sample."""
        return self.order.substitute_unit(epoch, step, row, attempt)

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
