"""The checks of a `VideoDecoder`'s settings."""

from __future__ import annotations

import math
from typing import Any

from mmstream.decoding.spans import is_span
from mmstream.decoding.video.family_sampling import FAMILY_SAMPLING
from mmstream.errors import ConfigError, escaped
from mmstream.wrong_arguments import refuse_bools

__all__ = ["check_settings"]

SAMPLINGS = ("uniform", *FAMILY_SAMPLING)

_COUNTS = (
    *("min_frames", "max_frames", "frame_multiple_of"),
    *("max_decoded_frames", "max_pixels", "max_bytes", "max_memory"),
)
_OPTIONAL_COUNTS = ("num_frames", "max_frame_pixels", "max_video_pixels", "resize_longest")
_SECONDS = ("fps", "clip_s", "max_duration_s", "timeout_s")


def check_settings(decoder: Any) -> None:
    """Refuse settings of a wrong type or range, or that do not go with each other.

    Args:
        decoder: A `VideoDecoder`, whose module imports this one.

    Raises:
        ConfigError: Names the setting and says what to give.
    """
    for name in ("indices", "video_pixel_budget", *_OPTIONAL_COUNTS, *_COUNTS, *_SECONDS):
        refuse_bools(**{name: getattr(decoder, name)})
    for name in (*_COUNTS, *_OPTIONAL_COUNTS):
        value = getattr(decoder, name)
        is_absent = value is None and name in _OPTIONAL_COUNTS
        if not is_absent and not _is_count(value):
            raise ConfigError(f"{name}={value!r}: give a number from 1 up")
    for name in _SECONDS:
        value = getattr(decoder, name)
        is_absent = value is None and name != "max_duration_s"
        if not is_absent and not _is_positive(value):
            raise ConfigError(f"{name}={value!r}: give a number above 0")
    if decoder.sampling not in SAMPLINGS:
        choices = ", ".join(map(repr, SAMPLINGS))
        raise ConfigError(f"sampling={decoder.sampling!r}: give one of {choices}")
    if sum(value is not None for value in (decoder.fps, decoder.num_frames, decoder.indices)) > 1:
        raise ConfigError("give one of fps, num_frames and indices")
    if decoder.sampling == "smolvlm" and decoder.fps is None and decoder.indices is None:
        raise ConfigError('sampling="smolvlm" takes frames per second: give fps and max_frames')
    if decoder.min_frames > decoder.max_frames:
        raise ConfigError(
            f"min_frames={decoder.min_frames} is above max_frames={decoder.max_frames}"
        )
    _check_sound(decoder)
    _check_device(decoder)
    _check_indices(decoder)
    _check_number(decoder)
    _check_span(decoder)
    _check_budget(decoder)


def _check_sound(decoder: Any) -> None:
    audio = decoder.audio
    if audio is not None and getattr(type(audio), "decoded_medium", None) != "audio":
        raise ConfigError(
            f"audio={escaped(repr(audio), 80)}: give mm.AudioDecoder(), or None to leave the sound "
            "out"
        )


def _check_device(decoder: Any) -> None:
    if decoder.device not in ("cpu", "cuda"):
        raise ConfigError(f"device={decoder.device!r}: give one of 'cpu', 'cuda'")
    if decoder.device == "cpu":
        return
    if decoder.interpolation in ("nearest", "lanczos"):
        raise ConfigError(f'interpolation="{decoder.interpolation}" needs device="cpu"')
    if decoder.resize_longest is not None:
        raise ConfigError('resize_longest needs device="cpu"')


def _check_indices(decoder: Any) -> None:
    indices = decoder.indices
    if indices is None:
        return
    if not isinstance(indices, tuple) or not indices:
        raise ConfigError(f"indices={indices!r}: give a tuple of frame numbers, such as (0, 8)")
    if not all(isinstance(index, int) and index >= 0 for index in indices):
        raise ConfigError(f"indices={indices!r}: give numbers of frames, from 0 up")


def _check_number(decoder: Any) -> None:
    """Refuse a number of frames beside bounds that it is beyond: they would not count."""
    number = decoder.num_frames if decoder.indices is None else len(decoder.indices)
    if number is None:
        return
    low, high = decoder.min_frames, decoder.max_frames
    if number < low or (number > high and high != type(decoder).max_frames):
        raise ConfigError(
            f"{number} frames by num_frames= or indices=, and min_frames={low}, "
            f"max_frames={high}: these are for other numbers of frames, so leave them out"
        )


def _check_span(decoder: Any) -> None:
    span = decoder.span
    if span is None or span == "row":
        return
    if not is_span(span):
        raise ConfigError(f'span={span!r}: give "row", (start_s, end_s) or None')


def _check_budget(decoder: Any) -> None:
    budget = decoder.video_pixel_budget
    if decoder.max_frame_pixels is not None and budget is None:
        raise ConfigError("max_frame_pixels goes with video_pixel_budget")
    if decoder.max_video_pixels is not None and (
        decoder.resize != "max_pixels" or budget is not None
    ):
        raise ConfigError(
            'max_video_pixels goes with resize="max_pixels", and without video_pixel_budget'
        )
    if budget is None:
        return
    if decoder.resize != "max_pixels":
        raise ConfigError('video_pixel_budget goes with resize="max_pixels"')
    if not (isinstance(budget, tuple) and len(budget) == 2 and 0 < budget[0] <= budget[1]):
        raise ConfigError(f"video_pixel_budget={budget!r}: give (low, high), above zero")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 1
