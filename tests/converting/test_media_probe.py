"""Facts about audio and video, and files of strangers that must do no more than be rejected."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

import mmstream as mm
from mmstream.converting.draft import Media, MediaRef, RowError
from mmstream.converting.media import load, remux
from mmstream.media.limits import Deadline
from tests.helpers.convert_corpus import rejects, run, write_files, write_rows
from tests.helpers.corpora import jpeg
from tests.helpers.media import load_media
from tests.helpers.media_bombs import BOMBS
from tests.helpers.media_files import AUDIO_KINDS, VIDEO_KINDS, audio_file, video_file


def store(kind, data, **options):
    [medium] = load_media([MediaRef(kind, "a.bin", data)], None, mm.MediaOptions(**options))
    return medium


def wav(seconds=0.5, rate=8000, channels=1):
    return audio_file("wav", seconds=seconds, sample_rate=rate, channels=channels)


def test_a_wav_states_its_duration_and_rate():
    medium = store("audio", wav(0.5, 8000, 2))
    assert medium.facts == {
        "duration_s": 0.5,
        "sample_rate": 8000,
        "num_channels": 2,
        "codec": "pcm",
    }
    assert store("audio", wav(), check="none").facts == {}
    decoded = store("audio", wav(0.5), check="full").facts
    assert (decoded["duration_s"], decoded["codec"]) == (0.5, "pcm")


def test_a_wav_that_was_streamed_counts_what_is_there():
    data = wav(0.5)
    sizeless = data[:40] + b"\xff\xff\xff\xff" + data[44:]
    assert store("audio", sizeless).facts["duration_s"] == 0.5


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_a_rotated_video_has_the_size_that_is_shown(rotation):
    facts = store("video", video_file(rotation=rotation)).facts
    size = (64, 48) if rotation == 180 else (48, 64)
    assert (facts["rotation"], facts["width"], facts["height"]) == (rotation, *size)


@pytest.mark.parametrize(
    ("kind", "data"), [("audio", wav(0.5)), ("video", video_file(num_frames=5))], ids=str
)
def test_short_and_long_files_are_rejects(kind, data):
    assert store(kind, data, min_duration_s=0.5, max_duration_s=0.5).data == data
    for limit, value in (("min_duration_s", 0.6), ("max_duration_s", 0.4)):
        with pytest.raises(RowError, match=f"0.5 s; {limit} is {value}"):
            store(kind, data, **{limit: value})


SOUND_IN_MP4 = audio_file("m4a").replace(b"ftypM4A ", b"ftypisom")


@pytest.mark.parametrize(
    ("kind", "data", "reason"),
    [
        ("video", video_file()[: len(video_file()) // 2], "truncated"),
        ("video", b"\0\0\0\x18ftypisom\0\0\2\0isommp42" + bytes(100), "damaged mp4"),
        ("video", SOUND_IN_MP4, "has no video in it"),
        ("audio", video_file(), "not an audio but a video"),
        ("audio", video_file("mkv"), "not an audio but a video"),
        ("audio", b"ID3\x04\0\0\0\0\0\0#EXTM3U\nfile:///etc/passwd\n", "damaged mp3"),
        ("audio", b"OggS\0\2" + bytes(200), "damaged ogg"),
        ("audio", BOMBS["4 GHz"](), "a sample rate of 4294967295 Hz"),
        ("video", b"\x1aE\xdf\xa3\x9fB\x86\x81\x01B\x82\x84webm" + bytes(50), "damaged mkv"),
    ],
)
def test_truncated_and_wrong_files_are_rejects(kind, data, reason):
    with pytest.raises(RowError, match=rf"^a\.bin: .*{reason}"):
        store(kind, data)


def test_decoding_a_whole_file_has_a_limit_of_time(monkeypatch):
    monkeypatch.setattr(load, "TIMEOUT_S", -1.0)
    with pytest.raises(RowError, match="takes longer than timeout_s=-1"):
        store("video", video_file(), check="full")


@pytest.mark.parametrize(
    ("data", "extension", "codec"),
    [(SOUND_IN_MP4, "m4a", "aac"), (audio_file("mka"), "mka", "opus")],
    ids=["mp4", "mka"],
)
def test_sound_alone_in_a_container_of_videos_is_audio(data, extension, codec):
    medium = store("audio", data)
    assert (medium.extension, medium.facts["codec"]) == (extension, codec)


def test_sound_alone_is_no_video_to_those_who_do_not_look_into_it():
    with pytest.raises(RowError, match="not an audio but mp4"):
        store("audio", SOUND_IN_MP4, check="none")


@pytest.mark.parametrize("kind", ["audio", "video"])
@pytest.mark.parametrize(
    "start", [b"ID3\x04\0\0\0\0\0\0", b"OggS", b"RIFF\0\0\0\0AVI ", b"\x1aE\xdf\xa3", b"fLaC"]
)
def test_a_playlist_cannot_open_other_files(tmp_path, kind, start):
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(video_file())
    for text in (
        f"ffconcat version 1.0\nfile {secret}\n",
        f"#EXTM3U\n#EXTINF:1,\nfile://{secret}\n",
    ):
        with pytest.raises(RowError):
            store(kind, start + b"\n" + text.encode())


def test_a_header_that_claims_a_giant_picture_takes_no_memory():
    data = bytearray(video_file("avi", codec="rawvideo"))
    start = data.index(b"vids") - 4
    header = data.index(b"strf", start) + 8
    struct.pack_into("<ii", data, header + 4, 1 << 20, 1 << 20)
    for check in ("header", "full"):
        with pytest.raises(RowError):
            store("video", bytes(data), check=check)


@pytest.mark.parametrize("kind", VIDEO_KINDS)
def test_a_video_of_any_kind_has_facts_and_frames_are_counted_where_no_header_does(kind):
    data = video_file(kind, audio_codec="libopus" if kind == "webm" else "libmp3lame")
    codec = {"libx264": "h264", "libvpx-vp9": "vp9"}.get(VIDEO_KINDS[kind][1], "mpeg4")
    expected = {
        "width": 64,
        "height": 48,
        "codec": codec,
        "num_frames": 12,
        "sample_rate": 48000,
        "num_channels": 1,
    }
    for check in ("header", "full"):
        medium = store("video", data, check=check)
        facts = medium.facts
        assert (medium.extension, medium.data) == (kind.removeprefix("fragmented "), data)
        assert expected.items() <= facts.items()
        # Sound that starts early, as MP3's does, makes the first frame of some files longer.
        assert facts["duration_s"] == pytest.approx(1.2, abs=0.11)
        assert facts["fps"] == pytest.approx(12 / facts["duration_s"])
    assert "sample_rate" not in store("video", video_file(kind)).facts


def test_a_variable_rate_is_that_of_the_frames():
    facts = store("video", video_file("mkv", times_s=(0, 0.1, 0.5, 0.6, 2.0))).facts
    assert facts["num_frames"] == 5
    assert facts["fps"] == pytest.approx(5 / facts["duration_s"], rel=0.01)


@pytest.mark.parametrize("kind", AUDIO_KINDS)
def test_a_sound_of_any_kind_has_facts_and_its_duration_is_that_of_its_packets(kind):
    data = audio_file(kind, seconds=1.5, sample_rate=48_000)
    extension = {"opus": "ogg", "vorbis": "ogg"}.get(kind, kind)
    codec = {"m4a": "aac", "mka": "opus", "wav": "pcm"}.get(kind, kind)
    for check, tolerance in (("header", 0.15), ("full", 0.11)):
        medium = store("audio", data, check=check)
        facts = medium.facts
        assert (medium.extension, medium.data) == (extension, data)
        assert facts["duration_s"] == pytest.approx(1.5, abs=tolerance)
        assert facts["codec"].startswith(codec)
        assert (facts["sample_rate"], facts["num_channels"]) == (48_000, 1 + (kind == "vorbis"))


def test_a_header_that_claims_a_year_of_sound_is_not_believed():
    assert store("audio", BOMBS["a year of opus"]()).facts["duration_s"] < 2


def test_the_first_track_is_the_one_whose_rotation_counts():
    """A second track, here one of sound, may have a matrix of its own."""
    data = bytearray(video_file(rotation=90, audio_codec="aac"))
    second = data.index(b"tkhd", data.index(b"tkhd") + 4)
    struct.pack_into(">4i", data, second + 44, -1 << 16, 0, 0, 0)
    assert store("video", bytes(data)).facts["rotation"] == 90


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"audio": "a.wav", "segments": [{"start": 0, "end": 9, "text": "a"}]},
            None,  # the end is cut in training
        ),
        (
            {"audio": "a.wav", "timestamps": [[0, 1], [0.5, 0.6]], "sentences": ["a", "b"]},
            "a.wav: segments[1]: starts at 0.5 s, and the file lasts 0.5 s; it is another file, or "
            "was cut off",
        ),
        (
            {"video": "v.mp4", "text": "t", "start_s": 7},
            "v.mp4: start_s: starts at 7 s, and the file lasts 1 s; it is another file, or was cut "
            "off",
        ),
        ({"video": "v.mp4", "text": "t", "start_s": "soon"}, None),
        ({"image": "a.jpg", "text": "t", "start_s": 7}, None),
    ],
)
def test_a_span_that_starts_behind_the_end_of_its_file_is_a_reject(tmp_path, row, reason):
    video = video_file("mp4", num_frames=10, fps=10)
    write_files(tmp_path, {"a.wav": wav(0.5), "v.mp4": video, "a.jpg": jpeg(0)})
    rows = [row, {"text": "another"}]
    run(rows, tmp_path / "out", media_root=tmp_path, max_rejects=1.0)
    assert list(rejects(tmp_path / "out").values()) == ([] if reason is None else [reason])


def test_spans_are_not_compared_where_no_duration_is_known(tmp_path):
    (tmp_path / "a.wav").write_bytes(wav(0.5))
    rows = [{"audio": "a.wav", "text": "t", "start_s": 1, "end_s": 2}]
    options = {"media_root": tmp_path, "media": mm.MediaOptions(check="none")}
    assert run(rows, tmp_path / "out", **options).num_rejects == 0


# -- videos of other containers become MP4s of the same packets, with a table of them


B_FRAMES = {"b_frames": 2, "open_gop": True, "num_frames": 20, "fps": 30}
VARIABLE = {"times_s": (0, 0.1, 0.15, 0.5, 0.9, 1.7)}


def stored(data: bytes, **options: Any) -> Media:
    return store("video", data, video_format="mp4", **options)


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
    assert medium.facts == store("video", data).facts
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
        raise mm.errors.TimeoutError("takes too long")

    monkeypatch.setattr(remux, "_has_same_sound", late)
    with pytest.raises(mm.errors.TimeoutError):
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
    assert mm.open_dataset(tmp_path / "out")[0]["mp4"] == stored(video_file("mkv")).data
    assert media.plan()["libraries"].keys() == {"av"}
    with pytest.raises(mm.ConfigError, match="video_format needs the headers of files"):
        mm.MediaOptions(video_format="mp4", check="none")
    with pytest.raises(mm.ConfigError, match="video_format='mkv': give 'mp4' or None"):
        mm.MediaOptions(video_format="mkv")  # type: ignore[arg-type]
