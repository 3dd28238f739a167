"""Hugging Face processors: the same pixels from their settings, or a refusal that says why."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream.decoding.video.sampling import FAMILY_SAMPLING, FrameRequest
from mmstream.errors import DecodeError
from tests.helpers.families import transformers
from tests.helpers.media_files import video_file
from tests.helpers.paths import PHOTOS
from tests.helpers.pictures import encoded, psnr

PAN_AND_SCAN = {
    "pan_and_scan_min_crop_size": 100,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
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
    ("Glm4vImageProcessor", {"size": {"shortest_edge": 12_544, "longest_edge": 400_000}}),
    ("Glm46VImageProcessor", {"size": {"shortest_edge": 2**19, "longest_edge": 2**20}}),
    ("Gemma3ImageProcessor", {}),
    ("Gemma3ImageProcessor", {"do_pan_and_scan": True, **PAN_AND_SCAN}),
    ("PixtralImageProcessor", {}),
    ("PixtralImageProcessor", {"size": {"longest_edge": 300}, "patch_size": 28}),
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


# -- video processors ------------------------------------------------------------------------------

RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2": (
        transformers.Qwen2VLVideoProcessor(),
        {
            "sampling": "qwen2_vl",
            "fps": 2,
            "min_frames": 4,
            "max_frames": 768,
            "resize": "max_pixels",
            "multiple_of": 28,
            "interpolation": "bicubic",
            "pixel_budget": (128 * 28 * 28, 768 * 28 * 28),
            "video_pixel_budget": None,
        },
    ),
    "qwen3": (
        transformers.Qwen3VLVideoProcessor(),
        {
            "sampling": "qwen3_vl",
            "multiple_of": 32,
            "frame_multiple_of": 2,
            "video_pixel_budget": (128 * 32 * 32, 768 * 32 * 32),
        },
    ),
    "llava": (
        transformers.LlavaOnevisionVideoProcessor(num_frames=16),
        {
            "sampling": "llava_onevision",
            "num_frames": 16,
            "size": (384, 384),
            "resize": "exact",
        },
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_each_family_has_its_own_rules_of_frames_and_pixels(name: str) -> None:
    processor, rules = RULES[name]
    decoder = mm.VideoDecoder.from_processor(processor)
    assert {setting: getattr(decoder, setting) for setting in rules} == rules


def test_what_the_user_says_of_frames_takes_the_place_of_the_processors_word() -> None:
    processor = transformers.Qwen3VLVideoProcessor()
    eight = mm.VideoDecoder.from_processor(processor, num_frames=8, max_pixels=1 << 20)
    assert (eight.num_frames, eight.fps, eight.max_pixels) == (8, None, 1 << 20)
    one_a_second = mm.VideoDecoder.from_processor(processor, fps=1)
    assert (one_a_second.fps, one_a_second.min_frames) == (1, processor.min_frames)
    two = mm.VideoDecoder.from_processor(processor, num_frames=2)  # fewer than its min_frames
    assert (two.num_frames, two.min_frames) == (2, 1)


@pytest.mark.parametrize("height", [96, 12])
@pytest.mark.parametrize("max_video_tokens", [1, 6, 40, 10_000])
@pytest.mark.parametrize("name", ["Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"])
def test_capped_frames_have_the_size_of_the_processor(
    name: str, max_video_tokens: int, height: int
) -> None:
    processor = getattr(transformers, name)(
        cap_pixels_per_frame=True,
        max_video_tokens=max_video_tokens,
        size={"shortest_edge": 3000, "longest_edge": 200_000},
        patch_size=8,
    )
    data = video_file("mp4", width=160, height=height, num_frames=24)
    for num_frames in (2, 4, 24):
        decoder = mm.VideoDecoder.from_processor(processor, num_frames=num_frames)
        shape = decoder.plan(data).shape
        frames = torch.zeros(1, num_frames, 3, height, 160, dtype=torch.uint8)
        resized = processor.resize(frames, processor.size, None, 16, 2, cap_pixels_per_frame=True)
        assert (shape.height, shape.width) == resized.shape[-2:], num_frames


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (transformers.InternVLVideoProcessor(), "InternVLVideoProcessor: not one of Qwen2VL"),
        (transformers.Qwen2VLVideoProcessor(do_resize=False), "do_resize=False: not resized"),
        (transformers.Qwen2VLVideoProcessor(resample=0), "resample=0: only 1"),
        (
            transformers.LlavaOnevisionVideoProcessor(do_center_crop=True, crop_size=384),
            "do_center_crop: no rule",
        ),
        (
            transformers.LlavaOnevisionVideoProcessor(),
            r"does not say which frames it takes: .*num_frames=8\)",
        ),
        (
            transformers.LlavaOnevisionVideoProcessor(num_frames=8, size={"shortest_edge": 384}),
            r"size=\{'shortest_edge': 384\}: no rule",
        ),
        (
            transformers.SmolVLMVideoProcessor(fps=1),
            r"does not say which frames it takes: .*fps=1, max_frames=64\)",
        ),
        (
            SimpleNamespace(video_processor=transformers.CLIPImageProcessor()),
            "CLIPImageProcessor: not one of",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else type(value).__name__,
)
def test_what_the_video_decoder_cannot_do_is_refused_by_name(processor: Any, message: str) -> None:
    with pytest.raises(mm.ConfigError, match=message):
        mm.VideoDecoder.from_processor(processor)


# -- which frames are taken ------------------------------------------------------------------------

PROCESSORS = {
    "qwen2_vl": transformers.Qwen2VLVideoProcessor,
    "qwen3_vl": transformers.Qwen3VLVideoProcessor,
    "llava_onevision": transformers.LlavaOnevisionVideoProcessor,
    "smolvlm": partial(transformers.SmolVLMVideoProcessor, num_frames=64),
}
RATES = [25.0, 30000 / 1001, 23.976, 0.7]
LENGTHS = [*range(1, 40), *range(40, 2400, 97), 107_892]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", FAMILY_SAMPLING)
def test_frames_per_second_give_the_frames_of_the_processor(name: str, rate: float) -> None:
    for fps in (2, 1, 0.5):
        processor = PROCESSORS[name](fps=fps)
        request = FrameRequest(
            fps=fps,
            min_frames=getattr(processor, "min_frames", 1),
            max_frames=64 if name == "smolvlm" else getattr(processor, "max_frames", 768),
            multiple_of=2,
        )
        for count in LENGTHS:
            try:
                taken = FAMILY_SAMPLING[name](count, rate, request).tolist()
            except DecodeError:
                taken = None
            try:
                metadata = transformers.video_utils.VideoMetadata(
                    count, rate, duration=count / rate
                )
                indices = processor.sample_frames(metadata, fps=fps)
                wanted = [int(index) for index in indices]
            except ValueError:
                wanted = None
            except ZeroDivisionError:
                wanted = [0]  # too few for the processor of Qwen2-VL
            assert taken == wanted, (count, rate, fps)


@pytest.mark.parametrize("name", ["llava_onevision", "qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize("num_frames", [1, 2, 7, 8, 32])
def test_a_number_of_frames_gives_the_frames_of_the_processor(name: str, num_frames: int) -> None:
    processor = PROCESSORS[name](fps=None)
    rule = FAMILY_SAMPLING[name]
    request = FrameRequest(num_frames=num_frames, min_frames=4, max_frames=768, multiple_of=2)
    for count in range(num_frames, 400, 7):
        metadata = transformers.video_utils.VideoMetadata(count, 25.0)
        try:
            wanted = np.asarray(processor.sample_frames(metadata, num_frames=num_frames))
        except (ValueError, ZeroDivisionError):
            continue
        taken = rule(count, 25.0, request)
        assert taken.tolist() == wanted.tolist(), count


def test_a_video_with_too_few_frames_is_bad() -> None:
    request = FrameRequest(num_frames=32, min_frames=1, max_frames=768, multiple_of=2)
    for name in ("llava_onevision", "qwen2_vl"):
        with pytest.raises(DecodeError, match="32 frames are wanted, and the video has 31"):
            FAMILY_SAMPLING[name](31, 25.0, request)
