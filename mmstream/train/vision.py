"""Images of one size, in the form that a pretrained vision-language model takes them.

Called by `mmstream.train.vlm`. Two forms cover the usual models of `transformers`:

- plain, [num_images, 3, S, S]: Llava, InternVL, Gemma 3; S is the tower's own.
- patched, one long row of flat patches with the grid of each image: Qwen2-VL, Qwen2.5-VL and
  Qwen3-VL; S is any multiple of a merged patch. An image is a film of `temporal_patch_size` equal
  frames, and patches that are merged to a token lie side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmstream.errors import ConfigError

__all__ = ["choose_image_size", "image_inputs", "look"]

DEFAULT_GRID = 16
"""Tokens on a side of an image, where the model leaves the size free."""


def choose_image_size(vlm: Any, wanted: int | None) -> int:
    """Return the side of the images in pixels.

    Args:
        vlm: a `transformers` model for image-text-to-text.
        wanted: None takes the model's.

    Raises:
        ConfigError: the model cannot take the wanted size, or says none itself.
    """
    vision, name = vlm.config.vision_config, type(vlm).__name__
    if _is_patched(vlm):
        step = vision.patch_size * vision.spatial_merge_size
        size = wanted or DEFAULT_GRID * step
        if size % step:
            raise ConfigError(f"{name}: image_size is {size}, no multiple of {step}")
        return int(size)
    own = getattr(vision, "image_size", None)
    own = own[0] if isinstance(own, list | tuple) else own
    if own is None or wanted not in (None, own):
        raise ConfigError(f"{name}: takes images of {own} pixels, not {wanted}")
    return int(own)


def image_inputs(vlm: Any, images: Tensor) -> dict[str, Tensor]:
    """Return the arguments that bring images, [N, 3, S, S], to the model's forward."""
    if not _is_patched(vlm):
        return {"pixel_values": images}
    vision = vlm.config.vision_config
    patch, merge = vision.patch_size, vision.spatial_merge_size
    num_images, num_channels, side = images.shape[:3]
    grid = side // patch
    blocks = images.reshape(num_images, num_channels, grid // merge, merge, patch, -1, merge, patch)
    blocks = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7)  # blocks, then patches in one, then pixels
    film = blocks.unsqueeze(6).expand(*blocks.shape[:6], vision.temporal_patch_size, patch, patch)
    return {
        "pixel_values": film.reshape(num_images * grid**2, -1),
        "image_grid_thw": torch.tensor([[1, grid, grid]], device=images.device).repeat(
            num_images, 1
        ),
    }


def look(vlm: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """Let the tower and projector look at images.

    Args:
        vlm: a `transformers` model for image-text-to-text.
        images: [N, 3, S, S].

    Returns:
        The vectors in place of the images' tokens, [N * tokens of an image, D], and the sum of all
        that the language model is given of the images: Qwen3-VL's deeper layers get some too.
    """
    seen = vlm.get_image_features(**image_inputs(vlm, images))
    vectors = torch.cat(list(getattr(seen, "pooler_output", seen)))
    total = vectors.float().sum()
    for layer in getattr(seen, "deepstack_features", None) or []:
        total = total + sum(part.float().sum() for part in layer)
    return vectors, total


def _is_patched(vlm: Any) -> bool:
    vision = vlm.config.vision_config
    return all(hasattr(vision, name) for name in ("spatial_merge_size", "temporal_patch_size"))
