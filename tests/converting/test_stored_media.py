"""Media as they are stored: their facts and checks, files of strangers, and images made smaller."""

from __future__ import annotations

import io
import json
import struct
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageCms, ImageOps

import mmstream as mm
from mmstream.converting.draft import Media, MediaRef, RowError
from mmstream.converting.media import load, remux
from mmstream.dataset.manifest import MANIFEST_NAME
from mmstream.media.limits import Deadline
from tests.helpers.convert_corpus import rejects, run, write_files, write_rows
from tests.helpers.corpora import jpeg
from tests.helpers.media import load_media
from tests.helpers.media_bombs import BOMBS
from tests.helpers.media_files import AUDIO_KINDS, VIDEO_KINDS, audio_file, video_file
from tests.helpers.pictures import encoded


def store(kind, data, name="a.bin", **options):
    [medium] = load_media([MediaRef(kind, name, data)], None, mm.MediaOptions(**options))
    return medium


def store_image(data, **options):
    return store("image", data, "a.jpg", **options)


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


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        *(("audio", start) for start in (b"ID3\x04\0\0\0\0\0\0", b"OggS", b"fLaC")),
        *(("video", start) for start in (b"RIFF\0\0\0\0AVI ", b"\x1aE\xdf\xa3")),
    ],
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


# -- images that are checked, made smaller or encoded again: never larger, never silently wrong


SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def picture(width=400, height=300, mode="RGB"):
    """A smooth picture: its corners have other colours."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    rgb = np.stack([x, y, 255 - x], 2).astype(np.uint8)
    return Image.fromarray(rgb).convert(mode)


def opened(medium):
    return Image.open(io.BytesIO(medium.data))


def mean_error(image, expected):
    difference = np.asarray(image.convert("RGB"), float) - np.asarray(expected.convert("RGB"))
    return np.abs(difference).mean()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF"])
def test_headers_tell_the_size_and_bytes_stay_as_they_are(format):
    data = encoded(picture(), format)
    facts = {"width": 400, "height": 300, "original_width": 400, "original_height": 300}
    for check in ("header", "full"):
        medium = store_image(data, check=check)
        assert (medium.data, medium.facts) == (data, facts)
        assert medium.extension == {"JPEG": "jpg"}.get(format, format.lower())
    assert store_image(data, check="none").facts == {}


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_an_image_that_needs_no_change_keeps_its_bytes(format):
    data = encoded(picture(), format)
    extension = {"JPEG": "jpg"}.get(format, format.lower())
    assert store_image(data, max_image_side=400, image_format=extension).data == data
    assert store_image(data, max_image_side=5000).data == data


@pytest.mark.parametrize(
    ("format", "extension"),
    [
        *(("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")),
        *(("GIF", "png"), ("BMP", "png"), ("AVIF", "jpg")),
    ],
)
def test_a_large_image_is_made_smaller_in_its_own_format_or_a_common_one(format, extension):
    data = encoded(picture(), format)
    medium = store_image(data, max_image_side=100)
    assert medium.extension == extension
    assert opened(medium).size == (100, 75)
    assert (medium.facts["width"], medium.facts["original_height"]) == (100, 300)
    assert mean_error(opened(medium), picture(100, 75)) < (12 if format == "GIF" else 4)
    assert store_image(data, max_image_side=100).data == medium.data


@pytest.mark.parametrize(
    ("height", "side", "new_height"),
    [(601, 3, 2), (601, 10, 8), (601, 20, 15), (601, 40, 30), (601, 99, 74), (2, 10, 1)],
)
def test_any_reduction_gives_the_right_size(height, side, new_height):
    medium = store_image(encoded(picture(799, height), "JPEG"), max_image_side=side)
    assert opened(medium).size == (side, new_height)


@pytest.mark.parametrize(
    ("format", "orientation"),
    [*(("JPEG", orientation) for orientation in range(1, 9)), ("PNG", 6), ("WEBP", 6)],
)
def test_the_orientation_is_applied_when_pixels_are_written(orientation, format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(), format, exif=exif)
    width, height = (300, 400) if orientation > 4 else (400, 300)
    unchanged = store_image(data)
    assert (unchanged.data, unchanged.facts["width"]) == (data, width)
    medium = store_image(data, max_image_side=200)
    assert opened(medium).size == (width // 2, height // 2)
    assert opened(medium).getexif().get(0x0112) is None
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    upright = upright.resize((width // 2, height // 2))
    assert mean_error(opened(medium), upright) < 3


def test_transparency_is_kept_or_laid_on_white():
    image = picture(mode="RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    data = encoded(image, "PNG")
    assert opened(store_image(data, max_image_side=100)).mode == "RGBA"
    assert opened(store_image(data, image_format="webp")).mode == "RGBA"
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image)
    assert mean_error(opened(store_image(data, image_format="jpg")), white) < 2


@pytest.mark.parametrize(
    ("mode", "format", "expected", "tolerance"),
    [
        ("P", "PNG", "RGB", 20),
        ("1", "PNG", "L", 20),
        ("L", "PNG", "L", 3),
        ("L", "JPEG", "L", 3),
        ("CMYK", "JPEG", "RGB", 6),  # as in training
    ],
)
def test_palettes_and_cmyk_become_colours_and_grey_stays_grey(mode, format, expected, tolerance):
    image = opened(store_image(encoded(picture(mode=mode), format), max_image_side=100))
    assert image.mode == expected
    assert mean_error(image, picture(100, 75, expected)) < tolerance


SMALL_PROFILE = SRGB.replace(b"s\0R\0G\0B", b"w\0i\0d\0e").replace(b"sRGB", b"wide")
PROFILE = SMALL_PROFILE + bytes(150_000)


@pytest.mark.parametrize(
    ("profile", "format", "kept"),
    [
        *((PROFILE, format, PROFILE) for format in ("JPEG", "PNG", "WEBP")),
        (SMALL_PROFILE, "JPEG", SMALL_PROFILE),
        (SRGB + b"sRGB IEC61966-2.1", "JPEG", b""),
        (PROFILE[:16] + b"CMYK" + PROFILE[20:], "JPEG", b""),
    ],
    ids=["large", "large in PNG", "large in WEBP", "small", "sRGB", "of CMYK"],
)
def test_a_colour_profile_is_kept_unless_it_says_nothing_new(profile, format, kept):
    medium = store_image(encoded(picture(), format, icc_profile=profile), max_image_side=100)
    assert opened(medium).info.get("icc_profile", b"")[:4000] == kept[:4000]


def test_what_would_be_lost_is_a_reject():
    frames = [picture(), picture().transpose(Image.Transpose.ROTATE_180)]
    deep = Image.fromarray(np.arange(120_000, dtype=np.uint16).reshape(300, 400))
    for data, reason in (
        (encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), "animation"),
        (encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]), "animation"),
        (encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]), "animation"),
        (encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:]), "several pictures"),
        (encoded(deep, "PNG"), "more than 8 bits"),
        (encoded(deep, "TIFF"), "more than 8 bits"),
    ):
        with pytest.raises(RowError, match=reason):
            store_image(data, image_format="jpg")
    assert store_image(encoded(deep, "PNG")).extension == "png"


def test_tiff_and_heic_are_read_where_they_become_something_else():
    data = encoded(picture(), "TIFF")
    with pytest.raises(RowError, match=r"tiff is not supported.*--image-format jpg"):
        store_image(data)
    assert opened(store_image(data, image_format="jpg", max_image_side=100)).size == (100, 75)
    file = io.BytesIO()
    pillow_heif.from_pillow(picture()).save(file, quality=90)
    medium = store_image(file.getvalue(), image_format="png")
    assert (medium.extension, medium.facts["original_width"]) == ("png", 400)
    assert mean_error(opened(medium), picture()) < 5


def test_heic_without_its_library_is_a_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    data = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)
    with pytest.raises(RowError, match="pip install pillow-heif"):
        store_image(data, image_format="jpg")


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_a_smaller_jpeg_has_chroma_of_half_the_size(subsampling):
    data = encoded(picture(), "JPEG", subsampling=subsampling, quality=90)
    medium = store_image(data, max_image_side=201)
    assert opened(medium).layer[0][1:3] == (2, 2)
    assert mean_error(opened(medium), picture(201, 151)) < 2


def test_quality_changes_the_size_and_lossless_stays_lossless():
    data = encoded(picture(), "JPEG", quality=98)
    sizes = [
        len(store_image(data, max_image_side=200, image_quality=quality).data)
        for quality in (50, 80, 95)
    ]
    assert sizes == sorted(sizes)
    assert len(store_image(data, max_image_side=200).data) == sizes[-1]
    lossless = encoded(picture(), "WEBP", lossless=True)
    assert store_image(lossless, max_image_side=200).data[12:16] == b"VP8L"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"min_image_side": 301}, "400x300 pixels; min_image_side is 301"),
        ({"max_aspect": 1.3}, "400x300 pixels; max_aspect is 1.3"),
        ({"min_image_side": 301, "max_image_side": 100}, ".*min_image_side"),
    ],
)
def test_small_and_long_images_are_rejects(options, reason):
    data = encoded(picture(), "PNG")
    with pytest.raises(RowError, match=f"^a.jpg: {reason}"):
        store_image(data, **options)
    assert store_image(data, min_image_side=300, max_aspect=4 / 3).data == data


def test_a_truncated_image_is_a_reject_where_it_is_decoded():
    data = encoded(picture(), "JPEG")[:-500]
    assert store_image(data).data == data
    for options in ({"check": "full"}, {"max_image_side": 100}, {"max_image_side": 20}):
        with pytest.raises(RowError, match=r"a\.jpg: JPEG: Premature end"):
            store_image(data, **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"check": "some"}, "check='some'"),
        ({"max_image_side": 0}, "max_image_side=0"),
        ({"max_image_side": True}, "max_image_side=True"),
        ({"image_format": "jpeg"}, "image_format='jpeg'"),
        ({"image_quality": 101, "max_image_side": 9}, "give a whole number from 1 to 100"),
        ({"image_quality": 90}, "changes nothing by itself"),
        ({"image_quality": 90, "image_format": "png"}, "PNG has no quality"),
        ({"max_aspect": 0.5}, "give a number from 1 up"),
        ({"max_aspect": float("nan")}, "give a number from 1 up"),
        ({"check": "none", "min_image_side": 9}, "needs the headers"),
        ({"min_duration_s": 5, "max_duration_s": 4}, "no file fits"),
    ],
)
def test_impossible_options_are_config_errors(options, reason):
    with pytest.raises(mm.ConfigError, match=reason):
        mm.MediaOptions(**options)


# -- options: from the call or the command line to the shards


SMALL = mm.MediaOptions(max_image_side=16)


def test_a_conversion_goes_on_with_the_same_options_only(corpus, tmp_path):
    run(corpus, tmp_path / "out", media=SMALL)
    manifest = json.loads((tmp_path / "out" / MANIFEST_NAME).read_bytes())
    plan = manifest["source"]["media"]
    assert plan["max_image_side"] == 16
    assert set(plan["libraries"]) == {"pillow", "simplejpeg", "torch"}
    assert run(corpus, tmp_path / "out", media=SMALL).was_finished
    for media in (None, mm.MediaOptions(max_image_side=17)):
        with pytest.raises(mm.ConfigError, match="media was"):
            run(corpus, tmp_path / "out", media=media)


def test_the_flags_are_the_options(corpus, tmp_path, mmstream):
    flags = "--max-image-side 16 --image-format webp --media-check full --num-workers 0"
    words = ["convert", corpus, tmp_path / "out", *flags.split(), "--max-rejects", "50%"]
    assert mmstream(*words)[0] == 0
    plan = json.loads((tmp_path / "out" / MANIFEST_NAME).read_bytes())["source"]
    del plan["media"]["libraries"]
    assert plan["media"] == {"check": "full", "max_image_side": 16, "image_format": "webp"}
    assert set(mm.open_dataset(tmp_path / "out").manifest.fields) == {"webp", "txt", "json"}
