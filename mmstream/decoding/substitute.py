"""One row of a step: its planned sample, decoded, or a substitute for a bad one.

This is the only place that catches errors of samples, and the only one that drops samples. A sample
is bad when two reads gave the same bytes and no decoder accepts them, or when `MAX_SAMPLE_READS`
reads gave no sample, or other bytes than its checksum says. A fault that storage makes once in a
while is no fault of the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch

from mmstream.bad_samples.policy import BadSamplePolicy
from mmstream.bad_samples.quarantine import BadSample
from mmstream.dataset.dataset import MAX_SAMPLE_READS
from mmstream.decoding.sample import LOSS_FIELD, Decode, TextTokens, decode_sample
from mmstream.errors import (
    ChecksumError,
    ConfigError,
    DecodeError,
    MMStreamError,
    SampleError,
    ShardError,
    SkipSample,
    escaped,
    where,
)
from mmstream.order import MAX_ATTEMPTS
from mmstream.progress import Progress, Stage
from mmstream.reading.step import Outcome, RawStep
from mmstream.types import Sample, SampleLineage, SampleRef

__all__ = ["MAX_SUBSTITUTES", "Lookup", "Row", "RowDecoder", "Transform"]

Transform: TypeAlias = Callable[[Sample], Sample]

BUGS = (NameError, ImportError, AttributeError, AssertionError, MemoryError)
"""What a transform raises because of its code, not its data. These errors stop the run."""

MAX_SUBSTITUTES = {SkipSample: 256, SampleError: 32}
"""Substitutes tried for a row: more where a filter leaves samples out than where data is bad.

After `order.MAX_ATTEMPTS` of them the row is invalid. What it shows still comes from its own draws,
so that a batch is the same on every topology.
"""

ORIGIN_FIELDS = ("__key__", "__url__", "__source__", "__lineage__", LOSS_FIELD)
"""Where a sample comes from, and what it has lost. A transform cannot change these fields."""


class Lookup(Protocol):
    """What decoding asks about samples that its step does not hold: `reading.lookup`."""

    def read(self, ref: SampleRef) -> Outcome:
        """Read one sample from storage, now."""

    def read_again(self, ref: SampleRef) -> Outcome:
        """Read one sample once more, past what this machine holds of its shard."""

    def forget_index(self, shard: int) -> None:
        """Read the index of a shard again at its next use."""

    def substitute(self, epoch: int, step: int, row: int, attempt: int) -> SampleRef:
        """Return the sample that takes the row of a bad one."""

    def stream(self, epoch: int, step: int, row: int) -> tuple[int, int]:
        """Return (seed, epoch), the key of the random draws for a row."""

    def shard_name(self, shard: int) -> str:
        """Return the name of a shard."""

    def shard_stamp(self, shard: int) -> str:
        """Return what tells a shard from one of the same name in another dataset."""


class Row(NamedTuple):
    """One row of a step, and what was bad about its planned sample."""

    sample: Sample | None
    shown: SampleRef
    bad: BadSample | None
    is_filled: bool = True
    """False: `sample` only keeps the shape of the batch, and the row is invalid."""


class _RowAddress(NamedTuple):
    epoch: int
    step: int
    row: int
    """Row of the global batch."""


@dataclass(frozen=True)
class RowDecoder:
    """Decodes rows. `DecodeStage` describes its fields."""

    lookup: Lookup
    decoders: Decode | None
    transforms: tuple[Transform, ...]
    policy: BadSamplePolicy
    progress: Progress

    def __call__(
        self, step: RawStep, position: int, text: TextTokens | None, image_out: torch.Tensor | None
    ) -> Row:
        """Return one row of a step: its planned sample, or else a substitute.

        Args:
            step: raw samples.
            position: of the row among the rows of this rank.
            text: what `decode_texts` has made of the planned sample.
            image_out: uint8 [H, W, 3], the memory of the batch for the row's image.
        """
        lineage = step.lineage
        planned = lineage.planned[position]
        address = _RowAddress(lineage.epoch, lineage.step, lineage.start + position)
        try:
            sample = self._decode_planned(
                address, planned, step.outcomes[position], image_out, text
            )
            return Row(sample, planned, None)
        except SampleError as error:
            cause = error.__cause__ if isinstance(error.__cause__, ShardError) else error
            if self.policy.action == "raise" and not isinstance(error, SkipSample):
                raise cause from None
            kind, reason = type(cause).__name__, str(error)
        substitute, shown, is_filled = self._substitute(address, image_out)
        is_filled = is_filled and self.policy.action != "mask"
        if not lineage.valid[position]:
            return Row(substitute, shown, None, is_filled)  # padding: counted where it is valid
        shard, index = planned
        bad = BadSample(
            *address,
            self.lookup.shard_name(shard),
            index,
            kind,
            reason,
            (self.lookup.shard_name(shown[0]), shown[1]) if is_filled else None,
            self.lookup.shard_stamp(shard),
        )
        return Row(substitute, shown, bad, is_filled)

    def _substitute(
        self, address: _RowAddress, image_out: torch.Tensor | None
    ) -> tuple[Sample | None, SampleRef, bool]:
        """Return a substitute, where it comes from, and whether it counts as the row's sample."""
        ref: SampleRef = (-1, -1)
        tried = set[SampleRef]()
        max_substitutes = MAX_SUBSTITUTES[SampleError]
        attempt = 0
        while attempt < max_substitutes:
            ref = self.lookup.substitute(*address, attempt)
            attempt += 1
            if ref in tried:
                continue
            tried.add(ref)
            try:
                self._note_read(address, ref)
                outcome = self.lookup.read(ref)
                sample = self._decode_planned(address, ref, outcome, image_out)
            except SkipSample:
                max_substitutes = MAX_SUBSTITUTES[SkipSample]
            except SampleError:
                pass
            else:
                return sample, ref, attempt <= MAX_ATTEMPTS
        return None, ref, False

    def _decode_planned(
        self,
        address: _RowAddress,
        ref: SampleRef,
        outcome: Outcome,
        image_out: torch.Tensor | None,
        text: TextTokens | None = None,
    ) -> Sample:
        """Return a sample ready to be collated. Read it again before calling it bad.

        Decoders give the same answer to the same bytes, so bytes that one of them has refused are
        not decoded again: the refusal may have taken all the time that a sample has.
        """
        earlier_outcomes: list[Outcome] = []
        while True:
            try:
                return self._decode(address, ref, outcome, image_out, text)
            except SkipSample:
                raise
            except (SampleError, ShardError) as error:
                is_last = len(earlier_outcomes) + 1 == MAX_SAMPLE_READS
                is_last |= isinstance(outcome, ShardError) and outcome.is_replaced
                if is_last or any(_is_same(earlier, outcome) for earlier in earlier_outcomes):
                    raise
                # The index may have been delivered wrong, but not one that fits its checksums.
                if isinstance(outcome, Exception) and not isinstance(outcome, ChecksumError):
                    self.lookup.forget_index(ref[0])
                self._note_read(address, ref)
                again = self.lookup.read_again(ref)
                if isinstance(error, DecodeError) and _is_same(outcome, again):
                    raise
            earlier_outcomes.append(outcome)
            text = None
            outcome = again

    def _note_read(self, address: _RowAddress, ref: SampleRef) -> None:
        self.progress.begin_sample(Stage.READ_AGAIN, address.epoch, address.step, *ref, "")

    def _decode(
        self,
        address: _RowAddress,
        ref: SampleRef,
        outcome: Outcome,
        image_out: torch.Tensor | None,
        text: TextTokens | None,
    ) -> Sample:
        if isinstance(outcome, ShardError):
            if self.policy.shards:
                raise SampleError(str(outcome)) from outcome
            raise outcome
        if isinstance(outcome, SampleError):
            raise outcome
        key = str(outcome["__key__"])
        self.progress.begin_sample(Stage.DECODE, address.epoch, address.step, *ref, key)
        seed, epoch = self.lookup.stream(*address)
        shard, index = outcome["__lineage__"][:2]
        lineage = SampleLineage(shard, index, epoch, address.step, seed)
        parsed, tokens = text or (outcome, None)
        sample = decode_sample(parsed | {"__lineage__": lineage}, self.decoders, image_out, tokens)
        for transform in self.transforms:
            sample = self._transform(transform, sample, ref)
        return sample

    def _transform(self, transform: Transform, sample: Sample, ref: SampleRef) -> Sample:
        name = getattr(transform, "__name__", type(transform).__name__)
        origin = {field: sample[field] for field in ORIGIN_FIELDS if field in sample}
        address = where(self.lookup.shard_name(ref[0]), ref[1], str(origin["__key__"]))
        try:
            result = transform(sample)
        except SampleError as error:
            # A user's subclass may not take one string, so it is raised again as one of ours.
            kind = next(k for k in (SkipSample, DecodeError, SampleError) if isinstance(error, k))
            raise kind(f"{address}: {name}: {error}") from error
        except (MMStreamError, *BUGS):
            raise
        except Exception as error:
            raise SampleError(f"{address}: {name}: {type(error).__name__}: {error}") from error
        if not isinstance(result, dict):
            raise ConfigError(
                f"transform {name} returned {type(result).__name__}: it must return the sample "
                '(to leave one out, raise mm.SkipSample("why"))'
            )
        if wrong := [key for key in result if not isinstance(key, str)]:
            raise ConfigError(
                f"transform {name} returned a sample with the key {escaped(repr(wrong[0]))}: "
                "keys are strings"
            )
        return {name: result[name] for name in result if name not in ORIGIN_FIELDS} | origin


def _is_same(outcome: Outcome, other: Outcome) -> bool:
    """Tell whether two reads gave the same bytes, or the same reason why there are none.

    Bytes that are no sample may be anything and look alike, so they are never the same.
    """
    if isinstance(outcome, ShardError) and isinstance(other, ShardError):
        return str(outcome) == str(other)
    return isinstance(outcome, dict) and outcome == other
