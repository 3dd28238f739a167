"""Decoders of made-up videos and recordings, for the stages around the real ones.

A file is JSON: what the decoder makes of it, and what goes wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mmstream.decoding.media_shapes import AudioShape, VideoShape
from mmstream.errors import DecodeError
from mmstream.media.ffmpeg import NoStreamError


def fake_file(
    number: int,
    length: int,
    *,
    size: tuple[int, int] = (4, 6),
    has_track: bool = True,
    bad: str = "",
) -> bytes:
    """A video of `length` frames, or a recording of so many samples, that shows a number.

    `bad`: "plan" or "decode", the call that refuses it.
    """
    content = {"number": number, "length": length, "size": size, "track": has_track, "bad": bad}
    return json.dumps(content).encode()


class Limits(NamedTuple):
    """What a sample may hold, in bytes or seconds."""

    most: float
    held: float = 0.0

    def holding(self, more: float) -> Limits:
        return self._replace(held=self.held + more)

    def check(self, more: float) -> None:
        if self.held + more > self.most:
            raise DecodeError(f"{self.held + more:g} exceeds {self.most:g}")


class FakeFeatures(NamedTuple):
    num_mels: int


class AudioPlan(NamedTuple):
    shape: AudioShape
    start: int
    content: dict[str, Any]


class DecodedAudio(NamedTuple):
    samples: Any
    features: Any
    plan: AudioPlan


@dataclass(frozen=True)
class FakeAudioDecoder:
    decoded_medium: ClassVar[str] = "audio"
    reads_ranges: ClassVar[bool] = True
    sample_rate: int = 100
    channels: int | None = 1
    dtype: str = "float32"
    features: FakeFeatures | None = None
    duration: int | None = None
    duration_s: float | None = None
    span: str | None = "row"
    is_random: bool = False
    max_seconds: float = 1e9

    def start_limits(self) -> Limits:
        return Limits(self.max_seconds)

    def plan(self, data, row=None, rng=None, limits=None) -> AudioPlan:
        content = parsed(data, "plan")
        if not content["track"]:
            raise NoStreamError("has no audio in it")
        length = content["length"] if self.duration is None else self.duration
        start = int(rng.integers(1000)) if self.is_random else span_of(row)[0]
        (limits or self.start_limits()).check(length / self.sample_rate)
        frames = 0 if self.features is None else -(-length // 2)
        return AudioPlan(AudioShape(length, frames, self.sample_rate), start, content)

    def decode(self, data, plan=None, row=None, rng=None, limits=None) -> DecodedAudio:
        parsed(data, "decode")
        plan = plan or self.plan(data, row, rng, limits)
        ramp = plan.content["number"] + plan.start + np.arange(plan.shape.num_samples) / 1024
        if self.features is not None:
            padded = np.zeros(
                (self.features.num_mels, plan.shape.num_feature_frames + 1), np.float32
            )
            padded[:, :-1] = ramp[::2]
            return DecodedAudio(None, padded, plan)
        return DecodedAudio(ramp.astype(self.dtype), None, plan)


class VideoPlan(NamedTuple):
    shape: VideoShape
    content: dict[str, Any]


class DecodedVideo(NamedTuple):
    pixels: Any
    times_s: Any


@dataclass(frozen=True)
class FakeVideoDecoder:
    decoded_medium: ClassVar[str] = "video"
    reads_ranges: ClassVar[bool] = True
    num_frames: int | None = None
    size: tuple[int, int] | None = None
    audio: FakeAudioDecoder | None = None
    span: str | None = None
    clip_s: float | None = None
    is_random: bool = False
    max_memory: float = 1e9

    @property
    def output_shape(self) -> tuple[int, int] | None:
        return self.size

    def start_limits(self) -> Limits:
        return Limits(self.max_memory)

    def plan(self, data, row=None, rng=None, limits=None) -> VideoPlan:
        content = parsed(data, "plan")
        num_frames = self.num_frames or content["length"]
        height, width = self.size or content["size"]
        start = float(rng.integers(1000)) if self.is_random else float(span_of(row)[0])
        (limits or self.start_limits()).check(num_frames * height * width * 3)
        times = tuple(start + np.arange(num_frames) / 4)
        size = tuple(content["size"])
        end = start + num_frames / 4
        shape = VideoShape(num_frames, height, width, size, times, 4.0, 4.0, end_s=end)
        return VideoPlan(shape, content)

    def decode(self, data, plan=None, out=None, rng=None, limits=None) -> DecodedVideo:
        parsed(data, "decode")
        frames = np.arange(plan.shape.num_frames)[:, None, None, None]
        out[:] = (plan.content["number"] * 10 + frames) % 256
        return DecodedVideo(out, np.array(plan.shape.times_s))


def parsed(data: bytes, call: str) -> dict[str, Any]:
    content = json.loads(bytes(data))
    if content["bad"] == call:
        raise DecodeError(f"{call} refuses it")
    return content


def span_of(row: Mapping[str, Any] | None) -> tuple[int, int]:
    row = row or {}
    return row.get("start_s", 0), row.get("end_s", 0)
