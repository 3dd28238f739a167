"""The header of an MP4 tells all about its frames, or the file is read whole."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

import mmstream as mm
from mmstream.decoding.facts import media_facts
from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.mp4_tables import UPRIGHT
from mmstream.decoding.ffmpeg.open import media_stream, open_media
from mmstream.decoding.video.file import TablePackets, discard_others, mp4_tables
from mmstream.decoding.video.frames import runs
from mmstream.decoding.video.timeline import demuxed_timeline
from mmstream.errors import DecodeError
from mmstream.lazy_bytes import LEAST_FETCH_BYTES, LazyBytes
from tests.helpers.media_files import frame_number, video_file

VARIABLE = (0.0, 0.1, 0.15, 0.9, 1.0, 1.05, 3.0, 3.5)


FILES: dict[str, dict[str, Any]] = {
    "plain": {},
    "index first": {"moov_first": True},
    "B-frames": {"b_frames": 3, "num_frames": 30},
    "open groups": {"b_frames": 3, "open_gop": True, "codec": "libx265"},
    "mov": {"kind": "mov", "b_frames": 2},
    "one frame": {"num_frames": 1},
    "two frames": {"num_frames": 2, "b_frames": 1},
    "variable rate": {"times_s": VARIABLE, "b_frames": 2},
    "late start": {"start_s": 3.0, "b_frames": 2},
    "sound": {"audio_codec": "aac", "b_frames": 2},
    "rotated": {"rotation": 90},
    "MPEG-4": {"codec": "mpeg4"},
}
"""How `video_file` makes files whose header is enough."""


@pytest.mark.parametrize("name", FILES)
def test_the_header_says_what_all_packets_say(name: str) -> None:
    data = video_file(**FILES[name])
    (table,) = mp4_tables(data).values()
    with open_media(data, Deadline()) as container:
        stream = media_stream(container, "video")
        discard_others(container, stream)
        packets = list(container.demux(stream))
        timeline = demuxed_timeline(packets, stream, Deadline(), 1000)
    for name in ("pts", "dts", "is_key", "is_shown"):
        ours, ffmpeg = getattr(table.timeline, name), getattr(timeline, name)
        shift = ours[0] - ffmpeg[0] if name in ("pts", "dts") else 0
        np.testing.assert_array_equal(ours - shift if shift else ours, ffmpeg)
    assert table.timeline.time_base == timeline.time_base
    assert table.timeline.last_duration == timeline.last_duration
    assert table.offsets.tolist() == [packet.pos for packet in packets if packet.size]
    assert table.sizes.tolist() == [packet.size for packet in packets if packet.size]
    stored = list(TablePackets(data, table).packets(0, len(table.sizes)))
    assert [number for number, _ in stored] == list(range(len(table.sizes)))
    for (_, packet), other in zip(stored, packets, strict=False):
        assert bytes(packet) == bytes(other)


@pytest.mark.parametrize("kind", ["mkv", "webm", "ts", "fragmented mp4"])
def test_other_files_have_no_tables(kind: str) -> None:
    assert mp4_tables(video_file(kind)) == {}


class Reads:
    """Notes which bytes of a file are read."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.num_bytes = 0

    def __call__(self, ranges: Any) -> list[bytes]:
        self.num_bytes += sum(stop - start for start, stop in ranges)
        return [self.content[start:stop] for start, stop in ranges]


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

    reads.num_bytes = 0
    decoded = decoder.decode(value, plan)
    whole = decoder.decode(content)
    np.testing.assert_array_equal(decoded.pixels, whole.pixels)
    np.testing.assert_array_equal(decoded.times_s, whole.times_s)
    table = plan.file.table
    needed = np.concatenate(
        [table.sizes[first:end] for first, end, _ in runs(table.timeline, plan.packets.tolist())]
    )
    assert reads.num_bytes <= 1.2 * needed.sum() + LEAST_FETCH_BYTES


@pytest.mark.parametrize(
    "edit",
    [(0, -1, 1), (500, 0, 1), (1000, 2048, 1), (1000, 0, 2)],
    ids=["empty", "cut end", "cut start", "half speed"],
)
def test_an_edit_list_that_leaves_out_frames_is_left_to_ffmpeg(edit: tuple[int, int, int]) -> None:
    data = bytearray(video_file("mp4"))
    (table,) = mp4_tables(bytes(data)).values()
    assert table.timeline.num_frames == 12
    start = data.index(b"elst") + 12
    struct.pack_into(">Iihh", data, start, edit[0], edit[1], edit[2], 0)
    assert mp4_tables(bytes(data)) == {}


def test_facts_count_the_frames_that_an_edit_list_leaves() -> None:
    data = bytearray(video_file("mp4"))
    struct.pack_into(">Iihh", data, data.index(b"elst") + 12, 700, 5120, 1, 0)  # from 0.5 s on
    decoder = mm.VideoDecoder()
    assert len(decoder(bytes(data))) == 7
    assert media_facts(bytes(data), "video", Deadline.start(60))["num_frames"] == 7


def test_a_cut_file_is_a_bad_one() -> None:
    for moov_first in (True, False):
        data = video_file("mp4", moov_first=moov_first)
        with pytest.raises(DecodeError, match="truncated: 100 bytes are missing at least"):
            mm.VideoDecoder().plan(data[:-100])


@pytest.mark.parametrize("name", [b"stsz", b"stts", b"stsc", b"stco", b"stss", b"stsd", b"mdhd"])
def test_damaged_tables_give_no_wrong_frames(name: bytes) -> None:
    whole = video_file("mp4", b_frames=2)
    for position in range(4, 24):
        data = bytearray(whole)
        data[data.index(name) + position] ^= 0xFF
        try:
            pixels = mm.VideoDecoder(max_decoded_frames=100)(bytes(data))
        except DecodeError:
            continue
        numbers = [frame_number(frame) for frame in pixels]
        assert numbers == sorted(numbers) or name in (b"stts", b"stss")


def test_a_track_header_that_is_cut_states_no_rotation() -> None:
    data = bytearray(video_file("mp4"))
    start = data.index(b"tkhd") - 4
    (size,) = struct.unpack_from(">I", data, start)
    struct.pack_into(">I", data, start, 40)
    struct.pack_into(">I4s", data, start + 40, size - 40, b"free")
    (table,) = mp4_tables(bytes(data)).values()
    assert table.turn == UPRIGHT
    assert len(mm.VideoDecoder()(bytes(data))) == 12


def test_tables_of_too_many_frames_take_no_memory() -> None:
    data = bytearray(video_file("mp4"))
    struct.pack_into(">II", data, data.index(b"stsz") + 8, 1, 2**32 - 1)
    with pytest.raises(DecodeError, match="its tables state"):
        mp4_tables(bytes(data))
