"""How each family of models takes videos.

    arguments.model_arguments -> `videos_of` -> a function of `SEEING`

Each function gets the videos of a batch and the model's config. It returns what the processor of
the family in `transformers` returns for videos: the same names, shapes and order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmstream.batching.media import mean_rate
from mmstream.errors import ConfigError
from mmstream.integrations.counts import check_count
from mmstream.integrations.mrope_positions import OMNI, QWEN3_OMNI
from mmstream.types import Batch


@dataclass(frozen=True)
class Videos:
    """The videos of a batch, normalised. There is at least one."""

    frames: list[Tensor]
    """Floating [F, 3, H, W], one entry a video."""
    fps: Tensor
    """float64 [num_videos], frames per second of each."""
    requested_fps: Tensor | None = None
    """float64 [num_videos], frames per second that the decoder was asked for. 0: it was asked
    otherwise. None: the batch does not say it."""


def videos_of(batch: Batch, field: str, change: Callable[[Tensor], Tensor]) -> Videos | None:
    """Return the videos of a batch, normalised; None if it has none.

    Args:
        batch: A batch of a loader, or of `mm.to_device`.
        field: Their field.
        change: Normalises frames.

    Raises:
        ConfigError: The batch has videos without ``video_frames``.
    """
    value = batch.get(field)
    if value is None or len(value) == 0:
        return None
    numbers = batch.get(f"{field}_frames")
    if not isinstance(numbers, Tensor):
        raise ConfigError(
            f"model_inputs: the batch has {field!r} without {field}_frames: decode videos with "
            "Decode(video=mm.VideoDecoder(...))"
        )
    counts = numbers.tolist()
    videos = list(torch.split(value, counts)) if isinstance(value, Tensor) else list(value)
    requested_fps = batch.get(f"{field}_requested_fps")
    return Videos([change(video) for video in videos], _rates(batch, field, counts), requested_fps)


def _rates(batch: Batch, field: str, counts: list[int]) -> Tensor:
    """Return the frames per second of each video.

    Where the batch does not say it, it is the mean over the times of its frames.
    """
    rates = batch.get(f"{field}_fps")
    if isinstance(rates, Tensor):
        return rates.to("cpu", torch.float64)
    times = batch[f"{field}_pts_s"].to("cpu", torch.float64)
    means = [mean_rate(video.tolist()) for video in torch.split(times, counts)]
    return torch.tensor(means, dtype=torch.float64)


def _patched(videos: Videos, config: Any) -> dict[str, Tensor]:
    """Qwen: one line per patch, [num_patches, channels * frames * P * P], and the grids.

    Frames are merged in pairs. The last frame is repeated where their number is odd.
    """
    group = config.vision_config.temporal_patch_size
    lines, grids = patch_lines(videos.frames, config, "videos", "VideoDecoder")
    inputs = {"pixel_values_videos": lines, "video_grid_thw": grids}
    if config.model_type == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = (group / videos.fps).float().to(lines.device)
    if config.model_type in OMNI:  # their processors count on the rate that they were asked for
        seconds = group / _requested_fps(videos, config)
        inputs["video_second_per_grid"] = seconds.float().to(lines.device)
    return inputs


def _requested_fps(videos: Videos, config: Any) -> Tensor:
    """Return the frames per second that the decoder was asked for, float64 [num_videos].

    Raises:
        ConfigError: It was asked otherwise, or the batch does not say it.
    """
    rates = videos.requested_fps
    if rates is None or len(rates) != len(videos.frames) or not bool((rates > 0).all()):
        raise ConfigError(
            f"model_inputs: {config.model_type} counts time by the frames per second that the "
            "decoder was asked for, and the batch has no such rate of each video in "
            "video_requested_fps: give VideoDecoder(fps=2)"
        )
    return rates


def _stacked(videos: Videos, config: Any) -> dict[str, Tensor]:
    """LLaVA-OneVision: [num_videos, F, 3, S, S]."""
    side = config.vision_config.image_size
    shapes = {tuple(frames.shape) for frames in videos.frames}
    height, width = videos.frames[0].shape[-2:]
    if (height, width) != (side, side):
        raise ConfigError(
            f"model_inputs: {config.model_type} takes frames of {side}x{side} here, not "
            f'{width}x{height}: VideoDecoder(size=({side}, {side}), resize="exact")'
        )
    if len(shapes) > 1:
        raise ConfigError(
            f"model_inputs: {config.model_type} takes videos of one number of frames, these "
            "differ: VideoDecoder(num_frames=8)"
        )
    return {"pixel_values_videos": torch.stack(videos.frames)}


def _by_video(videos: Videos, config: Any) -> dict[str, Tensor]:
    """SmolVLM: [num_videos, most frames, 3, S, S], and which pixels are of a frame.

    The model takes a frame that is all zeros for padding.
    """
    side = config.vision_config.image_size
    for frames in videos.frames:
        if frames.shape[-2:] != (side, side):
            raise ConfigError(
                f"model_inputs: {config.model_type} takes frames of {side}x{side} here, not "
                f"{frames.shape[-1]}x{frames.shape[-2]}: VideoDecoder.from_processor(processor)"
            )
    pixels = pad_sequence(videos.frames, batch_first=True)
    mask = torch.ones_like(pixels[:, :, 0], dtype=torch.int64)
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


SEEING: dict[str, Callable[[Videos, Any], dict[str, Tensor]]] = {
    "qwen2_vl": _patched,
    "qwen2_5_vl": _patched,
    "qwen3_vl": _patched,
    "qwen2_5_omni_thinker": _patched,
    QWEN3_OMNI: _patched,
    "llava_onevision": _stacked,
    "smolvlm": _by_video,
}
"""The function that arranges the videos, by the ``model_type`` of the family."""


def check_video_tokens(ids: Tensor, videos: Videos, config: Any) -> None:
    """Check that a text has as many video tokens as the model makes vectors of its videos.

    Args:
        ids: int64 [B, T].
        videos: Of the batch.
        config: The model's config.

    Raises:
        ConfigError: Says which ``video_length`` the model needs.
    """
    vision, family = config.vision_config, config.model_type
    if family == "smolvlm":
        return  # its frames are images, which the model counts itself
    if family == "llava_onevision":
        side = -(-(vision.image_size // vision.patch_size) // 2)
        number = sum(len(frames) * side**2 + 1 for frames in videos.frames)
        setting = f"mm.llava_onevision_video_length(patch_size={vision.patch_size})"
    else:
        merged = (vision.patch_size * vision.spatial_merge_size) ** 2
        number = sum(
            -(-len(frames) // vision.temporal_patch_size)
            * (frames.shape[-2] * frames.shape[-1] // merged)
            for frames in videos.frames
        )
        name = "qwen3_vl_video_length" if family == "qwen3_vl" else "qwen_vl_video_length"
        setting = (
            f"mm.{name}(patch_size={vision.patch_size}, merge_size={vision.spatial_merge_size})"
        )
    check_count(ids, config, "video", "videos", number, setting)


# -- pictures and videos as Qwen-VL takes them: one line per patch --------------------------------


def patch_lines(
    videos: Sequence[Tensor], config: Any, media: str, decoder: str
) -> tuple[Tensor, Tensor]:
    """Cut videos into patches. Frames are merged in groups; the last one is repeated to fill one.

    Args:
        videos: Floating [F, 3, H, W] each. A picture is a video of one frame.
        config: The model's config.
        media: What they are called in messages, such as "pictures".
        decoder: The decoder that messages name.

    Returns:
        The lines, [num_patches, channels * frames * P * P], and the grid of each video, int64
        [num_videos, 3]: its groups of frames, and patches down and across.

    Raises:
        ConfigError: A side is no multiple of the side of a token.
    """
    vision = config.vision_config
    patch, merge, group = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    side = patch * merge
    lines, grids = [], []
    for frames in videos:
        height, width = frames.shape[-2:]
        if height % side or width % side:
            raise ConfigError(
                f"model_inputs: {config.model_type} takes {media} whose sides are multiples of "
                f'{side}, not {width}x{height}: {decoder}(resize="max_pixels", '
                f"multiple_of={side})"
            )
        lines.append(_lines(_filled(frames, group), patch, merge, group))
        grids.append((-(-len(frames) // group), height // patch, width // patch))
    return torch.cat(lines), torch.tensor(grids, device=lines[0].device)


def _filled(frames: Tensor, group: int) -> Tensor:
    """Repeat the last frame up to a multiple of `group`. Nothing is copied for a picture."""
    num_missing = -len(frames) % group
    if len(frames) == 1:
        return frames.expand(1 + num_missing, -1, -1, -1)
    if not num_missing:
        return frames
    return torch.cat((frames, frames[-1:].expand(num_missing, -1, -1, -1)))


def _lines(frames: Tensor, patch: int, merge: int, group: int) -> Tensor:
    """Cut frames, [F, C, H, W], into lines. The patches that merge into one token are neighbours.

    For example, two frames of 4 x 4 patches that merge 2 x 2 give 16 lines: first the four patches
    of the upper left token, each with the pixels of both frames.
    """
    count, channels, height, width = frames.shape
    blocks = frames.reshape(
        *(count // group, group, channels),
        *(height // patch // merge, merge, patch, width // patch // merge, merge, patch),
    )
    blocks = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)  # tokens, patches of a token, pixels
    return blocks.reshape(count // group * height * width // patch**2, -1)
