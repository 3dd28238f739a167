"""Cutting a batch along its tokens: the parts, sorted, are the whole, and have its losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import mmstream as mm
from mmstream.batching.flat import flatten
from mmstream.batching.valid import next_tokens
from mmstream.types import Batch

SCHEMES = ("document-zigzag", "row-zigzag", "contiguous")
TOKEN_FIELDS = ("input_ids", "position_ids", "document_ids")


def made_batch(
    rows: Sequence[Sequence[int]], multiple: int, layout: Any = "flat", **settings: Any
) -> Batch:
    """A flat batch of rows with documents of these lengths."""
    rng = np.random.default_rng(0)
    samples: list[dict[str, Any]] = []
    for number, lengths in enumerate(rows):
        for length in lengths:
            ids = rng.integers(3, 64, length)
            weights = rng.random(length, np.float32)
            fields = {"input_ids": ids, "labels": ids, "label_weights": weights}
            samples.append({"__key__": str(number), "__url__": "a.tar", **fields})
    owners = [number for number, lengths in enumerate(rows) for _ in lengths]
    given = {"document_multiple_of": multiple, "pad_to_multiple_of": multiple, **settings}
    batch = flatten(samples, owners, len(rows), mm.Flat(layout=layout, **given))
    return batch | {"__valid__": torch.ones(len(rows), dtype=torch.bool)}


def padded_batch(num_rows: int, num_tokens: int) -> Batch:
    ids = torch.arange(num_rows * num_tokens).view(num_rows, num_tokens)
    return {
        "input_ids": ids,
        "attention_mask": (ids % 5 > 0).long(),
        "labels": ids.clone(),
        "image": torch.zeros(num_rows, 3, 2, 2),
        "__valid__": torch.ones(num_rows, dtype=torch.bool),
    }


def parts_of(batch: Batch, size: int, scheme: Any) -> list[Batch]:
    return [mm.cut_sequence(batch, rank, size, scheme) for rank in range(size)]


def joined(parts: Sequence[Batch], name: str) -> torch.Tensor:
    """The parts of a field of tokens side by side, sorted by their places."""
    order = torch.cat([part["sequence_index"] for part in parts], -1).argsort(-1)
    values = torch.cat([part[name] for part in parts], -1)
    return values.gather(-1, order.expand(values.shape))


@given(
    rows=st.lists(st.lists(st.integers(1, 40), max_size=4), min_size=1, max_size=4),
    size=st.integers(1, 5),
    scheme=st.sampled_from(SCHEMES),
    layout=st.sampled_from(["flat", "rows"]),
    spare=st.sampled_from([None, 20]),
)
def test_parts_of_documents_sorted_are_the_whole(
    rows: list[list[int]], size: int, scheme: str, layout: str, spare: int | None
) -> None:
    batch = made_batch(rows, 2 * size, layout, pad_documents_to=spare and 200)
    parts = parts_of(batch, size, scheme)
    shifted = mm.shift_labels(batch)
    names = [*TOKEN_FIELDS, *(n for n in shifted if n.startswith("shift_label"))]
    for name in names:
        assert torch.equal(joined(parts, name), shifted[name])
    for part in parts:
        assert part.keys() == shifted.keys() | {"sequence_index"}
        assert part["input_ids"].shape == part["sequence_index"].shape
        assert all(part[name] is batch[name] for name in ("cu_seq_lens_q", "num_tokens"))
    counted = sum(int((part["shift_labels"] != -100).sum()) for part in parts)
    assert counted == batch["num_label_tokens"]


@given(
    num_rows=st.integers(0, 3),
    chunk=st.integers(0, 4),
    size=st.integers(1, 4),
    scheme=st.sampled_from(SCHEMES),
)
def test_parts_of_padded_rows_sorted_are_the_whole(
    num_rows: int, chunk: int, size: int, scheme: str
) -> None:
    batch = padded_batch(num_rows, 2 * size * chunk)
    parts = parts_of(batch, size, scheme)
    for name in ("input_ids", "attention_mask"):
        assert torch.equal(joined(parts, name), batch[name])
    positions = torch.arange(2 * size * chunk).expand(num_rows, -1)
    assert torch.equal(joined(parts, "position_ids"), positions)
    assert torch.equal(joined(parts, "shift_labels")[:, :-1], next_tokens(batch))
    assert all(part["image"] is batch["image"] and "labels" not in part for part in parts)


def test_a_zigzag_gives_each_rank_a_head_and_its_tail() -> None:
    batch = made_batch([[8, 4], [12]], 4)
    expected = {
        "document-zigzag": [0, 1, 6, 7, 8, 11, 12, 13, 14, 21, 22, 23],
        "row-zigzag": [0, 1, 2, 3, 4, 5, 18, 19, 20, 21, 22, 23],
        "contiguous": list(range(12)),
    }
    for scheme, index in expected.items():
        assert parts_of(batch, 2, scheme)[0]["sequence_index"].tolist() == [index]


def test_positions_of_four_rows_and_embeddings_are_cut() -> None:
    batch = made_batch([[8, 4]], 4)
    batch["position_ids"] = torch.stack([batch["position_ids"] + 100 * i for i in range(4)])
    batch["inputs_embeds"] = batch["input_ids"][..., None].float() * torch.tensor([1.0, 2.0])
    for part in parts_of(batch, 2, "document-zigzag"):
        ids = part["input_ids"]
        assert torch.equal(part["inputs_embeds"], torch.stack([ids, 2 * ids], -1).float())
        assert torch.equal(part["position_ids"][3], part["position_ids"][0] + 300)
        assert torch.equal(batch["input_ids"][0, part["sequence_index"][0]], ids[0])


def test_labels_of_rows_are_left_alone() -> None:
    batch = padded_batch(2, 4) | {"labels": torch.tensor([3, 4])}
    assert mm.shift_labels(batch) is batch
    assert mm.cut_sequence(batch, 0, 2)["labels"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("changes", "cut", "message"),
    [
        ({}, (0, 2), r"document 1 has 6 tokens.*2 x size = 4.*_of=4"),
        ({}, (0, 2, "row-zigzag"), "row 0 has 14 tokens, and row-zigzag needs"),
        ({}, (0, 3, "contiguous"), r"row 0 has 14 tokens.* multiple of size = 3"),
        ({}, (2, 2), "rank 2 of size 2: give 0 to 1"),
        (
            {"attention_mask": torch.ones(1, 1, 14, 14)},
            (0, 7, "contiguous"),
            r"attention_mask is \[1, 1, 14, 14\]",
        ),
        ({"input_ids": None}, (0, 2), "it has no input_ids"),
    ],
)
def test_what_cannot_be_cut_is_an_error_that_says_what_to_do(
    changes: Batch, cut: Any, message: str
) -> None:
    batch = made_batch([[8, 6]], 2) | changes
    given = {name: value for name, value in batch.items() if value is not None}
    with pytest.raises(mm.ConfigError, match=message):
        mm.cut_sequence(given, *cut)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda part: mm.cut_sequence(part, 0, 2), "it is cut already"),
        (lambda part: mm.split_rows(part, 1), "split first, then cut"),
        (lambda part: mm.model_inputs(part, "llama"), r"model_inputs: .* part of mm\.cut_sequence"),
    ],
)
def test_a_part_is_not_cut_again_nor_given_to_a_model(use: Any, message: str) -> None:
    part = mm.cut_sequence(made_batch([[8, 6]], 2), 0, 2, "contiguous")
    with pytest.raises(mm.ConfigError, match=message):
        use(part)
