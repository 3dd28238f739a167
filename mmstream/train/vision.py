"""Images of one size, in the form that a pretrained vision-language model takes.

    vlm.ConversationVlm -> `choose_image_size`, `image_inputs`, `embed_images`

Two forms cover the usual models of `transformers`, for images of S x S pixels:

- Plain, [num_images, 3, S, S]: Llava, InternVL and Gemma 3. The model fixes S.
- Patched, one row per patch and the grid of each image: Qwen2-VL, Qwen2.5-VL and Qwen3-VL. S is any
  multiple of a merged patch. An image is a video of `temporal_patch_size` equal frames. Patches
  that merge into one token are neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmstream.errors import ConfigError
from mmstream.integrations.patches import patch_lines

__all__ = ["choose_image_size", "embed_images", "image_inputs"]

DEFAULT_GRID = 16
"""Default tokens per side of an image, for models that take several sizes."""


def choose_image_size(vlm: Any, image_size: int | None) -> int:
    """Return the side of the square images in pixels.

    Args:
        vlm: a `transformers` model for image-text-to-text.
        image_size: side in pixels. None: the size of the model, or 16 tokens per side if the model
            takes several sizes.

    Raises:
        ConfigError: the model does not take this size, or `image_size` is None and the model has no
            size.
    """
    vision = vlm.config.vision_config
    name = type(vlm).__name__
    if _is_patched(vlm):
        step = vision.patch_size * vision.spatial_merge_size
        size = image_size or DEFAULT_GRID * step
        if size % step:
            raise ConfigError(f"{name}: image_size is {size}; it must be a multiple of {step}")
        return int(size)
    model_size = getattr(vision, "image_size", None)
    model_size = model_size[0] if isinstance(model_size, list | tuple) else model_size
    if model_size is None or image_size not in (None, model_size):
        raise ConfigError(f"{name}: takes images of {model_size} pixels, not {image_size}")
    return int(model_size)


def image_inputs(vlm: Any, images: Tensor) -> dict[str, Tensor]:
    """Return the arguments by which the model's forward pass takes images, [N, 3, S, S].

    For example, S = 56, patches of 14 pixels and merges of 2 x 2 give a grid of 4 x 4 patches per
    image, and 4 tokens. `pixel_values` then has N * 16 rows: first the 4 patches of the first
    token, then those of the second.
    """
    if not _is_patched(vlm):
        return {"pixel_values": images}
    pictures = [image[None] for image in images]
    lines, grids = patch_lines(pictures, vlm.config, "pictures", "ImageDecoder")
    return {"pixel_values": lines, "image_grid_thw": grids}


def embed_images(vlm: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """Run the vision tower and the projector on images.

    Args:
        vlm: a `transformers` model for image-text-to-text.
        images: normalised, floating [N, 3, S, S].

    Returns:
        The vectors that replace the image tokens, [N * tokens per image, D], and the sum of
        everything that the language model gets from the images, a float32 scalar. In Qwen3-VL that
        includes the inputs of its deeper layers.
    """
    features = vlm.get_image_features(**image_inputs(vlm, images))
    vectors = torch.cat(list(getattr(features, "pooler_output", features)))
    total = vectors.float().sum()
    for layer in getattr(features, "deepstack_features", None) or []:
        total = total + sum(layer_features.float().sum() for layer_features in layer)
    return vectors, total


def _is_patched(vlm: Any) -> bool:
    """Return whether a model takes images as patches."""
    vision = vlm.config.vision_config
    return all(hasattr(vision, name) for name in ("spatial_merge_size", "temporal_patch_size"))
