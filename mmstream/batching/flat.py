"""Documents one after the other, without padding: what models take as packed batches.

Place in the flow: after decoding, before the loader, in the place of `collate`.
`Pipeline(batching=)` takes the settings, `Flat`, or `Pack` for rows that are planned. The fields
that are not tokens are still made by `collate`, with one entry per document.

A document is closed to all others. Its tokens lie at ``cu_seq_lens_q[i]`` to
``cu_seq_lens_q[i + 1]`` of the tokens, its positions begin at 0, and its first label is -100.
Padding is made of documents too, so that no token of it sees a token of a sample.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from mmstream.batching.collate import FEATURES, Collator, as_list, mean_rate, with_lineage
from mmstream.decoding.rows import BatchFields, is_several
from mmstream.decoding.step import DecodedStep
from mmstream.decoding.stored import CollateSettings
from mmstream.errors import ConfigError
from mmstream.families.family import DocumentMedia
from mmstream.packing.cost import Cost
from mmstream.packing.plan import PackLimits, PackPlan
from mmstream.settings import NonNegativeInt, PositiveInt, checked
from mmstream.types import IGNORED_LABEL, Batch, IntArray, Sample

# -- settings --------------------------------------------------------------------------------------


@runtime_checkable
class Positions(Protocol):
    """A rule for positions of more than one dimension: those of text, time, height and width."""

    def __call__(self, input_ids: IntArray, media: DocumentMedia) -> IntArray:
        """Return the positions of a document of L tokens, int64 [3, L]: time, height, width."""


_ADVICE = {
    "positions": "give a rule, such as "
    "mm.families.qwen_vl.QwenVLPositions.from_config(model.config)",
    "plan": "give the name of a plan, its folder or URL, what mm.plan returns, or these by source",
    "cost": "give an mm.Cost, such as mm.Cost.from_config(model.config)",
}


@checked({"positions": _ADVICE["positions"]})
@dataclass(frozen=True)
class Flat:
    """Batches without padding: the documents of a rank one after the other.

    A document is one text with its media. Its tokens see those before them in the same document,
    and no others. Each row of the batch is one sample.

    Attributes:
        layout: "flat": token fields are [1, T], of all rows together. "rows": they are [B, T], and
            each row is filled up with padding documents. The second is for attention that takes no
            lengths of documents: eager, sdpa and flex.
        pad_to_multiple_of: T is a multiple of this number of tokens.
        document_multiple_of: Each document is filled up to a multiple of this number of tokens,
            with tokens that have no labels. For context parallelism, which cuts each document. With
            packs it is that of the plan, which leaves room for it.
        pad_documents_to: Number of documents in ``cu_seq_lens_q``, for compiled models that need
            one shape. Documents without a token are added at the end. None: as many as there are.
        positions: A rule of models whose positions have several dimensions:
            `mm.families.qwen_vl.QwenVLPositions`.
            None: positions count the tokens of each document.
        first_position: The position of the first token of a document: 2 for models that count as
            RoBERTa does.

    Raises:
        ConfigError: A setting is none of those that it may be.

    Examples:
        >>> from mmstream.train.tokenizer import byte_tokenizer
        >>> pipeline = mm.Pipeline(
        ...     mm.open_dataset("shards/"),
        ...     global_batch_size=8,
        ...     decode=mm.Decode(text=mm.TextDecoder(byte_tokenizer())),
        ...     batching=mm.Flat(),
        ... )
        >>> batch = next(iter(mm.Loader(pipeline)))
        >>> batch["input_ids"].shape == (1, batch["num_tokens"])
        True
    """

    _: KW_ONLY
    layout: Literal["flat", "rows"] = "flat"
    pad_to_multiple_of: PositiveInt = 1
    document_multiple_of: PositiveInt = 1
    pad_documents_to: PositiveInt | None = None
    positions: Positions | None = None
    first_position: NonNegativeInt = 0


@checked(_ADVICE)
@dataclass(frozen=True)
class Pack(Flat):
    """Rows of several samples, packed by a plan. The other settings are those of `Flat`.

    A plan is made of the lengths of all samples, so the rows of every step are known before
    training. ``global_batch_size`` counts rows.

    Attributes:
        max_tokens: The most tokens of a row.
        plan: The plan: its name, its folder or URL, or an open one. None: the one that fits. With a
            mixture, each source has a plan: their common name, or a dict of them by source.
        weights_of: With a mixture: whether its weights are shares of samples or of tokens. They
            hold on average only: each pack has samples of one source, and their number varies.
        limits: `PackLimits`: what a row may hold beside tokens. None: tokens alone.
        cost: What a row costs the model. Rows are dealt to ranks so that their costs are about
            equal. None: they are not dealt.
        deal: Which ranks deal rows among themselves. "all": all of them. "off": none. "auto": all
            of them if the shards are local. On object storage, only ranks that share lanes do,
            because others would read each other's ranges. Each of the others sorts its own rows.

    Examples:
        >>> mm.Pack(8192, layout="rows").max_tokens
        8192
    """

    max_tokens: PositiveInt
    _: KW_ONLY
    plan: str | os.PathLike[str] | PackPlan | Mapping[str, Any] | None = None
    weights_of: Literal["samples", "tokens"] | None = None
    limits: PackLimits | None = None
    cost: Cost | None = None
    deal: Literal["auto", "all", "off"] = "auto"

    def __post_init__(self) -> None:
        if self.limits is not None and self.limits.max_tokens != self.max_tokens:
            raise ConfigError(
                f"mm.Pack({self.max_tokens}, limits=mm.PackLimits({self.limits.max_tokens})): rows "
                "have one length: give the same number to both"
            )
        if self.layout == "rows" and self.max_tokens % self.pad_to_multiple_of:
            raise ConfigError(
                f"max_tokens={self.max_tokens} is not a multiple of "
                f"pad_to_multiple_of={self.pad_to_multiple_of}: rows are as long as max_tokens"
            )


# -- the documents of samples ---------------------------------------------------------------------


class DocumentTokens(NamedTuple):
    """The tokens of a document."""

    ids: IntArray
    labels: IntArray | None
    weights: NDArray[np.float32] | None


def documents_of(samples: Sequence[Sample]) -> tuple[list[DocumentTokens], IntArray]:
    """Return the tokens of each document, and the number of its sample."""
    documents: list[DocumentTokens] = []
    owners: list[int] = []
    for number, sample in enumerate(samples):
        own = _documents_of_sample(sample)
        documents += own
        owners += [number] * len(own)
    return documents, np.asarray(owners, dtype=np.int64)


def filled_up(
    tokens: Sequence[DocumentTokens], multiple_of: int, pad_token_id: int
) -> list[DocumentTokens]:
    """Fill each document up to a multiple of tokens, without labels.

    Example: a document of 5 tokens gets 3 more for a multiple of 4.
    """
    has_labels = any(document.labels is not None for document in tokens)
    filled = []
    for ids, labels, weights in tokens:
        missing = (0, -len(ids) % multiple_of)
        if labels is None and has_labels:
            labels = ids
        filled.append(
            DocumentTokens(
                np.pad(ids, missing, constant_values=pad_token_id),
                None if labels is None else np.pad(labels, missing, constant_values=IGNORED_LABEL),
                None if weights is None else np.pad(weights, missing),
            )
        )
    return filled


def _documents_of_sample(sample: Sample) -> list[DocumentTokens]:
    ids = sample.get("input_ids")
    if ids is None:
        raise ConfigError(
            f"{_key(sample)}: no input_ids, and batches without padding are made of tokens: give "
            "Decode a TextDecoder"
        )
    labels, weights = sample.get("labels"), sample.get("label_weights")
    if not is_several(ids):
        return [_checked(sample, ids, labels, weights)]
    count = len(ids)
    for name, values in (("labels", labels), ("label_weights", weights)):
        if values is not None and not (is_several(values) and len(values) == count):
            raise ConfigError(
                f"{_key(sample)}: {count} documents in input_ids, and {name} is not a list of as "
                "many arrays"
            )
    if not count:
        raise ConfigError(f"{_key(sample)}: input_ids is an empty list: give it a document")
    return [
        _checked(sample, *values)
        for values in zip(ids, labels or [None] * count, weights or [None] * count, strict=True)
    ]


def _checked(sample: Sample, ids: Any, labels: Any, weights: Any) -> DocumentTokens:
    ids = as_array(ids, np.int64)
    if ids.ndim != 1 or not len(ids):
        raise ConfigError(f"{_key(sample)}: input_ids of shape {ids.shape}: a document is [L]")
    labels = None if labels is None else as_array(labels, np.int64)
    weights = None if weights is None else as_array(weights, np.float32)
    for name, values in (("labels", labels), ("label_weights", weights)):
        if values is not None and values.shape != ids.shape:
            raise ConfigError(
                f"{_key(sample)}: {len(ids)} input_ids and {name} of shape {values.shape}: a "
                "document has one for each token"
            )
    return DocumentTokens(ids, labels, weights)


def as_array(value: Any, dtype: Any) -> NDArray[Any]:
    """Return numbers, such as those of a tensor on a device, as an array."""
    if isinstance(value, torch.Tensor):
        value = value.cpu().numpy()
    return np.asarray(value, dtype=dtype)


def _key(sample: Sample) -> str:
    return str(sample.get("__key__", "a sample"))


# -- a batch of them ------------------------------------------------------------------------------

PLAIN = Collator()
"""Of samples that no decoder of media has made."""

_TOKEN_FIELDS = ("input_ids", "attention_mask", "labels", "label_weights")
"""Fields of a sample with one entry per token."""

_BATCH_FIELDS = (
    *("document_ids", "document_row", "document_sample", "position_ids"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *("num_tokens", "num_label_tokens"),
)
"""Fields that only a flat batch has, and no sample."""

_MARKS = ("document_row", "cu_seq_lens_q")
"""Those by which a flat batch is told from a padded one."""

PADDING_DOCUMENT_TOKENS = 1024
"""The most tokens of a padding document: attention over it costs no more than over a sample."""


class _Layout(NamedTuple):
    """The documents in the order of their tokens, padding among them."""

    lengths: IntArray
    rows: IntArray
    entries: IntArray
    """Number of the document among those of samples; -1 for padding."""
    shape: tuple[int, int]
    """Of token fields."""


def flatten(
    samples: Sequence[Sample],
    rows: Sequence[int],
    num_rows: int,
    settings: Flat,
    collator: Collator = PLAIN,
) -> Batch:
    """Make a batch of documents that lie one after the other.

    A sample whose ``input_ids`` is a list of arrays is several documents, such as a preference
    pair. They are neighbours. Other fields of the sample are repeated for each of them.

    Args:
        samples: Decoded samples, in the order of rows.
        rows: Row of each sample in this batch. Rows do not fall. A row may have no sample.
        num_rows: B, how many rows there are.
        settings: How the batch is laid out.
        collator: Makes the other fields, and knows the id of padding. Media that have tokens in the
            text are repeated for each document of a sample. Others come once, with its first
            document.

    Returns:
        A dict of fields. D is the number of documents, those of padding among them. T is the number
        of tokens of all rows, or of the longest row with ``layout="rows"``. Then token fields are
        [B, T] in place of [1, T], and documents count along the rows.

        ``input_ids`` and ``labels`` are int64 [1, T]. Labels are not shifted; the first of each
        document is -100, as no token before it predicts it. ``position_ids`` is int64 [1, T],
        or [4, 1, T] with a rule: of text, time, height and width. ``document_ids`` is int32
        [1, T], the number of each token's document.

        ``cu_seq_lens_q`` and ``cu_seq_lens_k`` are int32 [D + 1]: where documents begin and end.
        ``max_length_q`` and ``max_length_k`` are numbers: the longest document in tokens, rounded
        up to a power of two. ``document_row`` is int64 [D], the row of each document.
        ``document_sample`` is int64 [D], the number of its sample among those of this batch, and
        -1 for padding.

        ``label_weights``, where samples have them, is float32 [1, T]: 1 where a sample has none,
        and 0 where the label is -100. ``num_tokens`` and ``num_label_tokens`` are numbers: tokens
        of samples, and labels that are not -100.

        Other fields are as `collate` makes them, with one entry per document without padding.
        ``image_row`` and ``image_document``, int64 [num_images], are the row and the document of
        each picture, and so for videos and recordings.

    Raises:
        ConfigError: A sample has no ``input_ids``. Or its labels or their weights are not as many
            as its tokens. Or there are more documents than ``pad_documents_to``.

    Examples:
        >>> samples = [{"input_ids": np.array([5, 6, 7])}, {"input_ids": np.array([8])}]
        >>> batch = flatten(samples, [0, 1], 2, mm.Flat())
        >>> batch["input_ids"].tolist(), batch["cu_seq_lens_q"].tolist()
        ([[5, 6, 7, 8]], [0, 3, 4])
    """
    pad_token_id = collator.settings.pad_token_id or 0
    tokens, owners = documents_of(samples)
    num_tokens = sum(len(document.ids) for document in tokens)
    if settings.document_multiple_of > 1:
        tokens = filled_up(tokens, settings.document_multiple_of, pad_token_id)
    sample_rows = np.asarray(rows, dtype=np.int64)
    lengths = np.fromiter((len(document.ids) for document in tokens), np.int64, len(tokens))
    document_rows = sample_rows[owners]
    layout = _layout(lengths, document_rows, num_rows, settings)
    batch = _token_fields(tokens, layout, pad_token_id)
    batch |= _document_fields(layout, owners, num_rows, settings)
    batch["num_tokens"] = num_tokens
    if "labels" in batch:
        batch["num_label_tokens"] = int((batch["labels"] != IGNORED_LABEL).sum())
    batch |= _other_fields(samples, owners, layout, collator)
    batch["position_ids"] = _positions(
        tokens, samples, owners, layout, settings, collator.settings.counted_media
    )
    return batch


def reserved_batch_fields(batching: Flat | None, settings: CollateSettings) -> BatchFields:
    """Return the names that batches have for fields of their own.

    Args:
        batching: How batches without padding are laid out. None: they are padded.
        settings: Of the decoders.

    Examples:
        >>> settings = CollateSettings(video_fields={"video": None})
        >>> sorted(reserved_batch_fields(None, settings).reserved)
        ['audio_row', 'cu_seq_lens_q', 'document_row', 'image_row', 'video_frames', 'video_row']
    """
    stems, sounds = _stems(settings), settings.audio_fields
    names = {f"{stem}_row" for stem in stems} | {f"{name}_frames" for name in settings.video_fields}
    # A sample says the lengths of its features.
    names |= {f"{name}_length" for name in sounds if not name.endswith(FEATURES)}
    if batching is None:
        return BatchFields(frozenset(names).union(_MARKS))
    names |= {f"{stem}_document" for stem in stems}
    measured = () if batching.positions is None else ("image", "video")
    return BatchFields(frozenset(names).union(_BATCH_FIELDS), (*_TOKEN_FIELDS, *measured))


def make_flat_batch(step: DecodedStep, settings: Flat, collator: Collator) -> Batch:
    """Return the flat batch of a step: the fields of `flatten`, and where the rows come from.

    Args:
        step: The decoded samples, in the order of rows.
        settings: How the batch is laid out.
        collator: As for `flatten`.

    Returns:
        The dict of `flatten` with more fields. ``__key__`` and ``__url__`` are lists with one entry
        per document without padding, and so is ``__source__`` in a mixture. ``__valid__`` is bool
        [B]: False for padding, for masked rows and for rows that no sample could fill. Their labels
        are -100. ``__lineage__`` is a `BatchLineage`.
    """
    lineage, samples = step
    rows = range(len(samples)) if lineage.rows is None else lineage.rows
    return with_lineage(flatten(samples, rows, lineage.num_rows, settings, collator), lineage)


# -- tokens -----------------------------------------------------------------------------------


def _token_fields(tokens: Sequence[DocumentTokens], layout: _Layout, pad_token_id: int) -> Batch:
    """Return ids, labels and weights of labels, in the shape of the layout."""
    is_padding = np.repeat(layout.entries < 0, layout.lengths)
    fields: dict[str, NDArray[Any]] = {
        "input_ids": _joined([document.ids for document in tokens], is_padding, pad_token_id)
    }
    starts = np.cumsum(layout.lengths) - layout.lengths
    if any(document.labels is not None for document in tokens) or not tokens:
        labels = _joined(
            [document.ids if document.labels is None else document.labels for document in tokens],
            is_padding,
            IGNORED_LABEL,
        )
        labels[starts[layout.lengths > 0]] = IGNORED_LABEL
        fields["labels"] = labels
    if any(document.weights is not None for document in tokens):
        weights = _joined(
            [
                np.ones(len(document.ids), np.float32)
                if document.weights is None
                else document.weights
                for document in tokens
            ],
            is_padding,
            0,
        )
        if "labels" in fields:
            weights[fields["labels"] == IGNORED_LABEL] = 0
        fields["label_weights"] = weights
    return {name: torch.from_numpy(values.reshape(layout.shape)) for name, values in fields.items()}


def _joined(arrays: Sequence[NDArray[Any]], is_padding: Any, fill: int) -> NDArray[Any]:
    """Join the tokens of documents, with `fill` where padding is."""
    joined = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
    if len(joined) == len(is_padding):
        return joined
    filled = np.full(len(is_padding), fill, joined.dtype)
    filled[~is_padding] = joined
    return filled


# -- documents ----------------------------------------------------------------------------------


def _layout(lengths: IntArray, document_rows: IntArray, num_rows: int, settings: Flat) -> _Layout:
    """Return the documents with those of padding, where the settings ask for some.

    Example: documents of 3 and 2 tokens in 2 rows give with "rows" the lengths [3, 2, 1], as the
    second row has one token of padding.
    """
    if settings.layout == "flat":  # all documents are one line
        shape = (1, _rounded_up(max(1, int(lengths.sum())), settings.pad_to_multiple_of))
        cuts = np.array([0, len(lengths)])
    else:
        row_tokens = np.bincount(document_rows, weights=lengths, minlength=num_rows)
        longest = max(1, int(row_tokens.max()))
        width = settings.max_tokens if isinstance(settings, Pack) else longest
        shape = (num_rows, _rounded_up(width, settings.pad_to_multiple_of))
        cuts = np.searchsorted(document_rows, np.arange(num_rows + 1))
    all_lengths, entries, rows = [], [], []
    for line, (start, stop) in enumerate(pairwise(cuts.tolist())):
        padding = _padding_lengths(shape[1] - int(lengths[start:stop].sum()), settings)
        last_row = num_rows - 1 if settings.layout == "flat" else line
        all_lengths += [lengths[start:stop], padding]
        entries += [np.arange(start, stop), np.full(len(padding), -1)]
        rows += [document_rows[start:stop], np.full(len(padding), last_row)]
    return _Layout(
        np.concatenate(all_lengths), np.concatenate(rows), np.concatenate(entries), shape
    )


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _padding_lengths(num_tokens: int, settings: Flat) -> IntArray:
    """Return the lengths of padding documents: 2,500 tokens are [1024, 1024, 452]."""
    multiple_of = settings.document_multiple_of
    longest = max(1, PADDING_DOCUMENT_TOKENS // multiple_of) * multiple_of
    full, remainder = divmod(num_tokens, longest)
    return np.asarray([longest] * full + [remainder] * (remainder > 0), dtype=np.int64)


def _document_fields(layout: _Layout, owners: IntArray, num_rows: int, settings: Flat) -> Batch:
    """Return where documents begin, and what they belong to."""
    lengths, rows, entries = layout.lengths, layout.rows, layout.entries
    if settings.pad_documents_to is not None:
        num_missing = settings.pad_documents_to - len(lengths)
        if num_missing < 0:
            raise ConfigError(
                f"pad_documents_to={settings.pad_documents_to}: this batch has {len(lengths)} "
                "documents, with those of padding; give a larger number"
            )
        lengths = np.concatenate((lengths, np.zeros(num_missing, np.int64)))
        rows = np.concatenate((rows, np.full(num_missing, num_rows - 1)))
        entries = np.concatenate((entries, np.full(num_missing, -1)))
    borders = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=borders[1:])
    longest = 1 << (int(lengths.max()) - 1).bit_length()
    document_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    samples = np.full(len(entries), -1)
    samples[entries >= 0] = owners
    cu_seq_lens = torch.from_numpy(borders)
    return {
        "document_ids": torch.from_numpy(document_ids.reshape(layout.shape)),
        "document_row": torch.from_numpy(rows.astype(np.int64, copy=False)),
        "document_sample": torch.from_numpy(samples),
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _positions(
    tokens: Sequence[DocumentTokens],
    samples: Sequence[Sample],
    owners: IntArray,
    layout: _Layout,
    settings: Flat,
    counted_media: Collection[str],
) -> torch.Tensor:
    """Return positions that start over in each document: int64 [1, T], or [4, 1, T] with a rule."""
    starts = np.cumsum(layout.lengths) - layout.lengths
    first = starts - settings.first_position
    text = np.arange(int(layout.lengths.sum())) - np.repeat(first, layout.lengths)
    if settings.positions is None:
        return torch.from_numpy(text.reshape(layout.shape))
    positions = np.tile(text, (4, 1))
    for start, length, entry in zip(
        starts.tolist(), layout.lengths.tolist(), layout.entries.tolist(), strict=True
    ):
        if entry >= 0:
            media = _media_of(samples[owners[entry]], counted_media)
            rule = settings.positions(tokens[entry].ids, media)
            positions[1:, start : start + length] = rule
    return torch.from_numpy(positions.reshape(4, *layout.shape))


def _media_of(sample: Sample, counted_media: Collection[str]) -> DocumentMedia:
    """Return the sizes of a sample's pictures and videos in the text, and the videos' rates."""
    images: list[tuple[int, int]] = []
    videos: list[tuple[int, int, int]] = []
    if "image" in counted_media:
        images = [_size_of(image) for image in as_list(sample.get("image"))]
    if "video" in counted_media:
        videos = [(len(video), *_size_of(video)) for video in as_list(sample.get("video"))]
    rates = sample.get("video_fps") if videos else None
    if rates is not None:
        fps = np.atleast_1d(as_array(rates, np.float64)).tolist()
    else:
        times = as_list(sample.get("video_pts_s")) if videos else ()
        fps = [mean_rate(as_array(video, np.float64).tolist()) for video in times]
    return DocumentMedia(images, videos, fps)


def _size_of(image: Any) -> tuple[int, int]:
    height, width = image.shape[-2:]
    return int(height), int(width)


# -- other fields -------------------------------------------------------------------------------


def _other_fields(
    samples: Sequence[Sample],
    owners: IntArray,
    layout: _Layout,
    collator: Collator,
) -> Batch:
    """Return the fields that are not tokens, with one entry per document."""
    decoders = collator.settings
    stems = _stems(decoders)
    left_out = tuple(stem for stem, kind in stems.items() if kind not in decoders.counted_media)
    documents: list[Sample] = []
    before = -1
    for owner in owners.tolist():
        fields = {n: value for n, value in samples[owner].items() if n not in _TOKEN_FIELDS}
        if owner == before:
            fields = {n: value for n, value in fields.items() if not _belongs_to(n, left_out)}
        documents.append(fields)
        before = owner
    batch = collator(documents)
    for name in ("__key__", "__url__", "__source__"):
        if name in documents[0] if documents else name != "__source__":
            batch[name] = [document[name] for document in documents]
    numbers = torch.from_numpy(np.flatnonzero(layout.entries >= 0))
    rows = torch.from_numpy(layout.rows.astype(np.int64, copy=False))
    for stem in stems:
        if f"{stem}_row" in batch:
            owner_numbers = numbers[batch[f"{stem}_row"]]
        elif stem == "image" and _is_joined(batch.get(stem)):  # one of each document
            owner_numbers = numbers
        else:
            continue
        batch[f"{stem}_row"] = rows[owner_numbers]
        batch[f"{stem}_document"] = owner_numbers
    return batch


def _stems(settings: CollateSettings) -> dict[str, str]:
    """Return the kind of each field of media, by the field's name without what comes after it."""
    stems = {"image": "image"}
    stems |= dict.fromkeys(settings.video_fields or ("video",), "video")
    sounds = settings.audio_fields or ("audio",)
    return stems | {name.removesuffix(FEATURES): "audio" for name in sounds}


def _belongs_to(name: str, stems: Collection[str]) -> bool:
    return any(name == stem or name.startswith(f"{stem}_") for stem in stems)


def _is_joined(images: Any) -> bool:
    return isinstance(images, torch.Tensor) and images.ndim == 4
