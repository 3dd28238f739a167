"""When each frame of a video is shown, and which packets it is decoded from. Nothing is decoded.

Place in the flow: `decoding.video` chooses frames by their times, and decodes the packets that
they need.

Packets are stored in the order of decoding. A frame that others are predicted from comes before
them, though it may be shown after them. Worked example, four frames at 10 per second:

    packet            0    1    2    3
    shown at (pts)    0    3    1    2      in tenths of a second
    display order     0    2    3    1      packets by the time at which they are shown
    time of a frame   0.0  0.1  0.2  0.3
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmstream.errors import DecodeError
from mmstream.media.limits import Deadline
from mmstream.types import IntArray

BoolArray = NDArray[np.bool_]

_MAX_STEP_BACK_S = 0.5
"""Seconds by which times may fall from packet to packet: writers round and repair."""
HIDDEN_IN_VP8 = 0x10
"""The bit of a VP8 frame's first byte that says that it is shown (RFC 6386, section 9.1)."""


@dataclass(frozen=True)
class Timeline:
    """The packets of a video stream, in the order of decoding.

    Attributes:
        pts: When the frame of each packet is shown, in units of `time_base`.
        dts: The order in which packets are decoded, in the same units. It rises.
        is_key: Whether a decoder can start at a packet.
        is_shown: Whether the packet holds a frame that is shown.
        time_base: Seconds of one unit.
        last_duration: How long the last frame is shown, in units. 0: not known.
        is_counted: Whether frames are known by their number alone. The file does not say which
            packet is shown when. Then `pts` is the time of the frames in the order of display, and
            they must be decoded from the start.
        stated_s: The times of the frames in seconds, of a list of frames. None: `pts` has them.
    """

    pts: IntArray
    dts: IntArray
    is_key: BoolArray
    is_shown: BoolArray
    time_base: Fraction
    last_duration: int = 0
    is_counted: bool = False
    stated_s: NDArray[np.float64] | None = None

    @cached_property
    def display_order(self) -> IntArray:
        """Numbers of the packets with frames that are shown, by time."""
        packets = np.flatnonzero(self.is_shown)
        return packets[np.argsort(self.pts[packets], kind="stable")]

    @property
    def num_frames(self) -> int:
        """Number of frames that are shown."""
        return len(self.display_order)

    @cached_property
    def times_s(self) -> NDArray[np.float64]:
        """The time of each frame in seconds, by time. The first is 0, unless it is stated."""
        if self.stated_s is not None:
            return self.stated_s
        pts = self.pts[self.display_order].astype(np.float64)  # int64 would wrap around
        times: NDArray[np.float64] = (pts - pts[0]) * float(self.time_base)
        return times

    @cached_property
    def end_s(self) -> float:
        """The end of the last frame, in seconds."""
        times = self.times_s
        last = self.last_duration * float(self.time_base)
        if last <= 0 and len(times) > 1:
            last = float(times[-1]) / (len(times) - 1)
        return float(times[-1]) + last

    @property
    def duration_s(self) -> float:
        """Seconds from the first frame to the end of the last one."""
        return self.end_s - float(self.times_s[0])

    def start_of(self, packet: int) -> int:
        """Return the packet from which on to decode, so that the frame of a packet comes out.

        It is the last key before the packet. A frame that is shown before that key may be predicted
        from frames before the key too, in an open group of pictures. Then it is the key before.
        """
        keys = self._keys
        number = int(np.searchsorted(keys, packet, side="right")) - 1
        while number > 0 and self.pts[packet] < self.pts[keys[number]]:
            number -= 1
        return int(keys[max(number, 0)])

    @cached_property
    def _keys(self) -> IntArray:
        keys = np.flatnonzero(self.is_key)
        return keys if len(keys) else np.zeros(1, np.int64)


def demuxed_timeline(
    packets: Iterable[Any],
    stream: Any,
    deadline: Deadline,
    max_packets: int,
    has_pts: bool = True,
) -> Timeline:
    """Read the timeline of a stream from all of its packets.

    Args:
        packets: PyAV's packets, all of them.
        stream: PyAV's stream.
        deadline: When to stop.
        max_packets: Limit on their number.
        has_pts: Whether the container says when a frame is shown. AVI does not.

    Raises:
        DecodeError: The file has no frame, or too many packets, or its times start over.
        TimeoutError: It takes too long.
    """
    all_pts, all_dts = array("q"), array("q")  # a quarter of lists' memory
    is_key, is_shown, has_dts = bytearray(), bytearray(), bytearray()
    is_vp8 = stream.codec_context.name == "vp8"
    last = (-(1 << 63), 0)
    for packet in packets:
        if packet.size == 0:
            continue
        pts = packet.pts if packet.pts is not None else packet.dts
        if pts is None:
            if not (is_key and is_key[0] and last[0] == all_pts[0]):
                raise DecodeError("its packets have no times")
            # A cut into Matroska removes the times of frames that are shown before the first key.
            pts = all_pts[0] - 1
        dts = packet.dts if packet.dts is not None else pts
        is_hidden = packet.is_discard or (is_vp8 and not bytes(packet)[0] & HIDDEN_IN_VP8)
        all_pts.append(pts)
        all_dts.append(dts)
        has_dts.append(packet.dts is not None)
        is_key.append(packet.is_keyframe)
        is_shown.append(not is_hidden)
        if not is_hidden and pts > last[0]:
            last = (pts, packet.duration or 0)
        if len(all_pts) > max_packets:
            raise DecodeError(f"over {max_packets:,} packets of video in one file")
        deadline.check()
    if not any(is_shown):
        raise DecodeError("has no frame in it")
    _check_times_rise(np.array(all_dts, np.int64), np.frombuffer(has_dts, bool), stream.time_base)
    timeline = Timeline(
        np.array(all_pts, np.int64),
        np.array(all_dts, np.int64),
        np.frombuffer(is_key, bool).copy(),
        np.frombuffer(is_shown, bool).copy(),
        Fraction(stream.time_base),
        last[1],
    )
    if not has_pts and stream.codec_context.has_b_frames:
        return replace(timeline, pts=np.sort(timeline.dts), is_counted=True)
    return without_undecodable_start(timeline)


def _check_times_rise(dts: IntArray, is_stated: BoolArray, time_base: Fraction) -> None:
    """Refuse a file whose times start over, so that frames cannot be put in order by them.

    Raises:
        DecodeError: Names the first frame whose time falls, and by how much.
    """
    numbers = np.flatnonzero(is_stated)
    stated = dts[numbers].astype(np.float64)  # int64 would wrap around
    steps_s = (stated - np.maximum.accumulate(stated)) * float(time_base)
    falls = np.flatnonzero(steps_s < -_MAX_STEP_BACK_S)
    if len(falls):
        raise DecodeError(
            f"its times jump by {steps_s[falls[0]]:.2f} s at frame {numbers[falls[0]]}, "
            "as in files that were joined byte by byte: join them with ffmpeg -f concat"
        )


def without_undecodable_start(timeline: Timeline) -> Timeline:
    """Hide the frames that no decoder shows: those before the first key, in either order."""
    keys = np.flatnonzero(timeline.is_key)
    if not len(keys):
        raise DecodeError("has no frame that can be decoded on its own")
    first = keys[0]
    is_shown = timeline.is_shown & (timeline.pts >= timeline.pts[first])
    is_shown[:first] = False
    if not is_shown.any():
        raise DecodeError("has no frame in it")
    if is_shown.all():
        return timeline
    return replace(timeline, is_shown=is_shown)
