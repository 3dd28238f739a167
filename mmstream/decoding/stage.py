"""The third stage: order -> read -> DECODE -> batch -> loader -> device.

In: raw samples of a step. Out: as many decoded, transformed samples, whatever the data is like: a
bad sample's place is taken by a deterministic substitute, so steps and ranks stay in balance. This
is the one place that catches errors of samples and the one that drops samples.

"Bad" means that two reads gave the same bytes, which no decoder takes, or that eight gave no
sample: what storage, or the way from it, does once in a while is no fault of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mmstream.decoding import Decode, decode_sample
from mmstream.errors import (
    ConfigError,
    DecodeError,
    MMStreamError,
    SampleError,
    ShardError,
    SkipLimitError,
    SkipSample,
    where,
)
from mmstream.order import MAX_ATTEMPTS
from mmstream.reading import Job, Outcome, RawStep, Reader, Ref
from mmstream.sample import Sample
from mmstream.skip import Action, BadSample

__all__ = ["DecodedStep", "Transform", "decode"]

Transform = Callable[[Sample], Sample]

BUGS = (NameError, ImportError, AttributeError, AssertionError, MemoryError)
"""What a user's transform raises because of its code, not its data: these stop the run."""


MAX_LOOKS = 8
"""Reads of a sample that comes in other bytes each time, or in none that make sense."""

SHAPE_ATTEMPTS = {SkipSample: 256, SampleError: 32}
"""Attempts at a row that a filter, or bad data alone, leaves empty. After MAX_ATTEMPTS the row is
invalid; what it shows is still found by its own draws: a batch is the same on every topology."""

ORIGIN = ("__key__", "__url__", "__source__", "__lineage__")
"""Where a sample comes from: kept, whatever a transform returns."""


class DecodedStep(NamedTuple):
    """The samples of a job, a row each, ready to be collated."""

    job: Job
    samples: list[Sample]
    valid: list[bool]
    planned: list[Ref]
    shown: list[Ref]
    bad: tuple[BadSample, ...]
    num_bytes: int
    num_requests: int


def decode(
    steps: Iterable[RawStep],
    reader: Reader,
    decoders: Decode | None = None,
    transforms: Sequence[Transform] = (),
    *,
    skip_shards: bool = False,
    action: Action = "substitute",
    num_threads: int = 1,
) -> Iterator[DecodedStep]:
    """Yield each step with its samples decoded and transformed, in the order of rows.

    Args:
        steps: raw samples.
        reader: for second reads and substitutes.
        decoders: of images and text; None only parses ``json``.
        transforms: functions from sample to sample, run in this order after decoding.
        skip_shards: whether an unreadable shard makes bad samples or ends the stream.
        action: what becomes of a bad sample's row; see `SkipPolicy`.
        num_threads: rows decoded side by side; decoders release the GIL.

    Raises:
        ShardError: an unreadable shard, unless `skip_shards`.
        SampleError: a bad sample, where `action` is "raise".
        SkipLimitError: a step of which no row can be filled.
        StorageError: storage failed after retries.
        NameError, AttributeError, ...: a transform has a bug.
    """
    shape = decoders.image.output_shape if decoders and decoders.image else None
    filler = _Filler(reader, decoders, tuple(transforms), skip_shards, action)
    with ThreadPoolExecutor(num_threads) if num_threads > 1 else nullcontext() as pool:
        for step in steps:
            pictures = _picture_buffer(len(step.refs), shape)
            places = range(len(step.refs))
            fill = _bind(filler, step, pictures)
            rows = list(pool.map(fill, places) if pool else map(fill, places))
            yield _assemble(step, rows)


class _Row(NamedTuple):
    sample: Sample | None
    shown: Ref
    bad: BadSample | None
    filled: bool = True
    """False: `sample` only keeps the batch's shape, and the row is invalid."""


@dataclass(frozen=True)
class _Filler:
    """Fills one row of a step: with the planned sample, or else with a substitute."""

    reader: Reader
    decoders: Decode | None
    transforms: tuple[Transform, ...]
    skip_shards: bool
    action: Action

    def __call__(self, step: RawStep, place: int, out: torch.Tensor | None) -> _Row:
        planned, row = step.refs[place], step.job.start + place
        try:
            found = step.samples[place]
            return _Row(self._usable(step.job, row, planned, found, out), planned, None)
        except SampleError as error:
            cause = error.__cause__ if isinstance(error.__cause__, ShardError) else error
            if self.action == "raise" and not isinstance(error, SkipSample):
                raise cause from None
            kind, reason = type(cause).__name__, str(error)
        sample, shown, filled = self._substitute(step.job, row, out)
        filled = filled and self.action != "mask"
        if not step.valid[place]:
            return _Row(sample, shown, None, filled)  # padding: counted where it is valid
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
        return _Row(sample, shown, bad, filled)

    def _substitute(
        self, job: Job, row: int, out: torch.Tensor | None
    ) -> tuple[Sample | None, Ref, bool]:
        ref, tried = (-1, -1), set[Ref]()
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
        self, job: Job, row: int, ref: Ref, found: Outcome, out: torch.Tensor | None
    ) -> Sample:
        """Return a sample ready to be collated; look again before calling it bad."""
        before: list[Outcome] = []
        while True:
            try:
                return self._prepare(job, row, ref, found, out)
            except SkipSample:
                raise
            except (SampleError, ShardError):
                if len(before) + 1 == MAX_LOOKS or any(_same(one, found) for one in before):
                    raise
            before.append(found)
            if isinstance(found, Exception):  # perhaps it was the index that came wrong
                self.reader.dataset.forget_index(ref[0])
            found = self.reader.one(ref)

    def _prepare(
        self, job: Job, row: int, ref: Ref, found: Outcome, out: torch.Tensor | None
    ) -> Sample:
        if isinstance(found, ShardError):
            if self.skip_shards:
                raise SampleError(str(found)) from found
            raise found
        if isinstance(found, SampleError):
            raise found
        seed, epoch = self.reader.order.stream(job.epoch, job.step, row)
        lineage = found["__lineage__"]._replace(epoch=epoch, step=job.step, seed=seed)
        sample = decode_sample(found | {"__lineage__": lineage}, self.decoders, out)
        for transform in self.transforms:
            sample = self._transform(transform, sample, ref)
        return sample

    def _transform(self, transform: Transform, sample: Sample, ref: Ref) -> Sample:
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


def _bind(filler: _Filler, step: RawStep, pictures: torch.Tensor | None) -> Callable[[int], _Row]:
    return lambda place: filler(step, place, None if pictures is None else pictures[place])


def _assemble(step: RawStep, rows: list[_Row]) -> DecodedStep:
    """Put a step together; a row that nothing could fill shows another one and is invalid."""
    spare = next((row for row in rows if row.sample is not None), None)
    if spare is None:
        reason = next((row.bad.reason for row in rows if row.bad), "padding only")
        raise SkipLimitError(
            f"epoch {step.job.epoch} step {step.job.step}: no row could be filled, nor by "
            f"{SHAPE_ATTEMPTS[SampleError]} substitutes each or more; the first: {reason}"
        )
    filled = [spare if row.sample is None else row for row in rows]
    return DecodedStep(
        step.job,
        [row.sample for row in filled if row.sample is not None],
        [ok and row.filled for ok, row in zip(step.valid, rows, strict=True)],
        step.refs,
        [row.shown for row in filled],
        tuple(row.bad for row in rows if row.bad),
        step.num_bytes,
        step.num_requests,
    )


def _picture_buffer(num_rows: int, shape: tuple[int, int] | None) -> torch.Tensor | None:
    """Return uint8 [B, H, W, 3] for the pictures of a batch: decoders write, nobody copies.

    In a worker it lies in shared memory, so that crossing to the main process copies nothing.
    """
    if shape is None:
        return None
    buffer = torch.empty((num_rows, *shape, 3), dtype=torch.uint8)
    if torch.utils.data.get_worker_info() is not None:
        buffer.share_memory_()  # type: ignore[no-untyped-call]
    return buffer
