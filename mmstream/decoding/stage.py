"""A step of raw samples becomes a step of decoded samples, with as many rows.

A bad sample is replaced by a deterministic substitute (``substitute.py``), so all ranks keep the
same number of rows and steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch

from mmstream.bad_samples.policy import BadSamplePolicy
from mmstream.decoding.address import address
from mmstream.decoding.batch_memory import BatchMemory
from mmstream.decoding.by_field import IMAGE
from mmstream.decoding.media import video_files
from mmstream.decoding.sample import LOSS_FIELD, Decode, RowMemory, TextLoss, decode_texts
from mmstream.decoding.substitute import (
    Lookup,
    Prepared,
    PreparedSample,
    Row,
    RowDecoder,
    Transform,
)
from mmstream.errors import BadSampleLimitError
from mmstream.lazy_bytes import LazyBytes
from mmstream.progress import Progress, Stage
from mmstream.reading.step import BatchLineage, Outcome, RawStep
from mmstream.types import Sample, SampleLineage

__all__ = ["DecodeStage", "DecodedStep"]

T = TypeVar("T")

ALIGN_BYTES = 64
"""The pictures and videos of each field begin at a multiple of this in the memory of a batch."""


MAX_WAITING = 8
"""Rows that wait for storage side by side, while their files are read by ranges."""


class DecodedStep(NamedTuple):
    """The samples of a job, one per row, ready to be collated."""

    lineage: BatchLineage
    samples: list[Sample]


class _PlannedVideo(NamedTuple):
    """A video that will be decoded into the memory of its batch."""

    row: int
    file: str
    shape: tuple[int, int, int, int]
    """Of its frames: [F, H, W, 3]."""


class DecodeStage:
    """Decodes and transforms the samples of steps, in the order of rows. Holds threads.

    Args:
        lookup: reads single samples: second reads and substitutes.
        decoders: for images and text. None only parses ``json``.
        before: functions from raw sample to raw sample, run in this order before decoding.
        transforms: functions from sample to sample, run in this order after decoding.
        policy: what happens to the row of a bad sample.
        num_threads: rows decoded side by side; decoders release the GIL.
        memory: for images of one size. None: memory of this process alone.
        progress: where it writes down what it works on. None: nowhere.
    """

    def __init__(
        self,
        lookup: Lookup,
        decoders: Decode | None = None,
        transforms: Sequence[Transform] = (),
        *,
        before: Sequence[Transform] = (),
        policy: BadSamplePolicy,
        num_threads: int = 1,
        memory: BatchMemory | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._lookup = lookup
        self._decoders = decoders
        self._progress = progress or Progress()
        self._decode_row = RowDecoder(
            lookup, decoders, tuple(before), tuple(transforms), policy, self._progress
        )
        self._memory = memory or BatchMemory()
        self._shapes = decoders.plan.shapes(decoders.image) if decoders else {}
        self._is_plain = decoders is None and not transforms and not before
        # The calling thread decodes too. Plain samples are not worth handing to another thread.
        self._num_helpers = 0 if self._is_plain else num_threads - 1
        self._pool = ThreadPoolExecutor(self._num_helpers) if self._num_helpers else None

    def __call__(self, step: RawStep) -> DecodedStep:
        """Return a step with its samples decoded and transformed.

        Raises:
            ShardError: an unreadable shard, unless the policy takes it for bad samples.
            SampleError: a bad sample, where the policy is to raise.
            BadSampleLimitError: no row of the step has a good sample or substitute.
            StorageError: storage failed after retries.
            NameError, AttributeError, ...: a transform has a bug.
        """
        self._progress.begin_stage(Stage.TEXT, step.lineage.epoch, step.lineage.step)
        if self._is_plain:
            decoded = self._parsed(step)
            if decoded is not None:
                return decoded
        prepared = self._decode_row.prepare(step, self._side_by_side)
        memory = self._memory_of_rows(prepared)

        def decode_row(position: int) -> Row:
            return self._decode_row(step, position, prepared[position], memory[position])

        return _assembled(step, self._side_by_side(decode_row, step.outcomes))

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _parsed(self, step: RawStep) -> DecodedStep | None:
        """Return a step whose samples are only parsed. None: a sample is bad, or may be."""
        samples = [outcome for outcome in step.outcomes if isinstance(outcome, dict)]
        if len(samples) < len(step.outcomes):
            return None
        if any("json" in sample for sample in samples):
            samples = [sample for sample, _ in decode_texts(samples, None)]
            if any(isinstance(sample.get("json"), bytes) for sample in samples):
                return None
        lineage = step.lineage
        for row, sample in enumerate(samples, start=lineage.start):
            seed, epoch = self._lookup.stream(lineage.epoch, lineage.step, row)
            shard, index = sample["__lineage__"][:2]
            # _make takes half the time of a call.
            sample["__lineage__"] = SampleLineage._make((shard, index, epoch, lineage.step, seed))
        return DecodedStep(lineage, samples)

    def _side_by_side(self, function: Callable[[int], T], outcomes: Sequence[Outcome]) -> list[T]:
        """Call a function for each row of a step, in threads.

        Rows whose files are read by ranges wait for storage most of the time, so they get more.
        """
        num_waiting = min(MAX_WAITING, sum(map(_has_lazy_bytes, outcomes)))
        if num_waiting <= self._num_helpers + 1:
            return _all_rows(function, len(outcomes), self._pool, self._num_helpers)
        with ThreadPoolExecutor(num_waiting - 1, thread_name_prefix="mmstream-waiting") as pool:
            return _all_rows(function, len(outcomes), pool, num_waiting - 1)

    def _memory_of_rows(self, prepared: Sequence[Prepared | None]) -> list[RowMemory]:
        """Return memory of the batch for the pictures and videos of each row.

        Decoders write right into it. A batch crosses to the main process in one block, so all
        fields share one. The videos of a field lie one behind the other.
        """
        num_rows = len(prepared)
        videos = self._planned_videos(prepared)
        groups = [[(num_rows, *shape)] for shape in self._shapes.values()]
        groups += [[video.shape for video in of_field] for of_field in videos.values()]
        if not groups:
            return [RowMemory({}, {}) for _ in prepared]
        sizes = [sum(map(math.prod, shapes)) for shapes in groups]
        starts = [0, *accumulate(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)]
        memory = self._memory
        block = memory.take(starts[-2] + sizes[-1], spare_bytes=memory.spare_bytes)
        views = [
            _cut(block[start : start + size], shapes)
            for start, size, shapes in zip(starts, sizes, groups, strict=False)
        ]
        pictures = {name: view for name, (view,) in zip(self._shapes, views, strict=False)}
        rows = [
            RowMemory({name: view[row] for name, view in pictures.items()}, {})
            for row in range(num_rows)
        ]
        for of_field, of_videos in zip(videos.values(), views[len(pictures) :], strict=True):
            for video, view in zip(of_field, of_videos, strict=True):
                rows[video.row].videos[video.file] = view
        return rows

    def _planned_videos(
        self, prepared: Sequence[Prepared | None]
    ) -> dict[str, list[_PlannedVideo]]:
        """Return the videos of each field, in the order of rows."""
        videos: dict[str, list[_PlannedVideo]] = {}
        for row, entry in enumerate(prepared):
            if not isinstance(entry, PreparedSample) or not entry.plans or not self._decoders:
                continue
            for field, files in video_files(entry.sample, self._decoders).items():
                for file in files:
                    shape = entry.plans[file].shape
                    pixels = (shape.num_frames, shape.height, shape.width, 3)
                    videos.setdefault(field, []).append(_PlannedVideo(row, file, pixels))
        return videos


def _has_lazy_bytes(outcome: Outcome) -> bool:
    return isinstance(outcome, dict) and any(
        isinstance(value, LazyBytes) for value in outcome.values()
    )


def _cut(block: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Cut bytes into tensors that lie one behind the other."""
    stops = list(accumulate(map(math.prod, shapes)))
    starts = [0, *stops]
    return [
        block[start:stop].view(shape)
        for start, stop, shape in zip(starts, stops, shapes, strict=False)
    ]


def _all_rows(
    decode_row: Callable[[int], T], num_rows: int, pool: Executor | None, num_helpers: int
) -> list[T]:
    """Decode all rows. Each thread takes the next row, which is cheaper than one future per row.

    Raises the error of the first row that has one.
    """
    if pool is None:
        return list(map(decode_row, range(num_rows)))
    rows: dict[int, T] = {}
    errors: list[tuple[bool, int, BaseException]] = []
    positions = iter(range(num_rows))

    def work() -> None:
        while not errors:
            position = next(positions, None)
            if position is None:
                return
            try:
                rows[position] = decode_row(position)
            except BaseException as error:
                errors.append((isinstance(error, Exception), position, error))  # Ctrl-C first

    helpers = [pool.submit(work) for _ in range(num_helpers)]
    work()
    wait(helpers)
    if errors:
        raise min(errors, key=lambda entry: entry[:2])[2]
    return [rows[position] for position in range(num_rows)]


def _assembled(step: RawStep, rows: list[Row]) -> DecodedStep:
    """Put a step together. A row that nothing could fill repeats another one and is invalid."""
    lineage = step.lineage
    spare = next((row.sample for row in rows if row.sample is not None), None)
    if spare is None:
        reason = next((row.bad.reason for row in rows if row.bad), "padding only")
        raise BadSampleLimitError(
            f"epoch {lineage.epoch} step {lineage.step}: no row has a good sample, nor a good "
            f"substitute (a transform or decoder that refuses all of them?); the first: {reason}"
        )
    spare_ref = next(row.shown for row in rows if row.sample is not None)
    valid = [valid and row.is_filled for valid, row in zip(lineage.valid, rows, strict=True)]
    losses = [row.sample.pop(LOSS_FIELD, None) if row.sample else None for row in rows]
    valid_losses = [
        loss for loss, is_valid in zip(losses, valid, strict=True) if is_valid and loss is not None
    ]
    if valid_losses:
        lineage = _with_losses(lineage, valid_losses)
    lineage = replace(
        lineage,
        valid=valid,
        shown=[spare_ref if row.sample is None else row.shown for row in rows],
        bad=tuple(row.bad for row in rows if row.bad),
        no_picture=_first_without_picture(rows, valid),
    )
    return DecodedStep(lineage, [spare if row.sample is None else row.sample for row in rows])


def _first_without_picture(rows: list[Row], valid: list[bool]) -> str:
    """Return the address of a sample without a picture in a batch where others have one.

    Conversations may have none, so they do not count. "": there is no such sample.
    """
    samples = [
        row.sample
        for row, is_valid in zip(rows, valid, strict=True)
        if is_valid and row.sample is not None and IMAGE in row.sample
    ]
    empty = [s for s in samples if isinstance(s[IMAGE], list) and not s[IMAGE]]
    if len(empty) == len(samples):
        return ""
    return next((address(sample, "") for sample in empty if not _has_messages(sample)), "")


def _has_messages(sample: Sample) -> bool:
    row = sample.get("json")
    return isinstance(row, dict) and bool(row.get("messages"))


def _with_losses(lineage: BatchLineage, losses: list[TextLoss]) -> BatchLineage:
    """Add what texts have lost to the lineage of a batch: counts, and one example of each kind."""
    cut = [loss for loss in losses if loss.is_cut]
    shortened = [loss for loss in losses if loss.num_dropped_parts]
    return replace(
        lineage,
        num_cut_texts=len(cut),
        num_dropped_parts=sum(loss.num_dropped_parts for loss in shortened),
        text_losses=tuple(dict.fromkeys(loss.reason for loss in (*cut[:1], *shortened[:1]))),
    )
