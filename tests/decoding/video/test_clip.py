"""Clips for the GPU hold just the packets that frames need, and give the frames of the file."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.decoding.video.clip import UncopiedError, cut_clip
from mmstream.decoding.video.encoded import EncodedVideo, EncodedVideos, encode_video
from mmstream.errors import ConfigError, DecodeError
from tests.helpers.clips import on_device
from tests.helpers.media_files import frame_number, video_file
from tests.helpers.paths import DATA

FILES = {
    **{kind: {"kind": kind, "b_frames": 2} for kind in ("mp4", "mov", "mkv", "ts")},
    "fragmented mp4": {"kind": "fragmented mp4", "b_frames": 2},
    "vp9": {"kind": "webm"},
    "vp8": {"kind": "mkv", "codec": "libvpx"},
    "mpeg4 in avi": {"kind": "avi"},
    "h264, open groups": {"codec": "libx264", "b_frames": 3, "open_gop": True, "num_frames": 30},
    "h265, open groups": {"codec": "libx265", "b_frames": 3, "open_gop": True, "num_frames": 30},
    "turned": {"rotation": 90},
    "upside down": {"rotation": 180},
    "variable rate": {"kind": "mkv", "times_s": (0.0, 0.1, 0.15, 0.9, 1.0, 3.0), "b_frames": 2},
}


def encoded(data: Any, **settings: Any) -> EncodedVideo:
    """Encode a video that must be left to the GPU."""
    decoder = mm.VideoDecoder(device="cuda", **settings)
    limits = decoder.start_limits()
    plan = decoder.plan(data, limits=limits)
    assert plan.is_for_gpu
    video = encode_video(data, "mp4", decoder, plan, limits)
    assert isinstance(video, EncodedVideo)
    return video


@pytest.mark.parametrize("name", FILES)
def test_frames_of_a_clip_are_those_of_its_file(name: str) -> None:
    data = video_file(**FILES[name])
    all_frames = mm.VideoDecoder()(data)
    rng = np.random.default_rng(0)
    for size in (len(all_frames), 1, 2, 3, 4, 5):
        numbers = rng.choice(len(all_frames), size, replace=False)
        numbers = np.append(np.sort(numbers), numbers[:1])  # in order, and one again
        video = encoded(data, indices=tuple(numbers.tolist()))
        frames = video.decode()
        assert frames.shape == video.shape
        np.testing.assert_array_equal(frames.permute(0, 2, 3, 1), all_frames[numbers])


def test_frames_of_a_clip_of_av1_are_those_of_its_file() -> None:
    data = (DATA / "videos" / "av1_video.mkv").read_bytes()
    expected = mm.VideoDecoder(num_frames=3)(data)
    frames = encoded(data, num_frames=3).decode()
    np.testing.assert_array_equal(frames.permute(0, 2, 3, 1), expected)


def test_a_clip_holds_the_groups_of_its_frames_alone() -> None:
    data = video_file("mp4", num_frames=60, gop=6)
    video = encoded(data, indices=(1, 31, 32))
    assert mm.VideoDecoder().plan(video.clip).shape.num_frames == 2 + 3
    assert video.plan.numbers == (1, 3, 4)
    assert [frame_number(frame.permute(1, 2, 0)) for frame in video.decode()] == [1, 31, 32]
    assert video.clip == encoded(data, indices=(1, 31, 32)).clip


def test_frames_that_pad_are_no_frames_of_the_clip() -> None:
    data = video_file("mp4")
    video = encoded(data, num_frames=3, frame_multiple_of=2)
    assert (len(video), len(video.plan.numbers)) == (4, 3)
    expected = mm.VideoDecoder(num_frames=3, frame_multiple_of=2)(data)
    np.testing.assert_array_equal(video.decode().permute(0, 2, 3, 1), expected)


def test_a_random_crop_is_drawn_once() -> None:
    data = video_file("mp4")
    settings: dict[str, Any] = {"num_frames": 2, "size": 24, "crop": "random", "flip": 0.5}
    expected = mm.VideoDecoder(**settings)(data, rng=np.random.default_rng(5))
    decoder = mm.VideoDecoder(device="cuda", **settings)
    limits = decoder.start_limits()
    plan = decoder.plan(data, rng=np.random.default_rng(5), limits=limits)
    video = encode_video(data, "mp4", decoder, plan, limits)
    assert isinstance(video, EncodedVideo)
    np.testing.assert_array_equal(video.decode().permute(0, 2, 3, 1), expected)


@pytest.mark.parametrize(
    ("file", "settings", "reason"),
    [
        ({"kind": "mkv", "codec": "mjpeg", "pixel_format": "yuvj420p"}, {}, "codec mjpeg"),
        ({"kind": "avi", "codec": "libx264", "b_frames": 2}, {}, "AVI with B-frames"),
        ({"is_flipped": True}, {}, "frames that are mirrored"),
        ({"width": 528}, {"size": (48, 16)}, "more than 32 times smaller than its frames"),
    ],
    ids=["codec", "avi", "mirrored", "small"],
)
def test_the_plan_says_why_the_cpu_decodes(
    file: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    decoder = mm.VideoDecoder(device="cuda", resize="exact" if settings else None, **settings)
    plan = decoder.plan(video_file(**file))
    assert (plan.cpu_reason, plan.is_for_gpu) == (reason, False)
    assert not mm.VideoDecoder().plan(video_file(**file)).is_for_gpu


def test_old_colours_of_x264_stay_with_the_cpu() -> None:
    data = video_file("mp4", pixel_format="yuv444p")
    decoder = mm.VideoDecoder(device="cuda")
    limits = decoder.start_limits()
    plan = decoder.plan(data, limits=limits)
    reason = encode_video(data, "mp4", decoder, plan, limits)
    assert reason == "H.264 with colours at full resolution"


def test_packets_that_are_missing_are_not_left_out() -> None:
    data = video_file("ts")
    decoder = mm.VideoDecoder()
    limits = decoder.start_limits()
    plan = decoder.plan(data, limits=limits)
    ended = data[: 188 * (len(data) // 188 // 2)]
    with pytest.raises(UncopiedError, match="some of its packets are missing"):
        cut_clip(ended, plan.file, plan.packets.tolist(), limits.deadline)


def test_a_damaged_clip_is_no_video() -> None:
    video = encoded(video_file("mp4", num_frames=30, gop=30))
    damaged = EncodedVideo(video.clip[:-400] + bytes(400), video.plan, video.decoder)
    with pytest.raises(DecodeError):
        damaged.decode()


def test_the_device_makes_the_frames_of_the_cpu_nearly() -> None:
    data = video_file("mp4", width=128, height=96, b_frames=2)
    for settings in (
        {"num_frames": 5},
        {"num_frames": 5, "size": 32},
        {"num_frames": 5, "size": (40, 64), "resize": "letterbox", "fill": (250, 100, 0)},
        {"indices": (3, 3, 7), "size": 48, "interpolation": "bicubic"},
        {"num_frames": 3, "frame_multiple_of": 2, "resize": "max_pixels", "multiple_of": 16},
    ):
        frames = on_device(encoded(data, **settings))
        expected = torch.from_numpy(mm.VideoDecoder(**settings)(data)).permute(0, 3, 1, 2)
        assert frames.shape == expected.shape
        assert frames.is_contiguous(memory_format=torch.channels_last)
        difference = (frames.int() - expected.int()).abs()
        assert int(difference.max()) <= (1 if "size" in settings or "resize" in settings else 0)


def test_encoded_videos_are_a_sequence_and_can_be_pickled() -> None:
    one = encoded(video_file("mp4"), num_frames=2)
    other = torch.zeros(3, 3, 48, 64, dtype=torch.uint8)
    videos = EncodedVideos.join([one, other, one], is_joined=True)
    assert [len(video) for video in videos] == [2, 3, 2]
    assert repr(videos) == "<2 clips and 1 videos for mmstream.to_device>"
    assert videos[1] is other
    last = pickle.loads(pickle.dumps(videos[1:]))[1]
    assert torch.equal(last.decode(), one.decode())
    assert repr(one).startswith("<clip for 2 frames of 64x48, ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "gpu"}, "device='gpu': give one of 'cpu', 'cuda'"),
        ({"device": "cuda", "interpolation": "nearest"}, 'interpolation="nearest" needs device'),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mm.VideoDecoder(**settings)
