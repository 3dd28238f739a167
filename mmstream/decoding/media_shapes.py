"""The shapes that media will have after decoding, known before any frame or sample is decoded.

Place in the flow: decoders plan a medium from its header (`ImageDecoder.prepared_shape`,
`VideoDecoder.plan`, `AudioDecoder.plan`). `decoding.text` counts the tokens of each medium with the
shape of its plan.

Users import from here what their own length functions take and return.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from mmstream.decoding.image.geometry import ImageShape as ImageShape
from mmstream.errors import ConfigError, DecodeError, escaped
from mmstream.settings import shown


class VideoShape(NamedTuple):
    """The shape that a `VideoDecoder` gives a video. Functions of video length take it.

    Examples:
        Three seconds of 25 frames per second at two frames per second, padded to a multiple of 2:

        >>> shape = VideoShape(
        ...     num_frames=6, height=224, width=392, picture=(270, 480),
        ...     times_s=(0.0, 0.6, 1.2, 1.76, 2.36, 2.96), fps=25.0, sampled_fps=2.0,
        ...     indices=(0, 15, 30, 44, 59, 74),
        ... )
        >>> len(shape.times_s)
        6
    """

    num_frames: int
    """Number of frames, with those that pad it to ``frame_multiple_of``."""
    height: int
    """Height in pixels of the results."""
    width: int
    """Width in pixels of the results."""
    picture: tuple[int, int]
    """(height, width) of the upright picture in its file, in pixels."""
    times_s: tuple[float, ...]
    """The time of each frame in seconds, from the container. A frame that pads repeats the last."""
    fps: float
    """Frames per second of the file: its number of frames divided by its duration."""
    sampled_fps: float
    """Frames per second of the result: its frames without padding, by the length of the span."""
    start_s: float = 0.0
    """Where the span begins, in the container's time: that of the first frame for a whole video."""
    indices: tuple[int, ...] = ()
    """The number of each frame in the file, from 0, in the order in which frames are shown. A list
    of frames has times alone: ()."""
    num_padding: int = 0
    """How many frames at the end repeat the last one. A pixel budget does not count them."""
    end_s: float = math.inf
    """Where the span ends, in the container's time; no later than the video."""
    sound: AudioShape | None = None
    """The shape of its sound. None: it has none, or no text needs to know it."""
    requested_fps: float = 0.0
    """Frames per second that the decoder was asked for. 0: it was asked for frames otherwise."""


class AudioShape(NamedTuple):
    """The shape that an `AudioDecoder` gives an audio. Functions of audio length take it.

    Examples:
        >>> AudioShape(num_samples=48_000, num_feature_frames=300, sample_rate=16_000).num_samples
        48000
    """

    num_samples: int
    """Samples per channel, after the span, the crop and resampling."""
    num_feature_frames: int
    """Frames of its log-mel features that are not padding. 0 without features."""
    sample_rate: int
    """Samples per second of the result."""


class MediaShapes(NamedTuple):
    """The shapes of all media of a sample. Each kind is in the order in which messages count it."""

    images: Sequence[ImageShape] = ()
    videos: Sequence[VideoShape] = ()
    audios: Sequence[AudioShape] = ()
    tracks: Sequence[int | None] = ()
    """Of each video, the number of its sound among `audios`, from 0. None: it has none there."""


class MediaText(NamedTuple):
    """A text that takes the place of a medium's token, such as one with times between the frames.

    Examples:
        Two moments of a video, of which each takes 6 tokens:

        >>> marked = "<|vision_start|><|video_pad|><|vision_end|>"
        >>> media = MediaText(f"<0.2 seconds>{marked}<1.2 seconds>{marked}", lengths=(6, 6))
        >>> media.text.count("<|video_pad|>") == len(media.lengths)
        True
    """

    text: str
    """The text, with the medium's own token once for each entry of `lengths`."""
    lengths: Sequence[int]
    """How many tokens each of these becomes, from 1 up."""
    audio_lengths: Sequence[int] = ()
    """Of a video whose sound stands between its frames: how many tokens each token of audio in the
    text becomes. The text then has no other place for that sound."""


# -- spans of time, as settings of decoders and rows state them -----------------------------------
#
# The decoders of videos and recordings ask which part of a file is meant, before they plan it.

Span: TypeAlias = tuple[float, float]
"""(start, end) in seconds. The end is left out. It may be infinite."""

_SHOWN = 40


def is_span(value: object) -> bool:
    """Tell whether a value is a tuple of a start and a later end in seconds, from 0 up.

    Examples:
        >>> is_span((0, 2.5)), is_span((2.5, 2.5)), is_span((0, True))
        (True, False, False)
    """
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    start, end = map(_seconds, value)
    return start is not None and end is not None and 0 <= start < end


def require_span(setting: object) -> None:
    """Raise a ConfigError for a setting that is neither a span, "row" nor None."""
    is_word = isinstance(setting, str) and setting == "row"
    if not (setting is None or is_word or is_span(setting)):
        raise ConfigError(f'span={shown(setting)}: give "row", (start_s, end_s) or None')


def row_span(row: Mapping[str, Any] | None) -> Span | None:
    """Return the span that a row states by ``start_s`` and ``end_s``. None: it states none.

    Raises:
        DecodeError: They are not a span of time.
    """
    start, end = (None, None) if row is None else (row.get("start_s"), row.get("end_s"))
    if start is None and end is None:
        return None
    start = 0.0 if start is None else start
    end = math.inf if end is None else end
    if not is_span((start, end)):
        start, end = (escaped(repr(value), _SHOWN) for value in (start, end))
        raise DecodeError(f"start_s={start}, end_s={end}: not a span in seconds")
    return float(start), float(end)


def row_of_span(span: Span | None, setting: object) -> dict[str, float] | None:
    """Return a row that states the span of a decoder's call.

    Args:
        span: What the call gives. None: nothing.
        setting: The ``span`` of the decoder.

    Raises:
        ConfigError: The decoder does not go by the row.
    """
    if span is None:
        return None
    if setting != "row":
        raise ConfigError(f'span={span!r}: it needs a decoder with span="row", not {setting!r}')
    return {"start_s": span[0], "end_s": span[1]}


def _seconds(value: object) -> float | None:
    """Return a number as a float. None: it is not a number, or too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
