"""What a model of transformers gets from a batch is what its own processor makes.

The pictures are PNG, and the decoders resize as torchvision does, bit for bit. Idefics3 resizes
with a filter of its own, so its pictures have the right size already.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream import model_inputs
from tests.helpers.chats import assistant, user
from tests.helpers.corpora import write_corpus
from tests.helpers.families import Family, paligemma, transformers
from tests.helpers.media_models import assert_blank_media_train_nothing
from tests.helpers.model_cases import CASES, PAIRS, TOWER, paligemma as paligemma_model
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
    if number == 3:  # two side by side, and a word right behind one
        parts = [*parts[:2], *parts[3:-1], {"type": "text", "text": "then"}]
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


def loader_of(dataset: mm.Dataset, decode: mm.Decode) -> mm.Loader:
    decode = replace(decode, image=replace(decode.image, scaled_decoding=False))
    return mm.Loader(mm.Pipeline(dataset, global_batch_size=BATCH, decode=decode, shuffle=False))


def batches_of(dataset: mm.Dataset, decode: mm.Decode) -> list[dict[str, Any]]:
    return list(loader_of(dataset, decode))


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


@pytest.fixture
def llava(datasets):
    """A family, its small model, and a batch of conversations for it."""
    family, model = case_of("llava")
    return family, model, batches_of(datasets["conversations"], family.decode)[0]


# -- vision-language models -----------------------------------------------------------------------


@pytest.mark.slow
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
    assert_blank_media_train_nothing(model, without)
    assert [name for name, weight in trained.items() if weight.grad is None] == []


@pytest.mark.slow
def test_paligemma_gets_the_prefix_and_suffix_that_its_processor_makes_and_learns(tmp_path):
    family = paligemma()
    torch.manual_seed(0)
    model = paligemma_model(family.decode.text.tokenizer)
    numbers = [2, 1, 1, 0, 0, 0]  # of pictures

    def messages_of(number: int) -> list[dict[str, Any]]:
        parts = [{"type": "image", "field": f"{i}.png"} for i in range(numbers[number])]
        parts.append({"type": "text", "text": f"question {number}"})
        return [user(parts), assistant([{"type": "text", "text": CAPTIONS[number]}])]

    def fields_of(number: int) -> dict[str, bytes]:
        pictures = {f"{i}.png": PICTURES[number + i] for i in range(numbers[number])}
        return {"json": json.dumps({"messages": messages_of(number)}).encode(), **pictures}

    decode = replace(family.decode, image=replace(family.decode.image, scaled_decoding=False))
    dataset = mm.open_dataset(write_corpus(tmp_path, [6], fields_of))
    pipeline = mm.Pipeline(dataset, global_batch_size=3, decode=decode, shuffle=False)
    batch, without = mm.Loader(pipeline)
    inputs = model_inputs(batch, model, normalize=family.processor)
    expected = family.processor(
        text=[f"{'<image>' * numbers[number]}question {number}" for number in range(3)],
        images=[opened(PICTURES[number : number + numbers[number]]) for number in range(3)],
        suffix=CAPTIONS[:3],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    assert_same(inputs, dict(expected))
    assert_loss_falls(model, inputs)
    model.zero_grad()
    assert_blank_media_train_nothing(model, without)
    several = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    several["labels"][:, [-5, -1]] = 7  # a question between two answers sees no later text
    kinds = model_inputs(several, model, normalize=HALF)["token_type_ids"]
    assert kinds[0].tolist() == [0] * (kinds.shape[1] - 5) + [1] * 5


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
    for name, value in (("input_ids", token), ("attention_mask", 1), ("labels", -100)):
        assert longer[name].tolist() == [[*full[name][0].tolist(), value]]
    assert not (batch["input_ids"] == token).any()  # the batch itself has not changed


def test_a_batch_without_an_image_field_is_text_and_invalid_rows_have_no_labels(datasets):
    family, model = case_of("llava")
    batch = batches_of(datasets["conversations"], family.decode)[1]
    batch = {name: value for name, value in batch.items() if not name.startswith("image")}
    batch["__valid__"] = torch.tensor([True, False, True, True])
    inputs = model_inputs(batch, model)
    assert torch.isfinite(model(**inputs).loss)
    assert (inputs["labels"][1] == -100).all()
    labels = inputs["labels"][[0, 2, 3], : batch["labels"].shape[1]]
    assert labels.equal(batch["labels"][[0, 2, 3]])


# -- pixels are normalised once -------------------------------------------------------------------


def test_floating_pixels_are_those_of_to_device_and_are_not_normalised_again(datasets, llava):
    family, model, batch = llava
    processor = family.processor.image_processor
    normalize = mm.Normalize(processor.image_mean, processor.image_std)
    once = model_inputs(batch, model, normalize=normalize)["pixel_values"]
    loader = loader_of(datasets["conversations"], family.decode)
    moved = next(iter(mm.to_device(loader, "cpu", normalize=normalize)))
    for settings in ({}, {"normalize": family.processor}):
        assert model_inputs(moved, model, **settings)["pixel_values"].equal(once)


def test_pixels_have_the_dtype_of_the_model(llava):
    _, model, batch = llava
    inputs = model_inputs(batch, model.bfloat16(), normalize=HALF)
    assert inputs["pixel_values"].dtype == torch.bfloat16


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
    batch = batches_of(datasets["captions"], family.decode)[0]
    batch = {name.replace("image", "png"): value for name, value in batch.items()}
    for model in (clip, classifiers()["vit"], case_of("llava")[1]):
        with pytest.raises(mm.ConfigError, match=r"pictures in 'png': .*pass image_field='png'"):
            model_inputs(batch, model, normalize=HALF)
    with pytest.raises(mm.ConfigError, match="no 'jpg', and pictures in 'png'"):
        model_inputs(batch, clip, normalize=HALF, image_field="jpg")
    pixels = model_inputs(batch, clip, normalize=HALF, image_field="png")["pixel_values"]
    by_image = {**batch, "image": batch["png"]}
    assert pixels.equal(model_inputs(by_image, clip, normalize=HALF)["pixel_values"])


@pytest.mark.parametrize("companion", ["video_frames", "audio_row"])
@pytest.mark.parametrize("name", ["clip", "siglip", "vit"])
def test_what_takes_one_picture_a_row_refuses_videos_and_sound(datasets, name, companion):
    family, model = case_of("clip" if name == "vit" else name)
    model = classifiers()["vit"] if name == "vit" else model
    batch = batches_of(datasets["captions"], family.decode)[0]
    none, one = (torch.zeros(count, dtype=torch.int64) for count in (0, 1))
    model_inputs(batch | {companion: none}, model, normalize=HALF)
    kind = {"video_frames": "videos", "audio_row": "audio"}[companion]
    with pytest.raises(mm.ConfigError, match=f"{model.config.model_type} takes no {kind}"):
        model_inputs(batch | {companion: one}, model, normalize=HALF)


@pytest.mark.parametrize("name", ["siglip2", "metaclip_2", "shieldgemma2"])
def test_a_config_of_a_model_that_reads_is_no_classifier(datasets, name):
    family, _ = case_of("clip")
    batch = batches_of(datasets["captions"], family.decode)[0]
    with pytest.raises(mm.ConfigError, match=f"'{name}' is not one of"):
        model_inputs(batch, name, normalize=HALF)


# -- which family ---------------------------------------------------------------------------------


def test_a_model_its_config_and_its_wrappers_are_the_same_family(datasets):
    family, model = case_of("qwen2_5_vl")
    batch = batches_of(datasets["conversations"], family.decode)[0]
    expected = model_inputs(batch, model, normalize=HALF)
    wrapper = torch.nn.Module()
    wrapper.module = model  # as DistributedDataParallel has it
    for same in (model.config, wrapper):
        assert_same(model_inputs(batch, same, normalize=HALF), expected)
    by_name = model_inputs(batch, "qwen2_5_vl", normalize=HALF)  # of its default config
    assert by_name["image_grid_thw"].equal(expected["image_grid_thw"])
    assert not by_name["mm_token_type_ids"].any()  # its image token is another than the test's


REFUSED: dict[str, tuple[Any, Callable[[dict[str, Any]], dict[str, Any]], Any]] = {
    "uint8, not normalised: to_device": (None, dict, None),
    "normalize=int: give an": (None, dict, 3),
    "'bert' is not one of llava, ": ("bert", dict, HALF),
    "'lava' is not a model_type of transformers": ("lava", dict, HALF),
    "Linear has no config": (torch.nn.Linear(1, 1), dict, HALF),
    r"sides are multiples of 28, not .*multiple_of=28": (
        "qwen2_vl",
        lambda batch: batch | {"image": batch["image"][:, :, :50]},
        HALF,
    ),
    "'image' is a ndarray: give a tensor, or a list of tensors": (
        None,
        lambda batch: batch | {"image": batch["image"].numpy()},
        HALF,
    ),
    "llava_next takes tiles: ImageDecoder": ("llava_next", dict, HALF),
    "llava_onevision takes tiles: ImageDecoder": ("llava_onevision", dict, HALF),
    r"one picture a row, 000000 has 2: .*SkipSample": ("clip", dict, HALF),
    r"image_token= of the token with the id \d+$": (
        None,
        lambda batch: batch | {"input_ids": torch.zeros_like(batch["input_ids"])},
        HALF,
    ),
    r"takes pictures of (\d+)x\1 here, not 30x20: ImageDecoder\(size=\1\)": (
        None,
        lambda batch: batch | {"image": batch["image"][..., :20, :30]},
        HALF,
    ),
}
"""Part of the message -> a model in place of Llava's, a change of its batch, and `normalize`."""


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_model_cannot_take_is_said(llava, message):
    other, change, normalize = REFUSED[message]
    _, model, batch = llava
    with pytest.raises(mm.ConfigError, match=message):
        model_inputs(change(batch), other or model, normalize=normalize)


@pytest.mark.parametrize(
    ("name", "length", "setting"),
    [
        ("llava", 3, r"image_length=\d+\)$"),
        ("llava", None, r"the text has \d+: TextDecoder\(image_length=\d+\)$"),
        ("llava_onevision", 3, r"llava.onevision_image_length\(patch_size=14, max_tiles=9\)\)$"),
        ("internvl", 3, r"image_length=mm.families.internvl.image_length\(\d+\)\)$"),
        (
            "qwen2_vl",
            3,
            r"image_length=mm.families.qwen_vl.image_length\(patch_size=\d+, merge_size=2\)\)$",
        ),
    ],
)
def test_another_number_of_image_tokens_names_the_setting(datasets, name, length, setting):
    family, model = case_of(name)
    text = replace(family.decode.text, image_length=length)
    batch = batches_of(datasets["conversations"], replace(family.decode, text=text))[0]
    with pytest.raises(mm.ConfigError, match=rf"{name} takes [\d,]+ image tokens for .*{setting}"):
        model_inputs(batch, model, normalize=HALF)


def test_llava_onevision_refuses_tiles_of_one_of_several_pictures(datasets):
    family, model = case_of("llava_onevision")
    image = family.decode.image
    next_tiles = replace(image, tiles=mm.families.llava.LlavaNextTiles(image.tiles.shapes))
    [batch, _] = batches_of(datasets["conversations"], replace(family.decode, image=next_tiles))
    with pytest.raises(mm.ConfigError, match=r"one of each of several: .*LlavaOnevisionTiles\(\)"):
        model_inputs(batch, model, normalize=HALF)
