"""The tokens of a step become int64 [B, T], and the weights of labels float32 [B, T].

collate.collate -> `is_ids`, `are_tokens` -> `pad_tokens`, `pad_weights`
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from mmstream.types import IGNORED_LABEL, Batch, Sample


def is_ids(value: Any) -> bool:
    """Tell whether a value is an array as `TextDecoder` makes it. Then no tensor is needed."""
    return type(value) is np.ndarray and value.ndim == 1 and value.dtype == np.int64


def are_tokens(value: Any) -> bool:
    """Tell whether a value of a user is one row of whole numbers."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 1 and not (value.is_floating_point() or value.is_complex())
    return isinstance(value, list) and all(
        type(item) is int and abs(item) < 1 << 63 for item in value
    )


def pad_tokens(values: Sequence[Any], fill: int, pad_to: int | None, side: str) -> torch.Tensor:
    """Return int64 [B, T]: the first T tokens of each row, padded on one side."""
    rows = [
        np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value, dtype=np.int64)
        for value in values
    ]
    return _padded(rows, fill, np.int64, pad_to, side)


def pad_weights(
    names: Collection[str], samples: Sequence[Sample], pad_to: int | None, side: str
) -> dict[str, Batch]:
    """Return the weights of labels, float32 [B, T], where each sample has labels as text has them.

    They are padded with 0. Labels of a row without weights have 1.
    """
    if "label_weights" not in names:
        return {}
    rows = []
    for sample in samples:
        labels, weights = sample.get("labels"), sample.get("label_weights")
        if labels is None or not is_ids(labels):
            return {}
        if weights is None:
            weights = labels != IGNORED_LABEL
        if not isinstance(weights, np.ndarray) or weights.shape != labels.shape:
            return {}
        rows.append(weights)
    return {"label_weights": {"label_weights": _padded(rows, 0, np.float32, pad_to, side)}}


def _padded(
    rows: Sequence[NDArray[Any]], fill: int, dtype: DTypeLike, pad_to: int | None, side: str
) -> torch.Tensor:
    """Return [B, T]: the first T entries of each row, padded on one side."""
    width = pad_to or max(map(len, rows))
    padded = np.full((len(rows), width), fill, dtype=dtype)
    for row, padded_row in zip(rows, padded, strict=True):
        kept = row[:width]
        start = width - len(kept) if side == "left" else 0
        padded_row[start : start + len(kept)] = kept
    return torch.from_numpy(padded)
