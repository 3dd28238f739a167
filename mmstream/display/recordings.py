"""The videos and sounds of a sample or a batch, raw or decoded, and what they are in words.

    samples.py, cards.py -> recordings.py -> contents.py; drawn by media_files.py

A decoded recording is shown as the model gets it: the frames that were chosen, and the samples
after resampling.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mmstream.display.contents import fields_named, messages_of
from mmstream.media_types import AUDIO_EXTENSIONS, VIDEO_EXTENSIONS

EXTENSIONS = VIDEO_EXTENSIONS | AUDIO_EXTENSIONS

FEATURES = "_features"
"""How the name of a field ends that holds features of sounds."""


@dataclass(frozen=True)
class Clip:
    """Decoded frames of a video: uint8 or floating, [F, 3, H, W]."""

    frames: Any
    times_s: Any = None
    """When each frame is shown, in seconds, [F]. None: not known."""


@dataclass(frozen=True)
class Sound:
    """Decoded samples of a sound: floating or int16, [T] or [C, T]."""

    samples: Any


@dataclass(frozen=True)
class Features:
    """Features of a sound, such as log-mel: floating, [bins, frames]."""

    values: Any


Recording: TypeAlias = bytes | Clip | Sound | Features


def array_of(value: Any) -> npt.NDArray[Any]:
    """Return a tensor, on any device, or an array as an array of numpy."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value if "bfloat16" not in str(value.dtype) else value.float()
    return np.asarray(value)


def recordings_of(sample: Mapping[str, Any]) -> dict[str, Recording]:
    """Return the videos and sounds of a sample by field: files, or what decoders made of them.

    Decoded ones have the names that the messages give them, if these are as many.
    """
    named = [*dict.fromkeys(fields_named(messages_of(sample)))]
    recordings: dict[str, Recording] = {}
    for name, value in sample.items():
        if name.startswith("__"):
            continue
        if _extension(name) in EXTENSIONS and isinstance(value, bytes):
            recordings[name] = value
        elif f"{name}_pts_s" in sample:
            clips = _clips(value, sample[f"{name}_pts_s"])
            recordings |= _with_names(name, clips, named, VIDEO_EXTENSIONS)
        elif name == "audio" or _extension(name.removesuffix(FEATURES)) in {"audio", *EXTENSIONS}:
            sounds = _sounds(name, value, sample.get(f"{name}_length"))
            recordings |= _with_names(name, sounds, named, AUDIO_EXTENSIONS)
    return recordings


def batch_recordings(batch: Mapping[str, Any]) -> list[list[tuple[str, Recording]]]:
    """Return the videos and sounds of each row of a batch, with the names of their fields."""
    rows: list[list[tuple[str, Recording]]] = [[] for _ in batch["__key__"]]
    for name, value in batch.items():
        if f"{name}_frames" in batch and f"{name}_row" in batch:
            for row, clip in _batch_clips(batch, name):
                rows[row].append((name, clip))
        elif f"{name}_length" in batch:
            owners = _numbers(batch.get(f"{name.removesuffix(FEATURES)}_row"))
            sounds = _sounds(name, list(value), batch[f"{name}_length"])
            for row, sound in zip(owners, sounds, strict=False):
                rows[row].append((name, sound))
        elif _extension(name) in EXTENSIONS and isinstance(value, list):
            for row, data in enumerate(value[: len(rows)]):
                rows[row] += [(name, data)] if isinstance(data, bytes) else []
    return rows


def _batch_clips(batch: Mapping[str, Any], name: str) -> Iterator[tuple[int, Clip]]:
    """Yield the row and the frames of each video of a batch.

    For example, ``video_frames`` of [2, 4] says that the first 2 of 6 frames are one video.
    """
    frames = batch[name]
    times = batch.get(f"{name}_pts_s")
    start = 0
    numbers = zip(_numbers(batch[f"{name}_row"]), _numbers(batch[f"{name}_frames"]), strict=True)
    for number, (row, count) in enumerate(numbers):
        stop = start + count
        # Videos of different sizes are a list.
        clip = frames[number] if isinstance(frames, list) else frames[start:stop]
        yield row, Clip(clip, None if times is None else times[start:stop])
        start = stop


def _with_names(
    field: str, values: Sequence[Recording], named: Sequence[str], extensions: Collection[str]
) -> dict[str, Recording]:
    """Return recordings with their names in the messages, or with numbers."""
    names = [name for name in named if _extension(name) in extensions]
    if field not in ("video", "audio", "audio_features") or len(names) != len(values):
        names = [field] if len(values) == 1 else [f"{field} {i}" for i in range(len(values))]
    return dict(zip(names, values, strict=True))


def _clips(value: Any, times_s: Any) -> list[Clip]:
    times = times_s if isinstance(value, list) else [times_s]
    return [Clip(clip, each) for clip, each in zip(_each(value), times, strict=False)]


def _sounds(name: str, value: Any, lengths: Any) -> list[Recording]:
    """Return sounds or features, without padding where their lengths are known."""
    values = _each(value)
    numbers = _numbers(lengths) if lengths is not None else []
    if len(numbers) == len(values):
        values = [each[..., :length] for each, length in zip(values, numbers, strict=True)]
    return [Features(each) if name.endswith(FEATURES) else Sound(each) for each in values]


def _each(value: Any) -> list[Any]:
    """Return the tensors of a field. A file may have its name too."""
    values = value if isinstance(value, list) else [value]
    return [each for each in values if getattr(each, "ndim", 0)]


def _numbers(value: Any) -> list[int]:
    return [] if value is None else np.atleast_1d(array_of(value)).astype(np.int64).tolist()


def _extension(name: str) -> str:
    return name.rpartition(".")[2]


# -- in words -------------------------------------------------------------------------------------


def recording_text(recording: Clip | Sound | Features, sample_rate: int) -> str:
    """Return what a decoded recording is, in a few words."""
    if isinstance(recording, Clip):
        return clip_text(recording)
    if isinstance(recording, Features):
        return features_text(recording)
    return sound_text(recording, sample_rate)


def clip_text(clip: Clip) -> str:
    """Return what a clip is: ``8 frames of 640x360, 0.00 to 7.00 s``."""
    shape = list(getattr(clip.frames, "shape", ()))
    if len(shape) != 4 or not shape[0]:
        return "no video"
    noun = "frame" if shape[0] == 1 else "frames"
    text = f"{shape[0]:,} {noun} of {shape[3]}x{shape[2]}"
    times = [] if clip.times_s is None else array_of(clip.times_s).tolist()
    return f"{text}, {times[0]:.2f} to {times[-1]:.2f} s" if times else text


def sound_text(sound: Sound, sample_rate: int) -> str:
    """Return what a sound is: ``48,000 samples, 3.00 s at 16,000 Hz``."""
    shape = list(getattr(sound.samples, "shape", ()))
    if len(shape) not in (1, 2):
        return "no sound"
    channels = f", {shape[0]} channels" if len(shape) == 2 else ""
    seconds = shape[-1] / sample_rate
    return f"{shape[-1]:,} samples{channels}, {seconds:.2f} s at {sample_rate:,} Hz"


def features_text(features: Features) -> str:
    """Return what features are: ``80 bins x 3,000 frames``."""
    shape = list(getattr(features.values, "shape", ()))
    return f"{shape[0]} bins x {shape[1]:,} frames" if len(shape) == 2 else "no features"


def seconds_text(seconds: float) -> str:
    """Return a duration: ``4.2 s``, ``2:05`` from a minute on, ``1:02:05`` from an hour on."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
