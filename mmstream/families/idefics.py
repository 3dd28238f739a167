"""Idefics2, Idefics3 and SmolVLM: the pictures of a row side by side, and videos as pictures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from mmstream.decoding.media_shapes import MediaText, VideoShape
from mmstream.decoding.text.placeholders import VideoLength
from mmstream.errors import ConfigError
from mmstream.families.family import (
    Blank,
    Family,
    Inputs,
    Medium,
    Pictures,
    Tensor,
    Videos,
    require_size,
    side_of,
)
from mmstream.families.qwen_vl import frame_times
from mmstream.settings import PositiveInt, checked

# -- tokens of videos ------------------------------------------------------------------------------

_CLOCK_S = 1e-6
_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_SMALL_NUMBERS = _WORDS.split()
_TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


@checked()
def smolvlm_video_length(
    image_length: PositiveInt = 169,
    *,
    image_token: str = "<image>",
    fake_image_token: str = "<fake_token_around_image>",
    global_image_token: str = "<global-img>",
) -> VideoLength:
    """Write the tokens of a video for SmolVLM: an introduction, and the time of each frame.

    The rule is that of transformers' ``SmolVLMProcessor.replace_video_token``. Frames are images
    for the model. So the chat template must write `image_token` for a video, and rows have videos
    or images, not both, as with the processor.

    Args:
        image_length: Tokens of a frame, the ``image_seq_len`` of the processor.
        image_token: The token of an image. It is the ``video_token`` of the text decoder, too.
        fake_image_token: What stands around the tokens of each frame.
        global_image_token: What stands before them.

    Returns:
        A function for ``TextDecoder(video_length=)``. Use it with
        ``VideoDecoder.from_processor(processor)``.

    Examples:
        >>> shape = VideoShape(
        ...     num_frames=2, height=364, width=364, picture=(60, 90), times_s=(0.0, 61.0),
        ...     fps=30.0, sampled_fps=1.0, indices=(0, 1830), end_s=62.0,
        ... )
        >>> text = smolvlm_video_length()(shape)
        >>> text.text.splitlines()[0]
        'You are provided the following series of two frames from a 0:01:02 [H:MM:SS] video.'
        >>> text.text.splitlines()[-2]
        'Frame from 01:01:<fake_token_around_image><global-img><image><fake_token_around_image>'
    """
    marked = f"{fake_image_token}{global_image_token}{image_token}{fake_image_token}"
    return partial(_introduced, image_length=image_length, marked=marked)


def _introduced(shape: VideoShape, image_length: int, marked: str) -> MediaText:
    times = frame_times(shape)
    is_known = math.isfinite(shape.end_s)
    # A float of ten seconds may be a little below ten.
    duration_s = int((shape.end_s - shape.start_s if is_known else times[-1]) + _CLOCK_S)
    minutes, seconds = divmod(duration_s, 60)
    pieces = [
        f"You are provided the following series of {_in_words(len(times))} frames from a "
        f"{minutes // 60}:{minutes % 60:02}:{seconds:02} [H:MM:SS] video.\n"
    ]
    pieces += [f"\nFrame from {int(time // 60):02}:{int(time % 60):02}:{marked}" for time in times]
    return MediaText("".join([*pieces, "\n\n"]), (image_length,) * len(times))


def _in_words(number: int) -> str:
    """Return a number below 1,000 in English words, as the package ``num2words`` has them."""
    if number >= 1000:
        raise ConfigError(f"smolvlm_video_length: {number} frames: give VideoDecoder(max_frames=)")
    hundreds, remainder = divmod(number, 100)
    words = [f"{_SMALL_NUMBERS[hundreds]} hundred"] if hundreds else []
    if remainder >= 20:
        tens, ones = divmod(remainder, 10)
        words.append(_TENS[tens] + (f"-{_SMALL_NUMBERS[ones]}" if ones else ""))
    elif remainder or not hundreds:
        words.append(_SMALL_NUMBERS[remainder])
    return " and ".join(words)


# -- the families ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Idefics3(Family):
    """[B, most pictures of a row, 3, most H, most W], and which pixels are of a picture.

    The models take a picture that is all zeros for padding.
    """

    takes: tuple[str, ...] = ("image",)

    def image_inputs(self, pictures: Pictures, config: Any) -> Inputs:
        """Return the pictures by rows, and a mask of their pixels."""
        tiles = pictures.tiles
        height = max(tile.shape[-2] for tile in tiles)
        width = max(tile.shape[-1] for tile in tiles)
        rows = pictures.rows.tolist()
        most = max(rows.count(row) for row in set(rows))
        first = tiles[0]
        pixels = first.new_zeros(pictures.num_rows, most, first.shape[0], height, width)
        mask = pixels[:, :, 0].long()
        for index, (row, tile) in enumerate(zip(rows, tiles, strict=True)):
            position = index - rows.index(row)
            pixels[row, position, :, : tile.shape[-2], : tile.shape[-1]] = tile
            mask[row, position, : tile.shape[-2], : tile.shape[-1]] = 1
        return {"pixel_values": pixels, "pixel_attention_mask": mask}

    def blank(self, kind: str, config: Any) -> Blank | None:
        """Return a picture of one token."""
        side = side_of(config.vision_config.patch_size) * config.scale_factor
        return Blank.picture(config, 1, side, side)


@dataclass(frozen=True)
class Idefics2(Idefics3):
    """As Idefics3. Its resampler makes the same number of vectors of any picture."""

    def blank(self, kind: str, config: Any) -> Blank | None:
        """Return a picture of one patch."""
        patch = side_of(config.vision_config.patch_size)
        return Blank.picture(config, config.perceiver_config.resampler_n_latents, patch, patch)


@dataclass(frozen=True)
class SmolVLM(Idefics3):
    """As Idefics3, and videos: their frames are images, which the model counts itself."""

    takes: tuple[str, ...] = ("image", "video")

    def inputs(self, media: dict[str, Medium], ids: Tensor, config: Any) -> Inputs:
        """Return pictures or videos: a batch has not both, as with the processor."""
        if len(media) > 1:
            raise ConfigError(
                "model_inputs: smolvlm takes pictures or videos in a batch, as its processor does: "
                "convert and train them apart"
            )
        return super().inputs(media, ids, config)

    def video_inputs(self, videos: Videos, config: Any) -> Inputs:
        """Return [num_videos, most frames, 3, S, S], and which pixels are of a frame.

        The model takes a frame that is all zeros for padding.
        """
        import torch
        from torch.nn.utils.rnn import pad_sequence

        side = config.vision_config.image_size
        for frames in videos.frames:
            cure = "VideoDecoder.from_processor(processor)"
            require_size(config.model_type, "frames", frames, side, cure)
        pixels = pad_sequence(videos.frames, batch_first=True)
        mask = torch.ones_like(pixels[:, :, 0], dtype=torch.int64)
        return {"pixel_values": pixels, "pixel_attention_mask": mask}


FAMILIES: dict[str, Family] = {
    "idefics2": Idefics2(),
    "idefics3": Idefics3(),
    "smolvlm": SmolVLM(),
}
