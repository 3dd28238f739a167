"""Where the fields of a flat batch are cut, so that each micro-batch holds whole rows.

split.py -> `FlatCuts`, `cuts_by_tokens`

Tokens of a row are neighbours, and so are its documents and their media. What counts tokens or
documents from the beginning of the batch counts them from the beginning of the micro-batch.

    by tokens      input_ids, labels, label_weights, position_ids, document_ids
    by documents   cu_seq_lens_q, cu_seq_lens_k, document_row, document_sample
    by media       image, image_row, image_document, and so for videos and recordings
    by rows        __valid__, __lineage__
    by documents   without padding: all others that are lists or tensors, such as __key__
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mmstream.errors import ConfigError
from mmstream.types import IGNORED_LABEL, Batch

FIELDS_OF_ROWS = ("__valid__", "__lineage__")
"""Fields of a flat batch with one entry per row. Those of padded batches are cut by rows all."""

_TOKEN_FIELDS = ("input_ids", "labels", "label_weights", "position_ids", "document_ids")
_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k")
_FILLS = {"labels": IGNORED_LABEL, "label_weights": 0, "position_ids": 0, "document_ids": 0}
"""What a token of padding has in a micro-batch that would have none."""


class FlatCuts:
    """The cuts of a flat batch. On CUDA, the host waits for the device to know them.

    Args:
        batch: A batch of `flatten`.
        cuts: Rows cuts[i] to cuts[i + 1] go to micro-batch i.

    Attributes:
        entries: Where fields are cut that have one entry per document without padding.
    """

    def __init__(self, batch: Batch, cuts: Sequence[int]) -> None:
        self._batch = batch
        self._rows = list(cuts)
        starts = batch["cu_seq_lens_q"].numpy(force=True).astype(np.int64)
        self._samples = batch["document_sample"].numpy(force=True)
        is_sample = self._samples >= 0
        # Example: documents of the rows [0, 0, 2], cut at the rows [0, 1, 3], are cut at [0, 2, 3].
        documents = np.searchsorted(batch["document_row"].numpy(force=True), cuts)
        self._documents: list[int] = documents.tolist()
        self._tokens: list[int] = starts[documents].tolist()
        self.entries: list[int] = _sums_before(is_sample)[documents].tolist()
        sums = _sums_before(np.diff(starts) * is_sample)
        self._num_tokens: list[int] = np.diff(sums[documents]).tolist()
        self._has_rows = batch["input_ids"].shape[0] == len(batch["__valid__"])

    def fields_of_tokens(self) -> list[Batch]:
        """Return the fields of tokens and documents of each micro-batch. Tensors are views.

        A micro-batch without a token gets one of padding, so that a model can run on it.
        """
        return [
            self._micro_batch(number) if stop > start else self._padding(number)
            for number, (start, stop) in enumerate(pairwise(self._tokens))
        ]

    def documents_from_zero(self, documents: torch.Tensor, number: int) -> torch.Tensor:
        """Count the documents of media from the first one of a micro-batch."""
        return documents - self._documents[number]

    def _micro_batch(self, number: int) -> Batch:
        batch = self._batch
        first, stop = self._documents[number : number + 2]
        fields = {
            name: self._tokens_of(batch[name], number) for name in _TOKEN_FIELDS if name in batch
        }
        fields["document_ids"] = fields["document_ids"] - first
        for name in _BORDERS:
            fields[name] = batch[name][first : stop + 1] - self._tokens[number]
        fields["document_row"] = batch["document_row"][first:stop] - self._rows[number]
        samples = batch["document_sample"][first:stop]
        num_before = next((int(n) for n in self._samples[first:stop] if n >= 0), 0)
        fields["document_sample"] = from_zero(samples, num_before)
        return fields | self._counts(number, fields.get("labels"))

    def _tokens_of(self, values: torch.Tensor, number: int) -> torch.Tensor:
        if self._has_rows:  # [B, T], or [4, B, T]
            start, stop = self._rows[number : number + 2]
            return values.narrow(values.ndim - 2, start, stop - start)
        start, stop = self._tokens[number : number + 2]
        return values[..., start:stop]

    def _padding(self, number: int) -> Batch:
        """Return the fields of one padding document. Its token is the first of the batch."""
        batch = self._batch
        fields: Batch = {}
        for name in _TOKEN_FIELDS:
            if name in batch:
                token = batch[name][..., :1, :1]
                fields[name] = torch.full_like(token, _FILLS[name]) if name in _FILLS else token
        rows, borders = batch["document_row"], batch["cu_seq_lens_q"]
        fields |= dict.fromkeys(_BORDERS, torch.arange(2, dtype=borders.dtype, device=rows.device))
        # A micro-batch without a row has none for its padding either.
        has_rows = self._rows[number] < self._rows[number + 1]
        fields["document_row"] = rows.new_full((1,), 0 if has_rows else -1)
        fields["document_sample"] = rows.new_full((1,), -1)
        return fields | self._counts(number, fields.get("labels"))

    def _counts(self, number: int, labels: torch.Tensor | None) -> Batch:
        counts: Batch = {"num_tokens": self._num_tokens[number]}
        if labels is not None:
            counts["num_label_tokens"] = int((labels != IGNORED_LABEL).sum())
        return counts


def from_zero(numbers: torch.Tensor, start: int) -> torch.Tensor:
    """Count rows, samples or videos of a micro-batch from 0. -1 means none."""
    return torch.where(numbers < 0, numbers, numbers - start)


def cuts_by_tokens(batch: Batch, max_tokens: int, num_parts: int | None) -> list[int]:
    """Return where a flat batch is cut, so that no micro-batch of several rows has more tokens.

    Example: rows of 5, 3, 4 and 9 tokens with at most 8 tokens are cut at [0, 2, 3, 4]. With 5
    micro-batches the cuts are [0, 2, 3, 4, 4, 4]: the last two are empty.
    """
    num_rows = len(batch["__valid__"])
    lengths = np.diff(batch["cu_seq_lens_q"].numpy(force=True))
    rows = batch["document_row"].numpy(force=True)
    row_tokens = np.bincount(rows, weights=lengths, minlength=num_rows).astype(np.int64)
    cuts, size = [0], 0
    for row, num_tokens in enumerate(row_tokens.tolist()):
        if size and size + num_tokens > max_tokens:
            cuts.append(row)
            size = 0
        size += num_tokens
    cuts.append(num_rows)
    if num_parts is None:
        return cuts
    if len(cuts) - 1 > num_parts:
        raise ConfigError(
            f"split_rows: {len(cuts) - 1} micro-batches of {max_tokens} tokens, and "
            f"num_parts={num_parts}: give the largest number of all ranks, which each has from "
            "len(split_rows(batch, max_tokens=...))"
        )
    return cuts + [num_rows] * (num_parts - len(cuts) + 1)


def _sums_before(values: Any) -> Any:
    """Return the sums of the values before each position, and the whole: [3, 1] gives [0, 3, 4]."""
    return np.concatenate(([0], np.cumsum(values)))
