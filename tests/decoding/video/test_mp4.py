"""The header of an MP4 tells all about its frames, or the file is read whole."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest

import mmstream as mm
from mmstream.media.facts import media_facts
from mmstream.media.limits import Deadline
from tests.helpers.media_files import frame_number, video_file


@pytest.mark.slow
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
    sizes: list[int] = []

    def read(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        sizes.extend(stop - start for start, stop in ranges)
        return [content[start:stop] for start, stop in ranges]

    file = mm.LazyBytes(len(content), read)
    decoder = mm.VideoDecoder(num_frames=4, span=(40.0, 100.0))
    plan = decoder.plan(file)
    assert sum(sizes) < len(content) // 5

    sizes.clear()
    decoded = decoder.decode(file, plan)
    whole = decoder.decode(content)
    np.testing.assert_array_equal(decoded.pixels, whole.pixels)
    np.testing.assert_array_equal(decoded.times_s, whole.times_s)
    assert sum(sizes) < len(content) // 10  # at most 4 of 30 groups


def edited(*edit: int) -> bytes:
    """Return a video of 12 frames with another edit list: its length, its start and its rate."""
    data = bytearray(video_file("mp4"))
    struct.pack_into(">Iihh", data, data.index(b"elst") + 12, *edit, 0)
    return bytes(data)


@pytest.mark.parametrize(
    ("edit", "num_frames"),
    [((500, 0, 1), 5), ((1000, 2048, 1), 10), ((1000, 0, 2), 10)],
    ids=["cut end", "cut start", "half speed"],
)
def test_frames_that_an_edit_list_leaves_out_are_those_that_ffmpeg_leaves_out(
    edit: tuple[int, int, int], num_frames: int
) -> None:
    assert len(mm.VideoDecoder()(edited(*edit))) == num_frames
    with pytest.raises(mm.errors.DecodeError, match="has no frame in it"):
        mm.VideoDecoder()(edited(0, -1, 1))


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(
    "edit",
    [(500, 0, 1), (300, 2560, 1), (1000, 2048, 1), (700, 5120, 1), (1000, 0, 2)],
    ids=["cut end", "both", "cut start", "longer cut start", "half speed"],
)
def test_facts_count_the_frames_that_an_edit_list_leaves(
    edit: tuple[int, int, int], decode: bool
) -> None:
    data = edited(*edit)
    facts = media_facts(data, "video", Deadline.start(60), decode=decode)
    assert facts["num_frames"] == len(mm.VideoDecoder()(data)) < 12


def test_a_cut_file_is_a_bad_one() -> None:
    for moov_first in (True, False):
        data = video_file("mp4", moov_first=moov_first)
        with pytest.raises(
            mm.errors.DecodeError, match="truncated: 100 bytes are missing at least"
        ):
            mm.VideoDecoder().plan(data[:-100])


@pytest.mark.parametrize("name", [b"stsz", b"stts", b"stsc", b"stco", b"stss", b"stsd", b"mdhd"])
def test_damaged_tables_give_no_wrong_frames(name: bytes) -> None:
    whole = video_file("mp4", b_frames=2)
    for position in range(4, 24):
        data = bytearray(whole)
        data[data.index(name) + position] ^= 0xFF
        try:
            pixels = mm.VideoDecoder(max_decoded_frames=100)(bytes(data))
        except mm.errors.DecodeError:
            continue
        numbers = [frame_number(frame) for frame in pixels]
        assert numbers == sorted(numbers) or name in (b"stts", b"stss")


def test_a_track_header_that_is_cut_states_no_rotation() -> None:
    data = bytearray(video_file("mp4"))
    start = data.index(b"tkhd") - 4
    (size,) = struct.unpack_from(">I", data, start)
    struct.pack_into(">I", data, start, 40)
    struct.pack_into(">I4s", data, start + 40, size - 40, b"free")
    assert mm.VideoDecoder()(bytes(data)).shape == (12, 48, 64, 3)


def test_tables_of_too_many_frames_take_no_memory() -> None:
    data = bytearray(video_file("mp4"))
    struct.pack_into(">II", data, data.index(b"stsz") + 8, 1, 2**32 - 1)
    with pytest.raises(mm.errors.DecodeError, match="its tables state"):
        mm.VideoDecoder().plan(bytes(data))
