"""Videos and sounds that are read by ranges give what whole files give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import mmstream as mm
from tests.helpers.media_files import AUDIO_KINDS, VIDEO_KINDS, audio_file, video_file


def lazy(content: bytes) -> mm.LazyBytes:
    """Return a file as it lies in a tar: other files are before and behind it."""
    sample = b"before" * 100 + content + b"behind" * 100

    def read_ranges(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return [sample[start:stop] for start, stop in ranges]

    return mm.LazyBytes(len(sample), read_ranges, sample[:1000]).within(600, 600 + len(content))


@pytest.mark.parametrize("kind", VIDEO_KINDS)
def test_videos_read_by_ranges_are_those_of_whole_files(kind: str) -> None:
    content = video_file(kind, num_frames=30, audio_codec="libopus" if kind == "webm" else None)
    for decoder in (
        mm.VideoDecoder(),
        mm.VideoDecoder(indices=(3, 20)),
        mm.VideoDecoder(fps=2, span=(0.5, 2.1)),
    ):
        whole, ranged = decoder.decode(content), decoder.decode(lazy(content))
        np.testing.assert_array_equal(ranged.pixels, whole.pixels)
        np.testing.assert_array_equal(ranged.times_s, whole.times_s)


@pytest.mark.parametrize("kind", AUDIO_KINDS)
def test_sounds_read_by_ranges_are_those_of_whole_files(kind: str) -> None:
    content = audio_file(kind)
    for decoder in (mm.AudioDecoder(), mm.AudioDecoder(span=(0.2, 0.7))):
        np.testing.assert_array_equal(decoder(lazy(content)), decoder(content))


@pytest.mark.parametrize("kind", ["mp4", "mkv"])
def test_storage_that_fails_is_no_fault_of_a_video(kind: str) -> None:
    content = video_file(kind, num_frames=30)

    def read_ranges(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        raise mm.errors.StorageError("the server is away")

    # The first bytes are there, the others are not.
    for num_first in (0, 1000, len(content) // 2, len(content) - 1):
        with pytest.raises(mm.errors.StorageError, match="away"):
            mm.VideoDecoder()(mm.LazyBytes(len(content), read_ranges, content[:num_first]))


class CountedBytes:
    """A file that counts the bytes that are read of it."""

    def __init__(self, content: bytes):
        self.content, self.num_bytes = content, 0

    def __len__(self) -> int:
        return len(self.content)

    def read(self, start: int, stop: int) -> bytes:
        self.num_bytes += stop - start
        return self.content[start:stop]

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        pass


@pytest.mark.parametrize("kind", ["mkv", "ts"])
def test_a_late_frame_is_decoded_without_what_is_before_its_key(kind: str) -> None:
    content = video_file(kind, num_frames=60, width=512, height=384, b_frames=2)
    if kind == "ts":  # FFmpeg opens it by its first and last 250 KB: put empty packets between
        middle = len(content) // 2 // 188 * 188
        empty = b"\x47\x1f\xff\x10" + b"\xff" * 184
        content = content[:middle] + empty * 5000 + content[middle:]
    file = CountedBytes(content)
    decoder = mm.VideoDecoder(indices=(56,))
    plan = decoder.plan(file)
    file.num_bytes = 0
    frames = decoder.decode(file, plan).pixels
    assert file.num_bytes < len(content) / 2
    np.testing.assert_array_equal(frames[0], mm.VideoDecoder()(content)[56])
