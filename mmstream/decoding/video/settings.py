"""The checks of a `VideoDecoder`'s settings."""

from __future__ import annotations

from typing import Any

from mmstream.decoding.spans import require_span
from mmstream.errors import ConfigError
from mmstream.wrong_arguments import shown


def check_settings(decoder: Any) -> None:
    """Refuse settings that do not go with each other.

    Args:
        decoder: A `VideoDecoder`, whose module imports this one.

    Raises:
        ConfigError: Names the setting and says what to give.
    """
    if sum(value is not None for value in (decoder.fps, decoder.num_frames, decoder.indices)) > 1:
        raise ConfigError("give one of fps, num_frames and indices")
    if decoder.sampling == "smolvlm" and decoder.fps is None and decoder.indices is None:
        raise ConfigError('sampling="smolvlm" takes frames per second: give fps and max_frames')
    if decoder.min_frames > decoder.max_frames:
        raise ConfigError(
            f"min_frames={decoder.min_frames} is above max_frames={decoder.max_frames}"
        )
    _check_sound(decoder)
    if decoder.indices == ():
        raise ConfigError("indices=(): give numbers of frames from 0 up, such as (0, 8)")
    _check_number(decoder)
    require_span(decoder.span)
    _check_budget(decoder)


def _check_sound(decoder: Any) -> None:
    audio = decoder.audio
    if audio is not None and getattr(type(audio), "decoded_medium", None) != "audio":
        raise ConfigError(
            f"audio={shown(audio)}: give mm.AudioDecoder(), or None to leave the sound out"
        )


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
    if budget[0] > budget[1]:
        raise ConfigError(f"video_pixel_budget={budget!r}: give (low, high), above zero")
