"""A file that was cut is a bad one, where its container tells that bytes are missing."""

from __future__ import annotations

import pytest

from mmstream.errors import DecodeError
from mmstream.media.ffmpeg import open_media
from mmstream.media.limits import Deadline
from tests.helpers.media_files import VIDEO_KINDS, video_file

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
