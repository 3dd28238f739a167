"""Cutting a batch by rows: the parts, joined, are the batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st

import mmstream as mm
from mmstream.batching.flat import flatten
from mmstream.batching.split import cuts_by_tokens
from mmstream.batching.valid import invalid_tokens, mask_labels
from mmstream.reading.step import BatchLineage
from mmstream.types import BadSample
from tests.batching.test_flat import plain


def made_batch(images_of_rows: list[int], start: int, *, whole: bool) -> dict[str, Any]:
    """A batch as `collate` and the batch stage make it; `whole`: images are one tensor."""
    rows = range(len(images_of_rows))
    images = [
        torch.full((3, 2, 2), 10 * row + n) for row in rows for n in range(images_of_rows[row])
    ]
    bad = [BadSample(0, 4, start + row, "a", row, "DecodeError", "x", None) for row in rows[::2]]
    return {
        "image": torch.stack(images) if whole and images else images,
        "image_row": torch.repeat_interleave(torch.tensor(images_of_rows)),
        "input_ids": torch.arange(3 * len(rows)).view(-1, 3),
        "score": torch.arange(len(rows)) / 2,
        "txt": [f"row {row}" for row in rows],
        "more": {"ids": torch.arange(len(rows)), "name": "the same for all"},
        "temperature": torch.tensor(0.5),
        "nothing": None,
        "__key__": [str(row) for row in rows],
        "__valid__": torch.arange(len(rows)) % 3 > 0,
        "__lineage__": BatchLineage(
            0,
            4,
            start,
            planned=[(0, r) for r in rows],
            valid=[r % 3 != 0 for r in rows],
            shown=[(1, r) for r in rows],
            bad=tuple(bad),
            num_cut_texts=3,
            num_dropped_parts=2,
            text_losses=("a text", "another"),
            num_bytes=1000,
            num_requests=7,
        ),
    }


def join(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, BatchLineage):
        return BatchLineage(
            first.epoch,
            first.step,
            first.start,
            [ref for part in parts for ref in part.planned],
            [valid for part in parts for valid in part.valid],
            [ref for part in parts for ref in part.shown],
            tuple(record for part in parts for record in part.bad),
            num_cut_texts=sum(part.num_cut_texts for part in parts),
            num_dropped_parts=sum(part.num_dropped_parts for part in parts),
            text_losses=tuple(dict.fromkeys(loss for part in parts for loss in part.text_losses)),
            num_bytes=sum(part.num_bytes for part in parts),
            num_requests=sum(part.num_requests for part in parts),
        )
    if isinstance(first, dict):
        joined = {name: join([part[name] for part in parts]) for name in first}
        if "image_row" in first:
            sizes = [0, *(len(part["__valid__"]) for part in parts)]
            starts = torch.tensor(sizes).cumsum(0).tolist()
            joined["image_row"] = torch.cat(
                [part["image_row"] + start for part, start in zip(parts, starts)]
            )
        return joined
    if isinstance(first, list):
        return [item for part in parts for item in part]
    if isinstance(first, torch.Tensor) and first.ndim:
        return torch.cat(parts)
    assert all(part is first for part in parts)
    return first


@given(
    images_of_rows=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    num_parts=st.integers(1, 12),
    start=st.integers(0, 100),
    whole=st.booleans(),
)
def test_the_parts_joined_are_the_batch(
    images_of_rows: list[int], num_parts: int, start: int, whole: bool
) -> None:
    batch = made_batch(images_of_rows, start, whole=whole)
    parts = mm.split_rows(batch, num_parts)
    assert plain(join(parts)) == plain(batch)
    sizes = [len(part["__key__"]) for part in parts]
    assert len(parts) == min(num_parts, len(images_of_rows))
    assert max(sizes) - min(sizes) <= 1
    for part in parts:
        lineage, rows = part["__lineage__"], part["image_row"].tolist()
        assert [row for _, row in lineage.planned] == [int(key) for key in part["__key__"]]
        assert len(rows) == len(part["image"])
        assert rows == sorted(rows)
        assert all(0 <= row < len(part["__key__"]) for row in rows)


def test_a_list_named_like_a_companion_is_a_field_of_its_own() -> None:
    batch = {"txt": ["a", "b"], "txt_row": [b"1", b"2"], "__valid__": torch.tensor([True, True])}
    assert [part["txt_row"] for part in mm.split_rows(batch, 2)] == [[b"1"], [b"2"]]


BOXES = {
    "boxes": torch.zeros(5, 4),
    "boxes_row": torch.tensor([0, 0, 0, 1, 1]),
    "boxes_length": torch.tensor([3, 2]),
    "__valid__": torch.ones(2, dtype=torch.bool),
}


def test_a_field_is_cut_by_the_rows_that_its_companion_names() -> None:
    """Its lengths, too: they have one entry for each row, as no recordings have them."""
    parts = mm.split_rows(BOXES, 2)
    assert [len(part["boxes"]) for part in parts] == [3, 2]
    assert [part["boxes_length"].tolist() for part in parts] == [[3], [2]]


@pytest.mark.parametrize(
    ("changes", "how", "message"),
    [
        ({"boxes_row": None}, {"num_parts": 2}, "boxes has 5 entries for 2 rows"),
        (
            {"boxes_row": torch.tensor([1, 0, 0, 1, 1])},
            {"num_parts": 2},
            "boxes_row does not rise",
        ),
        ({}, {"num_parts": 0}, "num_parts=0"),
        ({}, {"max_tokens": 8}, "give num_parts"),
        ({}, {}, "give num_parts, or max_tokens="),
    ],
)
def test_what_cannot_be_cut_is_refused(
    changes: dict[str, Any], how: dict[str, int], message: str
) -> None:
    batch = {name: value for name, value in (BOXES | changes).items() if value is not None}
    with pytest.raises(mm.ConfigError, match=message):
        mm.split_rows(batch, **how)


# -- batches of documents --------------------------------------------------------------------------

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


def flat_batch(rows: list[list[list[int]]], settings: mm.Flat) -> dict[str, Any]:
    samples, of_rows = samples_of(rows)
    batch = flatten(samples, of_rows, len(rows), settings)
    batch["__valid__"] = torch.tensor([len(row) != 2 for row in rows])
    mask_labels(batch)
    return batch


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
    batch = flat_batch(rows, settings)
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
    batch = flat_batch([[[5]], [[3]], [[4]], [[9]]], mm.Flat())
    assert [part["num_tokens"] for part in mm.split_rows(batch, max_tokens=8)] == [8, 4, 9]
    assert cuts_by_tokens(batch, 8, None) == [0, 2, 3, 4]


def test_ranks_fill_up_to_the_same_number_of_micro_batches() -> None:
    batch = flat_batch([[[5]], [[3]], [[4]]], mm.Flat())
    parts = mm.split_rows(batch, 4, max_tokens=8)
    assert [part["num_tokens"] for part in parts] == [8, 4, 0, 0]
    empty = parts[-1]
    assert empty["input_ids"].shape == empty["position_ids"].shape == (1, 1)
    assert empty["__valid__"].tolist() == []
    assert invalid_tokens(empty).tolist() == [[True]]
    with pytest.raises(mm.ConfigError, match=r"2 micro-batches of 8 tokens, and num_parts=1"):
        mm.split_rows(batch, 1, max_tokens=8)


def test_a_field_of_rows_is_refused() -> None:
    batch = flat_batch([[[2], [3]], [[4]]], mm.Flat()) | {"of_rows": torch.zeros(2)}
    with pytest.raises(mm.ConfigError, match="of_rows has 2 entries for 3 rows or documents"):
        mm.split_rows(batch, 2)


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_labels_of_a_row_in_the_middle_are_masked(layout: Any) -> None:
    batch = flat_batch([[[3]], [[2], [2]], [[2]]], mm.Flat(layout=layout, pad_to_multiple_of=6))
    is_trained = batch["labels"][batch["labels"] != -100]
    assert is_trained.tolist() == [1, 2, 31]
    assert batch["num_label_tokens"] == 3
    assert batch["label_weights"].sum() == 1.5
    assert batch["labels"].shape == batch["input_ids"].shape
