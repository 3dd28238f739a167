"""A stranger's file is opened by FFmpeg without harm, and errors of reading are not lost."""

from __future__ import annotations

import errno
import io
from fractions import Fraction
from types import SimpleNamespace
from unittest.mock import Mock, patch

import av
import numpy as np
import pytest

import mmstream as mm
from mmstream.errors import DecodeError, TimeoutError
from mmstream.media import mp4 as mp4_reader
from mmstream.media.ffmpeg import media_stream, open_media
from mmstream.media.limits import Deadline
from mmstream.media.mp4 import read_mp4
from mmstream.media.timeline import Timeline, demuxed_timeline, without_undecodable_start
from mmstream.media.types import container_format
from tests.helpers.media_bombs import BOMBS, box, mp4
from tests.helpers.media_files import OLD_VIDEO_KINDS, VIDEO_KINDS, audio_file, video_file

NO_LIMIT = Deadline()


class Ranges:
    """A file that is read by ranges, and notes them. `fail` is raised from byte `fails_from` on."""

    def __init__(self, data: bytes, fail: BaseException | None = None, fails_from: int = 0) -> None:
        self.data, self.fail, self.fails_from = data, fail, fails_from
        self.ranges: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, item: slice) -> bytes:
        start, stop, _ = item.indices(len(self))
        if start < stop:
            self.ranges.append((start, stop))
        if self.fail is not None and stop > self.fails_from:
            raise self.fail
        return self.data[start:stop]


def num_frames(data: bytes | Ranges, deadline: Deadline = NO_LIMIT) -> int:
    with open_media(data, deadline) as container:
        return sum(1 for _ in container.decode(media_stream(container, "video")))


@pytest.mark.parametrize("kind", VIDEO_KINDS | OLD_VIDEO_KINDS)
def test_a_video_of_each_container_opens_from_bytes_and_from_ranges(kind: str) -> None:
    data = video_file(kind)
    assert num_frames(data) == 12
    ranges = Ranges(data)
    assert num_frames(ranges) == 12
    assert all(0 <= start < stop <= len(data) for start, stop in ranges.ranges)


@pytest.mark.parametrize(
    ("data", "format"),
    [
        (b"RF64....WAVE", "wav"),
        (b"FORM....AIFF", "aiff"),
        (b"ID3\x04\0\0\0\0\0\x05.....fLaC", "flac"),
        (b"ID3\x04\0\0\0\0\0\x05.....\xff\xfb\x90", "mp3"),
        (b"\xff\xfb\x90\0", "mp3"),
        (b"\xff\xf1\x50\x80", "aac"),
        (b"\0\0\0\0G" + bytes(191) + b"G", "mpegts"),
        (b"#EXTM3U\n", None),
        (b"ffconcat version 1.0\n", None),
        (b"<?xml version='1.0'?><MPD>", None),
        (b"", None),
    ],
    ids=lambda value: None if isinstance(value, bytes) else str(value),
)
def test_the_first_bytes_tell_the_format(data: bytes, format: str | None) -> None:
    assert container_format(data) == format


def test_a_damaged_file_is_a_bad_one_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DecodeError, match="truncated: "):
        num_frames(video_file()[:60])
    garbled = bytearray(video_file())
    garbled[200:2000] = bytes(1800)
    with pytest.raises(DecodeError):
        num_frames(bytes(garbled))
    assert capfd.readouterr() == ("", "")


def test_a_signal_while_reading_is_not_swallowed() -> None:
    data = video_file()
    with pytest.raises(KeyboardInterrupt):
        num_frames(Ranges(data, KeyboardInterrupt(), fails_from=len(data) // 2))


def test_an_error_of_the_body_is_raised_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), open_media(audio_file(), NO_LIMIT):
        raise ZeroDivisionError
    with pytest.raises(DecodeError, match="damaged wav: "), open_media(audio_file(), NO_LIMIT):
        raise av.InvalidDataError(errno.EINVAL, "invalid", "file")


def test_reading_ends_at_the_deadline() -> None:
    past = Deadline(2.0, -1.0)
    with pytest.raises(TimeoutError, match="takes longer than timeout_s=2"):
        num_frames(video_file(), past)
    assert not Deadline.start(None).is_over


def test_a_deadline_that_passes_in_the_body_ends_it() -> None:
    """Work of this thread counts, and waiting for storage does not."""
    clock = Mock(return_value=0.0)
    with patch("mmstream.media.limits.time.thread_time", clock):
        deadline = Deadline.start(100)
        with pytest.raises(TimeoutError), open_media(audio_file(), deadline):
            clock.return_value = 101.0


def test_a_frame_larger_than_the_limit_is_not_decoded() -> None:
    with open_media(video_file(), NO_LIMIT, max_pixels=64 * 48) as container:
        assert len(list(container.decode(video=0))) == 12
    large = video_file(width=640, height=480)
    with pytest.raises(DecodeError), open_media(large, NO_LIMIT, max_pixels=64 * 48) as container:
        list(container.decode(video=0))


def test_a_decoder_uses_the_calling_thread_only() -> None:
    with open_media(video_file(), NO_LIMIT) as container:
        assert media_stream(container, "video").codec_context.thread_count == 1


# -- files that were cut ---------------------------------------------------------------------------

STREAMED = b"\x01\xff\xff\xff\xff\xff\xff\xff"
"""The size of a segment of Matroska that is not known."""


def opened(data: bytes) -> bool:
    with open_media(data, Deadline.start(100)):
        return True


@pytest.mark.parametrize("kind", [kind for kind in VIDEO_KINDS if kind != "ts"])
def test_a_cut_video_is_refused(kind: str) -> None:
    data = video_file(kind, moov_first=kind in ("mp4", "mov"))
    assert opened(data)
    for length in (len(data) // 2, len(data) * 9 // 10):
        num_missing = len(data) - length
        with pytest.raises(DecodeError, match="truncated: ") as error:
            opened(data[:length])
        stated = int(str(error.value).split()[1].replace(",", ""))
        assert 0 < stated <= num_missing


@pytest.mark.parametrize("kind", ["mp4", "mkv", "avi"])
def test_what_follows_the_end_does_no_harm(kind: str) -> None:
    assert opened(video_file(kind) + bytes(100))


def test_a_file_that_was_streamed_states_no_end() -> None:
    data = video_file("mkv")
    start = data.index(b"\x18\x53\x80\x67") + 4
    assert opened(data[:start] + STREAMED + data[start + 8 : -200])
    data = video_file("avi")
    assert opened(data[:4] + b"\xff\xff\xff\xff" + data[8:-100])


# -- headers of MP4, and the times of frames -------------------------------------------------------


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


# -- timelines -------------------------------------------------------------------------------------


def timeline(pts: list[int], keys: list[int], shown: list[bool] | None = None) -> Timeline:
    is_key = np.zeros(len(pts), bool)
    is_key[keys] = True
    is_shown = np.array(shown or [True] * len(pts))
    return Timeline(np.array(pts), np.arange(len(pts)), is_key, is_shown, Fraction(1, 10), 1)


def test_frames_in_front_of_the_first_key_are_not_counted() -> None:
    whole = without_undecodable_start(timeline([5, 8, 6, 7, 9], [1]))
    assert whole.display_order.tolist() == [1, 4]
    np.testing.assert_allclose(whole.times_s, [0, 0.1])
    assert whole.duration_s == pytest.approx(0.2)


@pytest.mark.parametrize("keys", [[], [1]])
def test_a_video_without_a_frame_that_is_shown_is_a_bad_one(keys: list[int]) -> None:
    with pytest.raises(mm.errors.DecodeError, match="has no frame"):
        without_undecodable_start(timeline([0, 1, 2], keys, [True, False, False]))


def test_files_that_were_joined_byte_by_byte_are_refused() -> None:
    """Their times start over. By time, frames of one part would stand between those of another."""
    part = video_file("ts", num_frames=20, b_frames=2)
    assert len(mm.VideoDecoder()(part)) == 20
    with pytest.raises(mm.errors.DecodeError, match=r"jump by -1\.90 s at frame 20,"):
        mm.VideoDecoder()(part + part)


def demuxed(pts: list[int | None], keys: list[int]) -> Timeline:
    """Read the timeline of packets with these times, as PyAV gives them."""
    packets = [
        SimpleNamespace(
            size=1, pts=at, dts=None, is_keyframe=number in keys, is_discard=False, duration=1
        )
        for number, at in enumerate(pts)
    ]
    codec = SimpleNamespace(name="h264", has_b_frames=True)
    stream = SimpleNamespace(codec_context=codec, time_base=Fraction(1, 10))
    return demuxed_timeline(packets, stream, Deadline(), 100)


def test_frames_before_the_first_key_are_left_out_where_a_cut_has_removed_their_times() -> None:
    # ffmpeg -ss -c copy writes such Matroska files from videos with open groups of pictures.
    cut = demuxed([0, None, None, None, 4, 2, 1, 3], [0])
    assert cut.display_order.tolist() == [0, 6, 5, 7, 4]
    np.testing.assert_allclose(cut.times_s, [0, 0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("pts", [[None, 0, 1], [0, 1, None], [0, 4, None, 2]])
def test_packets_without_times_are_refused_elsewhere(pts: list[int | None]) -> None:
    with pytest.raises(mm.errors.DecodeError, match="its packets have no times"):
        demuxed(pts, [0])
