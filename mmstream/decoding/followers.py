"""What follows a picture, video or recording: boxes and points, and times.

Place in the flow: `sample.py` calls a `Follower` after what it follows was decoded. Boxes and
points are placed with the view that made the result of their picture. Times are placed in the span
that was taken of their file.

Coordinates are those of the upright picture: x from the left edge, y from the top. The pixel in the
corner covers 0 to 1. Results are equal to torchvision's ``tv_tensors.BoundingBoxes`` and
``KeyPoints`` for the same crop, resize and flip.

Times are seconds. In a file they count from its first frame, or from its first sound where it has
no video. So they refer to the same frames and sounds before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from mmstream.decoding.field import FieldResult
from mmstream.decoding.image.geometry import Plan, View
from mmstream.decoding.media_shapes import Span
from mmstream.decoding.sample_rng import is_user_function, seed_generators
from mmstream.errors import DecodeError, escaped
from mmstream.media.fields import address, call_user, value_at, with_address
from mmstream.media.types import Shape
from mmstream.settings import NonEmptyStr, checked
from mmstream.types import Sample


@dataclass(frozen=True)
class Follower:
    """Boxes or points of a picture, or times of a video or recording."""

    name: str
    decoder: Any
    """`Boxes`, `Points` or `Times`."""
    leader: str
    """The field that they follow."""

    @cached_property
    def is_user(self) -> bool:
        """Whether a function or class of the user finds or places them."""
        return is_user_function(self.decoder)

    def on_picture(
        self, sample: Sample, decoded: Sample, results: Mapping[str, FieldResult]
    ) -> dict[str, torch.Tensor]:
        """Return boxes or points as their picture was resized, cropped and flipped.

        Args:
            sample: The sample.
            decoded: Its results so far, and its other fields.
            results: What became of its pictures, by field.

        Raises:
            DecodeError: There are none, or there is not one such picture.
        """
        leader = with_address(sample, self.name, geometry_of, self.leader, results)
        return self._placed(sample, decoded, leader)

    def in_span(
        self, sample: Sample, decoded: Sample, spans: Mapping[str, Sequence[Span]]
    ) -> dict[str, torch.Tensor]:
        """Return times in the span that was taken of the one file; arguments as `on_picture`."""
        files = spans.get(self.leader, ())
        if len(files) != 1:
            raise DecodeError(
                f"{address(sample, self.name)}: it follows the span of {self.leader}, of which the "
                f"sample has {len(files)} encoded files, not one"
            )
        return self._placed(sample, decoded, files[0])

    def _placed(self, sample: Sample, decoded: Sample, leader: Any) -> dict[str, torch.Tensor]:
        if self.is_user:
            seed_generators(sample, f"field {self.name}")
        arrays = with_address(sample, self.name, self.decoder.place, decoded, *leader)
        names = (self.name, f"{self.name}_visible")
        return dict(zip(names, map(torch.from_numpy, arrays), strict=True))


def geometry_of(leader: str, results: Mapping[str, FieldResult]) -> Plan:
    """Return the geometry of the picture that others follow.

    Raises:
        DecodeError: There is not one such picture.
    """
    geometry = results[leader].geometry if leader in results else None
    if geometry is None:
        raise DecodeError(
            f"it shares the geometry of {leader}, of which the sample has not exactly one "
            "encoded picture"
        )
    return geometry


# -- boxes and points ------------------------------------------------------------------------------

BoxFormat = Literal["xyxy", "xywh", "cxcywh"]

Units = Literal["pixels", "0-1", "0-1000"]

Placed = tuple[NDArray[np.float32], NDArray[Any]]
"""The coordinates on the result, and what of each is visible there."""

_Source = NonEmptyStr | Callable[[dict[str, Any]], Any]

_ADVICE = {"source": 'give a path such as "json.boxes", or a function from the sample'}


@checked(_ADVICE)
@dataclass(frozen=True)
class Boxes:
    """Boxes of a sample that follow the geometry of its picture.

    A `Decode` uses it under a name of your choice, which `same_geometry` puts into the group of a
    picture. The batch then has two lists with one entry per row. ``batch["boxes"]`` holds float32
    [N, 4] tensors. ``batch["boxes_visible"]`` holds float32 [N] tensors: the share of each box that
    lies inside the result, 0 to 1.

    No box is left out, so box 3 of the result is box 3 of the data, and labels stay in step. What
    sticks out is cut at the edge of the result. A box that lies outside ends as one without area at
    the nearest edge, and has 0 in ``boxes_visible``.

    Attributes:
        source: Where the boxes are: a path such as ``"json.boxes"`` or ``"json.objects.*.bbox"``,
            a field with an array, or a function from the sample to a list of boxes.
        format: The four numbers of a box in the data. "xyxy": left, top, right, bottom. "xywh":
            left, top, width, height, as in COCO. "cxcywh": centre, width, height, as in YOLO.
        units: "pixels" of the upright picture, "0-1" for shares of its sides, or "0-1000".
        to_format: The four numbers of a box in the batch. None: as in the data.
        to_units: The units in the batch, of the result's sides. None: as in the data.

    Raises:
        ConfigError: A setting is none of these.

    Examples:
        >>> decode = mm.Decode(
        ...     {
        ...         "jpg": mm.ImageDecoder(size=224, crop="random", flip=0.5),
        ...         "boxes": mm.Boxes("json.boxes", format="xywh", to_format="xyxy"),
        ...     },
        ...     same_geometry=("jpg", "boxes"),
        ... )
    """

    source: _Source
    format: BoxFormat = "xyxy"
    units: Units = "pixels"
    to_format: BoxFormat | None = None
    to_units: Units | None = None

    def place(self, sample: Mapping[str, Any], picture: Shape, view: View) -> Placed:
        """Return the boxes of a sample on the result of its picture.

        Args:
            sample: A sample with its fields parsed.
            picture: (height, width) of the upright picture.
            view: How the result was made of the picture.

        Returns:
            float32 [N, 4], and float32 [N], the share of each box that is visible.

        Raises:
            DecodeError: There are no such boxes, or one is not four finite numbers, or ends before
                it begins.
        """
        boxes = _numbers(self.source, sample, 4)
        corners = _corners(boxes, self.format) * _unit_pixels(self.units, picture, 4)
        if (corners[:, 2:] < corners[:, :2]).any():
            wrong = int((corners[:, 2:] < corners[:, :2]).any(1).argmax())
            raise DecodeError(f"box {wrong} ends before it begins: {boxes[wrong].tolist()}")
        placed = placed_xy(corners.reshape(-1, 2), view).reshape(-1, 4)
        if view.flip:  # the right edge is the left one now
            placed = placed[:, [2, 1, 0, 3]]
        clipped = np.clip(placed, 0, [*view.shape[::-1]] * 2)
        areas, clipped_areas = _areas(placed), _areas(clipped)
        visible = np.divide(clipped_areas, areas, out=np.zeros_like(areas), where=areas > 0)
        in_units = clipped / _unit_pixels(self.to_units or self.units, view.shape, 4)
        result = _from_corners(in_units, self.to_format or self.format)
        return result.astype(np.float32), visible.astype(np.float32)


@checked(_ADVICE)
@dataclass(frozen=True)
class Points:
    """Points of a sample, such as keypoints, that follow the geometry of its picture.

    It is used as `Boxes`. The batch has two lists with one entry per row: float32 [N, 2] tensors
    (x, y), and under the name with ``_visible`` bool [N] tensors: whether each point lies on the
    result. A point outside keeps its coordinates there. A flip does not exchange left and right
    keypoints: that is for a transform.

    Attributes:
        source: Where the points are, as in `Boxes`.
        units: "pixels" of the upright picture, "0-1" for shares of its sides, or "0-1000".
        to_units: The units in the batch, of the result's sides. None: as in the data.

    Raises:
        ConfigError: A setting is none of these.

    Examples:
        >>> decode = mm.Decode(
        ...     {"jpg": mm.ImageDecoder(size=224), "points": mm.Points("json.keypoints")},
        ...     same_geometry=("jpg", "points"),
        ... )
    """

    source: _Source
    units: Units = "pixels"
    to_units: Units | None = None

    def place(self, sample: Mapping[str, Any], picture: Shape, view: View) -> Placed:
        """Return the points of a sample on the result of its picture: float32 [N, 2], bool [N].

        Raises:
            DecodeError: There are no such points, or one is not two finite numbers.
        """
        points = _numbers(self.source, sample, 2) * _unit_pixels(self.units, picture, 2)
        placed = placed_xy(points, view)
        is_visible = np.all((placed >= 0) & (placed <= view.shape[::-1]), axis=1)
        result = placed / _unit_pixels(self.to_units or self.units, view.shape, 2)
        return result.astype(np.float32), np.asarray(is_visible)


def placed_xy(points: NDArray[np.float64], view: View) -> NDArray[np.float64]:
    """Return where points of a picture lie on a result.

    Example: a picture of 100x200 is resized to 50x100, and the middle 50x50 are cut out. The point
    (100, 40) is resized to (50, 20), and lies at (25, 20) of the result.

    Args:
        points: float64 [N, 2], x and y in pixels of the upright picture.
        view: How the result was made.
    """
    top, left, height, width = view.box
    scale = np.array([view.resized[1] / width, view.resized[0] / height])
    offset = view.offset[::-1]
    placed: NDArray[np.float64] = (points - (left, top)) * scale + offset
    if view.flip:  # what is mirrored is the picture on the result, not the border around it
        start = max(0, offset[0])
        stop = min(view.shape[1], offset[0] + view.resized[1])
        placed[:, 0] = start + stop - placed[:, 0]
    return placed


def _numbers(source: _Source, sample: Mapping[str, Any], size: int) -> NDArray[np.float64]:
    """Return float64 [N, size] of a sample."""
    value = call_user(source, sample) if callable(source) else value_at(sample, source)
    try:
        numbers = np.asarray(value if len(value) else np.empty((0, size)), dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        numbers = np.empty(0)
    if numbers.ndim != 2 or numbers.shape[1] != size or not np.isfinite(numbers).all():
        name = "box" if size == 4 else "point"
        raise DecodeError(f"not a list of {size} numbers for each {name}: {escaped(value, 80)}")
    return numbers


def _corners(boxes: NDArray[np.float64], box_format: str) -> NDArray[np.float64]:
    """Return boxes as left, top, right, bottom."""
    if box_format == "xyxy":
        return boxes
    starts, sizes = boxes[:, :2], boxes[:, 2:]
    if box_format == "cxcywh":
        starts = starts - sizes / 2
    return np.concatenate((starts, starts + sizes), 1)


def _from_corners(corners: NDArray[np.float64], box_format: str) -> NDArray[np.float64]:
    if box_format == "xyxy":
        return corners
    starts, sizes = corners[:, :2], corners[:, 2:] - corners[:, :2]
    return np.concatenate((starts + sizes / 2 if box_format == "cxcywh" else starts, sizes), 1)


def _unit_pixels(units: str, shape: Shape, size: int) -> NDArray[np.float64]:
    """Return how many pixels a unit has, for each of the numbers of a box or a point."""
    height, width = (1, 1) if units == "pixels" else shape
    return np.array([width, height] * (size // 2)) / (1000 if units == "0-1000" else 1)


def _areas(corners: NDArray[np.float64]) -> NDArray[np.float64]:
    areas: NDArray[np.float64] = (corners[:, 2:] - corners[:, :2]).prod(1)
    return areas


# -- times -----------------------------------------------------------------------------------------

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
    format: Literal["start_end", "point"] = "start_end"
    origin: Literal["span", "file"] = "span"

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
            DecodeError: There are no such times, or one is not a finite number, or an interval ends
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
        >>> clipped, visible = placed_seconds(np.array([[0.0, 4.0], [8.0, 9.0]]), 3.0, 6.0)
        >>> clipped.tolist(), visible.tolist()
        ([[3.0, 4.0], [6.0, 6.0]], [0.25, 0.0])
    """
    if times.ndim == 1:
        return times, (times >= start_s) & (times < end_s)
    clipped = np.clip(times, start_s, end_s)
    durations, clipped_durations = np.diff(times).ravel(), np.diff(clipped).ravel()
    is_inside = (times[:, 0] >= start_s) & (times[:, 0] < end_s)
    visible = np.divide(
        clipped_durations, durations, out=is_inside.astype(np.float64), where=durations > 0
    )
    return clipped, visible.astype(np.float32)


def _intervals(value: Any) -> _Seconds:
    """Return float64 [N, 2] of lists of two numbers, or of objects with ``start_s`` and ``end_s``.

    Raises:
        DecodeError: They are something else, or one ends before it begins.
    """
    pairs = [_pair(item) for item in _items(value, "interval")]
    times = np.array(pairs, np.float64).reshape(-1, 2)
    is_wrong = times[:, 1] < times[:, 0]
    if is_wrong.any():
        number = int(is_wrong.argmax())
        raise DecodeError(f"interval {number} ends before it begins: {pairs[number]}")
    return times


def _points(value: Any) -> _Seconds:
    """Return float64 [N] of a list of numbers."""
    numbers = _items(value, "point in time")
    for number in numbers:
        _check_seconds(number, number)
    return np.array(numbers, np.float64)


def _items(value: Any, name: str) -> list[Any]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
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
    """Refuse what is not a time: strings, bools, NaN, and integers beyond floats."""
    is_number = isinstance(seconds, int | float) and type(seconds) is not bool
    if not (is_number and abs(seconds) < _MAX_SECONDS):  # which NaN is not
        raise DecodeError(f"no number of seconds in {escaped(repr(item), 80)}")


_MAX_SECONDS = 1e12
"""Beyond this, float64 does not tell a millisecond from the next."""
