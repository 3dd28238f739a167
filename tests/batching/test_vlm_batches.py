"""Batches of pictures of every size: as many tokens as pixels demand, and what the models take."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

import mmstream as mm
from mmstream import Decode
from tests.helpers.corpora import write_corpus
from tests.helpers.families import FAMILIES, PICTURES, conversation, native
from tests.helpers.paths import DOCS
from tests.helpers.pictures import JPEG, read

PAGE = (DOCS / "text.md").read_text("utf-8")
INPUTS: dict[str, Any] = {"torch": torch}
exec(re.findall(r"```python\n(import torch\n\n\ndef qwen_inputs.*?)```", PAGE, re.S)[0], INPUTS)
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


def batches(dataset: mm.Dataset, decode: Decode, num_workers: int = 0) -> list[dict[str, Any]]:
    pipeline = mm.Pipeline(
        dataset,
        global_batch_size=4,
        seed=3,
        decode=decode,
        bad_samples=mm.BadSamplePolicy(quarantine=None),
    )
    return list(mm.Loader(pipeline, num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 2])
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


def test_a_function_that_returns_no_number_stops_a_run_in_workers_too(varied: mm.Dataset) -> None:
    decode = native(length=mm.internvl_length(2.5))
    with pytest.raises(mm.ConfigError, match=r"_by_tile returned 2\.5 for ImageShape"):
        batches(varied, decode, num_workers=1)


TEXT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
VISION |= {"num_attention_heads": 2, "patch_size": 14}


def small_qwen(vocab_size: int, ids: dict[str, int]) -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    return transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(
            text_config={**TEXT, "vocab_size": vocab_size, "rope_parameters": rope},
            vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2},
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
        )
    )


def small_llava_next(vocab_size: int, ids: dict[str, int]) -> Any:
    return transformers.LlavaNextForConditionalGeneration(
        transformers.LlavaNextConfig(
            text_config=transformers.LlamaConfig(**TEXT, vocab_size=vocab_size),
            vision_config=transformers.CLIPVisionConfig(**VISION, image_size=336),
            image_token_index=ids["<image>"],
            image_grid_pinpoints=[list(shape) for shape in mm.LlavaNextTiles().shapes],
        )
    )


def small_intern_vl(vocab_size: int, ids: dict[str, int]) -> Any:
    vision = {**VISION, "patch_size": [14, 14], "image_size": [448, 448]}
    return transformers.InternVLForConditionalGeneration(
        transformers.InternVLConfig(
            text_config=transformers.Qwen2Config(**TEXT, vocab_size=vocab_size),
            vision_config=vision,
            image_token_id=ids["<IMG_CONTEXT>"],
        )
    )


@dataclass(frozen=True)
class Case:
    """A family's small model, and what its input is made of."""

    model: Callable[[int, dict[str, int]], Any]
    inputs: str
    image: dict[str, Any]


CASES = {
    "qwen2-vl": Case(small_qwen, "qwen_inputs", {}),
    "llava-next": Case(small_llava_next, "llava_next_inputs", {}),
    "internvl": Case(small_intern_vl, "internvl_inputs", {"tiles": mm.InternVLTiles(max_tiles=3)}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_transformers_takes_the_batch(varied: mm.Dataset, name: str) -> None:
    case, decode = CASES[name], FAMILIES[name]().decode
    decode = replace(decode, image=replace(decode.image, **case.image))
    tokenizer = decode.text.tokenizer
    model = case.model(len(tokenizer), tokenizer.get_vocab())
    image_id = tokenizer.convert_tokens_to_ids(decode.text.image_token)
    more = {"image_token_id": image_id} if name == "qwen2-vl" else {}
    pipeline = mm.Pipeline(
        varied,
        global_batch_size=4,
        decode=decode,
        shuffle=False,
        bad_samples=mm.BadSamplePolicy(quarantine=None),
    )
    loader = mm.Loader(pipeline, num_workers=0)
    normalize = mm.Normalize((0.5,) * 3, (0.5,) * 3)
    batch = next(iter(mm.to_device(loader, "cpu", normalize=normalize)))
    assert sorted(set(batch["image_row"].tolist())) == [0, 2, 3]  # the second is text alone
    outputs = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        labels=batch["labels"],
        **INPUTS[case.inputs](batch, **more),
    )
    assert torch.isfinite(outputs.loss)
    short = {field: batch[field].clone() for field in ("input_ids", "attention_mask")}
    short["input_ids"][0, int((batch["input_ids"][0] == image_id).nonzero()[0])] = 0
    with pytest.raises(ValueError, match="do not match"):  # it does check
        model(**short, **INPUTS[case.inputs](batch, **more))


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl"])
def test_patches_are_in_the_order_of_qwens_processor(name: str) -> None:
    family = FAMILIES[name]()
    processor = family.processor.image_processor
    decoder = replace(family.decode.image, scaled_decoding=False)
    expected = processor(
        [Image.open(io.BytesIO(picture)) for picture in PICTURES],
        return_tensors="pt",
        do_rescale=False,
        do_normalize=False,
    )
    images = [torch.from_numpy(decoder(picture)).permute(2, 0, 1) for picture in PICTURES]
    batch = {"image": images, "input_ids": torch.tensor([[7, 8, 7]])}
    inputs = INPUTS["qwen_inputs"](batch, 7, processor.patch_size, processor.merge_size)
    assert torch.equal(inputs["image_grid_thw"], expected["image_grid_thw"])
    error = (inputs["pixel_values"].float() - expected["pixel_values"]).abs()
    assert error.mean() < 0.2
    assert error.max() < 6
    assert inputs["mm_token_type_ids"].tolist() == [[1, 0, 1]]
