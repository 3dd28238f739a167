"""An MP4 that states more than its bytes can hold is refused before FFmpeg believes it."""

from __future__ import annotations

import io

import av
import pytest

from mmstream.errors import DecodeError
from mmstream.media import mp4 as mp4_reader
from mmstream.media.ffmpeg import open_media
from mmstream.media.limits import Deadline
from mmstream.media.mp4 import read_mp4
from tests.helpers.media_bombs import BOMBS, box, mp4
from tests.helpers.media_files import video_file


def num_index_entries(data: bytes) -> int:
    """Return how many entries FFmpeg makes of a file."""
    with av.open(io.BytesIO(data), format="mov") as container:
        return sum(len(stream.index_entries) for stream in container.streams)


def refused(data: bytes) -> bool:
    try:
        read_mp4(data)
    except DecodeError:
        return True
    return False


@pytest.mark.parametrize(
    "data",
    [
        video_file(audio_codec="aac"),
        video_file(num_frames=20, b_frames=2, moov_first=True),
        video_file("mov", audio_codec="pcm_s16le"),
        video_file("fragmented mp4", num_frames=30, audio_codec="aac"),
        mp4(1000),
        mp4(1000, edits=[(1000, 0, 65536)] * 7),
        mp4(1000, edits=[(500, -1, 65536), (500, 500, 65536)]),
    ],
    ids=["aac", "faststart", "pcm", "fragments", "one size", "seven edits", "an empty edit"],
)
def test_no_fewer_samples_are_counted_than_ffmpeg_makes_entries(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not refused(data)
    num_entries = num_index_entries(data)
    monkeypatch.setattr(mp4_reader, "MAX_SAMPLES", num_entries - 1)
    assert refused(data)
    # Nor are there many more: long films and plain sound are not refused.
    monkeypatch.setattr(mp4_reader, "MAX_SAMPLES", 4 * num_entries + 60)
    assert not refused(data)


@pytest.mark.parametrize(
    ("bomb", "reason"),
    [
        ("80 million frames", "its tables state 80,000,000 samples, more than 5,000,000"),
        ("80 million frames in a fragment", "its tables state 80,000,000 samples"),
        ("a million frames in each of 100 fragments", "its tables state 100,000,000 samples"),
        ("10,000 edits of 100,000 frames", "its tables state 1,000,000,000 samples"),
        ("compressed header", "its header is compressed"),
    ],
)
def test_a_file_of_a_few_bytes_cannot_take_gigabytes(bomb: str, reason: str) -> None:
    with (
        pytest.raises(DecodeError, match=reason),
        open_media(BOMBS[bomb](), Deadline.start(100)),
    ):
        raise AssertionError("it was opened")


@pytest.mark.parametrize("name", [b"udta", b"meta", b"hoov", b"free", b"wave"])
def test_tables_are_found_wherever_ffmpeg_looks(name: bytes) -> None:
    bomb = mp4(80_000_000)
    moov = bomb[bomb.index(b"moov") - 4 :]
    # A box that says that it is larger than the box around it ends with that one.
    lying = b"\x7f\xff\xff\xff" + moov[4:]
    boxes = (box(b"moov", box(name, moov)), box(name, moov), box(name, lying))
    assert [refused(box(b"ftyp", b"isom\0\0\2\0") + each) for each in boxes] == [True] * 3


def test_boxes_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mp4_reader, "MAX_BOXES", 100)
    read_mp4(box(b"ftyp") + box(b"free") * 90)
    with pytest.raises(DecodeError, match="has more than 100 boxes"):
        read_mp4(box(b"ftyp") + box(b"free") * 100)
    read_mp4(BOMBS["boxes in boxes"]()[:100_000])


@pytest.mark.parametrize("length", range(0, 700, 50))
def test_a_cut_file_is_counted_as_far_as_it_goes(length: int) -> None:
    read_mp4(mp4(10)[:length])
