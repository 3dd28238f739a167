"""`VideoDecoder` takes the right frames, at the right times, from files of all kinds."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

import mmstream as mm
from mmstream.media import video
from mmstream.media.facts import media_facts
from mmstream.media.limits import Deadline
from tests.helpers.media_files import (
    VIDEO_KINDS,
    frame_number,
    num_bytes,
    read_by_ranges,
    video_file,
)
from tests.helpers.paths import DATA, ROOT
from tests.helpers.pictures import encoded

VARIABLE = (0.0, 0.1, 0.15, 0.9, 1.0, 1.05, 3.0, 3.5, 3.6, 5.0)
"""Times in seconds: pauses and bursts."""


def numbers(pixels: np.ndarray) -> list[int]:
    return [frame_number(frame) for frame in pixels]


@pytest.mark.parametrize(
    "settings",
    [
        *({"kind": kind, "b_frames": 2} for kind in VIDEO_KINDS if kind not in ("avi", "webm")),
        {"kind": "avi"},
        {"kind": "webm"},
        {"moov_first": True},
        {"num_frames": 1},
        {"num_frames": 2, "b_frames": 1},
        {"start_s": 3.0, "b_frames": 2},
        {"audio_codec": "aac", "b_frames": 2},
        {"codec": "mpeg4"},
        *(
            {"codec": codec, "b_frames": 3, "open_gop": True, "num_frames": 30}
            for codec in ("libx264", "libx265")
        ),
    ],
    ids=str,
)
def test_every_frame_is_taken_alone_and_together(settings: dict[str, Any]) -> None:
    data = video_file(**settings)
    decoded = mm.VideoDecoder().decode(data)
    num_frames = settings.get("num_frames", 12)
    assert numbers(decoded.pixels) == list(range(num_frames))
    np.testing.assert_allclose(decoded.times_s, np.arange(num_frames) / 10, atol=0.0011)
    for number in range(num_frames):
        frame = mm.VideoDecoder(indices=(number,))(data)
        np.testing.assert_array_equal(frame[0], decoded.pixels[number])


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_frames_of_an_avi_are_taken_in_the_order_of_display(codec: str) -> None:
    data = video_file("avi", codec=codec, num_frames=20, b_frames=2)
    assert numbers(mm.VideoDecoder()(data)) == list(range(20))
    decoded = mm.VideoDecoder(indices=(17, 3, 3)).decode(data)
    assert numbers(decoded.pixels) == [17, 3, 3]
    np.testing.assert_allclose(decoded.times_s, [1.7, 0.3, 0.3])


@pytest.mark.parametrize("kind", ["mp4", "mkv", "webm", "ts", "fragmented mp4"])
def test_times_of_a_variable_rate_are_those_of_the_container(kind: str) -> None:
    data = video_file(kind, times_s=VARIABLE, b_frames=0 if kind == "webm" else 2)
    decoder = mm.VideoDecoder()
    plan = decoder.plan(data)
    np.testing.assert_allclose(plan.shape.times_s, VARIABLE, atol=0.0011)
    decoded = decoder.decode(data, plan)
    np.testing.assert_array_equal(decoded.times_s, plan.shape.times_s)
    assert numbers(decoded.pixels) == list(range(10))


def test_frames_of_a_variable_rate_are_spread_by_time() -> None:
    data = video_file("mp4", times_s=VARIABLE)
    plan = mm.VideoDecoder(num_frames=6).plan(data)
    assert plan.shape.indices == (0, 4, 5, 6, 8, 9)  # nearest to 0, 1, 2, 3, 4, 5 seconds


def test_two_frames_a_second_of_a_constant_rate() -> None:
    data = video_file("mp4", num_frames=40)
    shape = mm.VideoDecoder(fps=2).plan(data).shape
    assert shape.indices == tuple(np.linspace(0, 39, 8).round().astype(int))
    assert (shape.num_frames, shape.fps, shape.sampled_fps) == (8, 10.0, 2.0)


@pytest.mark.parametrize(
    ("settings", "num_frames"),
    [
        ({"fps": 2, "max_frames": 5}, 5),
        ({"fps": 0.1, "min_frames": 3}, 3),
        ({"fps": 100}, 40),
        ({"frame_multiple_of": 16}, 32),
    ],
    ids=str,
)
def test_the_number_of_frames_keeps_to_its_limits(
    settings: dict[str, Any], num_frames: int
) -> None:
    plan = mm.VideoDecoder(**settings).plan(video_file("mp4", num_frames=40))
    assert plan.shape.num_frames == num_frames


def test_the_last_frame_fills_up_to_a_multiple() -> None:
    data = video_file("mp4", num_frames=10)
    decoder = mm.VideoDecoder(num_frames=3, frame_multiple_of=2)
    decoded = decoder.decode(data)
    assert numbers(decoded.pixels) == [0, 4, 9, 9]
    shape = decoder.plan(data).shape
    assert (shape.num_frames, shape.num_padding, shape.indices) == (4, 1, (0, 4, 9, 9))
    assert decoded.times_s.tolist() == list(shape.times_s) == pytest.approx([0, 0.4, 0.9, 0.9])


@pytest.mark.parametrize(
    ("span", "wanted"),
    [
        ((0.3, 0.6), [3, 4, 5]),
        ((0.35, 0.39), [3]),
        ((1.0, 99.0), [10, 11]),
        ((0.0, 1e9), list(range(12))),
        (None, list(range(12))),
    ],
)
def test_a_span_of_time(span: tuple[float, float] | None, wanted: list[int]) -> None:
    data = video_file("mp4")
    assert numbers(mm.VideoDecoder(span=span)(data)) == wanted
    row = {"start_s": span[0], "end_s": span[1]} if span else {}
    decoder = mm.VideoDecoder(span="row")
    assert numbers(decoder.decode(data, row=row).pixels) == wanted
    assert decoder.plan(data, row).shape.start_s == (span or [0])[0]


def test_a_span_begins_in_the_last_frame_at_the_latest() -> None:
    with pytest.raises(mm.errors.DecodeError):
        mm.VideoDecoder(span="row").plan(video_file("mp4"), {"start_s": 1.2})


def test_a_random_clip_depends_on_its_generator_alone() -> None:
    data = video_file("mp4", num_frames=60, gop=10)
    decoder = mm.VideoDecoder(clip_s=1.0, num_frames=4, size=24, crop="random", flip=0.5)
    plans = [
        decoder.plan(data, rng=np.random.Generator(np.random.Philox(seed))) for seed in (1, 1, 2, 3)
    ]
    starts = {plan.shape.start_s for plan in plans}
    assert len(starts) == 3
    assert all(0 <= start <= 5 for start in starts)
    assert decoder.is_random
    with pytest.raises(mm.ConfigError, match="sample_rng"):
        decoder(data)
    decoder, plan = pickle.loads(pickle.dumps((decoder, plans[0])))  # they travel to workers
    expected = decoder(data, rng=np.random.Generator(np.random.Philox(1)))
    np.testing.assert_array_equal(decoder.decode(data, plan).pixels, expected)


def test_frames_are_resized_into_given_memory() -> None:
    data = video_file("mp4", width=128, height=96)
    decoder = mm.VideoDecoder(num_frames=3, size=32)
    plan = decoder.plan(data)
    assert (plan.shape.height, plan.shape.width, plan.shape.picture) == (32, 32, (96, 128))
    memory = np.zeros((3, 32, 32, 3), np.uint8)
    assert decoder.decode(data, plan, memory).pixels is memory
    resize = mm.ImageDecoder(size=32, scaled_decoding=False)
    for frame, picture in zip(memory, mm.VideoDecoder(num_frames=3)(data), strict=True):
        np.testing.assert_array_equal(frame, resize(encoded(Image.fromarray(picture), "png")))
    with pytest.raises(mm.ConfigError, match="cannot hold"):
        decoder.decode(data, plan, memory[:2])


@pytest.mark.parametrize("kind", ["mp4", "fragmented mp4"])
@pytest.mark.parametrize("is_flipped", [False, True])
@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_frames_are_turned_and_mirrored_as_the_file_says(
    rotation: int, is_flipped: bool, kind: str
) -> None:
    """FFmpeg's own tools show the same. One frame is decoded for fragments, to learn the turn."""
    stored = mm.VideoDecoder()(video_file(kind))
    data = video_file(kind, rotation=rotation, is_flipped=is_flipped)
    decoder = mm.VideoDecoder()
    assert decoder.plan(data).shape.picture == ((48, 64) if rotation % 180 == 0 else (64, 48))
    turned = np.rot90(stored[:, ::-1] if is_flipped else stored, -rotation // 90, axes=(1, 2))
    np.testing.assert_array_equal(decoder(data), turned)


def test_a_budget_of_pixels_holds_for_all_frames() -> None:
    decoder = mm.VideoDecoder(
        num_frames=4, resize="max_pixels", multiple_of=16, video_pixel_budget=(1024, 4 * 32 * 32)
    )
    shape = decoder.plan(video_file("mp4", width=128, height=96)).shape
    assert (shape.height, shape.width) == (16, 32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_pixels": 64 * 48 - 1}, "frames of 64x48 exceed max_pixels=3071"),
        ({"max_bytes": 1000}, r"video of \d+ bytes exceeds max_bytes"),
        ({"max_duration_s": 1.1}, "video of 1 s exceeds max_duration_s=1.1"),
        ({"max_memory": 100_000}, "needs 0 MiB to decode, more than max_memory=100000"),
        ({"max_decoded_frames": 5}, "more than max_decoded_frames=5"),
        ({"indices": (0, 12)}, "has 12 frames, and no frame 12"),
    ],
    ids=str,
)
def test_a_video_is_refused_before_it_is_decoded(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(mm.errors.DecodeError, match=message):
        mm.VideoDecoder(**settings).plan(video_file("mp4"))


def test_the_end_of_the_time_ends_the_work() -> None:
    with pytest.raises(mm.errors.TimeoutError, match="timeout_s=1e-06"):
        mm.VideoDecoder(timeout_s=1e-6)(video_file("mp4"))


def test_earlier_videos_of_a_sample_count_in_its_memory() -> None:
    data = video_file("mp4")
    decoder = mm.VideoDecoder(max_memory=1_000_000)
    limits = decoder.start_limits()
    decoder.plan(data, limits=limits)
    with pytest.raises(mm.errors.DecodeError, match="and the videos before it 1 MiB"):
        decoder.plan(data, limits=limits.holding(950_000))


@pytest.mark.parametrize(
    "settings",
    [
        {"fps": 0},
        {"fps": 2, "num_frames": 4},
        {"num_frames": 0},
        {"indices": ()},
        {"indices": (-1,)},
        {"clip_s": -1.0},
        {"min_frames": 9, "max_frames": 8},
        {"num_frames": 4, "max_frames": 2},
        {"num_frames": 4, "min_frames": 5},
        {"indices": (0, 1, 2), "max_frames": 2},
        {"sampling": "best"},
        {"sampling": "smolvlm", "num_frames": 8},
        {"audio": True},
        {"audio": mm.AudioDecoder},
        {"video_pixel_budget": (1, 2)},
        {"max_frame_pixels": 1000, "resize": "max_pixels"},
        {"max_video_pixels": 1000},
        {"max_video_pixels": 0, "resize": "max_pixels"},
        {"size": "large"},
        {"resize": "exact"},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(mm.ConfigError):
        mm.VideoDecoder(**settings)


def test_a_damaged_frame_is_decoded_from_the_start_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jumps = []

    def decoded_frames(*arguments: Any) -> Iterator[Any]:
        jumps.append(arguments[-1])
        raise video.DamagedError("damaged")

    monkeypatch.setattr(video, "decoded_frames", decoded_frames)
    data = video_file("mp4", num_frames=30, gop=5)
    for limit, expected in ((27, [True]), (28, [True, False])):
        jumps.clear()
        with pytest.raises(mm.errors.DecodeError, match="damaged"):
            mm.VideoDecoder(indices=(27,), max_decoded_frames=limit)(data)
        assert jumps == expected


# -- real files ------------------------------------------------------------------------------------

VIDEOS = DATA / "videos"
STORED = json.loads((VIDEOS / "frames.json").read_text())
MORE_VIDEOS = ROOT.parent / "shared" / "data"
"""Files that may not be stored here."""


def file(name: str) -> Path:
    path = next((path for folder in (VIDEOS, MORE_VIDEOS) for path in folder.rglob(name)), None)
    if path is None:
        pytest.skip(f"{name} is not on this machine")
    return path


@pytest.mark.parametrize("name", STORED)
def test_frames_and_times_are_those_of_an_exact_decoder(name: str) -> None:
    data, stored = file(name).read_bytes(), STORED[name]
    decoder = mm.VideoDecoder(indices=tuple(stored["numbers"][1::4]), span=None)
    plan = decoder.plan(data)
    assert plan.file.timeline.num_frames == stored["num_frames"]
    decoded = decoder.decode(data, plan)
    np.testing.assert_allclose(decoded.times_s, stored["times_s"][1::4], atol=1e-6)
    assert [zlib.crc32(frame) for frame in decoded.pixels] == stored["crc32"][1::4]


def test_ten_bits_become_eight_as_pyav_makes_them() -> None:
    data = file("h264_10bits.mp4").read_bytes()
    with av.open(io.BytesIO(data)) as container:
        wanted = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    np.testing.assert_array_equal(mm.VideoDecoder(span=None)(data), wanted)


# -- headers of MP4 --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("moov_first", [True, False])
def test_few_frames_take_the_bytes_of_their_groups(moov_first: bool) -> None:
    content = video_file(
        "mp4",
        num_frames=120,
        fps=2,
        gop=8,
        b_frames=2,
        width=128,
        height=128,
        pixel_format="yuv444p",
        moov_first=moov_first,
        audio_codec="aac",
    )
    file, ranges = read_by_ranges(content)
    decoder = mm.VideoDecoder(num_frames=2, span=(20.0, 50.0))
    plan = decoder.plan(file)
    assert num_bytes(ranges) < len(content) // 5

    ranges.clear()
    decoded = decoder.decode(file, plan)
    whole = decoder.decode(content)
    np.testing.assert_array_equal(decoded.pixels, whole.pixels)
    np.testing.assert_array_equal(decoded.times_s, whole.times_s)
    assert num_bytes(ranges) < len(content) // 10  # at most 2 of 15 groups


def edited(*edit: int) -> bytes:
    """Return a video of 12 frames with another edit list: its length, its start and its rate."""
    data = bytearray(video_file("mp4"))
    struct.pack_into(">Iihh", data, data.index(b"elst") + 12, *edit, 0)
    return bytes(data)


@pytest.mark.parametrize(
    ("edit", "num_frames"),
    [
        ((500, 0, 1), 5),
        ((300, 2560, 1), 3),
        ((1000, 2048, 1), 10),
        ((700, 5120, 1), 7),
        ((1000, 0, 2), 10),
    ],
    ids=["cut end", "both", "cut start", "longer cut start", "half speed"],
)
def test_frames_that_an_edit_list_leaves_out_are_those_that_ffmpeg_leaves_out(
    edit: tuple[int, int, int], num_frames: int
) -> None:
    data = edited(*edit)
    assert len(mm.VideoDecoder()(data)) == num_frames
    for decode in (False, True):
        facts = media_facts(data, "video", Deadline.start(60), decode=decode)
        assert facts["num_frames"] == num_frames
    with pytest.raises(mm.errors.DecodeError, match="has no frame in it"):
        mm.VideoDecoder()(edited(0, -1, 1))


def test_a_cut_file_is_a_bad_one() -> None:
    for moov_first in (True, False):
        data = video_file("mp4", moov_first=moov_first)
        with pytest.raises(
            mm.errors.DecodeError, match="truncated: 100 bytes are missing at least"
        ):
            mm.VideoDecoder().plan(data[:-100])


@pytest.mark.parametrize("name", [b"stsz", b"stts", b"stsc", b"stco", b"stss", b"stsd", b"mdhd"])
def test_damaged_tables_give_no_wrong_frames(name: bytes) -> None:
    whole = video_file("mp4", b_frames=2)
    for position in range(4, 24):
        data = bytearray(whole)
        data[data.index(name) + position] ^= 0xFF
        try:
            pixels = mm.VideoDecoder(max_decoded_frames=100)(bytes(data))
        except mm.errors.DecodeError:
            continue
        numbers = [frame_number(frame) for frame in pixels]
        assert numbers == sorted(numbers) or name in (b"stts", b"stss")


def test_a_track_header_that_is_cut_states_no_rotation() -> None:
    data = bytearray(video_file("mp4"))
    start = data.index(b"tkhd") - 4
    (size,) = struct.unpack_from(">I", data, start)
    struct.pack_into(">I", data, start, 40)
    struct.pack_into(">I4s", data, start + 40, size - 40, b"free")
    assert mm.VideoDecoder()(bytes(data)).shape == (12, 48, 64, 3)
