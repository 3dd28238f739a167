"""Pictures of every size in text: as many tokens as the models' own processors put for them."""

from __future__ import annotations

import io
import json
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream.decoding.media_shapes import ImageShape, MediaShapes, MediaText
from mmstream.decoding.text.placeholders import ImageLength
from tests.helpers.chats import CHATML, byte_chat
from tests.helpers.corpora import write_corpus
from tests.helpers.decodings import decode_texts
from tests.helpers.families import FAMILIES, PICTURES, conversation, native, per_pixel
from tests.helpers.pictures import JPEG, encoded, photo, read


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ids_are_those_of_the_models_own_processor(name: str) -> None:
    family = FAMILIES[name]()
    tokenizer = family.decode.text.tokenizer
    samples = [conversation(*PICTURES[i : i + 3]) for i in range(0, len(PICTURES), 3)]
    lengths = set()
    for sample, (_, decoded) in zip(samples, decode_texts(samples, family.decode), strict=True):
        tokens = decoded.tokens
        text = tokenizer.apply_chat_template(
            sample["json"]["messages"], tokenize=False, chat_template=family.processor_template
        )
        pictures = [Image.open(io.BytesIO(sample[f"{i}.jpg"])) for i in range(3)]
        expected = family.processor(images=[pictures], text=[text], add_special_tokens=False)
        assert tokens["input_ids"].tolist() == list(expected["input_ids"][0])
        is_image = tokens["input_ids"] == tokenizer.convert_tokens_to_ids(
            family.decode.text.image_token
        )
        assert (tokens["labels"][is_image] == -100).all()
        learned = tokenizer.decode(tokens["labels"][tokens["labels"] != -100])
        assert learned.replace("<|im_end|>", " ") == "a cat a mat "
        lengths.add(int(is_image.sum()))
    # Of LLaVA-OneVision, each of several pictures takes the same number. Gemma 3 makes few crops.
    assert len(lengths) == {"llava-onevision": 1, "gemma3": 3}.get(name, len(samples))


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"gemma3"}))  # its processor says 256
def test_thousands_of_shapes_take_as_many_tokens_as_the_processor_says(name: str) -> None:
    family = FAMILIES[name]()
    marks = 2 if name == "internvl" else 0
    shapes = np.exp(np.random.default_rng(0).uniform(np.log(14), np.log(2400), (3000, 2)))
    shapes = [(h, w) for h, w in shapes.astype(int).tolist() if max(h, w) < 100 * min(h, w)]
    if name == "glm4v":  # smaller ones, which it first makes as large as a token, differ
        shapes = [shape for shape in shapes if min(shape) >= 28]
    expected = family.processor._get_num_multimodal_tokens(image_sizes=shapes).num_image_tokens
    length = family.decode.text.image_length
    shapes_of = map(family.decode.image.shape_of, shapes)
    assert [num_written(length(shape)) + marks for shape in shapes_of] == expected


def num_written(length: Any) -> int:
    """Of Mistral 3, a mark ends each row."""
    return sum(length.lengths) + len(length.lengths) if isinstance(length, MediaText) else length


def test_an_image_is_never_cut_and_the_text_behind_the_last_one_is() -> None:
    sample = conversation(*(encoded(photo(3, width), "png") for width in (3, 6, 9)))
    shapes = [mm.ImageDecoder().prepared_shape(sample[f"{i}.jpg"]) for i in range(3)]
    whole = native(CHATML).text(sample, MediaShapes(shapes))
    starts = np.flatnonzero(
        whole["input_ids"] == byte_chat(CHATML).convert_tokens_to_ids("<image>")
    )
    assert len(starts) == 12 + 15 + 18
    ends = starts[[11, 26, 44]] + 1
    for length in range(1, len(whole["input_ids"]) + 1):
        text = native(CHATML, max_length=length).text
        num_whole = int((ends <= length).sum())
        if num_whole == 3:
            for name, array in text(sample, MediaShapes(shapes)).items():
                np.testing.assert_array_equal(array, whole[name][:length])
        else:
            with pytest.raises(mm.errors.DecodeError, match="ends before the media of the text"):
                text(sample, MediaShapes(shapes))


def half(shape: ImageShape) -> Any:
    return shape.height / 2


def none(shape: ImageShape) -> Any:
    return 0 if shape.height else None


def true(shape: ImageShape) -> Any:
    return shape.height > 0


@pytest.mark.parametrize(
    ("length", "reason"),
    [
        (
            half,
            r"image_length: half returned 30.0 for ImageShape\(height=60, width=90, .*from 1 up",
        ),
        (none, "image_length: none returned 0 for"),
        (true, "image_length: true returned True for"),
        (partial(half), "image_length: half returned 30.0 for"),
        (
            mm.families.qwen_vl.image_length(),
            "90x60 is not made of squares of 28 pixels: give .*multiple_of=28",
        ),
    ],
    ids=["half", "none", "true", "partial", "native for qwen"],
)
def test_what_is_no_number_of_tokens_is_told_in_one_line(length: Any, reason: str) -> None:
    decode = native(length=length)
    with pytest.raises(mm.ConfigError, match=reason) as error:
        decode_texts([conversation(JPEG, JPEG, JPEG)], decode)
    assert "\n" not in str(error.value)


def test_a_length_that_depends_on_the_picture_needs_the_picture() -> None:
    with pytest.raises(mm.ConfigError, match=r"is a function of the image: give Decode\(image=\)"):
        mm.Decode(text=native().text)
    with pytest.raises(mm.ConfigError, match="3 images needs the prepared_shape of each, not 0"):
        native().text(conversation(JPEG, JPEG, JPEG))


@pytest.mark.parametrize(
    "length",
    [
        mm.families.qwen_vl.image_length(16),
        mm.families.llava.next_image_length(),
        mm.families.llava.onevision_image_length(),
        mm.families.internvl.image_length(),
        mm.families.gemma3.image_length(),
        mm.families.mistral3.image_length(),
        per_pixel,
    ],
)
def test_functions_travel_to_workers(length: ImageLength) -> None:
    shape = ImageShape(448, 448, (600, 500), 5, (2, 2))
    assert pickle.loads(pickle.dumps(native(length=length))).text.image_length(shape) == length(
        shape
    )


# -- batches of pictures of every size -------------------------------------------------------------

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


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
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
