"""Videos of other containers become MP4s of the same packets, with a table of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

import mmstream as mm
from mmstream.converting.draft import Media, MediaRef, RowError
from mmstream.converting.media import remux
from mmstream.decoding.ffmpeg.deadline import Deadline
from tests.helpers.convert_corpus import write_rows
from tests.helpers.media import load_media
from tests.helpers.media_files import video_file

B_FRAMES = {"b_frames": 2, "open_gop": True, "num_frames": 20, "fps": 30}
VARIABLE = {"times_s": (0, 0.1, 0.15, 0.5, 0.9, 1.7)}


def stored(data: bytes, **options: Any) -> Media:
    media = mm.MediaOptions(video_format="mp4", **options)
    [medium] = load_media([MediaRef("video", "a.bin", data)], None, media)
    assert isinstance(medium, Media)
    return medium


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mkv", {"audio_codec": "aac"}),
        ("mkv", B_FRAMES),
        ("mkv", VARIABLE),
        ("mkv", {"codec": "libx265"}),
        ("webm", {}),
        ("ts", {"audio_codec": "aac"}),
        ("avi", {"audio_codec": "mp3"}),
        ("fragmented mp4", {"audio_codec": "aac"}),
    ],
    ids=str,
)
def test_frames_times_and_sound_are_those_of_the_file(kind: str, settings: dict[str, Any]) -> None:
    data = video_file(kind, **settings)
    medium = stored(data)
    assert medium.extension == "mp4"
    assert medium.facts == load_media([MediaRef("video", "a.bin", data)], None)[0].facts
    decoder = mm.VideoDecoder(audio=mm.AudioDecoder(sample_rate=None))
    assert decoder.plan(data).file.table is None
    plan = decoder.plan(medium.data)
    assert plan.file.table is not None
    assert plan.shape.times_s == pytest.approx(decoder.plan(data).shape.times_s, abs=1e-6)
    assert np.array_equal(decoder(medium.data), decoder(data))
    if "audio_codec" in settings:
        assert np.array_equal(decoder.audio(medium.data), decoder.audio(data))
    assert stored(data).data == medium.data


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mp4", {}),
        ("mov", {}),
        ("webm", {"codec": "libvpx"}),
        ("mkv", {"audio_codec": "libopus"}),
    ],
    ids=["has a table", "has one too", "no codec of MP4", "the sound would begin elsewhere"],
)
def test_a_video_that_would_gain_or_keep_nothing_stays_as_it_is(
    kind: str, settings: dict[str, Any]
) -> None:
    data = video_file(kind, **settings)
    medium = stored(data)
    assert (medium.extension, medium.data) == (kind, data)


def test_a_video_with_two_tracks_of_sound_stays_as_it_is() -> None:
    target = io.BytesIO()
    with (
        av.open(io.BytesIO(video_file("mkv", audio_codec="aac"))) as source,
        av.open(target, "w", format="matroska") as out,
    ):
        video, sound = source.streams
        copies = [out.add_stream_from_template(stream) for stream in (video, sound, sound)]
        for packet in source.demux(video):
            if packet.size:
                packet.stream = copies[0]
                out.mux(packet)
    assert stored(target.getvalue()).extension == "mkv"


def test_too_little_time_is_an_error_and_not_another_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(*_: Any) -> None:
        raise mm.TimeoutError("takes too long")

    monkeypatch.setattr(remux, "_has_same_sound", late)
    with pytest.raises(mm.TimeoutError):
        remux.remuxed(video_file("mkv"), Deadline.start(60))


def test_a_damaged_video_is_rejected_as_without_it() -> None:
    data = video_file("mkv", num_frames=60)
    with pytest.raises(RowError, match=r"truncated: [0-9,]+ bytes are missing"):
        stored(data[: len(data) // 2])


def test_a_converted_video_takes_the_name_of_its_container(tmp_path: Path) -> None:
    (tmp_path / "a.mkv").write_bytes(video_file("mkv"))
    rows = write_rows(tmp_path / "rows.jsonl", [{"video": "a.mkv", "text": "a film"}])
    media = mm.MediaOptions(video_format="mp4")
    mm.convert(rows, tmp_path / "out", media=media, num_workers=0)
    dataset = mm.open_dataset(tmp_path / "out")
    assert dataset[0]["mp4"] == stored(video_file("mkv")).data
    assert media.plan()["libraries"].keys() == {"av"}
    with pytest.raises(mm.ConfigError, match="video_format needs the headers of files"):
        mm.MediaOptions(video_format="mp4", check="none")
    with pytest.raises(mm.ConfigError, match="video_format='mkv': must be one of mp4"):
        mm.MediaOptions(video_format="mkv")  # type: ignore[arg-type]
