"""Where the fields of a flat batch are cut, so that each micro-batch holds whole rows.

split.py -> `cuts_by_tokens`, `FlatCuts`

Tokens of a row are neighbours, and so are its documents and their media. What counts tokens or
documents from the beginning of the batch counts them from the beginning of the micro-batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from mmstream.types import IGNORED_LABEL, Batch

__all__ = ["FlatCuts", "cuts_by_tokens"]

_TOKEN_FIELDS = ("input_ids", "labels", "label_weights", "position_ids", "document_ids")
_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k")


class FlatCuts:
    """The cuts of a flat batch. On CUDA, making them lets the host wait for the device.

    Args:
        batch: A batch of `flatten`.
        cuts: Rows cuts[i] to cuts[i + 1] go to micro-batch i.
    """

    def __init__(self, batch: Batch, cuts: Sequence[int]) -> None:
        self._batch = batch
        self._rows = list(cuts)
        rows = batch["document_row"].tolist()
        samples = batch["document_sample"].tolist()
        starts = batch["cu_seq_lens_q"].tolist()
        self._documents = [bisect_left(rows, cut) for cut in cuts]
        self._tokens = [starts[document] for document in self._documents]
        # Documents of samples before each cut: padding has no entry in their fields.
        self.entries = [
            sum(sample >= 0 for sample in samples[:document]) for document in self._documents
        ]
        self._first_samples = [
            next((sample for sample in samples[document:] if sample >= 0), 0)
            for document in self._documents
        ]
        lengths = [stop - start for start, stop in pairwise(starts)]
        self._num_tokens = [
            sum(
                length
                for length, sample in zip(lengths[start:stop], samples[start:stop], strict=True)
                if sample >= 0
            )
            for start, stop in pairwise(self._documents)
        ]
        self._is_of_rows = batch["input_ids"].shape[0] == len(batch["__valid__"])

    def token_fields(self) -> list[Batch]:
        """Return the fields of tokens and documents of each micro-batch. Tensors are views.

        A micro-batch without a token gets one of padding, so that a model can run on it.
        """
        return [
            self._micro_batch(number) if stop > start else self._padding()
            for number, (start, stop) in enumerate(pairwise(self._tokens))
        ]

    def documents_from_zero(self, documents: torch.Tensor, number: int) -> torch.Tensor:
        """Count the documents of media from the first one of a micro-batch."""
        return documents - self._documents[number]

    def _micro_batch(self, number: int) -> Batch:
        batch = self._batch
        documents = slice(*self._documents[number : number + 2])
        start = self._tokens[number]
        fields: Batch = {}
        for name in _TOKEN_FIELDS:
            if name in batch:
                fields[name] = self._tokens_of(batch[name], number)
        fields["document_ids"] = fields["document_ids"] - documents.start
        for name in _BORDERS:
            fields[name] = batch[name][documents.start : documents.stop + 1] - start
        fields["document_row"] = batch["document_row"][documents] - self._rows[number]
        samples = batch["document_sample"][documents]
        fields["document_sample"] = torch.where(
            samples < 0, samples, samples - self._first_samples[number]
        )
        fields["num_tokens"] = self._num_tokens[number]
        if "num_label_tokens" in batch:
            fields["num_label_tokens"] = int((fields["labels"] != IGNORED_LABEL).sum())
        return fields

    def _tokens_of(self, values: torch.Tensor, number: int) -> torch.Tensor:
        if self._is_of_rows:  # [B, T], or [4, B, T]
            start, stop = self._rows[number : number + 2]
            return values.narrow(values.ndim - 2, start, stop - start)
        start, stop = self._tokens[number : number + 2]
        return values[..., start:stop]

    def _padding(self) -> Batch:
        """Return the fields of one padding document, whose token is the first of the batch."""
        batch = self._batch
        fields = {name: batch[name][..., :1, :1] for name in _TOKEN_FIELDS if name in batch}
        for name, fill in (
            ("labels", IGNORED_LABEL),
            ("label_weights", 0),
            ("position_ids", 0),
            ("document_ids", 0),
        ):
            if name in fields:
                fields[name] = torch.full_like(fields[name], fill)
        borders = torch.zeros_like(batch["cu_seq_lens_q"][:2])
        borders[1] = 1
        fields |= dict.fromkeys(_BORDERS, borders)
        fields["document_row"] = torch.zeros_like(batch["document_row"][:1])
        fields["document_sample"] = torch.full_like(fields["document_row"], -1)
        fields["num_tokens"] = 0
        if "num_label_tokens" in batch:
            fields["num_label_tokens"] = 0
        return fields


def cuts_by_tokens(batch: Batch, max_tokens: int) -> list[int]:
    """Return where a flat batch is cut, so that no micro-batch of several rows has more tokens.

    Example: rows of 5, 3, 4 and 9 tokens with at most 8 tokens are cut at [0, 2, 3, 4].
    """
    rows = batch["document_row"].tolist()
    num_rows = len(batch["__valid__"])
    row_tokens = [0] * num_rows
    for row, (start, stop) in zip(rows, pairwise(batch["cu_seq_lens_q"].tolist()), strict=True):
        row_tokens[row] += stop - start
    cuts, size = [0], 0
    for row, num_tokens in enumerate(row_tokens):
        if size and size + num_tokens > max_tokens:
            cuts.append(row)
            size = 0
        size += num_tokens
    return [*cuts, num_rows]
