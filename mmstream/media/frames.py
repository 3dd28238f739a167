"""A video as a list of pictures: when each is shown, and what they are.

Place in the flow: a sample holds the list and its pictures as members of their own, so every reader
of WebDataset finds plain JPEGs:

    clip.frames              {"sample_fps": 2.0}, or {"timestamps": [0.0, 0.5, 1.25]},
                             or {"fps": 30.0, "indices": [0, 15, 37]}
    clip.frames.000.jpg      the pictures, numbered from 0
    clip.frames.001.jpg

`encoded_video` makes a `FrameList` of them, which goes wherever the file of a video goes. A
converter checks the times of rows with `frame_times` too. Times are those that are stated, so a
list may begin at 10 s of a longer video.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmstream.errors import DecodeError, escaped
from mmstream.media.fields import FRAMES, frame_names, parse_json
from mmstream.media.limits import MAX_MEMORY, MAX_PIXELS, Deadline, Limits
from mmstream.media.timeline import Timeline
from mmstream.media.types import EncodedMedia, Shape

TIME_KINDS = ("timestamps", "sample_fps", "indices")
"""The ways to state times, of which a list has one. ``indices`` goes with ``fps``."""

_ADVICE = (
    "give timestamps (the seconds of each frame), sample_fps (frames a second, from 0 s), or fps "
    "and indices (numbers of the frames in a video of this rate)"
)


def frame_times(values: Mapping[str, Any], num_frames: int) -> tuple[NDArray[np.float64], float]:
    """Return when frames are shown, float64 [F] in seconds, and their average rate per second.

    Args:
        values: One of `TIME_KINDS`.
        num_frames: How many frames there are.

    Raises:
        DecodeError: There are no times, two kinds of them, or another number of them; or they do
            not rise from 0 s on.

    Examples:
        >>> times, fps = frame_times({"fps": 30.0, "indices": [300, 315, 330]}, 3)
        >>> times.tolist(), fps
        ([10.0, 10.5, 11.0], 2.0)
    """
    kinds = [kind for kind in TIME_KINDS if values.get(kind) is not None]
    if len(kinds) != 1:
        found = "two kinds of times: " + " and ".join(kinds) if kinds else "no times"
        raise DecodeError(f"a list of {num_frames} frames with {found}; {_ADVICE}")
    if not num_frames:
        raise DecodeError("a list of no frames")
    (kind,) = kinds
    if kind == "sample_fps":
        rate = _rate(values, kind)
        stated = np.arange(num_frames, dtype=np.float64)
    else:
        stated = _numbers(values[kind], kind, num_frames)
        rate = _rate(values, "fps") if kind == "indices" else 1.0
    times = stated / rate
    length = float(times[-1] - times[0])
    falls = np.flatnonzero(np.diff(times) <= 0)
    if len(falls):
        number = int(falls[0]) + 1
        raise DecodeError(
            f"{kind}: frame {number} is at {times[number]:g} s, not after the frame before it"
        )
    if kind == "sample_fps":
        return times, rate
    return times, (num_frames - 1) / length if length else 1.0  # one frame lasts a second


def _rate(values: Mapping[str, Any], name: str) -> float:
    rate = values.get(name)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 1e-6 <= rate <= 1e6:
        raise DecodeError(f"{name}={escaped(rate, 40)}: expected frames per second, above 0")
    return float(rate)


def _numbers(values: Any, kind: str, num_frames: int) -> NDArray[np.float64]:
    """Return a list of seconds or of numbers of frames, float64 [F]."""
    allowed = int if kind == "indices" else (int, float)
    if not isinstance(values, list) or len(values) != num_frames:
        found = len(values) if isinstance(values, list) else type(values).__name__
        raise DecodeError(f"{found} {kind} for {num_frames} frames")
    for number, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, allowed) or not 0 <= value < 2**53:
            what = "whole numbers" if kind == "indices" else "seconds"
            raise DecodeError(f"{kind}[{number}]={escaped(value, 40)}: expected {what} from 0 up")
    return np.array(values, np.float64)


@dataclass(frozen=True)
class FrameList:
    """A list of pictures that is a video, in the place of its file.

    Attributes:
        names: Of the pictures, for messages.
        files: Their bytes.
        times_s: When they are shown: float64 [F], in seconds. They rise.
        fps: Frames per second, on average.
    """

    names: Sequence[str]
    files: Sequence[bytes | memoryview]
    times_s: NDArray[np.float64]
    fps: float

    @classmethod
    def parse(
        cls, data: bytes, names: Sequence[str], files: Sequence[bytes | memoryview]
    ) -> FrameList:
        """Return the list whose times a file states.

        Raises:
            DecodeError: It is not a JSON object, or its times are wrong; see `frame_times`.
        """
        values = parse_json(data)
        if not isinstance(values, dict):
            raise DecodeError(f"expected an object of JSON; {_ADVICE}")
        return cls(names, files, *frame_times(values, len(files)))

    def __len__(self) -> int:
        """Return the bytes of all pictures."""
        return sum(map(len, self.files))

    @property
    def timeline(self) -> Timeline:
        """The times of the frames. Each is a packet of its own."""
        numbers, every = np.arange(len(self.files)), np.ones(len(self.files), np.bool_)
        length = Fraction(1 / self.fps)
        return Timeline(numbers, numbers, every, every, length, 1, stated_s=self.times_s)

    def shape(self, number: int, limits: Limits) -> Shape:
        """Return (height, width) of a picture, upright, from its header where that tells.

        Raises:
            DecodeError: It is not a picture, or too large; its name comes first.
        """
        from mmstream.media.image import decode_bytes, header_shape  # loads Pillow

        data = self.files[number]
        try:
            height, width = header_shape(data, limits) or decode_bytes(data, limits)[0].shape[:2]
            limits.check_picture(height, width)
        except DecodeError as error:
            raise type(error)(f"{self.names[number]}: {error}") from None
        return height, width

    def pictures(
        self, shape: Shape, numbers: Sequence[int], deadline: Deadline
    ) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Decode some of the pictures.

        Yields:
            (number, uint8 [H, W, 3]), upright, in RGB.

        Raises:
            DecodeError: A picture is damaged, or of another shape; its name comes first.
            TimeoutError: It takes too long.
        """
        from mmstream.media.image import decode_bytes

        limits = Limits(MAX_PIXELS, MAX_MEMORY, deadline)
        for number in numbers:
            deadline.check()
            self._require_shape(number, shape, limits)
            try:
                pixels, _ = decode_bytes(self.files[number], limits)
            except DecodeError as error:
                raise type(error)(f"{self.names[number]}: {error}") from None
            yield number, pixels

    def facts(self, deadline: Deadline, *, decode: bool) -> dict[str, int | float | str]:
        """Return the facts of the video; see `media_facts`. ``end_s`` is where it ends."""
        limits = Limits(MAX_PIXELS, MAX_MEMORY, deadline)
        shape, numbers = self.shape(0, limits), range(len(self.files))
        for number in numbers:
            self._require_shape(number, shape, limits)
        for _ in self.pictures(shape, numbers, deadline) if decode else ():
            pass
        return {
            "duration_s": round(self.timeline.duration_s, 6),
            "end_s": self.timeline.end_s,
            "width": shape[1],
            "height": shape[0],
            "fps": round(self.fps, 6),
            "num_frames": len(self.files),
        }

    def _require_shape(self, number: int, shape: Shape, limits: Limits) -> None:
        own = self.shape(number, limits)
        if own != shape:
            raise DecodeError(
                f"{self.names[number]}: a frame of {own[1]}x{own[0]} in a video of "
                f"{shape[1]}x{shape[0]}; make all pictures of a list of one size"
            )


def encoded_video(sample: Mapping[str, Any], name: str) -> EncodedMedia | FrameList:
    """Return the file of a field of a video, or its list of frames.

    Raises:
        DecodeError: The list has no or wrong times, or a picture of it is missing.
    """
    if name.rpartition(".")[2] != FRAMES:
        file: EncodedMedia = sample[name]
        return file
    names = frame_names(sample, name)
    for number, picture in enumerate(names):
        if int(picture.split(".")[-2]) != number:
            raise DecodeError(f"frame {number} is missing: number the pictures from 0 without gaps")
        if not isinstance(sample[picture], bytes | memoryview):
            raise DecodeError(f"{picture}: expected bytes, not {type(sample[picture]).__name__}")
    return FrameList.parse(sample[name], names, [sample[picture] for picture in names])
