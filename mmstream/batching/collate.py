"""The samples of a step become a batch: a dict of tensors and lists.

A field that differs in shape from row to row becomes a list, so one odd sample never breaks a
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from mmstream.decoding.image.encoded import EncodedImage, EncodedImages
from mmstream.decoding.stage import DecodedStep
from mmstream.errors import ConfigError
from mmstream.types import IGNORED_LABEL, Batch, Sample

__all__ = ["Collate", "collate", "make_batch", "mask_labels"]

Collate = Callable[[list[Sample]], Batch]


AS_THEY_ARE = frozenset({bytes, memoryview, str})
"""Values of these types alone make a list of rows, whatever their field is called."""


def make_batch(step: DecodedStep, collate: Collate) -> Batch:
    """Return the batch of a step: what `collate` returns, and where its rows come from.

    Adds ``__key__`` and ``__url__`` (lists of B; of a mixture also ``__source__``), ``__valid__``
    (bool [B]) and ``__lineage__`` (`BatchLineage`). ``__valid__`` is False for padding, for masked
    rows and for rows that nothing could fill. Where ``labels`` go with ``input_ids`` token by
    token, the labels of such rows are -100, so that a loss leaves them out.

    Raises:
        ConfigError: `collate` returned no dict.
    """
    lineage, samples = step
    collated = collate(samples)
    if not isinstance(collated, Mapping):  # transformers' BatchEncoding is a Mapping, not a dict
        raise ConfigError(f"collate returned {type(collated).__name__}: it must return a dict")
    batch = dict(collated)
    batch["__key__"] = [sample["__key__"] for sample in samples]
    batch["__url__"] = [sample["__url__"] for sample in samples]
    if "__source__" in samples[0]:
        batch["__source__"] = [sample["__source__"] for sample in samples]
    batch["__valid__"] = torch.tensor(lineage.valid)
    if not all(lineage.valid):
        mask_labels(batch)
    batch["__lineage__"] = lineage
    return batch


def mask_labels(batch: Batch) -> None:
    """Set the token labels of invalid rows to -100, in place."""
    if _has_token_labels(batch):
        invalid = ~batch["__valid__"][:, None]
        batch["labels"] = batch["labels"].masked_fill(invalid, IGNORED_LABEL)


def collate(
    samples: list[Sample],
    *,
    pad_token_id: int = 0,
    pad_to: int | None = None,
    padding_side: str = "right",
) -> Batch:
    """Make a batch of samples.

    Args:
        samples: decoded; rows of the batch.
        pad_token_id: fills ``input_ids`` (a `Pipeline` passes its tokenizer's).
        pad_to: length of token fields; None: the longest of the batch.
        padding_side: "right" or "left".

    Returns:
        ``image``: uint8 [B, 3, H, W] (channels_last) when each sample has exactly one and all have
        one shape; else all images of the batch, [num_images, 3, H, W] or a list where shapes
        differ, with ``image_row`` int64 [num_images], the row of each. Where some are left to the
        GPU, `EncodedImages` in the place of either.
        ``input_ids``, ``attention_mask``, ``labels``: int64 [B, T], padded with `pad_token_id`, 0
        and -100.
        Other fields: numbers, and arrays of one shape and type, are stacked; everything else, and
        any field that some sample lacks, is a list of B (None where it lacks). So are fields of the
        names above that hold something else, such as a class number in ``labels``.
    """
    batch: Batch = {}
    names = dict.fromkeys(chain.from_iterable(samples))
    fills = {"input_ids": pad_token_id, "attention_mask": 0, "labels": IGNORED_LABEL}
    for name in names:
        if name.startswith("__"):
            continue
        values = [sample.get(name) for sample in samples]
        if AS_THEY_ARE.issuperset(map(type, values)):
            batch[name] = values
            continue
        if name in fills and all(map(_is_ids, values)):
            batch[name] = _pad(values, fills[name], pad_to, padding_side)
            continue
        values = list(map(_as_tensor, values))
        if name == "image" and all(map(_is_images, values)):
            batch |= _images(values)
        elif name in fills and all(map(_is_tokens, values)):
            batch[name] = _pad(values, fills[name], pad_to, padding_side)
        else:
            batch[name] = _stack(values)
    return batch


def _has_token_labels(batch: Batch) -> bool:
    """Tell whether a batch has one label per token, as language models do."""
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if not (isinstance(ids, torch.Tensor) and isinstance(labels, torch.Tensor)):
        return False
    return labels.shape == ids.shape and labels.ndim == 2 and labels.dtype == torch.int64


def _as_tensor(value: Any) -> Any:
    """Return an array as a tensor where torch knows its type, and numpy's scalars as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        return value
    try:  # a plain copy: torch refuses views that run backwards and warns of read-only ones
        return torch.from_numpy(np.array(value, order="C"))
    except (TypeError, ValueError):
        return value


def _is_ids(value: Any) -> bool:
    """Tell whether a value is what `TextDecoder` makes: the common case, and no tensor needed."""
    return type(value) is np.ndarray and value.ndim == 1 and value.dtype == np.int64


def _is_images(value: Any) -> bool:
    images = value if isinstance(value, list | tuple) else () if value is None else (value,)
    return all(isinstance(image, torch.Tensor | EncodedImage) for image in images)


def _is_tokens(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 1 and not (value.is_floating_point() or value.is_complex())
    return isinstance(value, list) and all(
        type(item) is int and abs(item) < 1 << 63 for item in value
    )


def _images(values: Sequence[Any]) -> Batch:
    rows = [list(value or ()) if isinstance(value, list | tuple | None) else [value]
            for value in values]  # fmt: skip
    images = [image for row in rows for image in row]
    whole: torch.Tensor | list[torch.Tensor] | EncodedImages
    if any(isinstance(image, EncodedImage) for image in images):
        whole = EncodedImages.join(images)
        is_one = len(set(whole.shapes)) == 1
    else:
        whole = _together(images)
        is_one = isinstance(whole, torch.Tensor)
    if is_one and all(len(row) == 1 for row in rows):
        return {"image": whole}
    counts = torch.tensor([len(row) for row in rows])
    return {"image": whole, "image_row": torch.repeat_interleave(counts)}


def _together(images: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Return images as one tensor, without a copy where they are rows of one buffer."""
    if not images or any(not _is_alike(image, images[0]) for image in images):
        return images
    first = images[0]
    size = first.numel() * first.element_size()
    begin, memory = first.data_ptr(), first.untyped_storage()
    if begin + size * len(images) <= memory.data_ptr() + memory.nbytes() and all(
        image.data_ptr() == begin + size * row and image.stride() == first.stride()
        for row, image in enumerate(images)
    ):
        shape, strides = (len(images), *first.shape), (first.numel(), *first.stride())
        whole = first.as_strided(shape, strides, first.storage_offset())
    else:
        whole = torch.stack(images)
    return whole.contiguous(memory_format=torch.channels_last) if whole.ndim == 4 else whole


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _pad(values: Sequence[Any], fill: int, pad_to: int | None, side: str) -> torch.Tensor:
    rows = [
        np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value, dtype=np.int64)
        for value in values
    ]
    width = pad_to or max(map(len, rows))
    padded = np.full((len(rows), width), fill, dtype=np.int64)
    for row, line in zip(rows, padded, strict=True):
        kept = row[:width]
        line[width - len(kept) if side == "left" else 0 :][: len(kept)] = kept
    return torch.from_numpy(padded)


def _stack(values: list[Any]) -> Any:
    if all(type(value) in (int, float, bool) for value in values):
        try:
            return torch.tensor(values)
        except (RuntimeError, OverflowError, ValueError):  # an integer beyond 64 bits
            return values
    if all(isinstance(value, torch.Tensor) for value in values) and (
        len({(value.shape, value.dtype, value.device) for value in values}) == 1
    ):
        return torch.stack(values)
    return values
