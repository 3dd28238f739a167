"""Settings of video processors become settings of the decoder, or are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmstream as mm
from tests.helpers.families import transformers
from tests.helpers.media_files import video_file

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


@pytest.mark.parametrize("max_video_tokens", [1, 6, 40, 10_000])
@pytest.mark.parametrize("name", ["Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"])
def test_capped_frames_have_the_size_of_the_processor(name: str, max_video_tokens: int) -> None:
    processor = getattr(transformers, name)(
        cap_pixels_per_frame=True,
        max_video_tokens=max_video_tokens,
        size={"shortest_edge": 3000, "longest_edge": 200_000},
        patch_size=8,
    )
    data = video_file("mp4", width=160, height=96, num_frames=24)
    for num_frames in (2, 4, 24):
        decoder = mm.VideoDecoder.from_processor(processor, num_frames=num_frames)
        shape = decoder.plan(data).shape
        frames = torch.zeros(1, num_frames, 3, 96, 160, dtype=torch.uint8)
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
def test_what_the_decoder_cannot_do_is_refused_by_name(processor: Any, message: str) -> None:
    with pytest.raises(mm.ConfigError, match=message):
        mm.VideoDecoder.from_processor(processor)
