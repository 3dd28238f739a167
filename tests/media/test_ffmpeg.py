"""A stranger's file is opened by FFmpeg without harm, and errors of reading are not lost."""

from __future__ import annotations

import errno
from unittest.mock import Mock, patch

import av
import pytest

from mmstream.errors import DecodeError, StorageError, TimeoutError
from mmstream.media.ffmpeg import media_stream, open_media
from mmstream.media.limits import Deadline
from mmstream.media.types import container_format
from tests.helpers.media_files import OLD_VIDEO_KINDS, VIDEO_KINDS, audio_file, video_file

NO_LIMIT = Deadline()


class Ranges:
    """A file that is read by ranges, and notes them. `fail` is raised from byte `fails_from` on."""

    def __init__(self, data: bytes, fail: BaseException | None = None, fails_from: int = 0) -> None:
        self.data, self.fail, self.fails_from = data, fail, fails_from
        self.ranges: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.data)

    def read(self, start: int, stop: int) -> bytes:
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


def test_an_unknown_file_is_a_bad_one() -> None:
    with pytest.raises(DecodeError, match="first bytes are not those of a known"):
        num_frames(b"#EXTM3U\nhttp://127.0.0.1/secret\n")


def test_a_damaged_file_is_a_bad_one_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DecodeError, match="truncated: "):
        num_frames(video_file()[:60])
    garbled = bytearray(video_file())
    garbled[200:2000] = bytes(1800)
    with pytest.raises(DecodeError):
        num_frames(bytes(garbled))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("share", [0, 0.3, 0.9])
@pytest.mark.parametrize("kind", ["mp4", "mkv", "ts"])
def test_an_error_of_storage_is_raised_and_never_a_short_video(
    kind: str, share: float, capfd: pytest.CaptureFixture[str]
) -> None:
    error = StorageError("the server is gone")
    data = video_file(kind)
    with pytest.raises(StorageError) as caught:
        num_frames(Ranges(data, error, round(share * len(data))))
    assert caught.value is error
    assert capfd.readouterr() == ("", "")
    assert num_frames(data) == 12  # nothing of the error is left behind


def test_a_signal_while_reading_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        num_frames(Ranges(video_file(), KeyboardInterrupt(), fails_from=500))


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
