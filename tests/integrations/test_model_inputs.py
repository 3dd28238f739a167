"""What a model of transformers gets from a batch is what its own processor makes.

The pictures are PNG, and the decoders resize as torchvision does, bit for bit. Idefics3 resizes
with a filter of its own, so its pictures have the right size already.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream.integrations import model_inputs
from tests.helpers.chats import assistant, user
from tests.helpers.corpora import write_corpus
from tests.helpers.families import Family, transformers
from tests.helpers.model_cases import CASES, PAIRS, TOWER
from tests.helpers.paths import PHOTOS
from tests.helpers.pictures import encoded

SIZES = [(112, 224), (224, 112), (224, 224), (56, 56), (56, 56), (56, 56)]
PICTURES = [
    encoded(Image.open(path).convert("RGB").resize(size), "png")
    for path, size in zip(PHOTOS, SIZES, strict=False)
]
NUM_PICTURES = [2, 0, 1, 3, 0, 0, 0, 0]
"""Of each sample. The last four are a batch without any."""
BATCH = 4
CAPTIONS = ["a bear", "two people on skis", "pizza, half eaten", "0000000000000000"] * 2
HALF = mm.Normalize((0.5,) * 3, (0.5,) * 3)


def messages_of(number: int) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": f"question {number} "}]
    for i in range(NUM_PICTURES[number]):
        parts += [{"type": "image", "field": f"{i}.png"}, {"type": "text", "text": f" then {i} "}]
    return [user(parts), assistant([{"type": "text", "text": f"an answer {'and more ' * number}"}])]


def pictures_of(number: int, first: int = 0) -> list[bytes]:
    return [PICTURES[first + (number + i) % 3] for i in range(NUM_PICTURES[number])]


def conversation_of(number: int, first: int = 0) -> dict[str, bytes]:
    pictures = {f"{i}.png": data for i, data in enumerate(pictures_of(number, first))}
    return {"json": json.dumps({"messages": messages_of(number)}).encode(), **pictures}


def captioned(number: int) -> dict[str, bytes]:
    picture = PICTURES[number % 3]
    return {"txt": CAPTIONS[number].encode(), "png": picture, "cls": b"%d" % number}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, mm.Dataset]:
    """Conversations, those with small pictures, and captions."""

    def write(name: str, fields_of: Any) -> mm.Dataset:
        folder = tmp_path_factory.mktemp(name)
        return mm.open_dataset(write_corpus(folder, [len(NUM_PICTURES)], fields_of))

    return {
        "conversations": write("conversations", conversation_of),
        "small": write("small", lambda number: conversation_of(number, first=3)),
        "captions": write("captions", captioned),
    }


def batches_of(dataset: mm.Dataset, decode: mm.Decode) -> list[dict[str, Any]]:
    decode = replace(decode, image=replace(decode.image, scaled_decoding=False))
    pipeline = mm.Pipeline(dataset, global_batch_size=BATCH, decode=decode, shuffle=False)
    return list(mm.Loader(pipeline))


def processed(family: Family, first: int) -> dict[str, Any]:
    """The batch of the first conversations, as the family's processor makes it."""
    tokenizer = family.decode.text.tokenizer
    texts = [
        tokenizer.apply_chat_template(
            messages_of(number), tokenize=False, chat_template=family.processor_template
        )
        for number in range(BATCH)
    ]
    settings = {"padding": True, "padding_side": "right", "add_special_tokens": False}
    pictures = [opened(pictures_of(number, first)) for number in range(BATCH)]
    return dict(family.processor(text=texts, images=pictures, return_tensors="pt", **settings))


def opened(files: list[bytes]) -> list[Image.Image]:
    return [Image.open(io.BytesIO(file)) for file in files]


def assert_same(inputs: dict[str, Any], expected: dict[str, Any]) -> None:
    assert inputs.keys() == expected.keys()
    for name, value in inputs.items():
        torch.testing.assert_close(value, expected[name].to(value.dtype), rtol=0, atol=1e-5)


def assert_loss_falls(model: torch.nn.Module, inputs: dict[str, Any], lr: float = 3e-3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for _ in range(5):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0], losses


def case_of(name: str) -> tuple[Family, Any]:
    """A family, and its small model."""
    case = {**CASES, **PAIRS}[name]
    family = case.family()
    torch.manual_seed(0)
    return family, case.model(family.decode.text.tokenizer)


# -- vision-language models -----------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_vision_language_model_gets_what_its_processor_makes_and_learns(datasets, name):
    family, model = case_of(name)
    kind, first = ("small", 3) if name == "idefics3" else ("conversations", 0)
    batch, without = batches_of(datasets[kind], family.decode)
    inputs = model_inputs(batch, model, normalize=family.processor)
    labels = inputs.pop("labels")
    assert_same(inputs, processed(family, first))
    assert labels.equal(batch["labels"])
    assert_loss_falls(model, {**inputs, "labels": labels})

    # A batch without pictures: the loss of its text alone, and gradients of 0 for the rest.
    model(**inputs, labels=labels).loss.backward()
    trained = {name: weight for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    blank = model_inputs(without, model)
    loss = model(**blank).loss
    loss.backward()
    untrained = [name for name, weight in trained.items() if weight.grad is None]
    assert untrained == []
    vision = [w for name, w in trained.items() if "vision" in name or "visual" in name]
    assert vision
    assert all(not weight.grad.any() for weight in vision)
    text = model_inputs(without, model, blank_image=False)
    assert set(text) == {"input_ids", "attention_mask", "labels"}
    torch.testing.assert_close(model(**text).loss, loss)


def test_the_blank_picture_stands_in_padding_or_makes_rows_longer(datasets):
    family, model = case_of("qwen2_vl")
    _, batch = batches_of(datasets["conversations"], family.decode)
    token = model.config.image_token_id
    inputs = model_inputs(batch, model)
    assert inputs["input_ids"].shape == batch["input_ids"].shape
    assert (inputs["input_ids"] == token).sum() == 1
    assert inputs["input_ids"][0, -1] == token  # the first row has most padding
    full = {name: batch[name][:1, :9] for name in ("input_ids", "attention_mask", "labels")}
    longer = model_inputs({**batch, **full, "__valid__": batch["__valid__"][:1]}, model)
    assert longer["input_ids"][0].tolist() == [*full["input_ids"][0].tolist(), token]
    assert longer["attention_mask"].tolist() == [[1] * 10]
    assert longer["labels"][0, -1] == -100
    assert not (batch["input_ids"] == token).any()  # the batch itself has not changed


def test_a_batch_whose_samples_have_no_image_field_at_all_is_text(datasets):
    family, model = case_of("llava")
    batch = batches_of(datasets["conversations"], family.decode)[1]
    batch = {name: value for name, value in batch.items() if not name.startswith("image")}
    assert torch.isfinite(model(**model_inputs(batch, model)).loss)


def test_invalid_rows_have_no_labels(datasets):
    family, model = case_of("llava")
    batch = batches_of(datasets["conversations"], family.decode)[0]
    batch = {**batch, "__valid__": torch.tensor([True, False, True, True])}
    inputs = model_inputs(batch, model, normalize=HALF)
    assert (inputs["labels"][1] == -100).all()
    assert inputs["labels"][[0, 2, 3]].equal(batch["labels"][[0, 2, 3]])


# -- pixels are normalised once -------------------------------------------------------------------


def test_floating_pixels_are_those_of_to_device_and_are_not_normalised_again(datasets):
    family, model = case_of("llava")
    batch = batches_of(datasets["conversations"], family.decode)[0]
    normalize = mm.Normalize(
        family.processor.image_processor.image_mean, family.processor.image_processor.image_std
    )
    once = model_inputs(batch, model, normalize=normalize)["pixel_values"]
    pipeline = mm.Pipeline(
        datasets["conversations"],
        global_batch_size=BATCH,
        decode=replace(family.decode, image=replace(family.decode.image, scaled_decoding=False)),
        shuffle=False,
    )
    moved = next(iter(mm.to_device(mm.Loader(pipeline), "cpu", normalize=normalize)))
    for settings in ({}, {"normalize": family.processor}):
        assert model_inputs(moved, model, **settings)["pixel_values"].equal(once)


def test_uint8_pixels_without_mean_and_std_are_refused(datasets):
    family, model = case_of("llava")
    batch = batches_of(datasets["conversations"], family.decode)[0]
    with pytest.raises(mm.ConfigError, match="uint8, not normalised: to_device"):
        model_inputs(batch, model)
    with pytest.raises(mm.ConfigError, match="normalize=int: give an"):
        model_inputs(batch, model, normalize=3)
    assert model_inputs(batch, model.bfloat16(), normalize=HALF)["pixel_values"].dtype == (
        torch.bfloat16
    )


# -- two towers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRS)
def test_two_towers_get_what_their_processor_makes_and_learn(datasets, name):
    family, model = case_of(name)
    batch = batches_of(datasets["captions"], family.decode)[0]
    inputs = model_inputs(batch, model, normalize=family.processor)
    assert inputs.pop("return_loss") is True
    expected = family.processor(
        text=CAPTIONS[:BATCH],
        images=opened([PICTURES[number % 3] for number in range(BATCH)]),
        padding="max_length",
        max_length=64,
        return_tensors="pt",
    )
    if name == "siglip":  # the tokenizers of its models make none
        expected.pop("attention_mask")
    assert_same(inputs, dict(expected))
    assert_loss_falls(model, {**inputs, "return_loss": True}, lr=1e-3)

    masked = {**batch, "__valid__": torch.tensor([True, True, False, True])}
    fewer = model_inputs(masked, model, normalize=family.processor)
    assert fewer["pixel_values"].equal(inputs["pixel_values"][[0, 1, 3]])
    assert fewer["input_ids"].equal(inputs["input_ids"][[0, 1, 3]])
    pictures = {key: value for key, value in batch.items() if key != "input_ids"}
    assert model_inputs(pictures, model, normalize=HALF).keys() == {"pixel_values"}
    assert model_inputs(pictures, model.vision_model.config, normalize=HALF).keys() == {
        "pixel_values"
    }


def test_two_towers_refuse_rows_without_exactly_one_picture(datasets):
    family, model = case_of("clip")
    decode = replace(family.decode, image=replace(case_of("llava")[0].decode.image))
    decode = replace(decode, text=case_of("llava")[0].decode.text)
    batch = batches_of(datasets["conversations"], decode)[0]
    with pytest.raises(mm.ConfigError, match=r"one picture a row, 000000 has 2: .*SkipSample"):
        model_inputs(batch, model, normalize=HALF)


# -- classification -------------------------------------------------------------------------------


def classifiers() -> dict[str, Any]:
    vit = transformers.ViTConfig(**TOWER, image_size=56, patch_size=14, num_labels=8)
    resnet = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=8
    )
    return {
        "vit": transformers.ViTForImageClassification(vit),
        "resnet": transformers.ResNetForImageClassification(resnet),
    }


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_a_classifier_gets_pictures_and_the_class_of_each_row(datasets, name):
    torch.manual_seed(0)
    model = classifiers()[name]
    processor = transformers.ViTImageProcessor(size={"height": 56, "width": 56})
    decode = mm.Decode(image=mm.ImageDecoder.from_processor(processor))
    batch = batches_of(datasets["captions"], decode)[1]
    batch["__valid__"] = torch.tensor([True, True, True, False])
    inputs = model_inputs(batch, model, normalize=processor)
    assert inputs["labels"].tolist() == [4, 5, 6, -100]
    images = opened([PICTURES[number % 3] for number in range(4, 8)])
    expected = processor(images, return_tensors="pt")
    assert_same({"pixel_values": inputs["pixel_values"]}, dict(expected))
    assert_loss_falls(model, inputs)

    numbers = {**batch, "labels": torch.tensor([3, 2, 1, 0])}
    assert model_inputs(numbers, name, normalize=HALF)["labels"].tolist() == [3, 2, 1, -100]
    with pytest.raises(mm.ConfigError, match=r"000004\.txt: not a class number"):
        model_inputs(batch, model, normalize=HALF, label_field="txt")


def test_pictures_of_a_decoder_by_field_are_named_and_never_left_out(datasets):
    family, clip = case_of("clip")
    decode = mm.Decode({"png": family.decode.image}, text=family.decode.text)
    pipeline = mm.Pipeline(
        datasets["captions"], global_batch_size=BATCH, decode=decode, shuffle=False
    )
    batch = next(iter(mm.Loader(pipeline)))
    for model in (clip, classifiers()["vit"], case_of("llava")[1]):
        with pytest.raises(mm.ConfigError, match=r"pictures in 'png': .*pass image_field='png'"):
            model_inputs(batch, model, normalize=HALF)
    with pytest.raises(mm.ConfigError, match="no 'jpg', and pictures in 'png'"):
        model_inputs(batch, clip, normalize=HALF, image_field="jpg")
    pixels = model_inputs(batch, clip, normalize=HALF, image_field="png")["pixel_values"]
    by_image = {**batch, "image": batch["png"]}
    assert pixels.equal(model_inputs(by_image, clip, normalize=HALF)["pixel_values"])


# -- which family ---------------------------------------------------------------------------------


def test_a_model_its_config_and_its_wrappers_are_the_same_family(datasets):
    family, model = case_of("qwen2_5_vl")
    batch = batches_of(datasets["conversations"], family.decode)[0]
    expected = model_inputs(batch, model, normalize=HALF)
    wrapper = torch.nn.Module()
    wrapper.module = model  # as DistributedDataParallel has it
    for same in (model.config, wrapper):
        assert_same(model_inputs(batch, same, normalize=HALF), expected)


def test_a_name_stands_for_the_default_config_of_the_family(datasets):
    family, _ = case_of("qwen2_vl")
    batch = batches_of(datasets["conversations"], family.decode)[0]
    inputs = model_inputs(batch, "qwen2_vl", normalize=HALF)
    assert inputs["image_grid_thw"].tolist()[0] == [1, 16, 8]
    assert not inputs["mm_token_type_ids"].any()  # its image token is another than the test's


def test_what_is_not_known_is_said(datasets):
    family, _ = case_of("llava")
    batch = batches_of(datasets["conversations"], family.decode)[0]
    for unknown, message in (
        ("bert", "'bert' is not one of llava, "),
        ("lava", "'lava' is not a model_type of transformers"),
        (torch.nn.Linear(1, 1), "Linear has no config"),
    ):
        with pytest.raises(mm.ConfigError, match=message):
            model_inputs(batch, unknown, normalize=HALF)
    with pytest.raises(mm.ConfigError, match=r"sides are multiples of 28, not .*multiple_of=28"):
        model_inputs({**batch, "image": batch["image"][:, :, :50]}, "qwen2_vl", normalize=HALF)
    for tiled in ("llava_next", "llava_onevision"):
        with pytest.raises(mm.ConfigError, match=f"{tiled} takes tiles: ImageDecoder"):
            model_inputs(batch, tiled, normalize=HALF)


def test_llava_onevision_refuses_tiles_of_one_of_several_pictures(datasets):
    family, model = case_of("llava_onevision")
    image = family.decode.image
    next_tiles = replace(image, tiles=mm.LlavaNextTiles(image.tiles.shapes))
    [batch, _] = batches_of(datasets["conversations"], replace(family.decode, image=next_tiles))
    with pytest.raises(mm.ConfigError, match=r"one of each of several: .*LlavaOnevisionTiles\(\)"):
        model_inputs(batch, model, normalize=HALF)


@pytest.mark.parametrize(
    ("name", "length", "setting"),
    [
        ("llava", 3, r"image_length=\d+\)$"),
        ("llava", None, r"the text has \d+: TextDecoder\(image_length=\d+\)$"),
        ("llava_onevision", 3, r"llava_onevision_length\(patch_size=14, max_tiles=9\)\)$"),
        ("internvl", 3, r"image_length=mm.internvl_length\(\d+\)\)$"),
        ("qwen2_vl", 3, r"image_length=mm.qwen_vl_length\(patch_size=\d+, merge_size=2\)\)$"),
    ],
)
def test_another_number_of_image_tokens_names_the_setting(datasets, name, length, setting):
    family, model = case_of(name)
    text = replace(family.decode.text, image_length=length)
    batch = batches_of(datasets["conversations"], replace(family.decode, text=text))[0]
    with pytest.raises(mm.ConfigError, match=rf"{name} takes [\d,]+ image tokens for .*{setting}"):
        model_inputs(batch, model, normalize=HALF)


def test_a_text_without_the_image_token_of_the_model_names_its_id(datasets):
    family, model = case_of("llava")
    batch = batches_of(datasets["conversations"], family.decode)[0]
    batch["input_ids"] = torch.zeros_like(batch["input_ids"])
    token = model.config.image_token_id
    with pytest.raises(mm.ConfigError, match=f"image_token= of the token with the id {token}$"):
        model_inputs(batch, model, normalize=HALF)


def test_another_size_than_that_of_the_tower_names_the_setting(datasets):
    family, model = case_of("llava")
    batch = batches_of(datasets["conversations"], family.decode)[0]
    batch["image"] = torch.zeros(len(batch["image"]), 3, 20, 30, dtype=torch.uint8)
    side = model.config.vision_config.image_size
    message = rf"takes pictures of {side}x{side} here, not 30x20: ImageDecoder\(size={side}\)"
    with pytest.raises(mm.ConfigError, match=message):
        model_inputs(batch, model, normalize=HALF)
