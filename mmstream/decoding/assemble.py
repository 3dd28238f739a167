"""Decoded samples -> rows of a step, ready to be collated. Rows of packs are filled here.

Place in the flow: `step.py` calls it last. What texts have lost, and what was bad, goes into the
lineage of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mmstream.bad_samples.quarantine import TOO_LONG, BadSample
from mmstream.decoding.address import address
from mmstream.decoding.field import IMAGE
from mmstream.decoding.substitute import (
    Document,
    Refusal,
    Row,
    RowAddress,
    RowDecoder,
    no_good_row,
)
from mmstream.decoding.text.placeholders import LOSS_FIELD, TextLoss
from mmstream.errors import LengthError, where
from mmstream.packing.settings import PackLimits
from mmstream.reading.step import BatchLineage, RawStep
from mmstream.types import Sample, SampleRef


class DecodedStep(NamedTuple):
    """The samples of a job, in the order of rows, ready to be collated.

    Without packs there is one per row. Rows of packs have any number; ``lineage.rows`` says the row
    of each sample.
    """

    lineage: BatchLineage
    samples: list[Sample]


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
    shown = [(number, entry) for number, row in enumerate(rows) for entry in row.documents]
    samples = [entry.sample for _, entry in shown if entry.sample is not None]
    return _decoded_step(
        step,
        samples,
        [True] * len(samples),
        valid=[bool(row.documents) for row in rows],
        rows=[number for number, _ in shown],
        shown=[entry.ref for _, entry in shown],
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
    no_picture = _first_without_picture(samples, is_valid)
    return DecodedStep(replace(lineage, no_picture=no_picture, **changes), samples)


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
