"""Part of the decode stage: one row of a step, filled with its planned sample or a substitute.

This is the one place that catches errors of samples and the one that drops samples. "Bad" means
that two reads gave the same bytes, which no decoder takes, or that eight gave no sample: what
storage, or the way from it, does once in a while is no fault of the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from mmstream.bad_samples.policy import Action, BadSample
from mmstream.decoding.sample import Decode, decode_sample
from mmstream.decoding.text.decoder import Tokens
from mmstream.errors import (
    ConfigError,
    DecodeError,
    MMStreamError,
    SampleError,
    ShardError,
    SkipSample,
    where,
)
from mmstream.order import MAX_ATTEMPTS
from mmstream.reading.reader import Job, Outcome, RawStep, Reader
from mmstream.types import Sample, SampleLineage, SampleRef

__all__ = ["SHAPE_ATTEMPTS", "Filler", "Ready", "Row", "Transform"]

Transform = Callable[[Sample], Sample]

Ready: TypeAlias = tuple[Sample, Tokens | DecodeError | None]
"""A sample with ``json`` parsed, and its text as tokens."""

BUGS = (NameError, ImportError, AttributeError, AssertionError, MemoryError)
"""What a user's transform raises because of its code, not its data: these stop the run."""


MAX_LOOKS = 8
"""Reads of a sample that comes in other bytes each time, or in none that make sense."""

SHAPE_ATTEMPTS = {SkipSample: 256, SampleError: 32}
"""Attempts at a row that a filter, or bad data alone, leaves empty. After MAX_ATTEMPTS the row is
invalid; what it shows is still found by its own draws: a batch is the same on every topology."""

ORIGIN = ("__key__", "__url__", "__source__", "__lineage__")
"""Where a sample comes from: kept, whatever a transform returns."""


class Row(NamedTuple):
    """One row of a step, and what was bad about its planned sample."""

    sample: Sample | None
    shown: SampleRef
    bad: BadSample | None
    filled: bool = True
    """False: `sample` only keeps the batch's shape, and the row is invalid."""


@dataclass(frozen=True)
class Filler:
    """What it takes to fill rows: `decoding.stage.decode` says what each of it is."""

    reader: Reader
    decoders: Decode | None
    transforms: tuple[Transform, ...]
    substitute_shards: bool
    action: Action

    def __call__(
        self, step: RawStep, place: int, ready: Ready | None, out: torch.Tensor | None
    ) -> Row:
        """Return the row at a place of a step: its planned sample, or else a substitute."""
        planned, row = step.refs[place], step.job.start + place
        try:
            found = step.samples[place]
            return Row(self._usable(step.job, row, planned, found, out, ready), planned, None)
        except SampleError as error:
            cause = error.__cause__ if isinstance(error.__cause__, ShardError) else error
            if self.action == "raise" and not isinstance(error, SkipSample):
                raise cause from None
            kind, reason = type(cause).__name__, str(error)
        sample, shown, filled = self._substitute(step.job, row, out)
        filled = filled and self.action != "mask"
        if not step.valid[place]:
            return Row(sample, shown, None, filled)  # padding: counted where it is valid
        name = self.reader.dataset.name_of
        bad = BadSample(
            step.job.epoch,
            step.job.step,
            row,
            name(planned[0]),
            planned[1],
            kind,
            reason,
            (name(shown[0]), shown[1]) if filled else None,
        )
        return Row(sample, shown, bad, filled)

    def _substitute(
        self, job: Job, row: int, out: torch.Tensor | None
    ) -> tuple[Sample | None, SampleRef, bool]:
        ref, tried = (-1, -1), set[SampleRef]()
        most = SHAPE_ATTEMPTS[SampleError]
        for attempt in range(SHAPE_ATTEMPTS[SkipSample]):
            if attempt == most:
                break
            ref = self.reader.order.substitute(job.epoch, job.step, row, attempt)
            if ref in tried:
                continue
            tried.add(ref)
            try:
                sample = self._usable(job, row, ref, self.reader.one(ref), out)
            except SkipSample:
                most = SHAPE_ATTEMPTS[SkipSample]
                continue
            except SampleError:
                continue
            return sample, ref, attempt < MAX_ATTEMPTS
        return None, ref, False

    def _usable(
        self,
        job: Job,
        row: int,
        ref: SampleRef,
        found: Outcome,
        out: torch.Tensor | None,
        ready: Ready | None = None,
    ) -> Sample:
        """Return a sample ready to be collated; look again before calling it bad."""
        before: list[Outcome] = []
        while True:
            try:
                return self._prepare(job, row, ref, found, out, ready)
            except SkipSample:
                raise
            except (SampleError, ShardError):
                if len(before) + 1 == MAX_LOOKS or any(_same(one, found) for one in before):
                    raise
            before.append(found)
            ready = None
            if isinstance(found, Exception):  # perhaps it was the index that came wrong
                self.reader.dataset.forget_index(ref[0])
            found = self.reader.one(ref)

    def _prepare(
        self,
        job: Job,
        row: int,
        ref: SampleRef,
        found: Outcome,
        out: torch.Tensor | None,
        ready: Ready | None,
    ) -> Sample:
        if isinstance(found, ShardError):
            if self.substitute_shards:
                raise SampleError(str(found)) from found
            raise found
        if isinstance(found, SampleError):
            raise found
        seed, epoch = self.reader.order.stream(job.epoch, job.step, row)
        shard, index = found["__lineage__"][:2]
        lineage = SampleLineage(shard, index, epoch, job.step, seed)
        parsed, tokens = ready or (found, None)
        sample = decode_sample(parsed | {"__lineage__": lineage}, self.decoders, out, tokens)
        for transform in self.transforms:
            sample = self._transform(transform, sample, ref)
        return sample

    def _transform(self, transform: Transform, sample: Sample, ref: SampleRef) -> Sample:
        name = getattr(transform, "__name__", type(transform).__name__)
        origin = {field: sample[field] for field in ORIGIN if field in sample}
        address = where(self.reader.dataset.name_of(ref[0]), ref[1], str(origin["__key__"]))
        try:
            result = transform(sample)
        except SampleError as error:
            # A user's own subclass becomes ours: it may not take one string, and is judged alike.
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
        return result | origin


def _same(one: Outcome, other: Outcome) -> bool:
    """Tell whether two reads gave the same bytes, or the same reason why there are none.

    Bytes that are no sample may be anything, and look alike: they are never the same.
    """
    if isinstance(one, ShardError) and isinstance(other, ShardError):
        return str(one) == str(other)
    return isinstance(one, dict) and one == other
