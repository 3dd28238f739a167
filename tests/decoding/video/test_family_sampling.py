"""The frames that a family takes are those that its processor takes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from mmstream.decoding.video.sampling import FAMILY_SAMPLING, FrameRequest
from mmstream.errors import DecodeError
from tests.helpers.families import transformers

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
