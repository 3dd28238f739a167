"""Settings of Hugging Face video processors -> settings of `VideoDecoder`.

Place in the flow: before a run, `VideoDecoder.from_processor` calls it once. Settings are read by
name, so transformers is not imported.

Normalization is left out: it belongs to the device (`mm.Normalize`).
"""

from __future__ import annotations

from typing import Any

from mmstream.errors import ConfigError
from mmstream.wrong_arguments import checked, shown

_INTERPOLATIONS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers of the filters."""

_FAMILIES = {
    "Qwen2VL": "qwen2_vl",
    "Qwen3VL": "qwen3_vl",
    "LlavaOnevision": "llava_onevision",
    "SmolVLM": "smolvlm",
}
"""The rule of sampling, by names of classes up to ``VideoProcessor``."""

_SHARE_OF_TOKENS = 0.9
"""How much of ``max_video_tokens`` the frames of Qwen2-VL may take."""

SMOLVLM_MAX_SIDE = 4096
"""Most pixels of a side that SmolVLM resizes a frame to first."""

DEFAULT_FPS = 2.0
"""Frames per second that the Qwen models are trained on, where the processor does not say it."""


@checked(cure="processor=: a setting that its class does not write; run it as a transform")
def settings_of(processor: Any, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a `VideoDecoder` that makes the same frames.

    Args:
        processor: A video processor, or a processor that holds one.
        chosen: Settings that the user gives. They say which frames of a video are taken, in place
            of the processor's `fps` or `num_frames`.

    Raises:
        ConfigError: The class is not known, or a setting has no counterpart. The message names it.
    """
    # Those of the omni models give their video processor a size at each call.
    called_with = getattr(processor, "videos_kwargs", None) or {}
    processor = getattr(processor, "video_processor", processor)
    name = type(processor).__name__
    family = _FAMILIES.get(name.partition("VideoProcessor")[0])
    if family is None:
        raise ConfigError(f"{name}: not one of {', '.join(_FAMILIES)}; run it as a transform")
    if getattr(processor, "do_resize", None) is not True:
        raise ConfigError(f"{name}.do_resize={shown(processor.do_resize)}: not resized")
    resample = getattr(processor, "resample", None)
    resample = getattr(resample, "value", resample)
    if resample not in _INTERPOLATIONS:
        raise ConfigError(
            f"{name}.resample={shown(resample)}: only 1 (Lanczos), 2 (bilinear) and 3 (bicubic)"
        )
    if getattr(processor, "do_center_crop", None):
        raise ConfigError(f"{name}.do_center_crop: no rule of the video decoder")
    settings = {
        "sampling": family,
        "interpolation": _INTERPOLATIONS[resample],
        **_frames(processor, family, chosen),
    }
    edges = dict(called_with.get("size") or processor.size)
    size = {key: side for key, side in edges.items() if side is not None}
    if family == "llava_onevision":
        if size.keys() != {"height", "width"}:
            raise ConfigError(f"{name}.size={size}: no rule of the video decoder")
        return {**settings, "size": (size["height"], size["width"]), "resize": "exact"}
    if family == "smolvlm":
        if size.keys() != {"longest_edge"}:
            raise ConfigError(f"{name}.size={size}: no rule of the video decoder")
        side = dict(processor.max_image_size)["longest_edge"]
        longest = min(size["longest_edge"], SMOLVLM_MAX_SIDE)
        return {**settings, "resize_longest": longest, "size": (side, side), "resize": "exact"}
    if size.keys() != {"shortest_edge", "longest_edge"}:
        raise ConfigError(f"{name}.size={size}: no rule of the video decoder")
    # For these processors, the two "edges" are numbers of pixels: of a frame, or of all frames.
    budget = "video_pixel_budget" if family == "qwen3_vl" else "pixel_budget"
    return {
        **settings,
        **_cap(processor, family),
        "resize": "max_pixels",
        "multiple_of": processor.patch_size * processor.merge_size,
        "frame_multiple_of": processor.temporal_patch_size,
        budget: (size["shortest_edge"], size["longest_edge"]),
    }


def _cap(processor: Any, family: str) -> dict[str, int]:
    """Return the limit of ``cap_pixels_per_frame``, which counts in tokens.

    Qwen3-VL limits the tokens of a frame, and Qwen2-VL those of a video, to 90 % of
    ``max_video_tokens``.
    """
    if not getattr(processor, "cap_pixels_per_frame", None):
        return {}
    token = (processor.patch_size * processor.merge_size) ** 2
    if family == "qwen3_vl":
        return {"max_frame_pixels": processor.max_video_tokens * token}
    share = int(processor.max_video_tokens * token * _SHARE_OF_TOKENS)
    return {"max_video_pixels": share * processor.temporal_patch_size}


def _frames(processor: Any, family: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that say how many frames are taken."""
    num_frames, fps = getattr(processor, "num_frames", None), getattr(processor, "fps", None)
    if chosen.keys() & {"num_frames", "indices"}:
        return {}
    if family == "smolvlm":
        return _smolvlm_frames(processor, chosen)
    if num_frames is not None and "fps" not in chosen:
        return {"num_frames": num_frames}
    bounds: dict[str, Any] = {}
    if family != "llava_onevision":
        bounds = {"min_frames": processor.min_frames, "max_frames": processor.max_frames}
    if "fps" in chosen:
        return bounds
    if fps is None and family == "llava_onevision":
        raise ConfigError(
            f"{type(processor).__name__} does not say which frames it takes: "
            "VideoDecoder.from_processor(processor, num_frames=8)"
        )
    return {**bounds, "fps": float(DEFAULT_FPS if fps is None else fps)}


def _smolvlm_frames(processor: Any, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that say how many frames SmolVLM takes: its ``num_frames`` at most."""
    settings = {}
    for name, own in (("fps", "fps"), ("max_frames", "num_frames")):
        value = getattr(processor, own, None)
        if value is not None:
            settings[name] = value
        elif name not in chosen:
            raise ConfigError(
                f"{type(processor).__name__} does not say which frames it takes: "
                "VideoDecoder.from_processor(processor, fps=1, max_frames=64)"
            )
    return settings
