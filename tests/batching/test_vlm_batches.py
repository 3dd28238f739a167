"""Batches of pictures of every size: as many tokens as pixels demand."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import mmstream as mm
from tests.helpers.corpora import write_corpus
from tests.helpers.families import PICTURES, conversation, native
from tests.helpers.pictures import JPEG, read

NUM_SAMPLES = 12
BAD = {5: JPEG[:-40]}


def sample_of(number: int) -> dict[str, bytes]:
    """A sample of no, one or three pictures, or a bad one, or one with an odd header."""
    if number % 6 == 1:
        return {"txt": b"a text"}
    if number % 6 == 2:
        return {"txt": b"a caption", "jpg": PICTURES[number % len(PICTURES)]}
    pictures = [PICTURES[(number + i) % len(PICTURES)] for i in range(3)]
    pictures[1] = BAD.get(number, pictures[1])
    pictures[2] = read("jpeg_ff00_header.jpg") if number == 3 else pictures[2]
    fields = conversation(*pictures)
    return {**fields, "json": json.dumps(fields["json"]).encode()}


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> mm.Dataset:
    folder = tmp_path_factory.mktemp("varied")
    return mm.open_dataset(write_corpus(folder, [7, NUM_SAMPLES - 7], sample_of))


def batches(dataset: mm.Dataset, decode: mm.Decode, num_workers: int = 0) -> list[dict[str, Any]]:
    pipeline = mm.Pipeline(
        dataset,
        global_batch_size=4,
        seed=3,
        decode=decode,
        bad_samples=mm.BadSamplePolicy(quarantine=None),
    )
    return list(mm.Loader(pipeline, num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_each_row_has_as_many_image_tokens_as_its_pictures_demand(
    varied: mm.Dataset, num_workers: int
) -> None:
    decode = native()
    image_id = decode.text.tokenizer.convert_tokens_to_ids("<image>")
    reasons, num_seen = [], 0
    expected = batches(varied, decode)
    for batch, same in zip(batches(varied, decode, num_workers), expected, strict=True):
        demanded = torch.zeros(4, dtype=torch.int64)
        for row, image in zip(batch["image_row"].tolist(), batch["image"], strict=True):
            demanded[row] += 3 * image.shape[1] + image.shape[2]
        is_image = batch["input_ids"] == image_id
        assert torch.equal(is_image.sum(dim=1), demanded)
        assert (batch["labels"][is_image] == -100).all()
        assert torch.equal(batch["input_ids"], same["input_ids"])
        assert torch.equal(batch["labels"], same["labels"])
        reasons += [bad.reason for bad in batch["__lineage__"].bad]
        num_seen += len(batch["__key__"])
    assert num_seen == NUM_SAMPLES
    assert len(reasons) == 1
    assert "000005.1.jpg: JPEG: " in reasons[0]  # not what its header says, which is whole


def no_whole_number(shape: object) -> float:
    return 2.5


@pytest.mark.slow
def test_a_function_that_returns_no_number_stops_a_run_in_workers_too(varied: mm.Dataset) -> None:
    decode = native(length=no_whole_number)
    with pytest.raises(mm.ConfigError, match=r"no_whole_number returned 2\.5 for ImageShape"):
        batches(varied, decode, num_workers=1)
