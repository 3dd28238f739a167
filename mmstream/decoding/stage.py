"""A step of raw samples becomes a step of decoded samples, with as many rows.

It works in three passes over all rows: plan, decode pictures, finish (``pictures.py`` says why).

A bad sample is replaced by a deterministic substitute (``substitute.py``), so all ranks keep the
same number of rows and steps. Where rows are packs it is left out of its row.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, chain
from threading import Event
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from mmstream._vector_math import resolve_vector_math
from mmstream.bad_samples.policy import BadSamplePolicy
from mmstream.bad_samples.quarantine import TOO_LONG, BadSample
from mmstream.decoding.address import address
from mmstream.decoding.batch_memory import BatchMemory
from mmstream.decoding.by_field import IMAGE
from mmstream.decoding.decode import Decode
from mmstream.decoding.image.decoder import Decoded
from mmstream.decoding.media import video_files
from mmstream.decoding.pictures import (
    PlannedPicture,
    decode_picture,
    early_decoders,
    plan_pictures,
)
from mmstream.decoding.sample import RowMemory, decode_texts
from mmstream.decoding.stored import StoredFields
from mmstream.decoding.substitute import (
    Document,
    OwnNames,
    Prepared,
    PreparedSample,
    Refusal,
    Row,
    RowAddress,
    RowDecoder,
    Transform,
    no_good_row,
)
from mmstream.decoding.text.placeholders import LOSS_FIELD, TextLoss
from mmstream.decoding.threaded_calls import ThreadedCalls, calls_ahead
from mmstream.errors import DecodeError, LengthError, SampleError, where
from mmstream.lazy_bytes import LazyBytes
from mmstream.packing.settings import PackLimits
from mmstream.progress import Progress, Stage
from mmstream.reading.lookup import SampleLookup
from mmstream.reading.step import BatchLineage, Outcome, RawStep
from mmstream.types import Sample, SampleLineage, SampleRef

T = TypeVar("T")

ALIGN_BYTES = 64
"""The pictures and videos of each field begin at a multiple of this in the memory of a batch."""


MAX_WAITING = 8
"""Rows that wait for storage side by side, while their files are read by ranges."""


class DecodedStep(NamedTuple):
    """The samples of a job, in the order of rows, ready to be collated.

    Without packs there is one per row. Rows of packs have any number; ``lineage.rows`` says the row
    of each sample.
    """

    lineage: BatchLineage
    samples: list[Sample]


class _PlannedVideo(NamedTuple):
    """A video that will be decoded into the memory of its batch."""

    row: int
    file: str
    shape: tuple[int, int, int, int]
    """Of its frames: [F, H, W, 3]."""


class _EarlyPicture(NamedTuple):
    """A picture that is decoded before its row."""

    row: int
    name: str
    """Of its field in the batch."""
    picture: PlannedPicture
    out: NDArray[np.uint8]
    """Its memory."""


class _BegunStep(NamedTuple):
    """A step whose planned pictures may be under way."""

    memory: list[RowMemory]
    pictures: list[_EarlyPicture]
    decoding: ThreadedCalls[Decoded | SampleError]
    """Of `pictures`."""
    is_awaited: Event
    """Set: the caller waits for this step, not for one before."""


class PreparedStep(NamedTuple):
    """What comes before the rows of a step are decoded."""

    rows: list[Prepared | None]
    begun: _BegunStep | None
    """None: no picture is under way yet."""


class DecodeStage:
    """Decodes and transforms the samples of steps, in the order of rows. Holds threads.

    Args:
        lookup: reads single samples: second reads and substitutes.
        decoders: for images and text. None only parses ``json``.
        before: functions from raw sample to raw sample, run in this order before decoding.
        transforms: functions from sample to sample, run in this order after decoding.
        policy: what happens to the row of a bad sample.
        num_threads: rows decoded side by side; decoders release the GIL.
        memory: for images of one size.
        progress: where it writes down what it works on.
        limits: what a row may hold, where rows are packs. None: a row is one sample.
        own_names: names that only batches may have.
    """

    def __init__(
        self,
        lookup: SampleLookup,
        decoders: Decode | None,
        transforms: Sequence[Transform],
        *,
        before: Sequence[Transform],
        policy: BadSamplePolicy,
        num_threads: int,
        memory: BatchMemory,
        progress: Progress,
        limits: PackLimits | None,
        own_names: OwnNames,
    ) -> None:
        self._limits = limits
        self._decoders = decoders
        self._progress = progress
        self._decode_row = RowDecoder(
            lookup, decoders, tuple(before), tuple(transforms), policy, progress, own_names
        )
        self._memory = memory
        self._shapes = decoders.shapes if decoders else {}
        self._early_decoders = early_decoders(decoders)
        has_functions = bool(transforms or before)
        is_baked = decoders is not None and decoders.stored is not None
        # Plain and baked samples: nothing is made of them that is worth a call for each.
        self._is_light = (decoders is None or is_baked) and not has_functions and limits is None
        # The calling thread decodes too. Light samples are not worth handing to another thread.
        self._num_helpers = 0 if self._is_light else num_threads - 1
        self._pool = ThreadPoolExecutor(self._num_helpers) if self._num_helpers else None
        if self._pool is not None:
            resolve_vector_math()  # transforms compute in all threads at once
        # Weak, because it holds the memory of a batch.
        self._last_begun: weakref.ref[ThreadedCalls[Decoded | SampleError]] | None = None

    def prepare(self, step: RawStep) -> PreparedStep | None:
        """Tokenize the texts of a step, plan its pictures, and let the helper threads begin them.

        It may run in another thread, while the step before is decoded. The helpers go on with these
        pictures when they find nothing to do there, and while the batch before is trained on.

        Returns:
            What a call takes for this step. None: there is nothing to prepare, or functions of the
            user take part, which run in the thread that asks for a batch.

        Raises:
            NameError, AttributeError, ...: a function of the user has a bug.
        """
        if self._is_light or self._decode_row.has_early_functions:
            return None
        rows = self._prepared(step)
        # Memory that is sent is taken by the thread that sends it.
        return PreparedStep(rows, None if self._memory.shared else self._begin(step, rows))

    def drop_prepared(self) -> None:
        """Leave the pictures of the step that was prepared last: it is not asked for."""
        decoding = None if self._last_begun is None else self._last_begun()
        if decoding is not None:
            decoding.stop()

    def __call__(self, step: RawStep, prepared: PreparedStep | None = None) -> DecodedStep:
        """Return a step with its samples decoded and transformed.

        Args:
            step: raw samples.
            prepared: what `prepare` has made of this step. None: it is prepared now.

        Raises:
            ShardError: an unreadable shard, unless the policy takes it for bad samples.
            SampleError: a bad sample, where the policy is to raise.
            BadSampleLimitError: no row of the step has a good sample or substitute.
            StorageError: storage failed after retries.
            NameError, AttributeError, ...: a transform has a bug.
        """
        self._progress.begin_stage(Stage.TEXT, step.lineage.epoch, step.lineage.step)
        decoded = self._at_once(step)
        if decoded is not None:
            return decoded
        rows, begun = prepared or PreparedStep(self._prepared(step), None)
        if begun is None:
            begun = self._begin(step, rows)
        memory = begun.memory
        rows = _with_early_pictures(rows, begun)
        if self._limits is not None:
            return self._packed(step, rows, memory, self._limits)
        decoded_rows = self._decode_rows(self._decode_row, step, rows, memory)
        return _assembled(step, self._decode_row.filled(step, decoded_rows))

    def _prepared(self, step: RawStep) -> list[Prepared | None]:
        """Prepare a step, and plan those of its pictures that are decoded before their rows."""
        prepared = self._decode_row.prepare(step, self._side_by_side)
        if self._decoders is None or not self._early_decoders:
            return prepared
        for row, entry in enumerate(prepared):
            if isinstance(entry, PreparedSample) and not isinstance(entry.tokens, SampleError):
                pictures = plan_pictures(entry.sample, self._decoders, self._early_decoders)
                prepared[row] = entry._replace(pictures=pictures)
        return prepared

    def _begin(self, step: RawStep, rows: Sequence[Prepared | None]) -> _BegunStep:
        """Take memory for a step, and let the helper threads begin its planned pictures."""
        memory = self._memory_of_rows(rows)
        pictures = [
            _EarlyPicture(row, name, picture, memory[row].pictures[name].numpy())
            for row, entry in enumerate(rows)
            if isinstance(entry, PreparedSample)
            for name, picture in entry.pictures.items()
            if isinstance(picture, PlannedPicture)
        ]

        def decode(number: int) -> Decoded | SampleError:
            row, _, picture, out = pictures[number]
            if is_awaited.is_set():  # else messages about a late batch mean another step
                self._decode_row.note_picture(step, row, picture)
            return decode_picture(picture, out)

        is_awaited = Event()
        sizes = [_num_bytes(step.outcomes[picture.row]) for picture in pictures]
        decoding = ThreadedCalls(decode, sizes)
        self._last_begun = weakref.ref(decoding)
        if self._pool is not None:
            decoding.begin(self._pool, self._num_helpers)
        return _BegunStep(memory, pictures, decoding, is_awaited)

    def _packed(
        self,
        step: RawStep,
        prepared: Sequence[Prepared | None],
        memory: Sequence[RowMemory],
        limits: PackLimits,
    ) -> DecodedStep:
        """Return a step whose rows are packs."""
        documents = self._decode_rows(self._decode_row.planned, step, prepared, memory)
        rows = packed_rows(step, documents, self._decode_row, limits)
        require_good_row(step, rows, self._decode_row, limits)
        return _assembled_packs(step, rows)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)  # nothing begins after this
            self.drop_prepared()
            self._pool.shutdown()

    def _at_once(self, step: RawStep) -> DecodedStep | None:
        """Return a step of plain or baked samples. None: there are others, or one may be bad."""
        if not self._is_light:
            return None
        samples = [outcome for outcome in step.outcomes if isinstance(outcome, dict)]
        if len(samples) < len(step.outcomes):
            return None
        stored = None if self._decoders is None else self._decoders.stored
        decoded = _parsed(samples) if stored is None else self._copied(step, samples, stored)
        own_names = self._decode_row.own_names
        if decoded is None or not own_names.reserved.isdisjoint(chain.from_iterable(decoded)):
            return None
        if own_names.decoded and any(map(own_names.wrong, decoded)):
            return None
        lineage = step.lineage
        for row, sample in enumerate(decoded, start=lineage.start):
            seed, epoch = self._decode_row.lookup.stream(lineage.epoch, lineage.step, row)
            shard, index = sample["__lineage__"][:2]
            # _make takes half the time of a call.
            sample["__lineage__"] = SampleLineage._make((shard, index, epoch, lineage.step, seed))
        if stored is None:
            return DecodedStep(lineage, decoded)
        rows = zip(decoded, lineage.planned, strict=True)
        return _assembled(step, [Row(sample, ref, None) for sample, ref in rows])

    def _copied(
        self, step: RawStep, samples: Sequence[Sample], stored: StoredFields
    ) -> list[Sample] | None:
        """Return the baked samples of a step, decoded. None: one is damaged."""
        lineage = step.lineage
        self._progress.begin_sample(
            Stage.DECODE,
            lineage.epoch,
            lineage.step,
            *lineage.planned[0],
            str(samples[0]["__key__"]),
        )
        views = self._take([[(len(samples), *shape)] for shape in self._shapes.values()])
        memory = {name: view for name, (view,) in zip(self._shapes, views, strict=True)}
        try:
            return stored.decode_all(samples, memory)
        except DecodeError:
            return None

    def _decode_rows(
        self,
        decode: Callable[[RawStep, int, Prepared | None, RowMemory], T],
        step: RawStep,
        rows: Sequence[Prepared | None],
        memory: Sequence[RowMemory],
    ) -> list[T]:
        """Decode all rows of a step in threads, those with functions of the user in this one.

        Such functions run in the order of rows. Other threads decode the media of the next rows.
        """
        decoder, decoders = self._decode_row, self._decoders

        def decode_row(position: int) -> T:
            return decode(step, position, rows[position], memory[position])

        if not decoder.has_functions:
            return self._side_by_side(decode_row, step.outcomes)

        def begun() -> Iterator[tuple[tuple[int, Prepared | None], bool]]:
            for position, entry in enumerate(rows):
                yield (position, decoder.begin(step, position, entry)), _has_media(entry, decoders)

        def decode_media(row: tuple[int, Prepared | None]) -> Prepared | None:
            return decoder.begin(step, *row, memory[row[0]])

        with self._helpers(step.outcomes) as (pool, num_helpers):
            if pool is None or (decoders is not None and decoders.has_user_media):
                return list(map(decode_row, range(len(rows))))
            ahead = calls_ahead(decode_media, begun(), pool, 2 * num_helpers)
            return [
                decode(step, position, entry, memory[position])
                for position, entry in enumerate(ahead)
            ]

    def _side_by_side(self, function: Callable[[int], T], outcomes: Sequence[Outcome]) -> list[T]:
        """Call a function for each row of a step, in threads."""
        with self._helpers(outcomes) as (pool, num_helpers):
            return _all_rows(function, outcomes, pool, num_helpers)

    @contextmanager
    def _helpers(self, outcomes: Sequence[Outcome]) -> Iterator[tuple[Executor | None, int]]:
        """Give the threads for a step, and their number.

        Rows whose files are read by ranges wait for storage most of the time, so they get more.
        """
        num_waiting = min(MAX_WAITING, sum(map(_has_lazy_bytes, outcomes)))
        if num_waiting <= self._num_helpers + 1:
            yield self._pool, self._num_helpers
            return
        with ThreadPoolExecutor(num_waiting - 1, thread_name_prefix="mmstream-waiting") as pool:
            yield pool, num_waiting - 1

    def _memory_of_rows(self, prepared: Sequence[Prepared | None]) -> list[RowMemory]:
        """Return memory of the batch for the pictures and videos of each row.

        Decoders write right into it. The videos of a field lie one behind the other.
        """
        num_rows = len(prepared)
        videos = self._planned_videos(prepared)
        groups = [[(num_rows, *shape)] for shape in self._shapes.values()]
        groups += [[video.shape for video in of_field] for of_field in videos.values()]
        views = self._take(groups)
        pictures = {name: view for name, (view,) in zip(self._shapes, views, strict=False)}
        rows = [
            RowMemory({name: view[row] for name, view in pictures.items()}, {})
            for row in range(num_rows)
        ]
        for of_field, of_videos in zip(videos.values(), views[len(pictures) :], strict=True):
            for video, view in zip(of_field, of_videos, strict=True):
                rows[video.row].videos[video.file] = view
        return rows

    def _take(self, groups: Sequence[Sequence[tuple[int, ...]]]) -> list[list[torch.Tensor]]:
        """Return memory of the batch for tensors of bytes, by group and shape.

        A batch crosses to the main process in one block, so all of them share one.
        """
        if not groups:
            return []
        sizes = [sum(map(math.prod, shapes)) for shapes in groups]
        starts = [0, *accumulate(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)]
        memory = self._memory
        block = memory.take(starts[-2] + sizes[-1], spare_bytes=memory.spare_bytes)
        return [
            _cut(block[start : start + size], shapes)
            for start, size, shapes in zip(starts, sizes, groups, strict=False)
        ]

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


def _with_early_pictures(
    rows: Sequence[Prepared | None], begun: _BegunStep
) -> list[Prepared | None]:
    """Decode the planned pictures that are left. Return the rows with what became of them."""
    begun.is_awaited.set()
    early: list[dict[str, Decoded | SampleError]] = [
        {name: bad for name, bad in entry.pictures.items() if isinstance(bad, SampleError)}
        if isinstance(entry, PreparedSample)
        else {}
        for entry in rows
    ]
    for picture, result in zip(begun.pictures, begun.decoding.finish(), strict=True):
        early[picture.row][picture.name] = result
    return [
        entry._replace(early=results) if isinstance(entry, PreparedSample) and results else entry
        for entry, results in zip(rows, early, strict=True)
    ]


def _has_media(entry: Prepared | None, decoders: Decode | None) -> bool:
    """Tell whether media of a row are left to decode, and not only short Python."""
    if not isinstance(entry, PreparedSample) or decoders is None or decoders.stored is not None:
        return False
    num_pictures = len(decoders.plan.pictures) + (decoders.image is not None)
    return decoders.has_media or len(entry.early) < num_pictures


def _parsed(samples: list[Sample]) -> list[Sample] | None:
    """Return plain samples with their JSON parsed. None: one may be bad."""
    if any("json" in sample for sample in samples):
        samples = [sample for sample, _ in decode_texts(samples, None)]
        if any(isinstance(sample.get("json"), bytes) for sample in samples):
            return None
    return samples


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
    decode_row: Callable[[int], T],
    outcomes: Sequence[Outcome],
    pool: Executor | None,
    num_helpers: int,
) -> list[T]:
    """Decode all rows, in the calling thread and in those of a pool.

    Raises the error of the first row that has one.
    """
    if pool is None:
        return list(map(decode_row, range(len(outcomes))))
    calls = ThreadedCalls(decode_row, list(map(_num_bytes, outcomes)))
    calls.begin(pool, num_helpers)
    return calls.finish()


def _num_bytes(outcome: Outcome) -> int:
    """Return the bytes of a raw sample, which tell roughly how long it takes to decode."""
    if not isinstance(outcome, dict):
        return 0
    return sum(len(value) for value in outcome.values() if isinstance(value, bytes | memoryview))


def _assembled(step: RawStep, rows: list[Row]) -> DecodedStep:
    """Put a step together. All rows have a sample."""
    lineage = step.lineage
    valid = [valid and row.is_filled for valid, row in zip(lineage.valid, rows, strict=True)]
    samples = [row.sample for row in rows if row.sample is not None]
    lineage = _with_losses(lineage, samples, valid)
    lineage = replace(
        lineage,
        valid=valid,
        shown=[row.shown for row in rows],
        bad=tuple(row.bad for row in rows if row.bad),
        no_picture=_first_without_picture(samples, valid),
    )
    return DecodedStep(lineage, samples)


def _assembled_packs(step: RawStep, rows: list[PackedRow]) -> DecodedStep:
    """Put a step of packs together. A row that nothing could fill is empty and invalid."""
    lineage = step.lineage
    shown = [(number, entry) for number, row in enumerate(rows) for entry in row.documents]
    bad = tuple(record for row in rows for record in row.bad)
    samples = [entry.sample for _, entry in shown if entry.sample is not None]
    lineage = _with_losses(lineage, samples, [True] * len(samples))
    lineage = replace(
        lineage,
        valid=[bool(row.documents) for row in rows],
        rows=[number for number, _ in shown],
        shown=[entry.ref for _, entry in shown],
        bad=bad,
        no_picture=_first_without_picture(samples, [True] * len(samples)),
        **_unlike_measured(rows),
    )
    return DecodedStep(lineage, samples)


def _unlike_measured(rows: list[PackedRow]) -> dict[str, Any]:
    """Return what the lineage of a step says about samples unlike measured, with one example."""
    unlike = [
        (entry.sample, num_tokens_of(entry.sample), measured)
        for row in rows
        for entry, measured in row.unlike_measured
        if entry.sample is not None
    ]
    if not unlike:
        return {}
    sample, num_tokens, measured = unlike[0]
    return {
        "num_longer": sum(num_tokens > measured for _, num_tokens, measured in unlike),
        "num_shorter": sum(num_tokens < measured for _, num_tokens, measured in unlike),
        "unlike_measured": f"{address(sample, '')}: {num_tokens:,} tokens, {measured:,} measured",
    }


def _first_without_picture(of_rows: Sequence[Sample], valid: list[bool]) -> str:
    """Return the address of a sample without a picture in a batch where others have one.

    Conversations may have none, so they do not count. "": there is no such sample.
    """
    samples = [
        sample
        for sample, is_valid in zip(of_rows, valid, strict=True)
        if is_valid and IMAGE in sample
    ]
    empty = [s for s in samples if isinstance(s[IMAGE], list) and not s[IMAGE]]
    if len(empty) == len(samples):
        return ""
    return next((address(sample, "") for sample in empty if not _has_messages(sample)), "")


def _has_messages(sample: Sample) -> bool:
    row = sample.get("json")
    return isinstance(row, dict) and bool(row.get("messages"))


def _with_losses(
    lineage: BatchLineage, samples: Sequence[Sample], valid: Sequence[bool]
) -> BatchLineage:
    """Take what texts have lost out of samples, and add it to the lineage of their batch.

    That is counts, and one example of each kind. Invalid samples do not count.
    """
    of_samples = [sample.pop(LOSS_FIELD, None) for sample in samples]
    losses: list[TextLoss] = [
        loss
        for loss, is_valid in zip(of_samples, valid, strict=True)
        if is_valid and loss is not None
    ]
    if not losses:
        return lineage
    cut = [loss for loss in losses if loss.is_cut]
    shortened = [loss for loss in losses if loss.num_dropped_parts]
    return replace(
        lineage,
        num_cut_texts=len(cut),
        num_dropped_parts=sum(loss.num_dropped_parts for loss in shortened),
        text_losses=tuple(dict.fromkeys(loss.reason for loss in (*cut[:1], *shortened[:1]))),
    )


# -- decoded samples -> rows of packs --------------------------------------------------------------
#
# A row without a good sample gets a substitute pack, the same one on every topology. A sample that
# has more tokens than were measured stays where its row has room, and is a bad sample elsewhere.
#
# Example: T is 10. A row was planned with samples of 4, 3 and 3 tokens. The first has 5 now, and
# the second cannot be decoded. Then the row has 5 + 3 tokens, and one record. Had the second been
# good, the first would be left out: 3 + 3 + 5 is more than T.

MAX_PACK_SUBSTITUTES = 4
"""Substitute packs that are tried for a row without a good sample."""

FEW_DOCUMENTS = 2
"""Samples of a pack that few bad ones empty."""

MAX_SUBSTITUTES_OF_FEW = 16
"""Substitutes that are tried for such a pack. A filter that leaves out half of them empties one row
of 130,000 then. Filters belong into the plan: ``--where``."""


class PackedRow(NamedTuple):
    """A row of a step, as it is delivered."""

    documents: list[Document]
    """Good samples, in order. Empty: the row is padding, or nothing fills it."""
    bad: list[BadSample]
    """Records of its planned samples that are left out, in order."""
    unlike_measured: list[tuple[Document, int]]
    """Those of its planned samples that have more or fewer tokens than measured, and how many were
    measured."""


def packed_rows(
    step: RawStep, documents: Sequence[Document], decoder: RowDecoder, limits: PackLimits
) -> list[PackedRow]:
    """Return the rows of a step.

    Args:
        step: as it was planned and read.
        documents: its planned samples, good and bad.
        decoder: reads substitutes.
        limits: what a pack may hold.

    Raises:
        LengthError: a sample is too long, and the policy is to raise.
        StorageError: storage failed after retries.
    """
    lineage = step.lineage
    assert step.num_tokens is not None, "the order of packs says them"
    by_row: list[list[_Measured]] = [[] for _ in range(lineage.num_rows)]
    for number, (document, num_tokens) in enumerate(zip(documents, step.num_tokens, strict=True)):
        by_row[lineage.planned_row(number)].append(_Measured(document, num_tokens))
    return [
        _packed_row(
            RowAddress(lineage.epoch, lineage.step, lineage.order_row(row)),
            of_row,
            decoder,
            limits,
        )
        for row, of_row in enumerate(by_row)
    ]


def require_good_row(
    step: RawStep, rows: Sequence[PackedRow], decoder: RowDecoder, limits: PackLimits
) -> None:
    """Stop a run at a step of which no pack on any rank has a good sample. Masked rows may.

    Args:
        step: as it was planned.
        rows: those of this rank.
        decoder: reads the packs of other ranks, where those of this one are empty.
        limits: what a pack may hold.

    Raises:
        BadSampleLimitError: there is none.
    """
    bad = [record for row in rows for record in row.bad]
    if not bad or any(row.documents for row in rows) or decoder.policy.action == "mask":
        return
    lineage, lookup = step.lineage, decoder.lookup
    for position in range(lookup.order.global_batch_size):
        row, unit = lookup.planned(lineage.epoch, lineage.step, position)
        if unit.refs and not lineage.start <= position < lineage.start + len(rows):
            address = RowAddress(lineage.epoch, lineage.step, row)
            documents = decoder.read_pack(address, unit.refs)
            planned = list(map(_Measured, documents, unit.num_tokens or []))
            if _packed_row(address, planned, decoder, limits).documents:
                return
    raise no_good_row(lineage, bad[0].reason)


def num_tokens_of(sample: Sample, multiple_of: int = 1) -> int:
    """Return how many tokens of its pack a sample takes; several documents are added up.

    Args:
        sample: decoded; ``input_ids`` are tokens, or a list of the tokens of each document.
        multiple_of: each document takes a multiple of so many tokens.

    Examples:
        >>> num_tokens_of({"input_ids": [[1, 2, 3], [4]]}, multiple_of=2)
        6
    """
    ids: Any = sample.get("input_ids", ())
    is_several = isinstance(ids, list | tuple) and not any(isinstance(item, int) for item in ids)
    lengths = map(len, ids) if is_several else (len(ids),)
    return sum(-(-length // multiple_of) * multiple_of for length in lengths)


class _Measured(NamedTuple):
    """A sample of a pack, and its tokens as measured."""

    document: Document
    num_tokens: int

    @property
    def growth(self) -> int:
        """How many tokens it has more than measured. A bad sample has none."""
        sample = self.document.sample
        return 0 if sample is None else num_tokens_of(sample) - self.num_tokens


def _packed_row(
    address: RowAddress, planned: list[_Measured], decoder: RowDecoder, limits: PackLimits
) -> PackedRow:
    """Return a row: its good samples that fit, or those of a substitute."""
    unlike = [(entry.document, entry.num_tokens) for entry in planned if entry.growth]
    fitted = _fitted(planned, limits, decoder)
    if decoder.policy.action == "raise":
        for document in fitted:
            if document.refusal is not None and document.refusal.kind == TOO_LONG:
                raise LengthError(document.refusal.reason)
    shown = [document for document in fitted if document.sample is not None]
    substitute: list[Document] = []
    if planned and not shown and decoder.policy.action != "mask":
        substitute = _substitute(address, fitted, decoder, limits)
    first = substitute[0].ref if substitute else None
    bad = [
        decoder.record(address, document.ref, document.refusal, first, number)
        for number, document in enumerate(fitted)
        if document.refusal is not None
    ]
    return PackedRow(shown or substitute, bad, unlike)


def _substitute(
    address: RowAddress, planned: list[Document], decoder: RowDecoder, limits: PackLimits
) -> list[Document]:
    """Return the good samples of the first substitute pack that has some."""
    max_attempts = MAX_SUBSTITUTES_OF_FEW if len(planned) <= FEW_DOCUMENTS else MAX_PACK_SUBSTITUTES
    tried = set[tuple[SampleRef, ...]]()
    for attempt in range(max_attempts):
        unit = decoder.lookup.order.substitute_unit(*address, attempt)
        if tuple(unit.refs) in tried:
            continue
        tried.add(tuple(unit.refs))
        documents = decoder.read_pack(address, unit.refs)
        measured = list(map(_Measured, documents, unit.num_tokens or []))
        good = [
            document
            for document in _fitted(measured, limits, decoder)
            if document.sample is not None
        ]
        if good:
            return good
    return []


def _fitted(documents: list[_Measured], limits: PackLimits, decoder: RowDecoder) -> list[Document]:
    """Return samples, with a refusal for those that make their row too long.

    Samples that are no longer than measured fit in any case. The others get the room that is left,
    in their order.
    """
    lengths = [
        0 if sample is None else num_tokens_of(sample, limits.document_multiple_of)
        for sample in (entry.document.sample for entry in documents)
    ]
    fitted = [entry.document for entry in documents]
    if sum(lengths) <= limits.max_tokens:
        return fitted
    room = limits.max_tokens
    for number in sorted(range(len(documents)), key=lambda number: documents[number].growth > 0):
        if lengths[number] <= room:
            room -= lengths[number]
            continue
        ref, sample, _ = fitted[number]
        assert sample is not None, "a bad sample has no tokens"
        address = where(decoder.lookup.shard_name(ref[0]), ref[1], str(sample["__key__"]))
        reason = (
            f"{address}: {num_tokens_of(sample):,} tokens, {documents[number].num_tokens:,} were "
            f"measured, and its pack of {limits.max_tokens:,} has no room for more: measure and "
            "plan anew"
        )
        fitted[number] = Document(ref, None, Refusal(TOO_LONG, reason))
    return fitted
