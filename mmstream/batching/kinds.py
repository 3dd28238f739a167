"""The kinds of batches: what each asks of a pipeline, its order, and how it makes a batch.

    Pipeline(batching=)   rows of a step        batch
    None                  samples               padded: `collate`, or the user's own function
    `Buckets`             those of one bucket   the same
    `Flat`                samples               documents without padding: `flatten`
    `Pack`                packs of a plan       the same

A pipeline asks `check_batching`, `order_of` and `batches_of`, which know the kinds apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeAlias

from mmstream.batching.collate import Collate, Collator, collate, make_batch
from mmstream.batching.flat import Flat, Pack, make_flat_batch
from mmstream.batching.lengths import find_plan, packs_of_mixture
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.mixture import Mixture
from mmstream.dataset.select import bucket_order
from mmstream.decoding.batch_memory import BatchMemory
from mmstream.decoding.decode import Decode
from mmstream.decoding.rows import Transform
from mmstream.decoding.step import DecodedStep
from mmstream.errors import ConfigError
from mmstream.order import AnyOrder, BucketOrder, Buckets
from mmstream.order.buckets import Edge
from mmstream.packing.order import PackOrder
from mmstream.settings import refuse_broken
from mmstream.types import Batch

Batching: TypeAlias = Flat | Buckets | None
"""``Pipeline(batching=)``."""

SECONDS = "duration_s"
"""The column whose buckets pad recordings. Those of other columns pad tokens."""

# -- the order -------------------------------------------------------------------------------------


def order_of(
    batching: Batching,
    dataset: Dataset | Mixture,
    decode: Decode | None,
    before: Sequence[Transform],
    **settings: Any,
) -> AnyOrder:
    """Return the order of the rows of a pipeline. Settings are those of `Order.from_counts`."""
    if isinstance(batching, Buckets):
        return bucket_order(dataset, batching, **settings)
    if not isinstance(batching, Pack):
        return dataset.plan_order(**settings)
    if isinstance(dataset, Mixture):
        return packs_of_mixture(dataset, batching, decode, before, **settings)
    plan = find_plan(dataset, batching, decode, before, settings["seed"])
    return PackOrder.from_plan(plan, dataset.corpus, **settings)


# -- a batch of a step -----------------------------------------------------------------------------


def collator_of(decode: Decode | None, memory: BatchMemory) -> Collator:
    """Return `collate` with what it must know of the decoders.

    Args:
        decode: The decoders. None: there are none.
        memory: For recordings, and for fields of baked datasets.
    """
    if decode is None:
        return Collator()
    settings = decode.collate_settings
    if decode.stored is not None:
        return Collator(settings, tuple(decode.stored.shapes), memory.take)
    return Collator(settings, take_memory=memory.take if decode.table.media else None)


def batches_of(
    batching: Batching,
    order: AnyOrder,
    decode: Decode | None,
    collator: Collator,
    own_collate: Collate,
    repeat: int,
) -> Callable[[DecodedStep], Batch]:
    """Return the function that makes the batch of a step.

    Args:
        batching: The kind of batches.
        order: Of their rows.
        decode: The decoders. None: there are none.
        collator: `collate` with what it must know of the decoders.
        own_collate: ``Pipeline(collate=)``.
        repeat: Rows of a batch for each sample.
    """
    if isinstance(batching, Flat):
        flat = _with_plan_of(order, batching)
        return partial(make_flat_batch, settings=flat, collator=collator)
    function = collator if own_collate is collate else own_collate
    # An epoch that began with other settings may have an order without buckets.
    if (
        isinstance(batching, Buckets)
        and batching.pad_to == "edge"
        and isinstance(order, BucketOrder)
        and decode is not None
    ):
        collator_at = lru_cache(partial(_collator_at, collator, decode, order.settings.column))
        return partial(_make_padded, order, collator_at)
    return partial(make_batch, collate=function, repeat=repeat)


def _make_padded(
    order: BucketOrder, collator_at: Callable[[Edge], Collator], step: DecodedStep
) -> Batch:
    """Make the batch of a step, padded to the edge of its bucket."""
    return make_batch(step, collator_at(order.edge(step.lineage.epoch, step.lineage.step)))


def _collator_at(collator: Collator, decode: Decode, column: str, edge: Edge) -> Collator:
    """Return the collator that pads to the edge of a bucket: seconds, or else tokens."""
    if isinstance(edge, tuple):  # pictures have no padding
        return collator
    if column == SECONDS:
        return replace(collator, settings=decode.collate_settings_at(edge))
    return replace(collator, min_tokens=math.ceil(edge))


def _with_plan_of(order: AnyOrder, batching: Flat) -> Flat:
    """Return the settings with the length of documents that the plan leaves room for."""
    if not isinstance(order, PackOrder):
        return batching
    multiple_of = order.plan.settings.document_multiple_of
    if batching.document_multiple_of not in (1, multiple_of):
        raise ConfigError(
            f"mm.Pack(document_multiple_of={batching.document_multiple_of}): its plan leaves room "
            f"for multiples of {multiple_of}: plan packs with --document-multiple-of"
        )
    return replace(batching, document_multiple_of=multiple_of)


# -- what does not go together ---------------------------------------------------------------------


def check_batching(
    batching: Batching,
    dataset: Dataset | Mixture,
    decode: Decode | None,
    transforms: Sequence[Transform],
    *,
    is_own: bool,
) -> None:
    """Refuse settings of a pipeline that do not go with how batches are made.

    Args:
        batching: The kind of batches.
        dataset: What is read.
        decode: The decoders.
        transforms: The functions after decoding.
        is_own: ``collate`` is a function of the user.
    """
    is_flat, is_mixture = isinstance(batching, Flat), isinstance(dataset, Mixture)
    has_shapes = isinstance(batching, Buckets) and batching.has_shapes
    text = None if decode is None else decode.text
    refuse_broken(
        (
            not is_flat and text is not None and text.texts == "all" and not is_own,
            'TextDecoder(texts="all") makes several documents of a sample, and padded batches '
            "have one text a row: pass batching=mm.Flat()",
        ),
        (
            is_flat and is_own,
            "batching= makes the batches, so collate= would do nothing: leave out one of the two, "
            "and add fields to samples with transforms=",
        ),
        (
            is_flat and decode is None and not transforms,
            "batching= joins the tokens of texts, and nothing makes any: "
            "pass decode=mm.Decode(text=mm.TextDecoder(tokenizer))",
        ),
        (
            isinstance(batching, Buckets) and is_mixture,
            "batching=mm.Buckets(...) is for one dataset, and this is a mixture: its sources have "
            "epochs of their own",
        ),
        (
            decode is not None and decode.needs_bucket and not has_shapes,
            'ImageDecoder(size="bucket") takes the size from batching=mm.Buckets("aspect", '
            "edges=mm.aspect_edges(512)): give these too",
        ),
    )
    if isinstance(batching, Pack):
        _check_packs(batching, decode, is_mixture=is_mixture)
    if isinstance(batching, Buckets) and batching.pad_to == "edge":
        _check_padding(batching, decode, is_own=is_own)


def _check_padding(buckets: Buckets, decode: Decode | None, *, is_own: bool) -> None:
    """Refuse padding to edges where nothing has a length that they tell."""
    begin = f'mm.Buckets({buckets.column!r}, pad_to="edge")'
    settings = None if decode is None else decode.collate_settings
    sounds = () if decode is None or decode.is_baked else decode.table.sounds.values()
    refuse_broken(
        (is_own, f"{begin}: collate= makes the batches: leave out one of the two"),
        (
            buckets.column == SECONDS
            and (not sounds or None in [decoder.sample_rate for decoder in sounds]),
            f"{begin} pads recordings of a known rate: pass decode=mm.Decode(audio="
            "mm.AudioDecoder(sample_rate=16_000)), for a dataset that is not baked",
        ),
        (
            buckets.column != SECONDS and (settings is None or settings.pad_token_id is None),
            f"{begin} pads tokens: pass decode=mm.Decode(text=mm.TextDecoder(tokenizer)), or "
            f"buckets of {SECONDS}, which pad recordings",
        ),
        (
            buckets.column != SECONDS and settings is not None and settings.pad_to is not None,
            f'{begin}: TextDecoder(padding="max_length") pads all rows to one length: leave out '
            "one of the two",
        ),
    )


def _check_packs(pack: Pack, decode: Decode | None, *, is_mixture: bool) -> None:
    """Refuse settings that do not go with packs, or with those of a mixture."""
    text = None if decode is None else decode.text
    max_length = pack.max_tokens if text is None else text.max_length
    refuse_broken(
        (
            decode is not None and decode.is_baked,
            "batching=mm.Pack(...): packs are planned from texts, and a baked dataset has tokens: "
            "use mm.Flat(), or packs of the dataset that was baked",
        ),
        (
            max_length < pack.max_tokens,
            f"TextDecoder(max_length={max_length}) would cut texts that a row of "
            f"{pack.max_tokens} tokens has room for: give max_length={pack.max_tokens}",
        ),
        (
            is_mixture and pack.weights_of is None,
            "batching=mm.Pack(...) of a mixture: packs hold different numbers of samples, so say "
            'what its weights are proportions of: mm.Pack(weights_of="samples"), or '
            'mm.Pack(weights_of="tokens")',
        ),
        (
            not is_mixture and pack.weights_of is not None,
            f"mm.Pack(weights_of={pack.weights_of!r}): is for a mixture, and this is one "
            "dataset: leave it out",
        ),
        (
            not is_mixture and isinstance(pack.plan, Mapping),
            "mm.Pack(plan={source: plan}): is for a mixture, and this is one dataset: give its "
            "plan",
        ),
    )
