"""Batches without padding: documents one after the other, and what says where they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.batching.collate import Collator
from mmstream.batching.flat import flatten, reserved_batch_fields
from mmstream.decoding.stored import CollateSettings
from mmstream.train import megatron_packing
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.bad_corpus import make_pipeline
from tests.helpers.chats import tokenizer
from tests.helpers.corpora import write_corpus

MEDIA = CollateSettings(video_fields={"video": None}, audio_fields={"audio": ((0, 0), "float32")})


def padded_by(pad_token_id: int) -> Collator:
    return Collator(CollateSettings(pad_token_id))


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


def plain(value: Any) -> Any:
    """Tensors as lists, also those in lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


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
    assert plain(batch) == expected
    assert batch["document_ids"].dtype == batch["cu_seq_lens_q"].dtype == torch.int32


def test_documents_are_filled_up_to_a_multiple_without_labels() -> None:
    samples = [
        {"input_ids": np.array([5, 6, 7]), "labels": np.array([5, 6, 7])},
        {"input_ids": np.array([8, 9]), "label_weights": np.array([0, 3.0])},
    ]
    batch = flatten(samples, [0, 1], 2, mm.Flat(document_multiple_of=4), padded_by(1))
    expected = {
        "input_ids": [[5, 6, 7, 1, 8, 9, 1, 1]],
        "labels": [[-100, 6, 7, -100, -100, 9, -100, -100]],
        "label_weights": [[0, 1, 1, 0, 0, 3, 0, 0]],
        "cu_seq_lens_q": [0, 4, 8],
        "position_ids": [[0, 1, 2, 3, 0, 1, 2, 3]],
        "num_tokens": 5,
    }
    assert plain({name: batch[name] for name in expected}) == expected
    assert megatron_packing(batch, multiple_of=4)["total_tokens"] == 8


def test_rows_of_one_length_end_with_padding_documents() -> None:
    samples = [sample("1", 3), sample("2", 2), sample("3", 1)]
    batch = flatten(samples, [0, 0, 2], 3, mm.Pack(6, layout="rows"), padded_by(9))
    expected = {
        "input_ids": [[100, 101, 102, 200, 201, 9], [9, 9, 9, 9, 9, 9], [300, 9, 9, 9, 9, 9]],
        "document_row": [0, 0, 0, 1, 2, 2],
        "document_sample": [0, 1, -1, -1, 2, -1],
        "cu_seq_lens_q": [0, 3, 5, 6, 12, 13, 18],
        "__key__": ["1", "2", "3"],
    }
    assert plain({name: batch[name] for name in expected}) == expected


def test_a_rank_without_tokens_gets_a_padding_document() -> None:
    batch = flatten([], [], 2, mm.Flat(), padded_by(9))
    expected = {"input_ids": [[9]], "labels": [[-100]], "num_tokens": 0, "num_label_tokens": 0}
    assert plain({name: batch[name] for name in expected}) == expected


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


# -- other fields ----------------------------------------------------------------------------------

NUM_SAMPLES = 5


def with_tokens(number: int, *, one_shape: bool) -> dict[str, Any]:
    """A sample with a field of each kind."""
    size = (8, 8) if one_shape else (8, 8 + 2 * number)
    return {
        "__key__": str(number),
        "__url__": "a.tar",
        "__source__": "some",
        "input_ids": np.arange(number + 1),
        "attention_mask": np.ones(number + 1, np.int64),
        "labels": np.arange(number + 1),
        "image": [torch.full((3, *size), number, dtype=torch.uint8)] * (1 if one_shape else number),
        "video": [torch.full((number + 1, 3, *size), number, dtype=torch.uint8)] * (number % 2),
        "video_pts_s": [np.arange(number + 1) / 2] * (number % 2),
        "audio": [np.full(number + 3, number, np.float32)] * (number % 3),
        "json": {"number": number},
        "txt": f"text {number}",
        "raw": bytes([number]),
        "score": number / 2,
        "npy": np.full((2, 2), number),
        "boxes": np.zeros((number, 4), np.float32),
    }


@pytest.mark.parametrize("one_shape", [True, False])
@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_other_fields_are_those_of_collate(layout: Any, one_shape: bool) -> None:
    samples = [with_tokens(number, one_shape=one_shape) for number in range(NUM_SAMPLES)]
    padded = mm.collate(samples)
    batch = flatten(samples, [0, 0, 1, 1, 3], 4, mm.Pack(16, layout=layout))
    assert padded.keys() - batch.keys() == {"attention_mask"}
    for name in padded.keys() - {"input_ids", "labels", "attention_mask"}:
        if not name.endswith("_row"):
            assert plain(batch[name]) == plain(padded[name]), name
    for stem, counts in (("image", [1] * 5 if one_shape else range(5)), ("video", [0, 1, 0, 1, 0])):
        documents = batch[f"{stem}_document"]
        owners = batch["document_sample"][documents].tolist()
        assert owners == np.repeat(np.arange(NUM_SAMPLES), counts).tolist()
        assert torch.equal(batch[f"{stem}_row"], batch["document_row"][documents])
    assert batch["__source__"] == ["some"] * NUM_SAMPLES


@pytest.mark.parametrize("batching", [None, mm.Flat(), mm.Pack(16, layout="rows")])
def test_the_names_of_a_batch_are_those_that_it_has_and_no_sample(batching: Any) -> None:
    samples = [with_tokens(number, one_shape=False) for number in range(NUM_SAMPLES)]
    batch = mm.collate(samples) if batching is None else flatten(samples, [0] * 5, 1, batching)
    marks = {"cu_seq_lens_q", "document_row"} if batching is None else set()
    names = reserved_batch_fields(batching, MEDIA)
    assert names.reserved == (batch.keys() - samples[0].keys()) | marks
    assert names.decoded == () or {*names.decoded} - samples[0].keys() == {"label_weights"}


NAMES = sorted(reserved_batch_fields(mm.Flat(), MEDIA).reserved)
TOKENS = ["input_ids", "attention_mask", "labels", "label_weights"]


@pytest.mark.parametrize("origin", ["tar", "before", "transforms"])
@pytest.mark.parametrize("batching", [None, mm.Flat(), mm.Flat(layout="rows")])
def test_a_field_named_like_one_of_a_batch_makes_its_sample_bad_or_loses_nothing(
    batching: Any, origin: str, tmp_path: Path
) -> None:
    names = NAMES if origin == "transforms" else NAMES + TOKENS

    def odd_field(number: int, value: Any) -> dict[str, Any]:
        """Of each batch of four samples, the last one has a field of the next name."""
        return {names[number // 4]: value} if number % 4 == 3 else {}

    def fields(number: int) -> dict[str, bytes]:
        stored = {"txt": b"abc", "json": json.dumps({"id": number}).encode()}
        return stored | odd_field(number, b"7") if origin == "tar" else stored

    def add(sample: dict[str, Any]) -> dict[str, Any]:
        return sample | odd_field(sample["json"]["id"], 7)

    pipeline = make_pipeline(
        write_corpus(tmp_path, [4 * len(names)], fields),
        decode=mm.Decode(text=mm.TextDecoder(tokenizer(), max_length=16)),
        batching=batching,
        shuffle=False,
        global_batch_size=4,
        **({} if origin == "tar" else {origin: (add,)}),
    )
    reserved = reserved_batch_fields(batching, CollateSettings()).reserved
    for name, batch in zip(names, mm.Loader(pipeline), strict=True):
        assert len(mm.split_rows(batch, 2)) == 2
        reasons = [bad.reason for bad in batch["__lineage__"].bad]
        if name in NAMES and name not in reserved:
            assert reasons == []
            assert batch[name] in ([None] * 3 + [7], [None] * 3 + [b"7"])
        else:
            (reason,) = reasons
            assert f"{name}: " in reason


@pytest.mark.parametrize("name", ["input_ids", "labels", "image", "video", "document_row"])
def test_files_that_are_no_tokens_nor_media_make_their_sample_bad(name: str, tmp_path: Any) -> None:
    corpus = write_corpus(tmp_path, [8], lambda n: {"txt": b"a"} | ({name: b"7"} if n == 3 else {}))

    def tokens(sample: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": np.arange(3)} | sample

    def positions(ids: Any, _media: Any) -> Any:
        return np.tile(np.arange(len(ids)), (3, 1))

    loader = mm.Loader(
        make_pipeline(
            corpus,
            transforms=(tokens,),
            batching=mm.Flat(positions=positions),
            global_batch_size=4,
        )
    )
    assert all(isinstance(batch["document_row"], torch.Tensor) for batch in loader)
    assert loader.stats.num_bad == 1
