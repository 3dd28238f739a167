"""Facts about audio and video, and files of strangers that must do no more than be rejected."""

from __future__ import annotations

import functools
import io
import json
import random
import struct
import wave
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

import mmstream as mm
from mmstream.converting.draft import MediaRef, RowError
from mmstream.converting.media import probe
from tests.helpers.convert_corpus import run
from tests.helpers.corpora import jpeg
from tests.helpers.media import load_media
from tests.helpers.media_bombs import BOMBS
from tests.helpers.media_files import AUDIO_KINDS, VIDEO_KINDS, audio_file, video_file


def store(kind, data, **options):
    [medium] = load_media([MediaRef(kind, "a.bin", data)], None, mm.MediaOptions(**options))
    return medium


def wav(seconds=0.5, rate=8000, channels=1):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(bytes(round(seconds * rate) * 2 * channels))
    return file.getvalue()


@functools.cache
def audio(format, codec, rate=16000, seconds=1.0):
    file = io.BytesIO()
    with av.open(file, "w", format=format) as out:
        stream = out.add_stream(codec, rate=rate, layout="mono")
        samples = np.zeros((1, round(rate * seconds)), np.int16)
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(stream.format, "mono", rate, stream.frame_size or None)
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(piece))
        out.mux(stream.encode())
    return file.getvalue()


@functools.cache
def video(format, codec="mpeg4", frames=10, rotation=0):
    file = io.BytesIO()
    with av.open(file, "w", format=format) as out:
        stream = out.add_stream(codec, rate=Fraction(10))
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(frames):
            pixels = np.full((48, 64, 3), i * 20, np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode())
    data = bytearray(file.getvalue())
    if rotation:
        matrix = data.index(b"tkhd") + 4 + 40
        cosine, sine = {90: (0, 1), 180: (-1, 0), 270: (0, -1)}[rotation]
        struct.pack_into(
            ">9i",
            data,
            matrix,
            *(v << 16 for v in (cosine, sine, 0, -sine, cosine, 0, 0, 0)),
            1 << 30,
        )
    return bytes(data)


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
    assert (decoded["duration_s"], decoded["codec"]) == (0.5, "pcm_s16le")


def test_a_wav_that_was_streamed_counts_what_is_there():
    data = wav(0.5)
    sizeless = data[:40] + b"\xff\xff\xff\xff" + data[44:]
    assert store("audio", sizeless).facts["duration_s"] == 0.5


@pytest.mark.parametrize(
    ("format", "codec", "extension", "name"),
    [
        ("flac", "flac", "flac", "flac"),
        ("mp3", "libmp3lame", "mp3", "mp3"),
        ("ogg", "libopus", "ogg", "opus"),
        ("ipod", "aac", "m4a", "aac"),
    ],
)
def test_audio_of_any_format_has_facts(format, codec, extension, name):
    rate = 48000 if codec == "libopus" else 16000
    data = audio(format, codec, rate)
    for check in ("header", "full"):
        medium = store("audio", data, check=check)
        assert (medium.extension, medium.data) == (extension, data)
        assert medium.facts["codec"] == name
        assert medium.facts["duration_s"] == pytest.approx(1, abs=0.15)
        assert medium.facts["num_channels"] == 1
        assert medium.facts["sample_rate"] == rate


@pytest.mark.parametrize(
    ("format", "extension"),
    [("mp4", "mp4"), ("mov", "mov"), ("matroska", "mkv"), ("avi", "avi")],
)
def test_video_of_any_format_has_facts(format, extension):
    data = video(format)
    for check in ("header", "full"):
        medium = store("video", data, check=check)
        assert (medium.extension, medium.data) == (extension, data)
        facts = {"width": 64, "height": 48, "fps": 10.0, "duration_s": 1.0, "codec": "mpeg4"}
        assert facts.items() <= medium.facts.items()
        if format in ("mp4", "mov"):
            assert medium.facts["num_frames"] == 10


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_a_rotated_video_has_the_size_that_is_shown(rotation):
    facts = store("video", video("mp4", rotation=rotation)).facts
    assert facts["rotation"] == rotation
    assert (facts["width"], facts["height"]) == ((64, 48) if rotation == 180 else (48, 64))


def test_short_and_long_files_are_rejects():
    for kind, data in (("audio", wav(0.5)), ("video", video("mp4", frames=5))):
        for options, reason in (
            ({"min_duration_s": 0.6}, "0.5 s; min_duration_s is 0.6"),
            ({"max_duration_s": 0.4}, "0.5 s; max_duration_s is 0.4"),
        ):
            with pytest.raises(RowError, match=reason):
                store(kind, data, **options)
        assert store(kind, data, min_duration_s=0.5, max_duration_s=0.5).data == data


def test_truncated_and_wrong_files_are_rejects():
    whole = video("mp4")
    for kind, data, reason in (
        ("video", whole[: len(whole) // 2], "truncated"),
        ("video", b"\0\0\0\x18ftypisom\0\0\2\0isommp42" + bytes(100), "damaged mp4"),
        ("video", audio("ipod", "aac").replace(b"ftypM4A ", b"ftypisom"), "has no video in it"),
        ("audio", b"ID3\x04\0\0\0\0\0\0#EXTM3U\nfile:///etc/passwd\n", "damaged mp3"),
        ("audio", b"OggS\0\2" + bytes(200), "damaged ogg"),
        ("video", b"\x1aE\xdf\xa3\x9fB\x86\x81\x01B\x82\x84webm" + bytes(50), "damaged mkv"),
    ):
        with pytest.raises(RowError, match=rf"^a\.bin: {reason}"):
            store(kind, data)


def test_decoding_a_whole_file_has_a_limit_of_time(monkeypatch):
    monkeypatch.setattr(probe, "DECODE_TIMEOUT_S", -1.0)
    with pytest.raises(RowError, match="takes longer than timeout_s=-1"):
        store("video", video("mp4"), check="full")


def test_sound_alone_in_an_mp4_is_audio():
    data = audio("mp4", "aac")
    medium = store("audio", data)
    assert (medium.extension, medium.facts["codec"]) == ("m4a", "aac")
    with pytest.raises(RowError, match="not an audio but a video"):
        store("audio", video("mp4"))
    with pytest.raises(RowError, match="has no video in it"):
        store("video", data)
    with pytest.raises(RowError, match="not an audio but mp4"):
        store("audio", data, check="none")


def test_a_playlist_cannot_open_other_files(tmp_path):
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(video("mp4"))
    for start in (b"ID3\x04\0\0\0\0\0\0", b"OggS", b"RIFF\0\0\0\0AVI ", b"\x1aE\xdf\xa3", b"fLaC"):
        for text in (
            f"ffconcat version 1.0\nfile {secret}\n",
            f"#EXTM3U\n#EXTINF:1,\nfile://{secret}\n",
        ):
            for kind in ("audio", "video"):
                with pytest.raises(RowError):
                    store(kind, start + b"\n" + text.encode())


def test_a_header_that_claims_a_giant_picture_takes_no_memory():
    data = bytearray(video("avi", "rawvideo"))
    start = data.index(b"vids") - 4
    header = data.index(b"strf", start) + 8
    struct.pack_into("<ii", data, header + 4, 1 << 20, 1 << 20)
    for check in ("header", "full"):
        with pytest.raises(RowError):
            store("video", bytes(data), check=check)


def image(format):
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (24, 32, 3), np.uint8)
    Image.fromarray(noise).save(file, format)
    return file.getvalue()


NUM_MUTATIONS = 150


def samples():
    yield from (("image", name, image(name)) for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP"))
    yield from (("image", name, image(name)) for name in ("AVIF", "TIFF"))
    yield "audio", "wav", wav(0.01)
    yield "audio", "flac", audio("flac", "flac", seconds=0.1)
    yield "audio", "mp3", audio("mp3", "libmp3lame", seconds=0.1)
    yield "audio", "ogg", audio("ogg", "libopus", 48000, seconds=0.1)
    yield from (("video", name, video(name, frames=2)) for name in ("mp4", "matroska", "avi"))


@pytest.mark.parametrize(
    ("kind", "name", "data"), samples(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_mutated_headers_give_a_medium_or_a_reject(kind, name, data):
    """Nothing else is raised, nothing hangs, and the same bytes give the same answer."""
    rng = random.Random(name)
    for _ in range(NUM_MUTATIONS):
        mutated = bytearray(data)
        for _ in range(rng.choice((1, 2, 8))):
            mutated[rng.randrange(4, min(len(data), 400))] = rng.randrange(256)
        if rng.random() < 0.3:
            del mutated[rng.randrange(5, len(mutated)) :]
        options = rng.choice(({}, {"check": "full"}, {"max_image_side": 9, "image_format": "webp"}))
        answers = []
        for _ in range(2):
            try:
                medium = store(kind, bytes(mutated), **options)
                answers.append((medium.extension, medium.data, medium.facts))
            except RowError as error:
                answers.append(str(error))
        assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", VIDEO_KINDS)
def test_frames_are_counted_where_no_header_counts_them(kind):
    data = video_file(kind, audio_codec="libopus" if kind == "webm" else "libmp3lame")
    for check in ("header", "full"):
        facts = store("video", data, check=check).facts
        assert facts["num_frames"] == 12
        # Sound that starts early, as MP3's does, makes the first frame of some files longer.
        assert facts["duration_s"] == pytest.approx(1.2, abs=0.11)
        assert facts["fps"] == pytest.approx(12 / facts["duration_s"])
        assert (facts["sample_rate"], facts["num_channels"]) == (48000, 1)
    assert "sample_rate" not in store("video", video_file(kind)).facts


def test_a_variable_rate_is_that_of_the_frames():
    facts = store("video", video_file("mkv", times_s=(0, 0.1, 0.5, 0.6, 2.0))).facts
    assert facts["num_frames"] == 5
    assert facts["fps"] == pytest.approx(5 / facts["duration_s"], rel=0.01)


@pytest.mark.parametrize("kind", AUDIO_KINDS)
def test_the_duration_of_a_sound_is_that_of_its_packets(kind):
    data = audio_file(kind, seconds=1.5)
    extension = {"opus": "ogg", "vorbis": "ogg"}.get(kind, kind)
    for check, tolerance in (("header", 0.15), ("full", 0.11)):
        medium = store("audio", data, check=check)
        assert medium.extension == extension
        assert medium.facts["duration_s"] == pytest.approx(1.5, abs=tolerance)
    lying = BOMBS["a year of opus"]()
    assert store("audio", lying).facts["duration_s"] < 2


def test_the_first_track_is_the_one_whose_rotation_counts():
    """A second track, here one of sound, may have a matrix of its own."""
    data = bytearray(video_file(rotation=90, audio_codec="aac"))
    second = data.index(b"tkhd", data.index(b"tkhd") + 4)
    struct.pack_into(">4i", data, second + 44, -1 << 16, 0, 0, 0)
    assert store("video", bytes(data)).facts["rotation"] == 90


def test_a_rate_that_no_column_holds_is_a_reject():
    with pytest.raises(RowError, match="damaged wav"):
        store("audio", BOMBS["4 GHz"]())


def test_sound_alone_in_a_container_of_videos_is_audio():
    medium = store("audio", audio_file("mka"))
    assert medium.extension == "mka"
    with pytest.raises(RowError, match="not an audio but a video"):
        store("audio", video_file("mkv"))


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
    (tmp_path / "a.wav").write_bytes(wav(0.5))
    (tmp_path / "v.mp4").write_bytes(video_file("mp4", num_frames=10, fps=10))
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    rows = [row, {"text": "another"}]
    run(rows, tmp_path / "out", media_root=tmp_path, max_rejects=1.0)
    lines = (tmp_path / "out/rejects.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in lines] == ([] if reason is None else [reason])


def test_spans_are_not_compared_where_no_duration_is_known(tmp_path):
    (tmp_path / "a.wav").write_bytes(wav(0.5))
    rows = [{"audio": "a.wav", "text": "t", "start_s": 1, "end_s": 2}]
    options = {"media_root": tmp_path, "media": mm.MediaOptions(check="none")}
    assert run(rows, tmp_path / "out", **options).num_rejects == 0
