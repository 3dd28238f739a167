"""The makers of media files give what they say: other tests rely on it."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import pytest

from tests.helpers.media_files import (
    AUDIO_KINDS,
    VIDEO_KINDS,
    audio_file,
    frame_number,
    frame_pixels,
    video_file,
)


def shown(data: bytes) -> list[tuple[float, int]]:
    """Return the time of each frame, in milliseconds, and the number that it shows."""
    with av.open(io.BytesIO(data)) as container:
        return [
            (round(1000 * (frame.time or 0)), frame_number(frame.to_ndarray(format="rgb24")))
            for frame in container.decode(video=0)
        ]


@pytest.mark.parametrize("size", [(48, 64), (16, 32), (361, 127)])
def test_a_picture_shows_its_number(size: tuple[int, int]) -> None:
    for number in (0, 1, 255, 256, 40_000):
        assert frame_number(frame_pixels(number, *size)) == number


@pytest.mark.parametrize("kind", VIDEO_KINDS)
def test_frames_show_their_numbers_in_every_container(kind: str) -> None:
    frames = shown(video_file(kind))
    assert [number for _, number in frames] == list(range(12))
    first = frames[0][0]
    assert [time - first for time, _ in frames] == pytest.approx(range(0, 1200, 100), abs=1)


@pytest.mark.parametrize("kind", ["mp4", "mov", "mkv", "ts"])
def test_frames_have_any_times_and_any_order_of_coding(kind: str) -> None:
    times = (0.0, 0.1, 0.15, 0.9, 1.0, 1.7, 1.75, 2.5)
    data = video_file(kind, times_s=times, b_frames=2, open_gop=True, gop=4)
    frames = shown(data)
    assert [number for _, number in frames] == list(range(8))
    first = frames[0][0]
    assert [(time - first) / 1000 for time, _ in frames] == pytest.approx(times, abs=0.002)


def test_a_file_has_the_tracks_that_are_asked_for() -> None:
    assert video_file(moov_first=True).index(b"moov") < 64 < video_file().index(b"moov")
    with av.open(io.BytesIO(video_file(audio_codec="aac", pixel_aspect=(4, 3)))) as container:
        assert len(container.streams.audio) == 1
        assert container.streams.video[0].sample_aspect_ratio == Fraction(4, 3)
    for kind in ("mp3", "m4a", "flac"):
        with av.open(io.BytesIO(audio_file(kind, cover=True))) as container:
            assert {stream.type for stream in container.streams} == {"audio", "video"}


@pytest.mark.parametrize("kind", AUDIO_KINDS)
def test_audio_of_every_kind_has_its_length(kind: str) -> None:
    with av.open(io.BytesIO(audio_file(kind, seconds=0.5, channels=2))) as container:
        frames = list(container.decode(audio=0))
    seconds = sum(frame.samples for frame in frames) / frames[0].sample_rate
    assert seconds == pytest.approx(0.5, abs=0.15)
