"""A step of raw samples becomes a step of decoded samples, with as many rows.

A step goes through three passes, each over all rows. A decoder in C fills the caches of its core
with pixels, and Python runs several times slower after it, so the passes keep the two apart:

    1 plan     functions before decoding, JSON, headers, draws; all texts in one call
    2 decode   pictures of fixed shapes, right into the memory of the batch
    3 finish   values, all other media, functions after decoding; substitutes of bad samples

- Memory: one block for all pictures of fixed shapes and all planned videos of a step. Everything
  else has memory of its own.
- Threads: the calling thread and `num_threads` - 1 helpers. Pass 1 runs in the calling thread, but
  plans of videos and recordings in all. Pass 2 runs in all, the largest files first. So does pass
  3, unless functions of the user take part: they run in the calling thread in the order of rows,
  while helpers decode the media of the next rows. Passes 1 and 2 of the next step may begin while
  the caller still works on this one.
- Bad samples: an error of pass 1 or 2 waits for pass 3. There `rows.py` reads the sample
  again and then takes another for it, so all ranks keep the same number of rows and steps. Where
  rows are packs, it is left out of its row.
- Plain and baked samples take no pass, if none is bad and no function takes part: they are made
  field by field (`_at_once`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from mmstream.decoding.bad_samples import BadSamplePolicy
from mmstream.decoding.batch_memory import BatchMemory
from mmstream.decoding.decode import Decode
from mmstream.decoding.rows import (
    BatchFields,
    PackedRow,
    Prepared,
    Row,
    RowDecoder,
    Transform,
    num_tokens_of,
    packed_rows,
    require_good_row,
)
from mmstream.decoding.sample import PLAIN, RowMemory, SampleDecoding, parse_fields
from mmstream.decoding.text.placeholders import LOSS_FIELD, TextLoss
from mmstream.decoding.threaded_calls import ThreadedCalls, calls_ahead, resolve_vector_math
from mmstream.errors import SampleError
from mmstream.media.fields import address
from mmstream.packing.plan import PackLimits
from mmstream.progress import Progress, Stage
from mmstream.reading.fetcher import SampleLookup
from mmstream.reading.step import BatchLineage, Outcome, RawStep
from mmstream.tar.lazy_bytes import LazyBytes
from mmstream.types import Sample, SampleLineage

T = TypeVar("T")

MAX_WAITING = 8
"""Rows that wait for storage side by side, while their files are read by ranges."""


class DecodedStep(NamedTuple):
    """The samples of a job, in the order of rows, ready to be collated.

    Without packs there is one per row. Rows of packs have any number; ``lineage.rows`` says the row
    of each sample.
    """

    lineage: BatchLineage
    samples: list[Sample]


class BegunPictures(NamedTuple):
    """Pass 2 of a step, which may be under way."""

    memory: Sequence[RowMemory]
    """Of each row, for pass 3 too."""
    calls: ThreadedCalls[None]


class PlannedStep(NamedTuple):
    """A step after pass 1."""

    rows: list[Prepared | None]
    begun: BegunPictures | None
    """None: pass 2 has not begun."""


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
        batch_fields: names that only batches may have.
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
        batch_fields: BatchFields,
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._decode_row = RowDecoder(
            lookup,
            decoders or PLAIN,
            tuple(before),
            tuple(transforms),
            policy,
            progress,
            batch_fields,
        )
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
        self._last_begun: weakref.ref[ThreadedCalls[None]] | None = None

    def with_decoders(self, decoders: Decode) -> DecodeStage:
        """Return this stage with other decoders of the same fields. It shares its threads."""
        stage = copy(self)
        stage._decode_row = replace(self._decode_row, decoders=decoders)
        stage._last_begun = None
        return stage

    def with_transform(self, transform: Transform) -> DecodeStage:
        """Return this stage with one more function after decoding. It shares its threads."""
        stage, row = copy(self), self._decode_row
        stage._decode_row = replace(row, transforms=(*row.transforms, transform))
        stage._is_light, stage._last_begun = False, None
        return stage

    def prepare(self, step: RawStep) -> PlannedStep | None:
        """Do pass 1 of a step, and let the helper threads begin pass 2.

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
        rows = self._decode_row.plan(step, self._side_by_side)
        # Memory that is sent is taken by the thread that sends it.
        return PlannedStep(rows, None if self._memory.shared else self._begin_pictures(step, rows))

    def drop_prepared(self) -> None:
        """Leave the pictures of the step that was prepared last: it is not asked for."""
        calls = None if self._last_begun is None else self._last_begun()
        if calls is not None:
            calls.stop()

    def __call__(self, step: RawStep, planned: PlannedStep | None = None) -> DecodedStep:
        """Return a step with its samples decoded and transformed.

        Args:
            step: raw samples.
            planned: what `prepare` has made of this step. None: that is done now.

        Raises:
            ShardError: an unreadable shard, unless the policy takes it for bad samples.
            SampleError: a bad sample, where the policy is to raise.
            BadSampleLimitError: no row of the step has a good sample or substitute.
            StorageError: storage failed after retries.
            NameError, AttributeError, ...: a transform has a bug.
        """
        decoder, limits = self._decode_row, self._limits
        decoder.progress.begin_stage(Stage.TEXT, step.lineage.epoch, step.lineage.step)
        decoded = self._at_once(step)
        if decoded is not None:
            return decoded
        rows, begun = planned or (decoder.plan(step, self._side_by_side), None)  # 1
        memory, pictures = begun or self._begin_pictures(step, rows)  # 2
        pictures.finish()
        if limits is None:  # 3
            filled = decoder.filled(step, self._finish_rows(decoder, step, rows, memory))
            return assembled(step, filled)
        documents = self._finish_rows(decoder.planned, step, rows, memory)
        packs = packed_rows(step, documents, decoder, limits)
        require_good_row(step, packs, decoder, limits)
        return assembled_packs(step, packs)

    def _begin_pictures(self, step: RawStep, rows: Sequence[Prepared | None]) -> BegunPictures:
        """Take memory for a step, and let the helper threads begin its planned pictures."""
        tasks = [
            (position, entry, field)
            for position, entry in enumerate(rows)
            if isinstance(entry, SampleDecoding)
            for field in entry.early_fields
        ]
        memory = self._memory_of_rows(rows)

        def decode(number: int) -> None:
            position, entry, field = tasks[number]
            if calls.is_awaited:  # else messages about a late batch mean another step
                self._decode_row.note(step, position, entry)
            entry.decode_picture(field, memory[position])

        calls = ThreadedCalls(decode, [_num_bytes(step.outcomes[task[0]]) for task in tasks])
        self._last_begun = weakref.ref(calls)
        if self._pool is not None:
            calls.begin(self._pool, self._num_helpers)
        return BegunPictures(memory, calls)

    def _memory_of_rows(self, rows: Sequence[Prepared | None]) -> Sequence[RowMemory]:
        """Return memory of the batch for each row. The videos of a field lie one after the other.

        A batch crosses to the main process in one block, so all fields share one.
        """
        planned: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
        for position, entry in enumerate(rows):
            for name, plan in entry.plans.items() if isinstance(entry, SampleDecoding) else ():
                if plan.shapes:
                    files = [(position, shape) for shape in plan.shapes]
                    planned.setdefault(name, []).extend(files)
        groups = self._fixed_shapes(len(rows))
        groups += [[shape for _, shape in of_field] for of_field in planned.values()]
        views = self._memory.take_groups(groups)
        fixed = dict(zip(self._decode_row.decoders.shapes, views, strict=False))
        memory = [
            {name: [view[position]] for name, (view,) in fixed.items()}
            for position in range(len(rows))
        ]
        for (name, of_field), of_views in zip(planned.items(), views[len(fixed) :], strict=True):
            for (position, _), view in zip(of_field, of_views, strict=True):
                memory[position].setdefault(name, []).append(view)
        return memory

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
        lineage, batch_fields = step.lineage, self._decode_row.batch_fields
        decoders = self._decode_row.decoders
        stored = decoders.stored
        if stored is not None:
            key = str(samples[0]["__key__"])
            sample_position = (lineage.epoch, lineage.step, *lineage.planned[0])
            self._decode_row.progress.begin_sample(Stage.DECODE, *sample_position, key)
        groups = self._memory.take_groups(self._fixed_shapes(len(samples)))
        memory = {name: block for name, (block,) in zip(decoders.shapes, groups, strict=True)}
        try:
            if stored is None:
                decoded = [parse_fields(sample, decoders) for sample in samples]
            else:
                decoded = stored.decode_all(samples, memory)
        except SampleError:
            return None
        if not batch_fields.reserved.isdisjoint(chain.from_iterable(decoded)):
            return None
        if batch_fields.decoded and any(map(batch_fields.wrong, decoded)):
            return None
        for row, sample in enumerate(decoded, start=lineage.start):
            seed, epoch = self._decode_row.lookup.stream(lineage.epoch, lineage.step, row)
            shard, index = sample["__lineage__"][:2]
            # _make takes half the time of a call.
            sample["__lineage__"] = SampleLineage._make((shard, index, epoch, lineage.step, seed))
        if stored is None:
            return DecodedStep(lineage, decoded)
        rows = zip(decoded, lineage.planned, strict=True)
        return assembled(step, [Row(sample, ref, None) for sample, ref in rows])

    def _fixed_shapes(self, num_rows: int) -> list[list[tuple[int, ...]]]:
        """Return the shape of all rows of each field whose rows have one shape."""
        return [[(num_rows, *shape)] for shape in self._decode_row.decoders.shapes.values()]

    def _finish_rows(
        self,
        decode: Callable[[RawStep, int, Prepared | None, RowMemory], T],
        step: RawStep,
        rows: list[Prepared | None],
        memory: Sequence[RowMemory],
    ) -> list[T]:
        """Do pass 3 for all rows in threads, for those with functions of the user in this one.

        Such functions run in the order of rows. Other threads decode the media of the next rows.
        Nothing stays in `rows`: large pictures go when a function has made them small.
        """
        decoder = self._decode_row

        def taken(position: int) -> Prepared | None:
            entry, rows[position] = rows[position], None
            return entry

        def decode_row(position: int) -> T:
            return decode(step, position, taken(position), memory[position])

        if not decoder.has_functions:
            return self._side_by_side(decode_row, step.outcomes)

        def begun() -> Iterator[tuple[tuple[int, Prepared | None], bool]]:
            for position in range(len(rows)):
                entry = decoder.begin(step, position, taken(position))
                yield (position, entry), isinstance(entry, SampleDecoding) and entry.has_media_left

        def decode_media(row: tuple[int, Prepared | None]) -> Prepared | None:
            return decoder.begin(step, *row, memory[row[0]])

        with self._helpers(step.outcomes) as (pool, num_helpers):
            if pool is None or decoder.decoders.table.has_user_media:
                return list(map(decode_row, range(len(rows))))
            ahead = calls_ahead(decode_media, begun(), pool, 2 * num_helpers)
            return [
                decode(step, position, entry, memory[position])
                for position, entry in enumerate(ahead)
            ]

    def _side_by_side(self, function: Callable[[int], T], outcomes: Sequence[Outcome]) -> list[T]:
        """Call a function for each row of a step, in threads.

        Raises the error of the first row that has one.
        """
        with self._helpers(outcomes) as (pool, num_helpers):
            if pool is None:
                return list(map(function, range(len(outcomes))))
            calls = ThreadedCalls(function, list(map(_num_bytes, outcomes)))
            calls.begin(pool, num_helpers)
            return calls.finish()

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


def _has_lazy_bytes(outcome: Outcome) -> bool:
    return isinstance(outcome, dict) and any(
        isinstance(value, LazyBytes) for value in outcome.values()
    )


def _num_bytes(outcome: Outcome) -> int:
    """Return the bytes of a raw sample, which tell roughly how long it takes to decode."""
    if not isinstance(outcome, dict):
        return 0
    return sum(len(value) for value in outcome.values() if isinstance(value, bytes | memoryview))


# -- decoded samples -> the step; its lineage says what was bad, and what texts have lost ----------


def assembled(step: RawStep, rows: list[Row]) -> DecodedStep:
    """Put a step together. All rows have a sample."""
    of_rows = step.lineage.valid
    valid = [valid and row.is_filled for valid, row in zip(of_rows, rows, strict=True)]
    return _decoded_step(
        step,
        [row.sample for row in rows if row.sample is not None],
        valid,
        valid=valid,
        shown=[row.shown for row in rows],
        bad=tuple(row.bad for row in rows if row.bad),
    )


def assembled_packs(step: RawStep, rows: list[PackedRow]) -> DecodedStep:
    """Put a step of packs together. A row that nothing could fill is empty and invalid."""
    documents = [(number, entry) for number, row in enumerate(rows) for entry in row.documents]
    samples = [entry.sample for _, entry in documents if entry.sample is not None]
    return _decoded_step(
        step,
        samples,
        [True] * len(samples),
        valid=[bool(row.documents) for row in rows],
        rows=[number for number, _ in documents],
        shown=[entry.ref for _, entry in documents],
        bad=tuple(record for row in rows for record in row.bad),
        **_unlike_measured(rows),
    )


def _decoded_step(
    step: RawStep, samples: list[Sample], is_valid: list[bool], **changes: Any
) -> DecodedStep:
    """Return samples with the lineage of their step.

    Args:
        step: The step.
        samples: All of it.
        is_valid: Whether each counts.
        changes: What else the lineage says.
    """
    lineage = _with_losses(step.lineage, samples, is_valid)
    return DecodedStep(replace(lineage, **changes), samples)


def _unlike_measured(rows: list[PackedRow]) -> dict[str, Any]:
    """Return what the lineage of a step says about samples unlike measured, with one example."""
    unlike = [document for row in rows for document in row.unlike_measured]
    if not unlike:
        return {}
    sample, measured = unlike[0].sample or {}, unlike[0].num_measured
    num_tokens = num_tokens_of(sample)
    return {
        "num_longer": sum(document.growth > 0 for document in unlike),
        "num_shorter": sum(document.growth < 0 for document in unlike),
        "unlike_measured": f"{address(sample, '')}: {num_tokens:,} tokens, {measured:,} measured",
    }


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
