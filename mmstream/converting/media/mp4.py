"""An MP4 of packets that are there already. Nothing is encoded anew.

cut, remux -> MP4
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import av

__all__ = ["mp4_of"]

_SAME_BYTES = {"fflags": "+bitexact"}
"""No version of FFmpeg and no time of day in the file."""


def mp4_of(
    templates: Sequence[Any], packets: Iterable[tuple[Any, Any]], time_base: Fraction | None = None
) -> bytes:
    """Return an MP4 of packets. The same packets give the same bytes.

    Args:
        templates: PyAV's streams that the packets come from. The MP4 has them in this order.
        packets: (stream, packet), in the order of decoding.
        time_base: Seconds of one unit of all times. None: FFmpeg chooses it for each stream.

    Raises:
        FFmpegError: An MP4 cannot hold them.
    """
    target = io.BytesIO()
    with av.open(target, "w", format="mp4", options=_SAME_BYTES) as out:
        streams: dict[int, Any] = {}
        for template in templates:
            stream: Any = out.add_stream_from_template(template, opaque=True)
            if time_base is not None:
                stream.time_base = time_base
            streams[template.index] = stream
        for template, packet in packets:
            packet.stream = streams[template.index]
            out.mux(packet)
    return target.getvalue()
