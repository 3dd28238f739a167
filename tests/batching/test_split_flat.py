"""Cutting batches of documents: each micro-batch is the batch of its own rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import mmstream as mm
from mmstream.batching.flat import flatten
from mmstream.batching.split import cuts_by_tokens
from mmstream.batching.valid import invalid_tokens, mask_labels

DOCUMENTS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=2), max_size=3)
"""The lengths of the documents of each sample of a row."""


def samples_of(rows: list[list[list[int]]]) -> tuple[list[dict[str, Any]], list[int]]:
    """Samples with documents of these lengths, and their rows. Every third has two pictures."""
    samples: list[dict[str, Any]] = []
    of_rows = []
    for row, lengths_of_samples in enumerate(rows):
        for lengths in lengths_of_samples:
            number = len(samples)
            ids = [np.arange(length) + 10 * number for length in lengths]
            one = len(ids) == 1
            weights = [np.full(length, 0.5, np.float32) for length in lengths]
            samples.append(
                {
                    "__key__": str(number),
                    "__url__": "a.tar",
                    "input_ids": ids[0] if one else ids,
                    "labels": ids[0] if one else ids,
                    "label_weights": weights[0] if one else weights,
                    "image": [torch.full((3, 2, 2), number)] * (number % 3),
                    "audio": np.full(number % 4 + 1, number, np.float32),
                    "score": float(number),
                }
            )
            of_rows.append(row)
    return samples, of_rows


def made_batch(rows: list[list[list[int]]], settings: mm.Flat) -> dict[str, Any]:
    samples, of_rows = samples_of(rows)
    batch = flatten(samples, of_rows, len(rows), settings)
    batch["__valid__"] = torch.tensor([len(row) != 2 for row in rows])
    mask_labels(batch)
    return batch


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, list) else value


@hypothesis_settings(max_examples=40)
@given(
    st.lists(DOCUMENTS, min_size=1, max_size=6),
    st.integers(1, 7),
    st.sampled_from(["flat", "rows"]),
)
def test_a_micro_batch_is_the_batch_of_its_rows(
    rows: list[list[list[int]]], num_parts: int, layout: Any
) -> None:
    settings = mm.Pack(40, layout=layout)
    batch = made_batch(rows, settings)
    parts = mm.split_rows(batch, num_parts)
    num_parts = min(num_parts, len(rows))
    assert len(parts) == num_parts
    samples, of_rows = samples_of(rows)
    cuts = [i * len(rows) // num_parts for i in range(num_parts + 1)]
    for part, (start, stop) in zip(parts, pairwise(cuts), strict=True):
        own = [s for s, row in zip(samples, of_rows, strict=True) if start <= row < stop]
        own_rows = [row - start for row in of_rows if start <= row < stop]
        expected = flatten(own, own_rows, stop - start, settings)
        expected["__valid__"] = batch["__valid__"][start:stop]
        mask_labels(expected)
        assert part.keys() == batch.keys()
        for name, value in expected.items():
            if own and name not in ("max_length_q", "max_length_k", "audio"):
                assert plain(part[name]) == plain(value), name
        assert part["max_length_q"] >= max(np.diff(part["cu_seq_lens_q"]))
        if own:
            longest = expected["audio"].shape[-1]  # the batch pads to the longest of all rows
            assert torch.equal(part["audio"][:, :longest], expected["audio"])
        else:  # one token of padding, or a row of it
            assert part["document_sample"].eq(-1).all()
            assert part["labels"].eq(-100).all()
            assert part["num_tokens"] == 0
    assert sum(part["num_tokens"] for part in parts) == batch["num_tokens"]
    assert sum(part["num_label_tokens"] for part in parts) == batch["num_label_tokens"]
    assert sum((part["__key__"] for part in parts), []) == batch["__key__"]


def test_micro_batches_of_a_number_of_tokens() -> None:
    batch = made_batch([[[5]], [[3]], [[4]], [[9]]], mm.Flat())
    assert [part["num_tokens"] for part in mm.split_rows(batch, max_tokens=8)] == [8, 4, 9]
    assert cuts_by_tokens(batch, 8, None) == [0, 2, 3, 4]


def test_ranks_fill_up_to_the_same_number_of_micro_batches() -> None:
    batch = made_batch([[[5]], [[3]], [[4]]], mm.Flat())
    parts = mm.split_rows(batch, 4, max_tokens=8)
    assert [part["num_tokens"] for part in parts] == [8, 4, 0, 0]
    empty = parts[-1]
    assert empty["input_ids"].shape == empty["position_ids"].shape == (1, 1)
    assert empty["__valid__"].tolist() == []
    assert invalid_tokens(empty).tolist() == [[True]]
    with pytest.raises(mm.ConfigError, match=r"2 micro-batches of 8 tokens, and num_parts=1"):
        mm.split_rows(batch, 1, max_tokens=8)


def test_a_field_of_rows_is_refused() -> None:
    batch = made_batch([[[2], [3]], [[4]]], mm.Flat()) | {"of_rows": torch.zeros(2)}
    with pytest.raises(mm.ConfigError, match="of_rows has 2 entries for 3 rows or documents"):
        mm.split_rows(batch, 2)


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_labels_of_a_row_in_the_middle_are_masked(layout: Any) -> None:
    batch = made_batch([[[3]], [[2], [2]], [[2]]], mm.Flat(layout=layout, pad_to_multiple_of=6))
    is_trained = batch["labels"][batch["labels"] != -100]
    assert is_trained.tolist() == [1, 2, 31]
    assert batch["num_label_tokens"] == 3
    assert batch["label_weights"].sum() == 1.5
    assert batch["labels"].shape == batch["input_ids"].shape
