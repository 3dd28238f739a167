"""Hugging Face processors: the same pixels from their settings, or a refusal that says why."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream.types import Sample
from tests.helpers.corpora import captioned, write_corpus
from tests.helpers.families import transformers
from tests.helpers.paths import PHOTOS
from tests.helpers.pictures import encoded, psnr

KNOWN: list[tuple[str, dict[str, Any]]] = [
    ("CLIPImageProcessor", {}),
    ("CLIPImageProcessor", {"do_center_crop": False}),
    ("BitImageProcessor", {"size": {"shortest_edge": 256}}),  # as DINOv2
    ("LlavaImageProcessor", {"size": {"shortest_edge": 336}, "crop_size": 336}),
    ("LlavaImageProcessor", {"size": {"shortest_edge": 90}, "crop_size": 90, "do_pad": True}),
    ("SiglipImageProcessor", {"size": {"height": 160, "width": 160}}),
    ("ViTImageProcessor", {}),
    ("Qwen2VLImageProcessor", {"max_pixels": 200_000}),
    ("Qwen2VLImageProcessor", {"patch_size": 16, "min_pixels": 2**18, "max_pixels": 2**20}),
    ("LlavaNextImageProcessor", {"size": {"shortest_edge": 336}, "crop_size": 336}),
    ("LlavaOnevisionImageProcessor", {}),
    ("GotOcr2ImageProcessor", {"crop_to_patches": True, "max_patches": 6}),
]


def plain_pixels(processor: Any, image: Any) -> np.ndarray:
    """What a processor makes of an image, without its normalisation and its patches' order."""
    outputs = processor(image, return_tensors="pt", do_rescale=False, do_normalize=False)
    pixels = outputs["pixel_values"]
    if "image_grid_thw" in outputs:
        _, rows, columns = outputs["image_grid_thw"][0].tolist()
        patch, merge = processor.patch_size, processor.merge_size
        pixels = pixels.view(rows // merge, columns // merge, merge, merge, 3, 2, patch, patch)
        pixels = pixels[:, :, :, :, :, 0].permute(4, 0, 2, 5, 1, 3, 6)
        pixels = pixels.reshape(1, 3, rows * patch, columns * patch)
    return pixels.reshape(-1, *pixels.shape[-3:]).permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize(("name", "settings"), KNOWN, ids=str)
def test_a_known_processors_pixels_are_ours(name: str, settings: dict[str, Any]) -> None:
    processor = getattr(transformers, name)(**settings)
    decoder = mm.ImageDecoder.from_processor(processor, scaled_decoding=False)
    for path in PHOTOS[:6]:
        expected = plain_pixels(processor, Image.open(path).convert("RGB"))
        actual = decoder(path.read_bytes())
        actual = actual.reshape(-1, *actual.shape[-3:])
        assert actual.shape == expected.shape
        assert psnr(actual, expected) >= 50


def test_several_pictures_of_llava_onevision_are_padded_to_squares_first() -> None:
    processor = transformers.LlavaOnevisionImageProcessor(image_mean=[0.5, 0.3, 0.2])
    decoder = mm.ImageDecoder.from_processor(processor, scaled_decoding=False)
    images = [Image.open(path).convert("RGB") for path in PHOTOS[:6]]
    images += [images[0].resize(size) for size in ((33, 1), (7, 500), (384, 384))]
    expected = plain_pixels(processor, [images])
    for image, square in zip(images, expected, strict=True):
        [tile] = decoder.of_sample(len(images))(encoded(image, "png"))
        np.testing.assert_array_equal(tile, square)
    # Of a JPEG that is decoded at a quarter of its size, too.
    small = replace(decoder, size=56, tiles=mm.families.llava.LlavaOnevisionTiles(((56, 112),)))
    data = PHOTOS[0].read_bytes()
    exact = replace(small, scaled_decoding=False).of_sample(2)(data)
    assert psnr(replace(small, scaled_decoding=True).of_sample(2)(data), exact) >= 30


def test_a_picture_that_becomes_too_large_a_square_is_refused() -> None:
    wide = encoded(Image.new("RGB", (30_000, 2)), "png")
    decoder = mm.ImageDecoder(size=384, tiles=mm.families.llava.LlavaOnevisionTiles())
    assert decoder(wide).shape == (2, 384, 384, 3)
    with pytest.raises(mm.errors.DecodeError, match="max_memory"):
        decoder.of_sample(2)(wide)


CLIP = transformers.CLIPImageProcessor()
LIKE_CLIP: dict[str, Any] = {
    "size": (224, 224),
    "interpolation": "bicubic",
    "crop_rounding": "down",
}


@pytest.mark.parametrize(
    ("processor", "changes", "expected"),
    [
        (SimpleNamespace(image_processor=CLIP), {}, {**LIKE_CLIP, "resize_size": 224}),
        (
            CLIP,
            {"crop": "random", "resize_size": None, "flip": 0.5},
            {**LIKE_CLIP, "crop": "random", "resize_size": None, "flip": 0.5},
        ),
        (
            transformers.Qwen2VLImageProcessor(min_pixels=10_000, max_pixels=90_000),
            {},
            {"multiple_of": 28, "pixel_budget": (10_000, 90_000)},
        ),
        (
            transformers.LlavaNextImageProcessor(size={"shortest_edge": 336}, crop_size=336),
            {},
            {"tiles": mm.families.llava.LlavaNextTiles()},
        ),
        (
            transformers.LlavaOnevisionImageProcessor(image_mean=[0.5, 0.5, 0.5]),
            {},
            {"tiles": mm.families.llava.LlavaOnevisionTiles(background=(127, 127, 127))},
        ),
        (
            transformers.GotOcr2ImageProcessor(crop_to_patches=True, max_patches=6),
            {},
            {"tiles": mm.families.internvl.InternVLTiles(1, 6)},
        ),
    ],
    ids=["clip", "changed", "qwen", "llava next", "llava onevision", "internvl"],
)
def test_settings_are_taken_over_and_can_be_overridden(
    processor: Any, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    decoder = mm.ImageDecoder.from_processor(processor, **changes)
    assert {name: getattr(decoder, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Llama4ImageProcessor", {}, "not one of"),
        ("ConvNextImageProcessor", {}, "not one of"),
        ("CLIPImageProcessor", {"do_resize": False}, "do_resize"),
        ("CLIPImageProcessor", {"resample": 1}, "resample"),
        ("CLIPImageProcessor", {"size": {"shortest_edge": 100}}, "size"),
        ("CLIPImageProcessor", {"size": {"longest_edge": 100}}, "size"),
        ("LlavaImageProcessor", {"do_pad": True, "crop_size": {"height": 9, "width": 9}}, "crop"),
        ("SiglipImageProcessor", {"do_pad": True}, "do_pad"),
        ("LlavaNextImageProcessor", {}, "multiple of size=224"),
        ("Qwen2VLImageProcessor", {"size": {"height": 9, "width": 9}}, "size"),
    ],
    ids=str,
)
def test_what_the_decoder_cannot_do_is_refused_by_name(
    name: str, settings: dict[str, Any], reason: str
) -> None:
    processor = getattr(transformers, name)()
    vars(processor).update(settings)
    with pytest.raises(mm.ConfigError, match=reason):
        mm.ImageDecoder.from_processor(processor)


PROCESSOR = transformers.ConvNextImageProcessor(size={"shortest_edge": 32})


def run_processor(sample: Sample) -> Sample:
    outputs = PROCESSOR(sample["image"], return_tensors="pt", input_data_format="channels_first")
    return {**sample, "image": outputs["pixel_values"][0]}


def test_any_processor_runs_as_a_transform(tmp_path: Any) -> None:
    pipeline = mm.Pipeline(
        mm.open_dataset(write_corpus(tmp_path, [8])),
        global_batch_size=4,
        decode=mm.Decode(image=mm.ImageDecoder()),
        transforms=(run_processor,),
        shuffle=False,
    )
    batch = next(iter(mm.Loader(pipeline, num_workers=0)))
    assert batch["image"].dtype == torch.float32
    with Image.open(io.BytesIO(captioned(0)["jpg"])) as image:
        expected = PROCESSOR(image, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(batch["image"][0], expected)
