"""The timeline from an MP4's tables is the one that all of its packets give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mmstream as mm
from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.open import media_stream, open_media
from mmstream.decoding.video.file import discard_others
from mmstream.decoding.video.frames import runs
from mmstream.decoding.video.mp4_timeline import StoredPackets, mp4_timeline
from mmstream.decoding.video.timeline import demuxed_timeline
from mmstream.lazy_bytes import LEAST_FETCH_BYTES, LazyBytes
from tests.helpers.media_files import video_file

FILES = {
    "plain": {},
    "index first": {"moov_first": True},
    "B-frames": {"b_frames": 2},
    "open groups": {"b_frames": 3, "open_gop": True, "codec": "libx265"},
    "mov": {"kind": "mov", "b_frames": 2},
    "one frame": {"num_frames": 1},
    "two frames": {"num_frames": 2, "b_frames": 1},
    "variable rate": {"times_s": (0.0, 0.1, 0.15, 0.9, 1.0, 3.0), "b_frames": 2},
    "late start": {"start_s": 3.0, "b_frames": 2},
    "sound": {"audio_codec": "aac", "b_frames": 2},
    "rotated": {"rotation": 90},
    "MPEG-4": {"codec": "mpeg4"},
}
"""How `video_file` makes files whose tables are enough."""


@pytest.mark.parametrize("name", FILES)
def test_tables_say_what_all_packets_say(name: str) -> None:
    data = video_file(**FILES[name])  # type: ignore[arg-type]
    with open_media(data, Deadline()) as container:
        stream = media_stream(container, "video")
        known = mp4_timeline(data, container, stream)
        assert known is not None
        timeline, stored = known
        discard_others(container, stream)
        expected = demuxed_timeline(container, stream, Deadline(), 1000)
    for column in ("pts", "dts", "is_key", "is_shown"):
        np.testing.assert_array_equal(getattr(timeline, column), getattr(expected, column))
    assert (timeline.time_base, timeline.last_duration) == (
        expected.time_base,
        expected.last_duration,
    )
    with open_media(data, Deadline()) as container:
        demuxed = [packet for packet in container.demux(video=0) if packet.size]
        packets = list(StoredPackets(data, stored, timeline).packets(0, len(demuxed)))
        assert [number for number, _ in packets] == list(range(len(demuxed)))
        for (_, packet), other in zip(packets, demuxed, strict=True):
            assert bytes(packet) == bytes(other)
            assert (packet.pts, packet.dts) == (other.pts, other.dts)
            assert packet.is_keyframe == other.is_keyframe


@pytest.mark.parametrize("kind", ["mkv", "webm", "ts", "fragmented mp4"])
def test_other_files_have_no_tables(kind: str) -> None:
    data = video_file(kind)
    with open_media(data, Deadline()) as container:
        assert mp4_timeline(data, container, media_stream(container, "video")) is None


class Reads:
    """Notes which bytes of a file are read."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.ranges: list[tuple[int, int]] = []

    def __call__(self, ranges: Any) -> list[bytes]:
        self.ranges += ranges
        return [self.content[start:stop] for start, stop in ranges]

    @property
    def num_bytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@pytest.mark.parametrize("moov_first", [True, False])
def test_few_frames_take_the_bytes_of_their_groups(moov_first: bool) -> None:
    content = video_file(
        "mp4",
        num_frames=240,
        fps=2,
        gop=8,
        b_frames=2,
        width=128,
        height=128,
        pixel_format="yuv444p",
        moov_first=moov_first,
        audio_codec="aac",
    )
    reads = Reads(content)
    value = LazyBytes(len(content), reads)
    decoder = mm.VideoDecoder(num_frames=4, span=(40.0, 100.0))
    plan = decoder.plan(value)
    assert reads.num_bytes <= 4 * LEAST_FETCH_BYTES < len(content) // 5

    reads.ranges.clear()
    decoded = decoder.decode(value, plan)
    whole = decoder.decode(content)
    np.testing.assert_array_equal(decoded.pixels, whole.pixels)
    np.testing.assert_array_equal(decoded.times_s, whole.times_s)
    stored = plan.file.packet_bytes
    needed = [stored.of_run(*run[:2]) for run in runs(plan.file.timeline, sorted(plan.packets))]
    assert reads.ranges == needed  # opening it again has read nothing
