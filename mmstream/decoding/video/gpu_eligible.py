"""Which videos a GPU may decode, as far as the header and the plan show.

Place in the flow: `VideoDecoder.plan` asks here with ``device="cuda"``. The CPU decodes all other
videos in the worker, and the loader counts them by these reasons. Whether the GPU at hand knows a
codec in this size and with these colours is found out later, in `mmstream.to_device`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmstream.decoding.image.geometry import View
from mmstream.decoding.image.plan import is_steep
from mmstream.decoding.video.file import VideoFile
from mmstream.decoding.video.frames import runs

__all__ = ["refusal"]

_CODECS = frozenset(
    (
        *("h264", "hevc", "mpeg4"),
        *("av1", "libaom-av1", "libdav1d", "vp8", "libvpx", "vp9", "libvpx-vp9"),
    )
)
"""The codecs that torchcodec gives to NVDEC, by the names of FFmpeg's decoders."""


def refusal(file: VideoFile, packets: Sequence[int], view: View) -> str:
    """Say why the CPU decodes a video, in a few words.

    Args:
        file: What is known of it.
        packets: The packets of the chosen frames.
        view: How each frame is made of a picture.

    Returns:
        The reason, one of few. "": a GPU may decode it.
    """
    timeline = file.timeline
    if file.codec not in _CODECS:
        return f"codec {file.codec}"
    if file.turn.is_flipped:
        return "frames that are mirrored"  # torchcodec turns them, and does not mirror them
    if timeline.is_counted:
        return "AVI with B-frames"
    parts = runs(timeline, sorted(set(packets)))
    if not all(timeline.is_shown[start:end].all() for start, end, _ in parts):
        return "frames that are not shown"
    if is_steep(view):
        return "more than 32 times smaller than its frames"
    return ""
