"""Batches without padding: documents one behind the other, and what says where they end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.batching.flat import flatten
from mmstream.train import megatron_packing
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import write_corpus


def sample(key: str, *lengths: int, **fields: Any) -> dict[str, Any]:
    """A decoded sample with documents of these lengths; several are a list."""
    ids = [100 * int(key) + np.arange(length) for length in lengths]
    one = len(lengths) == 1
    return {
        "__key__": key,
        "__url__": "a.tar",
        "input_ids": ids[0] if one else ids,
        "attention_mask": np.ones_like(ids[0]) if one else [np.ones_like(i) for i in ids],
        "labels": ids[0] if one else ids,
        **fields,
    }


def plain(batch: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """These fields of a batch, tensors as lists."""
    values = {name: batch[name] for name in names}
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def test_documents_lie_one_behind_the_other() -> None:
    batch = flatten([sample("1", 3), sample("2", 2)], [0, 1], 2, mm.Flat())
    expected = {
        "input_ids": [[100, 101, 102, 200, 201]],
        "labels": [[-100, 101, 102, -100, 201]],
        "position_ids": [[0, 1, 2, 0, 1]],
        "document_ids": [[0, 0, 0, 1, 1]],
        "cu_seq_lens_q": [0, 3, 5],
        "cu_seq_lens_k": [0, 3, 5],
        "max_length_q": 4,
        "max_length_k": 4,
        "document_row": [0, 1],
        "document_sample": [0, 1],
        "num_tokens": 5,
        "num_label_tokens": 3,
        "__key__": ["1", "2"],
        "__url__": ["a.tar"] * 2,
    }
    assert plain(batch, batch) == expected
    assert batch["document_ids"].dtype == batch["cu_seq_lens_q"].dtype == torch.int32


def test_documents_are_filled_up_to_a_multiple_without_labels() -> None:
    samples = [
        {"input_ids": np.array([5, 6, 7]), "labels": np.array([5, 6, 7])},
        {"input_ids": np.array([8, 9]), "label_weights": np.array([0, 3.0])},
    ]
    batch = flatten(samples, [0, 1], 2, mm.Flat(document_multiple_of=4), pad_token_id=1)
    expected = {
        "input_ids": [[5, 6, 7, 1, 8, 9, 1, 1]],
        "labels": [[-100, 6, 7, -100, -100, 9, -100, -100]],
        "label_weights": [[0, 1, 1, 0, 0, 3, 0, 0]],
        "cu_seq_lens_q": [0, 4, 8],
        "position_ids": [[0, 1, 2, 3, 0, 1, 2, 3]],
        "num_tokens": 5,
    }
    assert plain(batch, expected) == expected
    assert megatron_packing(batch, multiple_of=4)["total_tokens"] == 8


def test_rows_of_one_length_end_with_padding_documents() -> None:
    samples = [sample("1", 3), sample("2", 2), sample("3", 1)]
    batch = flatten(samples, [0, 0, 2], 3, mm.Pack(6, layout="rows"), pad_token_id=9)
    expected = {
        "input_ids": [[100, 101, 102, 200, 201, 9], [9, 9, 9, 9, 9, 9], [300, 9, 9, 9, 9, 9]],
        "document_row": [0, 0, 0, 1, 2, 2],
        "document_sample": [0, 1, -1, -1, 2, -1],
        "cu_seq_lens_q": [0, 3, 5, 6, 12, 13, 18],
        "__key__": ["1", "2", "3"],
    }
    assert plain(batch, expected) == expected


def test_a_rank_without_tokens_gets_a_padding_document() -> None:
    batch = flatten([], [], 2, mm.Flat(), pad_token_id=9)
    expected = {"input_ids": [[9]], "labels": [[-100]], "num_tokens": 0, "num_label_tokens": 0}
    assert plain(batch, expected) == expected


def test_a_pipeline_makes_flat_batches(tmp_path: Path) -> None:
    write_corpus(tmp_path, [6, 5])
    decode = mm.Decode(image=mm.ImageDecoder(size=32), text=mm.TextDecoder(byte_tokenizer()))
    given: dict[str, Any] = {"global_batch_size": 4, "drop_last": False, "decode": decode}
    dataset = mm.open_dataset(tmp_path)
    padded = mm.Loader(mm.Pipeline(dataset, **given))
    flat = mm.Loader(mm.Pipeline(dataset, **given, batching=mm.Flat()), num_workers=1)
    num_invalid = 0
    for rows, batch in zip(padded, flat, strict=True):
        assert batch["__key__"] == rows["__key__"]
        is_token = rows["attention_mask"] == 1
        assert torch.equal(batch["input_ids"][0], rows["input_ids"][is_token])
        first = batch["cu_seq_lens_q"][:-1].long()
        labels = rows["labels"][is_token]
        labels[first] = -100
        assert torch.equal(batch["labels"][0], labels)
        assert torch.equal(batch["image"], rows["image"])
        assert batch["image_row"].tolist() == batch["image_document"].tolist() == [0, 1, 2, 3]
        assert batch["num_label_tokens"] == int((labels != -100).sum())
        assert torch.equal(batch["__valid__"], rows["__valid__"])
        num_invalid += int((~batch["__valid__"]).sum())
    assert num_invalid == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batching": mm.Flat}, r"pass mm\.Flat\(\)"),
        ({"batching": mm.Flat(), "collate": list}, "leave out one of the two"),
        ({"batching": mm.Flat()}, "nothing makes any"),
    ],
    ids=["class", "collate", "decode"],
)
def test_a_pipeline_refuses(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write_corpus(tmp_path, [4])
    with pytest.raises(mm.ConfigError, match=message):
        mm.Pipeline(mm.open_dataset(tmp_path), global_batch_size=2, **settings)
