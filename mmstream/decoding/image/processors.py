"""Settings of Hugging Face image processors -> settings of `ImageDecoder`.

Place in the flow: before a run, `ImageDecoder.from_processor` calls it once. Settings are read by
name, so transformers is not imported.

Normalization is left out: it belongs to the device (`mm.Normalize`). A processor that does
something else than the decoder can run as a transform instead; ``docs/images.md`` shows how.
"""

from __future__ import annotations

from typing import Any

from mmstream.decoding.image.tiles import (
    InternVLTiles,
    LlavaNextTiles,
    LlavaOnevisionTiles,
    SquareTile,
)
from mmstream.errors import ConfigError
from mmstream.wrong_arguments import checked, shown

_INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}
"""Pillow's numbers of the filters."""

_KNOWN = (
    *("Bit", "CLIP", "GotOcr2", "Llava", "LlavaNext", "LlavaOnevision", "Qwen2VL", "Siglip"),
    "ViT",
)
"""Names of classes up to ``ImageProcessor``. The tests compare each with the decoder."""


@checked(cure="processor=: a setting that its class does not write; run it as a transform")
def settings_of(processor: Any) -> dict[str, Any]:
    """Return the settings of an `ImageDecoder` that makes the same pixels.

    Four kinds of processors are known:

    - SigLIP and ViT stretch a picture to a size.
    - CLIP, DINOv2 (``Bit``) and Llava scale the shorter side; some then crop. With ``do_pad``,
      Llava first pads a picture to a square.
    - Qwen2-VL and its successors keep the size within a pixel budget.
    - Llava-NeXT, LLaVA-OneVision and InternVL (``GotOcr2``) cut tiles.

    Other classes are refused, because settings of the same names may mean something else there.

    Raises:
        ConfigError: The class is not known, or a setting has no counterpart. The message names it.
    """
    processor = getattr(processor, "image_processor", processor)
    name = type(processor).__name__
    if name.partition("ImageProcessor")[0] not in _KNOWN:
        raise ConfigError(f"{name}: not one of {', '.join(_KNOWN)}; run it as a transform")
    if getattr(processor, "do_resize", None) is not True:
        raise ConfigError(f"{name}.do_resize={shown(processor.do_resize)}: not resized")
    resample = getattr(processor, "resample", None)
    resample = getattr(resample, "value", resample)
    if resample not in _INTERPOLATIONS:
        raise ConfigError(f"{name}.resample={shown(resample)}: only 2 (bilinear) and 3 (bicubic)")
    return {"interpolation": _INTERPOLATIONS[resample], **_geometry(processor, name)}


def _geometry(processor: Any, name: str) -> dict[str, Any]:
    """Return the settings that say how large results are and what is cut."""
    size = _plain_size(processor, "size")
    crop = _plain_size(processor, "crop_size")
    unknown = ConfigError(f"{name}.size={size}, crop_size={crop}: no rule of the image decoder")
    if hasattr(processor, "merge_size"):
        if size.keys() != {"shortest_edge", "longest_edge"}:
            raise unknown
        return {
            "resize": "max_pixels",
            "multiple_of": processor.patch_size * processor.merge_size,
            # For these processors, the two "edges" are numbers of pixels.
            "pixel_budget": (size["shortest_edge"], size["longest_edge"]),
        }
    tiles = _tiles(processor, name)
    if tiles is not None:
        sides = {*size.values(), *crop.values()}
        if len(sides) != 1:
            raise unknown
        return {"size": sides.pop(), "tiles": tiles}
    is_cropped = getattr(processor, "do_center_crop", None)
    if getattr(processor, "do_pad", None):
        side = size.get("shortest_edge")
        if not name.startswith("LlavaImage") or side is None:
            raise ConfigError(f'{name}.do_pad: pads before it resizes; resize="letterbox" is near')
        if is_cropped and crop != {"height": side, "width": side}:
            raise unknown
        return {"size": side, "tiles": SquareTile(), "fill": _background(processor)}
    if size.keys() == {"shortest_edge"}:
        return _shortest(size["shortest_edge"], crop if is_cropped else None, unknown)
    if size.keys() != {"height", "width"} or (is_cropped and crop != size):
        raise unknown
    return {"size": (size["height"], size["width"]), "resize": "exact"}


def _tiles(processor: Any, name: str) -> LlavaNextTiles | InternVLTiles | None:
    pinpoints = getattr(processor, "image_grid_pinpoints", None)
    if pinpoints:
        shapes = tuple((int(height), int(width)) for height, width in pinpoints)
        if not name.startswith("LlavaOnevision"):
            return LlavaNextTiles(shapes)
        return LlavaOnevisionTiles(shapes, background=_background(processor))
    if getattr(processor, "crop_to_patches", False):
        return InternVLTiles(processor.min_patches, processor.max_patches)
    return None


def _background(processor: Any) -> tuple[int, int, int]:
    """Return the colour of what is padded: the mean of the processor's normalization."""
    red, green, blue = (int(255 * mean) for mean in processor.image_mean)
    return red, green, blue


def _shortest(side: int, crop: dict[str, int] | None, unknown: ConfigError) -> dict[str, Any]:
    """Return the settings for a shorter side of this length, with or without a centre crop."""
    if crop is None:
        return {"size": side, "crop": None}
    if crop.keys() != {"height", "width"} or side < max(crop.values()):
        raise unknown
    shape = (crop["height"], crop["width"])
    return {"size": shape, "resize_size": side, "crop_rounding": "down"}


def _plain_size(processor: Any, name: str) -> dict[str, int]:
    """Return a size setting as a dict, without the sides that are None."""
    value = getattr(processor, name, None) or {}
    return {key: side for key, side in dict(value).items() if side is not None}
