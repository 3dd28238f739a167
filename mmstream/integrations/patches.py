"""Pictures and videos as Qwen-VL takes them: one line per patch.

families.py, videos.py -> `patch_lines`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmstream.errors import ConfigError


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
