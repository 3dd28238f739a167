"""The documents of samples: the tokens of each, their labels and the weights of these.

    flat.flatten -> `documents_of`, `filled_up`

A sample is one document, or several where its ``input_ids`` is a list of arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mmstream.errors import ConfigError
from mmstream.types import IGNORED_LABEL, IntArray, Sample


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
    if _are_ids(ids, labels) and weights is None:  # as `TextDecoder` makes them
        return [DocumentTokens(ids, labels, None)]
    if not _is_several(ids):
        return [_checked(sample, ids, labels, weights)]
    count = len(ids)
    for name, values in (("labels", labels), ("label_weights", weights)):
        if values is not None and not (_is_several(values) and len(values) == count):
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


def _are_ids(ids: Any, labels: Any) -> bool:
    """Tell whether these are int64 arrays of one length from 1 up."""
    return (
        type(ids) is type(labels) is np.ndarray
        and ids.dtype == labels.dtype == np.int64
        and ids.shape == labels.shape
        and ids.ndim == 1
        and ids.size > 0
    )


def _is_several(value: Any) -> bool:
    """Tell whether a field holds the tokens of several documents."""
    return isinstance(value, list | tuple) and not any(isinstance(item, int) for item in value)


def _checked(sample: Sample, ids: Any, labels: Any, weights: Any) -> DocumentTokens:
    ids = as_array(ids, np.int64)
    if ids.ndim != 1 or not len(ids):
        raise ConfigError(f"{_key(sample)}: input_ids of shape {ids.shape}: a document is [L]")
    if labels is not None:
        labels = as_array(labels, np.int64)
    if weights is not None:
        weights = as_array(weights, np.float32)
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
