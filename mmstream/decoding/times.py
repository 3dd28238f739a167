"""Times that go with a video or recording: they follow the span that its decoder takes.

Place in the flow: `decoding.field` calls `place` after the videos and recordings of a sample were
decoded, with the span in the file that became the result.

Times are seconds. In a file they count from its first frame, or from its first sound where it has
no video. So they refer to the same frames and sounds before and after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.fields import call_user, value_at
from mmstream.errors import DecodeError, escaped
from mmstream.wrong_arguments import NonEmptyStr, checked

TimeFormat = Literal["start_end", "point"]

TimeOrigin = Literal["span", "file"]

_Seconds = NDArray[np.float64]


@checked({"source": 'give a path such as "json.segments", or a function from the sample'})
@dataclass(frozen=True)
class Times:
    """Times of a sample that follow the span that is taken of its video or recording.

    A `Decode` uses it under a name of your choice. The batch then has two lists with one entry per
    row. ``batch["events"]`` holds float64 [N, 2] tensors: start and end in seconds.
    ``batch["events_visible"]`` holds float32 [N] tensors: the share of each interval that lies
    inside the span, 0 to 1. With ``format="point"`` they are float64 [N] and bool [N].

    As with `Boxes`, no time is left out, so interval 3 of the result is interval 3 of the data, and
    labels stay in step. An interval that sticks out is cut at the ends of the span. One that lies
    outside ends as one without length at the nearest end, and has 0 in ``events_visible``. An
    interval without length in the data has 1 where it lies inside. A point outside keeps its time.

    Attributes:
        source: Where the times are: a path such as ``"json.segments"``, a field with an array, or a
            function from the sample. An interval is a list ``[start, end]``, or an object with
            ``start_s`` and ``end_s``. A point is a number.
        follows: The field of the batch whose span counts: ``"video"``, ``"audio"``, or the name of
            a decoder by field, such as ``"mp4"``. A sample must have one such file.
        format: "start_end" for intervals, "point" for points in time.
        origin: What time 0 is in the batch. "span": the start of the span that was taken. "file":
            as in the data, and in ``video_pts_s``.

    Raises:
        ConfigError: A setting is none of these.

    Examples:
        >>> decode = mm.Decode(
        ...     {"events": mm.Times("json.segments", follows="video")},
        ...     video=mm.VideoDecoder(fps=2.0, clip_s=4.0),
        ... )
    """

    source: NonEmptyStr | Callable[[dict[str, Any]], Any]
    follows: str
    format: TimeFormat = "start_end"
    origin: TimeOrigin = "span"

    def place(
        self, sample: Mapping[str, Any], start_s: float, end_s: float
    ) -> tuple[_Seconds, NDArray[Any]]:
        """Return the times of a sample in the span that was taken of its file.

        Args:
            sample: A sample with its fields parsed.
            start_s: Where the span begins in the file, in seconds.
            end_s: Where it ends.

        Returns:
            Intervals, float64 [N, 2], and the share of each that is visible, float32 [N]. Or
            points, float64 [N], and whether each is visible, bool [N].

        Raises:
            DecodeError: There are no such times, or one is no finite number, or an interval ends
                before it begins.
        """
        source = self.source
        value = call_user(source, dict(sample)) if callable(source) else value_at(sample, source)
        times = _points(value) if self.format == "point" else _intervals(value)
        times, visible = placed_seconds(times, start_s, end_s)
        return (times - start_s if self.origin == "span" else times), visible


def placed_seconds(times: _Seconds, start_s: float, end_s: float) -> tuple[_Seconds, NDArray[Any]]:
    """Return times cut at the ends of a span, in the time of the file, and what is visible of each.

    Args:
        times: Intervals [N, 2] or points [N], in seconds. Points are not cut.
        start_s: The start of the span, which belongs to it.
        end_s: Its end, which does not.

    Examples:
        >>> shown, visible = placed_seconds(np.array([[0.0, 4.0], [8.0, 9.0]]), 3.0, 6.0)
        >>> shown.tolist(), visible.tolist()
        ([[3.0, 4.0], [6.0, 6.0]], [0.25, 0.0])
    """
    if times.ndim == 1:
        return times, (times >= start_s) & (times < end_s)
    shown = np.clip(times, start_s, end_s)
    whole, rest = np.diff(times).ravel(), np.diff(shown).ravel()
    is_inside = (times[:, 0] >= start_s) & (times[:, 0] < end_s)
    visible = np.divide(rest, whole, out=is_inside.astype(np.float64), where=whole > 0)
    return shown, visible.astype(np.float32)


def _intervals(value: Any) -> _Seconds:
    """Return float64 [N, 2] of lists of two numbers, or of objects with ``start_s`` and ``end_s``.

    Raises:
        DecodeError: They are something else, or one ends before it begins.
    """
    if isinstance(value, np.ndarray):
        value = value.tolist()
    pairs = [_pair(item) for item in _items(value, "interval")]
    times = np.array(pairs, np.float64).reshape(-1, 2)
    is_wrong = times[:, 1] < times[:, 0]
    if is_wrong.any():
        number = int(is_wrong.argmax())
        raise DecodeError(f"interval {number} ends before it begins: {pairs[number]}")
    return times


def _points(value: Any) -> _Seconds:
    """Return float64 [N] of a list of numbers."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    numbers = _items(value, "point in time")
    for number in numbers:
        _check_seconds(number, number)
    return np.array(numbers, np.float64)


def _items(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise DecodeError(f"not a list with an entry for each {name}: {escaped(repr(value), 80)}")
    return list(value)


def _pair(item: Any) -> list[Any]:
    """Return the start and the end of an interval."""
    pair = [item.get("start_s"), item.get("end_s")] if isinstance(item, dict) else item
    if not (isinstance(pair, list | tuple) and len(pair) == 2):
        raise DecodeError(f"neither [start, end] nor start_s and end_s: {escaped(repr(item), 80)}")
    for seconds in pair:
        _check_seconds(seconds, item)
    return list(pair)


def _check_seconds(seconds: Any, item: Any) -> None:
    """Refuse what is no time: strings, bools, NaN, and integers beyond floats."""
    is_number = isinstance(seconds, int | float) and type(seconds) is not bool
    if not (is_number and abs(seconds) < _MAX_SECONDS and math.isfinite(seconds)):
        raise DecodeError(f"no number of seconds in {escaped(repr(item), 80)}")


_MAX_SECONDS = 1e12
"""Beyond this, float64 does not tell a millisecond from the next."""
