"""A stranger's file is opened by FFmpeg without harm, and errors of reading are not lost."""

from __future__ import annotations

import errno
import io
from unittest.mock import Mock, patch

import av
import numpy as np
import pytest
import soundfile

from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.open import MediaSource, media_stream, open_media
from mmstream.errors import DecodeError, StorageError, TimeoutError
from mmstream.media_types import container_format

NO_LIMIT = Deadline()


def wav(num_samples: int = 8000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(num_samples), 8000, format="WAV")
    return file.getvalue()


CODECS = {"flv": "flv", "vob": "mpeg2video"}
"""Of containers that do not take MPEG-4."""


def video(format: str = "mp4", num_frames: int = 10, size: tuple[int, int] = (64, 48)) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=format) as out:
        stream = out.add_stream(CODECS.get(format, "mpeg4"), rate=25)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(num_frames):
            pixels = np.full((*size[::-1], 3), number * 20, np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode())
    return file.getvalue()


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


@pytest.mark.parametrize("format", ["mp4", "mov", "matroska", "avi", "mpegts", "flv", "asf", "vob"])
def test_a_video_of_each_container_opens_from_bytes_and_from_ranges(format: str) -> None:
    data = video(format)
    assert num_frames(data) == 10
    ranges = Ranges(data)
    assert num_frames(ranges) == 10
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


def test_a_file_without_the_kind_is_a_bad_one() -> None:
    with (
        pytest.raises(DecodeError, match="has no audio in it"),
        open_media(video(), NO_LIMIT) as container,
    ):
        media_stream(container, "audio")


def test_a_damaged_file_is_a_bad_one_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DecodeError, match="truncated: "):
        num_frames(video()[:60])
    garbled = bytearray(video())
    garbled[200:2000] = bytes(1800)
    with pytest.raises(DecodeError):
        num_frames(bytes(garbled))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("share", [0, 0.3, 0.9])
@pytest.mark.parametrize("format", ["mp4", "matroska", "mpegts"])
def test_an_error_of_storage_is_raised_and_never_a_short_video(
    format: str, share: float, capfd: pytest.CaptureFixture[str]
) -> None:
    error = StorageError("the server is gone")
    data = video(format)
    with pytest.raises(StorageError) as caught:
        num_frames(Ranges(data, error, round(share * len(data))))
    assert caught.value is error
    assert capfd.readouterr() == ("", "")
    assert num_frames(data) == 10  # nothing of the error is left behind


def test_a_signal_while_reading_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        num_frames(Ranges(video(), KeyboardInterrupt(), fails_from=500))


def test_an_error_of_the_body_is_raised_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), open_media(wav(), NO_LIMIT):
        raise ZeroDivisionError
    with pytest.raises(DecodeError, match="damaged wav: "), open_media(wav(), NO_LIMIT):
        raise av.InvalidDataError(errno.EINVAL, "invalid", "file")


def test_reading_ends_at_the_deadline() -> None:
    past = Deadline(2.0, -1.0)
    with pytest.raises(TimeoutError, match="takes longer than timeout_s=2"):
        num_frames(video(), past)
    source = MediaSource(wav(), past)
    assert source.read(10) == b""
    with pytest.raises(TimeoutError):
        source.check()
    assert not Deadline.start(None).is_over


def test_a_deadline_that_passes_in_the_body_ends_it() -> None:
    """Work of this thread counts, and waiting for storage does not."""
    clock = Mock(return_value=0.0)
    with patch("mmstream.decoding.ffmpeg.deadline.time.thread_time", clock):
        deadline = Deadline.start(100)
        with pytest.raises(TimeoutError), open_media(wav(), deadline):
            clock.return_value = 101.0


def test_a_read_is_never_longer_than_the_buffer_of_ffmpeg() -> None:
    class Generous(Ranges):
        def read(self, start: int, stop: int) -> bytes:
            return self.data[start : stop + 100]

    source = MediaSource(Generous(bytes(1000)), NO_LIMIT)
    assert len(source.read(10)) == 10
    assert source.tell() == 10


def test_a_source_moves_as_a_file_does() -> None:
    data = bytes(range(100))
    source, file = MediaSource(data, NO_LIMIT), io.BytesIO(data)
    for seek, size in (((10,), 2), ((-2, io.SEEK_CUR), 1), ((-1, io.SEEK_END), -1), ((200,), 5)):
        assert source.seek(*seek) == file.seek(*seek)
        assert source.read(size) == file.read(size)
        assert source.tell() == file.tell()
    assert source.seek(-1) < 0
    assert source.tell() == 200


def test_a_frame_larger_than_the_limit_is_not_decoded() -> None:
    with open_media(video(), NO_LIMIT, max_pixels=64 * 48) as container:
        assert len(list(container.decode(video=0))) == 10
    large = video(size=(640, 480))
    with pytest.raises(DecodeError), open_media(large, NO_LIMIT, max_pixels=64 * 48) as container:
        list(container.decode(video=0))


def test_a_decoder_uses_the_calling_thread_only() -> None:
    with open_media(video(), NO_LIMIT) as container:
        assert media_stream(container, "video").codec_context.thread_count == 1
