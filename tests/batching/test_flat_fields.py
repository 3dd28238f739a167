"""No field of a sample is forgotten in a flat batch, or takes the place of the batch's own."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.batching.flat import flatten, own_names
from tests.helpers.bad_corpus import make_pipeline
from tests.helpers.chats import tokenizer
from tests.helpers.corpora import write_corpus

NUM_SAMPLES = 5


def sample(number: int, *, one_shape: bool) -> dict[str, Any]:
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
    samples = [sample(number, one_shape=one_shape) for number in range(NUM_SAMPLES)]
    padded = mm.collate(samples)
    batch = flatten(samples, [0, 0, 1, 1, 3], 4, mm.Pack(16, layout=layout))
    assert padded.keys() - batch.keys() == {"attention_mask"}
    for name in padded.keys() - {"input_ids", "labels", "attention_mask"}:
        if not name.endswith("_row"):
            assert _plain(batch[name]) == _plain(padded[name]), name
    for stem, counts in (("image", [1] * 5 if one_shape else range(5)), ("video", [0, 1, 0, 1, 0])):
        documents = batch[f"{stem}_document"]
        owners = batch["document_sample"][documents].tolist()
        assert owners == np.repeat(np.arange(NUM_SAMPLES), counts).tolist()
        assert torch.equal(batch[f"{stem}_row"], batch["document_row"][documents])
    assert batch["__source__"] == ["some"] * NUM_SAMPLES


@pytest.mark.parametrize("batching", [None, mm.Flat(), mm.Pack(16, layout="rows")])
def test_the_names_of_a_batch_are_those_that_it_has_and_no_sample(batching: Any) -> None:
    samples = [sample(number, one_shape=False) for number in range(NUM_SAMPLES)]
    batch = mm.collate(samples) if batching is None else flatten(samples, [0] * 5, 1, batching)
    marks = {"cu_seq_lens_q", "document_row"} if batching is None else set()
    names = own_names(batching, ["video"], ["audio"])
    assert names.reserved == (batch.keys() - samples[0].keys()) | marks
    assert names.decoded == () or {*names.decoded} - samples[0].keys() == {"label_weights"}


NAMES = sorted(own_names(mm.Flat(), ["video"], ["audio"]).reserved)
TOKENS = ["input_ids", "attention_mask", "labels", "label_weights"]


def _add(origin: str, name: str) -> dict[str, Any]:
    """Settings by which the sample 3 gets a field of this name."""

    def add(sample: dict[str, Any]) -> dict[str, Any]:
        return sample | ({name: 7} if sample["json"]["id"] == 3 else {})

    return {} if origin == "tar" else {origin: (add,)}


@pytest.mark.parametrize(
    ("origin", "name"),
    [(origin, name) for origin in ("tar", "before", "transforms") for name in NAMES]
    + [(origin, name) for origin in ("tar", "before") for name in TOKENS],
)
@pytest.mark.parametrize("batching", [None, mm.Flat(), mm.Flat(layout="rows")])
def test_a_field_named_like_one_of_a_batch_makes_its_sample_bad_or_loses_nothing(
    batching: Any, origin: str, name: str, tmp_path: Any
) -> None:
    corpus = write_corpus(
        tmp_path,
        [8],
        lambda n: (
            {"txt": b"abc", "json": json.dumps({"id": n}).encode()}
            | ({name: b"7"} if n == 3 and origin == "tar" else {})
        ),
    )
    decode = mm.Decode(text=mm.TextDecoder(tokenizer(), max_length=16))
    pipeline = make_pipeline(
        corpus,
        decode=decode,
        batching=batching,
        shuffle=False,
        global_batch_size=4,
        **_add(origin, name),
    )
    loader = mm.Loader(pipeline)
    batches = list(loader)
    for batch in batches:
        assert len(mm.split_rows(batch, 2)) == 2
    is_field = name not in own_names(batching).reserved and name in NAMES
    if is_field:
        assert batches[0][name][:3] == [None] * 3
        assert batches[0][name][3] in (7, b"7")
    else:
        assert loader.stats.num_bad == 1
        assert f"{name}: " in batches[0]["__lineage__"].bad[0].reason


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


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list) else value
