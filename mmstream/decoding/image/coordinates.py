"""Boxes and points that go with a picture: they follow its resize, crop and flip.

Place in the flow: `decoding.field` calls `place` after the picture of the same geometry was
decoded, with the view that made its result.

All coordinates are those of the upright picture: x from the left edge, y from the top. The pixel in
the corner covers 0 to 1. Results are equal to torchvision's ``tv_tensors.BoundingBoxes`` and
``KeyPoints`` for the same crop, resize and flip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.fields import call_user, value_at
from mmstream.decoding.image.geometry import Shape, View
from mmstream.errors import DecodeError, escaped
from mmstream.wrong_arguments import NonEmptyStr, checked

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
        corners = _to_pixels(_corners(boxes, self.format), self.units, picture)
        if (corners[:, 2:] < corners[:, :2]).any():
            wrong = int((corners[:, 2:] < corners[:, :2]).any(1).argmax())
            raise DecodeError(f"box {wrong} ends before it begins: {boxes[wrong].tolist()}")
        placed = placed_xy(corners.reshape(-1, 2), view).reshape(-1, 4)
        if view.flip:  # the right edge is the left one now
            placed = placed[:, [2, 1, 0, 3]]
        shown = np.clip(placed, 0, [*view.shape[::-1]] * 2)
        whole, rest = _areas(placed), _areas(shown)
        visible = np.divide(rest, whole, out=np.zeros_like(whole), where=whole > 0)
        result = _from_corners(
            _from_pixels(shown, self.to_units or self.units, view.shape),
            self.to_format or self.format,
        )
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
        points = _to_pixels(_numbers(self.source, sample, 2), self.units, picture)
        placed = placed_xy(points, view)
        is_visible = np.all((placed >= 0) & (placed <= view.shape[::-1]), axis=1)
        result = _from_pixels(placed, self.to_units or self.units, view.shape)
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


def _to_pixels(values: NDArray[np.float64], units: str, shape: Shape) -> NDArray[np.float64]:
    return values * _unit_pixels(units, shape, values.shape[1])


def _from_pixels(values: NDArray[np.float64], units: str, shape: Shape) -> NDArray[np.float64]:
    return values / _unit_pixels(units, shape, values.shape[1])


def _unit_pixels(units: str, shape: Shape, size: int) -> NDArray[np.float64]:
    """Return how many pixels a unit has, for each of the numbers of a box or a point."""
    height, width = (1, 1) if units == "pixels" else shape
    return np.array([width, height] * (size // 2)) / (1000 if units == "0-1000" else 1)


def _areas(corners: NDArray[np.float64]) -> NDArray[np.float64]:
    areas: NDArray[np.float64] = (corners[:, 2:] - corners[:, :2]).prod(1)
    return areas
