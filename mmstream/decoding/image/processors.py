"""Settings of Hugging Face image processors, taken over where the image decoder does the same.

Part of the decode stage, called by ``ImageDecoder.from_processor``. Only settings are read, by
name, so transformers is not imported. What normalises stays out: pass ``processor.image_mean`` and
``processor.image_std`` to `mm.Normalize`, which works on the device. A processor that does what the
decoder cannot do is run as a transform instead; ``docs/images.md`` has the three lines.
"""

from __future__ import annotations

from typing import Any

from mmstream.decoding.image.tiles import InternVLTiles, LlavaNextTiles
from mmstream.errors import ConfigError

_INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}
"""Pillow's numbers of filters."""

_KNOWN = ("Bit", "CLIP", "GotOcr2", "Llava", "LlavaNext", "Qwen2VL", "Siglip", "ViT")
"""Classes without ``ImageProcessor`` and suffixes, each compared with the decoder in the tests."""


def settings_of(processor: Any) -> dict[str, Any]:
    """Return the settings of an `ImageDecoder` that makes the same pixels.

    Known are processors that stretch to a size (SigLIP, ViT), scale the shorter side with or
    without a centre crop (CLIP, DINOv2's Bit, Llava without padding), keep the size within a pixel
    budget (Qwen2-VL and its successors), and cut tiles (Llava-NeXT, InternVL's GotOcr2). Another
    class is refused, since settings of the same names may mean something else there.

    Raises:
        ConfigError: Names the processor and what it does beyond that.
    """
    processor = getattr(processor, "image_processor", processor)
    name = type(processor).__name__
    if name.partition("ImageProcessor")[0] not in _KNOWN:
        raise ConfigError(f"{name}: not one of {', '.join(_KNOWN)}; run it as a transform")
    if getattr(processor, "do_resize", None) is not True:
        raise ConfigError(f"{name}.do_resize={getattr(processor, 'do_resize', None)}: not resized")
    resample = getattr(processor, "resample", None)
    resample = getattr(resample, "value", resample)
    if resample not in _INTERPOLATIONS:
        raise ConfigError(f"{name}.resample={resample}: only 2 (bilinear) and 3 (bicubic)")
    return {"interpolation": _INTERPOLATIONS[resample], **_geometry(processor, name)}


def _geometry(processor: Any, name: str) -> dict[str, Any]:
    size, crop = _plain(processor, "size"), _plain(processor, "crop_size")
    unknown = ConfigError(f"{name}.size={size}, crop_size={crop}: no rule of the image decoder")
    if hasattr(processor, "merge_size"):
        if size.keys() != {"shortest_edge", "longest_edge"}:
            raise unknown
        factor = processor.patch_size * processor.merge_size
        budget = (size["shortest_edge"], size["longest_edge"])
        return {"resize": "max_pixels", "multiple_of": factor, "pixel_budget": budget}
    tiles = _tiles(processor)
    if tiles is not None:
        sides = {*size.values(), *crop.values()}
        if len(sides) != 1:
            raise unknown
        return {"size": sides.pop(), "tiles": tiles}
    if getattr(processor, "do_pad", None):
        raise ConfigError(f'{name}.do_pad: pads before it resizes; resize="letterbox" is near')
    is_cropped = getattr(processor, "do_center_crop", None)
    if size.keys() == {"shortest_edge"}:
        return _cropped(size["shortest_edge"], crop if is_cropped else None, unknown)
    if size.keys() != {"height", "width"} or (is_cropped and crop != size):
        raise unknown
    return {"size": (size["height"], size["width"]), "resize": "exact"}


def _tiles(processor: Any) -> LlavaNextTiles | InternVLTiles | None:
    shapes = getattr(processor, "image_grid_pinpoints", None)
    if shapes:
        return LlavaNextTiles(tuple((int(height), int(width)) for height, width in shapes))
    if getattr(processor, "crop_to_patches", False):
        return InternVLTiles(processor.min_patches, processor.max_patches)
    return None


def _cropped(shortest: int, crop: dict[str, int] | None, unknown: ConfigError) -> dict[str, Any]:
    if crop is None:
        return {"size": shortest, "crop": None}
    if crop.keys() != {"height", "width"} or shortest < max(crop.values()):
        raise unknown
    shape = (crop["height"], crop["width"])
    return {"size": shape, "resize_size": shortest, "crop_rounding": "down"}


def _plain(processor: Any, name: str) -> dict[str, int]:
    value = getattr(processor, name, None) or {}
    return {key: side for key, side in dict(value).items() if side is not None}
