"""One row of a step: its planned samples, decoded, or a substitute for bad ones.

Place in the flow: `step.py` calls it in each of its passes. A row is one sample, or a pack of
several: the second half of this module fills packs.

This is the only place that catches errors of samples, and the only one that drops samples. A sample
is bad when two reads gave the same bytes and no decoder accepts them, or when `MAX_SAMPLE_READS`
reads gave no sample, or other bytes than its checksum says. A fault that storage makes once in a
while is not a fault of the data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from traceback import extract_tb
from typing import Any, NamedTuple, TypeAlias

from mmstream.dataset.shards import MAX_SAMPLE_READS
from mmstream.decoding.bad_samples import BadSamplePolicy
from mmstream.decoding.decode import Decode
from mmstream.decoding.sample import NO_MEMORY, RowMemory, SampleDecoding, parse_fields, tokenize
from mmstream.decoding.sample_rng import is_user_function, seed_generators
from mmstream.decoding.text.placeholders import LOSS_FIELD
from mmstream.errors import (
    BUGS,
    BadSampleLimitError,
    ChecksumError,
    ConfigError,
    DecodeError,
    LengthError,
    MMStreamError,
    SampleError,
    ShardError,
    SkipSample,
    escaped,
    where,
)
from mmstream.media.fields import call_user
from mmstream.order import MAX_ATTEMPTS
from mmstream.packing.plan import PackLimits
from mmstream.progress import Progress, Stage
from mmstream.reading.fetcher import SampleLookup
from mmstream.reading.step import BatchLineage, Outcome, RawStep
from mmstream.tar.lazy_bytes import LazyBytes
from mmstream.types import TOO_LONG, BadSample, Sample, SampleLineage, SampleRef

logger = logging.getLogger(__name__)

Transform: TypeAlias = Callable[[Sample], Sample]

SideBySide: TypeAlias = Callable[[Callable[[int], Any], Sequence[Outcome]], list[Any]]
"""Calls a function with the position of each raw sample, in threads, and returns the results in
order."""

MAX_SUBSTITUTES = {SkipSample: 256, SampleError: 32}
"""Substitutes tried for a row: more where a filter leaves samples out than where data is bad.

After `order.MAX_ATTEMPTS` of them the row is invalid. What it shows still comes from its own draws,
so that a batch is the same on every topology.
"""

ORIGIN_FIELDS = ("__key__", "__url__", "__source__", "__lineage__", LOSS_FIELD)
"""Where a sample comes from, and what became of it. A transform cannot change these fields."""


def one_by_one(function: Callable[[int], Any], outcomes: Sequence[Outcome]) -> list[Any]:
    """Call a function with the position of each raw sample, as `SideBySide`, in this thread."""
    return [function(position) for position in range(len(outcomes))]


class BatchFields(NamedTuple):
    """Names that batches have for fields of their own."""

    reserved: frozenset[str] = frozenset()
    """Only batches have them. A sample with one is bad: its field would take the batch's place."""
    decoded: tuple[str, ...] = ()
    """Fields that batches make something of. A sample whose field is a file is bad."""

    def wrong(self, sample: Sample) -> str | None:
        """Return a field of a sample that batches cannot have. None: there is none."""
        if not self.reserved.isdisjoint(sample):
            return min(self.reserved.intersection(sample))
        files = (name for name in self.decoded if isinstance(sample.get(name), bytes))
        return next(files, None)


Prepared: TypeAlias = SampleDecoding | SampleError | ShardError
"""A sample that is being decoded, or why it is bad."""


class Row(NamedTuple):
    """One row of a step, and what was bad about its planned sample."""

    sample: Sample | None
    shown: SampleRef
    bad: BadSample | None
    is_filled: bool = True
    """False: `sample` only keeps the shape of the batch, and the row is invalid."""


class Refusal(NamedTuple):
    """Why a sample is bad."""

    kind: str
    """One of `mmstream.types.KINDS`."""
    reason: str


class Document(NamedTuple):
    """A sample of a pack, or why it is left out."""

    ref: SampleRef
    sample: Sample | None
    refusal: Refusal | None = None
    num_measured: int = 0
    """Its tokens when the pack was planned."""

    @property
    def growth(self) -> int:
        """How many tokens it has more than measured. A bad sample has none."""
        return 0 if self.sample is None else num_tokens_of(self.sample) - self.num_measured


class RowAddress(NamedTuple):
    """A row of a step."""

    epoch: int
    step: int
    row: int
    """Row of the global batch."""


class _Call(NamedTuple):
    """A function before or after decoding."""

    function: Transform
    stage: str
    """Its place, which keys its draws."""
    is_user: bool
    """Whether it may draw at random."""


@dataclass(frozen=True)
class RowDecoder:
    """Decodes rows. `DecodeStage` describes its fields."""

    lookup: SampleLookup
    decoders: Decode
    before: tuple[Transform, ...]
    transforms: tuple[Transform, ...]
    policy: BadSamplePolicy
    progress: Progress
    batch_fields: BatchFields = field(default_factory=BatchFields)
    _shown_places: set[tuple[str, int]] = field(default_factory=set, init=False)
    """Lines of functions of the user whose traceback was logged."""

    def plan(
        self, step: RawStep, side_by_side: SideBySide, *, all_shapes: bool = False
    ) -> list[Prepared | None]:
        """Do pass 1 of a step: functions before decoding, plans of media, all texts in one call.

        Args:
            step: raw samples.
            side_by_side: plans the videos and recordings of several samples at a time.
            all_shapes: nothing is decoded: plan all recordings, also those that no text counts, and
                no pictures.

        Returns:
            One entry per row, for a call; None for a sample that was not read.

        Raises:
            StorageError: storage failed after retries.
            NameError, AttributeError, ...: a function has a bug.
        """
        rows: list[Prepared | None] = []
        for position, outcome in enumerate(step.outcomes):
            entry: Prepared | None = None
            if isinstance(outcome, dict):
                ref = step.lineage.planned[position]
                try:
                    sample = self._before(_address(step, position), ref, outcome)
                    entry = SampleDecoding(sample, self.decoders)
                except (SampleError, ShardError) as error:  # a function may read more of a file
                    entry = error
            rows.append(entry)
        table = self.decoders.table

        def plan(position: int) -> Prepared | None:
            entry = rows[position]
            if not isinstance(entry, SampleDecoding):
                return entry
            if table.media:
                self.note(step, position, entry)
            try:
                entry.plan(all_shapes=all_shapes)
            except (SampleError, ShardError) as error:
                return error
            return entry

        if not table.media or table.has_user_media:
            side_by_side = one_by_one
        planned: list[Prepared | None] = side_by_side(plan, step.outcomes)
        decodings = [entry for entry in planned if isinstance(entry, SampleDecoding)]
        tokenize(decodings, self.decoders)
        for decoding in () if all_shapes else decodings:
            decoding.plan_pictures()
        return planned

    def note(self, step: RawStep, position: int, entry: SampleDecoding) -> None:
        """Write down that files of a row are decoded now."""
        lineage, ref = step.lineage, step.lineage.planned[position]
        key = str(entry.sample["__key__"])
        self.progress.begin_sample(Stage.DECODE, lineage.epoch, lineage.step, *ref, key)

    @cached_property
    def has_early_functions(self) -> bool:
        """Whether functions of the user run before or while media are decoded."""
        is_user = any(call.is_user for call in self._before_calls)
        return is_user or self.decoders.has_user_functions

    @cached_property
    def has_functions(self) -> bool:
        """Whether functions of the user take part. They run in one thread, in the order of rows."""
        return self.has_early_functions or any(call.is_user for call in self._transform_calls)

    @cached_property
    def _before_calls(self) -> list[_Call]:
        return _calls(self.before, "before")

    @cached_property
    def _transform_calls(self) -> list[_Call]:
        return _calls(self.transforms, "transforms")

    def begin(
        self, step: RawStep, position: int, entry: Prepared | None, out: RowMemory | None = None
    ) -> Prepared | None:
        """Begin a row: all before its media, or with `out` these too; arguments as for a call.

        Functions of the user come before media. The media may be decoded in any thread.
        """
        if not isinstance(entry, SampleDecoding):
            return entry
        self.note(step, position, entry)
        try:
            entry.begin() if out is None else self._finish(entry, step.outcomes[position], out)
        except (SampleError, ShardError) as error:
            return error
        return entry

    def __call__(
        self, step: RawStep, position: int, prepared: Prepared | None, out: RowMemory
    ) -> Row:
        """Return one row of a step: its planned sample, or else a substitute.

        Args:
            step: raw samples.
            position: of the row among the rows of this rank.
            prepared: what `plan` has made of the planned sample.
            out: the memory of the batch for the row's pictures and videos.
        """
        planned, sample, refusal, _ = self.planned(step, position, prepared, out)
        if refusal is None:
            return Row(sample, planned, None)
        address = _address(step, position)
        substitute, substitute_ref, is_filled = self._substitute(address, out)
        is_filled = is_filled and self.policy.action != "mask"
        if not step.lineage.valid[position]:  # padding: counted where it is valid
            return Row(substitute, substitute_ref, None, is_filled)
        bad = self.record(address, planned, refusal, substitute_ref if is_filled else None)
        return Row(substitute, substitute_ref, bad, is_filled)

    def planned(
        self, step: RawStep, position: int, prepared: Prepared | None, out: RowMemory
    ) -> Document:
        """Return a planned sample of a step, or why it is bad. Arguments as for a call."""
        ref = step.lineage.planned[position]
        address = _address(step, position)
        try:
            sample = self._decode_planned(address, ref, step.outcomes[position], out, prepared)
        except SampleError as error:
            cause = error.__cause__ if isinstance(error.__cause__, ShardError) else error
            if self.policy.action == "raise" and not isinstance(error, SkipSample):
                raise cause from cause.__cause__
            self._show_traceback(error, step.outcomes[position])
            return Document(ref, None, Refusal(type(cause).__name__, str(error)))
        return Document(ref, sample)

    def _show_traceback(self, error: SampleError, outcome: Outcome) -> None:
        """Log where a function of the user failed, once a line of it."""
        cause = error.__cause__
        if cause is None or isinstance(cause, MMStreamError):
            return
        frames = extract_tb(cause.__traceback__)
        location = frames[-1].filename, frames[-1].lineno or 0
        if frames[0].name in _CALLERS and location not in self._shown_places:
            self._shown_places.add(location)
            url = str(outcome["__url__"]) if isinstance(outcome, dict) else ""
            logger.warning(
                "%s (of %s); the next errors of this line are counted only",
                *(error, escaped(url.rpartition("/")[0])),
                exc_info=cause,
            )

    def read_pack(self, address: RowAddress, refs: Sequence[SampleRef]) -> list[Document]:
        """Read and decode samples that their step does not hold: those of a substitute pack."""
        self._note_read(address, refs[0])
        return [
            self._document(address, ref, outcome)
            for ref, outcome in zip(refs, self.lookup.read_all(refs), strict=True)
        ]

    def _document(self, address: RowAddress, ref: SampleRef, outcome: Outcome) -> Document:
        """Decode a sample that its step does not hold."""
        try:
            return Document(ref, self._decode_planned(address, ref, outcome, NO_MEMORY))
        except SampleError as error:
            return Document(ref, None, Refusal(type(error).__name__, str(error)))

    def record(
        self,
        address: RowAddress,
        planned: SampleRef,
        refusal: Refusal,
        substitute: SampleRef | None,
        document: int | None = None,
    ) -> BadSample:
        """Return the record of a bad sample.

        Args:
            address: of its row.
            planned: the sample.
            refusal: why it is bad.
            substitute: the sample that takes its row. None: none does.
            document: its number in its pack.
        """
        shard, index = planned
        return BadSample(
            *address,
            self.lookup.shard_name(shard),
            index,
            *refusal,
            None if substitute is None else (self.lookup.shard_name(substitute[0]), substitute[1]),
            self.lookup.shard_stamp(shard),
            document,
        )

    def filled(self, step: RawStep, rows: list[Row]) -> list[Row]:
        """Let rows without a sample show the first one of the whole step, on whatever rank it is.

        So a row shows the same on every topology, and all ranks stop at the same step.

        Raises:
            BadSampleLimitError: no row of the step has a good sample or substitute.
        """
        if all(row.sample is not None for row in rows):
            return rows
        lineage = step.lineage
        order = self.lookup.order
        whole = order.rows_of(lineage.epoch, lineage.step, (0, order.global_batch_size))
        for number in range(*whole):
            position = number - lineage.start
            if 0 <= position < len(rows):
                sample, ref = rows[position].sample, rows[position].shown
            else:
                sample, ref = self._row_of_others(RowAddress(lineage.epoch, lineage.step, number))
            if sample is not None:
                # The loss is counted where the row is.
                spare = {name: value for name, value in sample.items() if name != LOSS_FIELD}
                return [
                    row._replace(sample=spare, shown=ref) if row.sample is None else row
                    for row in rows
                ]
        reason = next((row.bad.reason for row in rows if row.bad), "padding only")
        raise no_good_row(lineage, reason)

    def _row_of_others(self, address: RowAddress) -> tuple[Sample | None, SampleRef]:
        """Return what a row of another rank shows, and where it comes from."""
        (ref,) = self.lookup.planned(*address)[1].refs
        self._note_read(address, ref)
        document = self._document(address, ref, self.lookup.read(ref))
        if document.sample is not None:
            return document.sample, ref
        return self._substitute(address, NO_MEMORY)[:2]

    def _substitute(
        self, address: RowAddress, out: RowMemory
    ) -> tuple[Sample | None, SampleRef, bool]:
        """Return a substitute, where it comes from, and whether it counts as the row's sample."""
        ref: SampleRef = (-1, -1)
        tried = set[SampleRef]()
        max_substitutes = MAX_SUBSTITUTES[SampleError]
        attempt = 0
        while attempt < max_substitutes:
            (ref,) = self.lookup.order.substitute_unit(*address, attempt).refs
            attempt += 1
            if ref in tried:
                continue
            tried.add(ref)
            try:
                self._note_read(address, ref)
                outcome = self.lookup.read(ref)
                sample = self._decode_planned(address, ref, outcome, out)
            except SkipSample:
                max_substitutes = MAX_SUBSTITUTES[SkipSample]
            except SampleError:
                pass
            else:
                return sample, ref, attempt <= MAX_ATTEMPTS
        return None, ref, False

    def _decode_planned(
        self,
        address: RowAddress,
        ref: SampleRef,
        outcome: Outcome,
        out: RowMemory,
        prepared: Prepared | None = None,
    ) -> Sample:
        """Return a sample ready to be collated. Read it again before calling it bad.

        Decoders give the same answer to the same bytes, so bytes that one of them has refused are
        not decoded again: the refusal may have taken all the time that a sample has.
        """
        earlier_outcomes: list[Outcome] = []
        while True:
            try:
                return self._decode(address, ref, outcome, out, prepared)
            except (SampleError, ShardError) as error:
                if _is_final(error, outcome, earlier_outcomes):
                    raise
                # The index may have been delivered wrong, but not one that fits its checksums.
                if isinstance(outcome, Exception) and not isinstance(outcome, ChecksumError):
                    self.lookup.forget_index(ref[0])
                self._note_read(address, ref)
                again = self.lookup.read_again(ref)
                if isinstance(error, DecodeError) and _is_same(outcome, again):
                    raise
            earlier_outcomes.append(outcome)
            prepared = None
            outcome = again

    def _note_read(self, address: RowAddress, ref: SampleRef) -> None:
        self.progress.begin_sample(Stage.READ_AGAIN, address.epoch, address.step, *ref, "")

    def _decode(
        self,
        address: RowAddress,
        ref: SampleRef,
        outcome: Outcome,
        out: RowMemory,
        prepared: Prepared | None,
    ) -> Sample:
        """Decode one sample. An unreadable shard is its fault where the policy says so."""
        try:
            for error in (outcome, prepared):
                if isinstance(error, SampleError | ShardError):
                    raise error
            assert isinstance(outcome, dict)
            key = str(outcome["__key__"])
            self.progress.begin_sample(Stage.DECODE, address.epoch, address.step, *ref, key)
            if not isinstance(prepared, SampleDecoding):
                prepared = SampleDecoding(self._before(address, ref, outcome), self.decoders)
            sample = self._finish(prepared, outcome, out)
            for call in self._transform_calls:
                sample = self._transform(call, sample, ref)
        except ShardError as error:
            if self.policy.shards:
                raise SampleError(str(error)) from error
            raise
        finally:
            for value in outcome.values() if isinstance(outcome, dict) else ():
                if isinstance(value, LazyBytes):  # the step holds it until its last row
                    value.clear()
        if (name := self.batch_fields.wrong(sample)) is not None:
            raise SampleError(
                f"{self._where(ref, sample)}.{name}: batches have a field of this name themselves: "
                "rename the file in the tar or in Pipeline(before=), or what a transform adds"
            )
        return sample

    def _finish(self, entry: SampleDecoding, outcome: Outcome, out: RowMemory) -> Sample:
        """Return a sample with its media decoded, before the functions after decoding."""
        sample = entry.finish(out)
        assert isinstance(outcome, dict)
        # No decoder has taken these. Nobody after this reads by ranges, or may keep a view of what
        # was read.
        unread = [
            name
            for name, value in sample.items()
            if isinstance(value, LazyBytes)
            or (isinstance(value, memoryview) and value is outcome.get(name))
        ]
        for name in unread:
            sample[name] = bytes(sample[name])
        return sample

    def _before(self, address: RowAddress, ref: SampleRef, raw: Sample) -> Sample:
        """Return a raw sample with its lineage, after the functions before decoding.

        They find ``json`` parsed. The raw sample is not changed: a second read is compared with it.
        """
        seed, epoch = self.lookup.stream(*address)
        shard, index = raw["__lineage__"][:2]
        sample = raw | {"__lineage__": SampleLineage(shard, index, epoch, address.step, seed)}
        if self.before:
            self.progress.begin_sample(
                Stage.TEXT, address.epoch, address.step, *ref, str(raw["__key__"])
            )
            sample = parse_fields(sample, self.decoders)
        for call in self._before_calls:
            sample = self._transform(call, sample, ref)
        return sample

    def _transform(self, call: _Call, sample: Sample, ref: SampleRef) -> Sample:
        transform, stage, is_user = call
        if is_user:
            seed_generators(sample, stage)
        name = getattr(transform, "__name__", type(transform).__name__)
        origin = {field: sample[field] for field in ORIGIN_FIELDS if field in sample}
        try:
            result = transform(sample)
        except SampleError as error:
            # A user's subclass may not take one string, so it is raised again as one of ours.
            kind = next(k for k in (SkipSample, DecodeError, SampleError) if isinstance(error, k))
            raise kind(f"{self._where(ref, origin)}: {name}: {error}") from error
        except MMStreamError:
            raise
        except BUGS as error:
            error.add_note(f"{name} was called with {self._where(ref, origin)}")
            raise
        except Exception as error:
            reason = f"{name}: {type(error).__name__}: {error}"
            raise SampleError(f"{self._where(ref, origin)}: {reason}") from error
        if not isinstance(result, dict):
            raise ConfigError(
                f"{name} returned {type(result).__name__}: it must return the sample "
                '(to leave one out, raise mm.SkipSample("why"))'
            )
        if wrong := [key for key in result if not isinstance(key, str)]:
            raise ConfigError(
                f"{name} returned a sample with the key {escaped(repr(wrong[0]))}: keys are strings"
            )
        return {name: result[name] for name in result if name not in ORIGIN_FIELDS} | origin

    def _where(self, ref: SampleRef, origin: Sample) -> str:
        return where(self.lookup.shard_name(ref[0]), ref[1], str(origin["__key__"]))


def _calls(functions: Sequence[Transform], stage: str) -> list[_Call]:
    return [
        _Call(function, f"{stage} {number}", is_user_function(function))
        for number, function in enumerate(functions)
    ]


_CALLERS = (call_user.__name__, RowDecoder._transform.__name__)
"""What calls functions of the user."""


def no_good_row(lineage: BatchLineage, reason: str) -> BadSampleLimitError:
    """Return the error of a step of which no row, on any rank, has a sample."""
    return BadSampleLimitError(
        f"epoch {lineage.epoch} step {lineage.step}: no row has a good sample, nor a good "
        f"substitute (a transform or decoder that refuses all of them?); the first: {reason}"
    )


def _address(step: RawStep, position: int) -> RowAddress:
    lineage = step.lineage
    row = lineage.order_row(lineage.planned_row(position))
    return RowAddress(lineage.epoch, lineage.step, row)


def _is_final(error: Exception, outcome: Outcome, earlier_outcomes: Sequence[Outcome]) -> bool:
    """Tell whether a sample need not be read again.

    Args:
        error: Why it cannot be used.
        outcome: What was read.
        earlier_outcomes: What was read before.
    """
    cause = error if isinstance(error, ShardError) else error.__cause__
    return (
        isinstance(error, SkipSample)
        or (isinstance(error, SampleError) and error.is_refused)
        or (isinstance(cause, ShardError) and cause.is_replaced)
        or len(earlier_outcomes) + 1 == MAX_SAMPLE_READS
        or any(_is_same(earlier, outcome) for earlier in earlier_outcomes)
    )


def _is_same(outcome: Outcome, other: Outcome) -> bool:
    """Tell whether two reads gave the same bytes, or the same reason why there are none.

    Bytes that are not a sample may be anything and look alike, so they are never the same.
    """
    if isinstance(outcome, ShardError) and isinstance(other, ShardError):
        return str(outcome) == str(other)
    if not (isinstance(outcome, dict) and isinstance(other, dict)):
        return False
    if outcome.keys() != other.keys():
        return False
    return all(_is_same_value(value, other[name]) for name, value in outcome.items())


def _is_same_value(value: object, other: object) -> bool:
    """Tell whether two reads of a field gave the same bytes, as far as these were read."""
    if not isinstance(value, LazyBytes):
        return value == other
    try:
        return value.is_same(other)
    except ShardError:
        return False


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
    unlike_measured: list[Document]
    """Those of its planned samples that have more or fewer tokens than measured."""


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
    by_row: list[list[Document]] = [[] for _ in range(lineage.num_rows)]
    for number, document in enumerate(_with_measured(documents, step.num_tokens)):
        by_row[lineage.planned_row(number)].append(document)
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
            documents = _with_measured(decoder.read_pack(address, unit.refs), unit.num_tokens)
            if _packed_row(address, documents, decoder, limits).documents:
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
    lengths = map(len, ids) if is_several(ids) else (len(ids),)
    return sum(-(-length // multiple_of) * multiple_of for length in lengths)


def is_several(value: Any) -> bool:
    """Tell whether a field holds the tokens of several documents."""
    return isinstance(value, list | tuple) and not any(isinstance(item, int) for item in value)


def _with_measured(
    documents: Sequence[Document], num_tokens: Sequence[int] | None
) -> list[Document]:
    assert num_tokens is not None, "the order of packs says them"
    pairs = zip(documents, num_tokens, strict=True)
    return [document._replace(num_measured=measured) for document, measured in pairs]


def _packed_row(
    address: RowAddress, planned: list[Document], decoder: RowDecoder, limits: PackLimits
) -> PackedRow:
    """Return a row: its good samples that fit, or those of a substitute."""
    unlike = [document for document in planned if document.growth]
    fitted = _fitted(planned, limits, decoder)
    if decoder.policy.action == "raise":
        for document in fitted:
            if document.refusal is not None and document.refusal.kind == TOO_LONG:
                raise LengthError(document.refusal.reason)
    good = [document for document in fitted if document.sample is not None]
    substitute: list[Document] = []
    if planned and not good and decoder.policy.action != "mask":
        substitute = _substitute(address, fitted, decoder, limits)
    first = substitute[0].ref if substitute else None
    bad = [
        decoder.record(address, document.ref, document.refusal, first, number)
        for number, document in enumerate(fitted)
        if document.refusal is not None
    ]
    return PackedRow(good or substitute, bad, unlike)


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
        documents = _with_measured(decoder.read_pack(address, unit.refs), unit.num_tokens)
        fitted = _fitted(documents, limits, decoder)
        good = [document for document in fitted if document.sample is not None]
        if good:
            return good
    return []


def _fitted(documents: list[Document], limits: PackLimits, decoder: RowDecoder) -> list[Document]:
    """Return samples, with a refusal for those that make their row too long.

    Samples that are no longer than measured fit in any case. The others get the room that is left,
    in their order.
    """
    lengths = [
        0
        if document.sample is None
        else num_tokens_of(document.sample, limits.document_multiple_of)
        for document in documents
    ]
    if sum(lengths) <= limits.max_tokens:
        return documents
    fitted, room = list(documents), limits.max_tokens
    for number in sorted(range(len(documents)), key=lambda number: documents[number].growth > 0):
        if lengths[number] <= room:
            room -= lengths[number]
            continue
        ref, sample, _, num_measured = documents[number]
        assert sample is not None, "a bad sample has no tokens"
        address = where(decoder.lookup.shard_name(ref[0]), ref[1], str(sample["__key__"]))
        reason = (
            f"{address}: {num_tokens_of(sample):,} tokens, {num_measured:,} were "
            f"measured, and its pack of {limits.max_tokens:,} has no room for more: measure and "
            "plan again"
        )
        fitted[number] = Document(ref, None, Refusal(TOO_LONG, reason))
    return fitted
