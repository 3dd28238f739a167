"""The videos and sounds of a sample or a batch, raw or decoded, and what they are in words.

    samples.py, cards.py -> recordings.py -> contents.py

A decoded recording is shown as the model gets it: the frames that were chosen, and the samples
after resampling.
"""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mmstream.display.contents import fields_named, file_kind, messages_of
from mmstream.display.markup import (
    html_text,
    media_player,
    picture_of_pixels,
    player,
    png,
    problem_html,
    size_text,
    small_line,
    stretched,
)
from mmstream.errors import DecodeError
from mmstream.media.types import AUDIO_EXTENSIONS, VIDEO_EXTENSIONS

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


# -- how they are drawn ----------------------------------------------------------------------------
#
# The files may come from strangers: they are opened within limits, and only a part of them is
# decoded. What cannot be decoded says why.

SIDE = 112
"""Pixels of the longer side of a frame on a sheet."""

MAX_FRAMES = 8
"""Frames of a clip that are shown, spread over all."""


def clip_tiles(clip: Clip, side: int, max_frames: int = MAX_FRAMES, *, label: str) -> list[str]:
    """Return frames of a clip as thumbnails with their times.

    Args:
        clip: uint8 or normalised. The values of normalised frames are stretched to 0..255, those of
            all frames alike.
        side: Pixels of the longer side.
        max_frames: So many are shown, spread over all, the first and the last included.
        label: Name of the video.
    """
    times = None if clip.times_s is None else array_of(clip.times_s)
    tiles = []
    for number, pixels in _spread_frames(clip.frames, max_frames):
        time = "" if times is None else f"{float(times[number]):.2f} s"
        words = small_line(time) if time else ""
        shown = picture_of_pixels(pixels, side, f"{label} {time}".strip())
        tiles.append(f"<div>{shown}{words}</div>")
    return tiles


def clip_html(name: str, clip: Clip) -> str:
    """Return a contact sheet of a clip, and what it is."""
    text = html_text(f"{name}: {clip_text(clip)}", 200)
    tiles = clip_tiles(clip, SIDE, label=name) if clip_text(clip) != "no video" else []
    return frames_html(tiles) + small_line(text)


def frames_html(tiles: Sequence[str]) -> str:
    """Return frames side by side; nothing where there are none."""
    style = "display:flex;flex-wrap:wrap;gap:4px;margin:4px 0"
    return f'<div style="{style}">{"".join(tiles)}</div>' if tiles else ""


def _spread_frames(frames: Any, max_frames: int) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Yield (number, pixels uint8 [H, W, 3]) of frames that are spread over a clip."""
    count = min(max_frames, len(frames))
    numbers = np.unique(np.linspace(0, len(frames) - 1, count).round().astype(np.int64))
    chosen = array_of(frames[numbers.tolist()]) if count else np.zeros((0, 3, 1, 1), np.uint8)
    if chosen.dtype.kind == "f":
        chosen = stretched(chosen)
    for number, pixels in zip(numbers.tolist(), chosen, strict=True):
        yield number, np.ascontiguousarray(pixels.transpose(1, 2, 0))


TIMEOUT_S = 5.0
"""Longest time to open a file, and to decode some of it."""

WAVEFORM_S = 60.0
"""Seconds of a sound that are drawn."""

WAVEFORM_RATE = 8000
"""Samples per second that are drawn: enough for a picture."""


def is_media_file(name: str, value: object) -> bool:
    """Tell whether a field holds the file of a video or a sound."""
    extension = name.rpartition(".")[2]
    return isinstance(value, bytes) and extension in VIDEO_EXTENSIONS | AUDIO_EXTENSIONS


def file_text(data: bytes) -> str:
    """Return what a file holds, from its headers, or why they cannot be read.

    For example: ``h264 640x360, 30 fps, 276 frames, 9.2 s; aac 44,100 Hz, 2 channels, 9.2 s``.
    """
    from mmstream.media.deadline import Deadline
    from mmstream.media.ffmpeg import is_cover, open_media

    try:
        with open_media(data, Deadline.start(TIMEOUT_S)) as container:
            streams = [*container.streams.video, *container.streams.audio]
            kept = [stream for stream in streams if not is_cover(stream)]
            texts = [_stream_text(stream, container.duration) for stream in kept]
            return "; ".join(texts) or "no video or sound in it"
    except DecodeError as error:
        return str(error)


def _stream_text(stream: Any, duration: int | None) -> str:
    """Return the codec, size, rate and length of a stream.

    Args:
        stream: PyAV's stream.
        duration: Of the file, in microseconds; it is taken where the stream does not say its own.
    """
    context = stream.codec_context
    if context is None:
        return f"{stream.type} of an unknown codec"
    name = context.codec.canonical_name
    seconds = (duration or 0) / 1e6
    if stream.duration and stream.time_base:
        seconds = float(stream.duration * stream.time_base)
    length = [seconds_text(seconds)] if seconds > 0 else []
    if stream.type == "video":
        rate = [f"{float(stream.average_rate):.4g} fps"] if stream.average_rate else []
        frames = [f"{stream.frames:,} frames"] if stream.frames else []
        return ", ".join([f"{name} {context.width}x{context.height}", *rate, *frames, *length])
    channels = f"{context.channels} channel{'s' * (context.channels != 1)}"
    return ", ".join([f"{name} {context.sample_rate:,} Hz", channels, *length])


def field_text(data: bytes) -> str:
    """Return the size, kind and content of a file: ``481.2 kB MP4: h264 640x360, 30 fps, ...``."""
    kind = file_kind(data).partition(" ")[0]
    return f"{size_text(len(data))} {kind}: {file_text(data)}".replace(" :", ":")


def file_html(name: str, data: bytes, max_bytes: int) -> str:
    """Return a player for a file, frames of its video or the waveform of its sound, and facts.

    Args:
        name: Of the field. Its extension says which of the two it is.
        data: The file.
        max_bytes: Larger files get no player.
    """
    facts = small_line(html_text(file_text(data), 300))
    return f"{_drawn(name, data)}{player(name, data, max_bytes)}{facts}"


def file_thumbnail(name: str, data: bytes, side: int) -> str:
    """Return the first frame of a video, or the waveform of a sound, as a tile."""
    return _drawn(name, data, side, num_frames=1)


def _drawn(name: str, data: bytes, side: int = SIDE, num_frames: int = 8) -> str:
    """Return frames or a waveform, or why there are none."""
    try:
        if name.rpartition(".")[2] in VIDEO_EXTENSIONS:
            return frames_html(clip_tiles(_clip(data, num_frames), side, num_frames, label=name))
        sound = _sound(data)
        width = 480 if num_frames > 1 else side
        return f"<div>{waveform(sound.samples, width, label=name)}</div>"
    except DecodeError as error:
        return problem_html(error, 200, "max-width:40em")


def _clip(data: bytes, num_frames: int) -> Clip:
    """Return frames of a video that are spread over it."""
    import torch

    from mmstream.decoding.video.decoder import VideoDecoder

    decoder = VideoDecoder(num_frames=num_frames, timeout_s=TIMEOUT_S)
    decoded = decoder.decode(data)
    return Clip(torch.from_numpy(decoded.pixels).permute(0, 3, 1, 2), decoded.times_s)


def _sound(data: bytes) -> Sound:
    """Return the start of a sound."""
    from mmstream.decoding.audio.decoder import AudioDecoder

    decoder = AudioDecoder(
        sample_rate=WAVEFORM_RATE, channels=1, duration_s=WAVEFORM_S, timeout_s=TIMEOUT_S
    )
    return Sound(decoder.decode(data).samples)


# -- sounds: a waveform, a player, a picture of features -------------------------------------------

WIDTH = 480
HEIGHT = 56
"""Pixels of a waveform."""

BLUE = (70, 130, 220)
"""Seen on light and on dark ground."""

PEAK = 32767
"""Of 16-bit samples."""


def waveform(samples: Any, width: int = WIDTH, height: int = HEIGHT, label: str = "") -> str:
    """Return the picture of a sound: the range of its samples in each column of pixels.

    Args:
        samples: Floating in -1..1 or int16, [T] or [C, T]. Channels are mixed.
        width: In pixels; shorter sounds are stretched to it.
        height: In pixels.
        label: What it is, for those who do not see it.
    """
    mono = _mono(samples)
    pixels = np.zeros((height, width, 4), dtype=np.uint8)
    pixels[..., :3] = BLUE
    if mono.size:
        bounds = np.linspace(0, mono.size, width + 1).astype(np.int64)
        starts = np.minimum(bounds[:-1], mono.size - 1)
        low = np.minimum.reduceat(mono, starts)
        high = np.maximum.reduceat(mono, starts)
        middle = (height - 1) / 2
        top = np.floor(middle - np.clip(high, -1, 1) * middle)
        bottom = np.ceil(middle - np.clip(low, -1, 1) * middle)
        line = np.arange(height)[:, None]
        pixels[..., 3] = np.where((line >= top) & (line <= bottom), 255, 0)
    return png(pixels, label)


def wav_of(samples: Any, sample_rate: int) -> bytes:
    """Return a WAV of 16 bits. Samples beyond -1..1 are cut off.

    Args:
        samples: Floating in -1..1 or int16, [T] or [C, T].
        sample_rate: Samples per second.
    """
    values = _floats(samples)
    channels = values[None] if values.ndim == 1 else values
    numbers = np.rint(np.clip(channels, -1, 1) * PEAK).astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((len(channels), 2, sample_rate, 0, "NONE", ""))
        file.writeframes(np.ascontiguousarray(numbers.T).tobytes())
    return buffer.getvalue()


def spectrogram(values: Any, label: str = "", width: int = WIDTH) -> str:
    """Return features as a picture: time from left to right, low bins below, high values bright."""
    grey = stretched(array_of(values).astype(np.float32))
    step = max(1, -(-grey.shape[1] // width))
    return png(np.ascontiguousarray(grey[::-1, ::step]), label)


def sound_html(name: str, sound: Sound, sample_rate: int, max_bytes: int) -> str:
    """Return a decoded sound: its waveform, what it is, and a player.

    Args:
        name: Of its field.
        sound: The samples.
        sample_rate: Samples per second, which the samples themselves do not say.
        max_bytes: Larger sounds get no player.
    """
    text = f"{name}: {sound_text(sound, sample_rate)}"
    if getattr(sound.samples, "ndim", 0) not in (1, 2):
        return html_text(text, 200)
    num_bytes = 2 * math.prod(sound.samples.shape)
    data = wav_of(sound.samples, sample_rate) if num_bytes <= max_bytes else b""
    more = "" if data else f", no player: more than {size_text(max_bytes)}"
    return (
        f"<div>{waveform(sound.samples, label=text)}</div>"
        f"{media_player('audio/wav', data) if data else ''}"
        f"{small_line(html_text(text + more, 200))}"
    )


def features_html(name: str, features: Features) -> str:
    """Return the picture of features, and what they are."""
    text = f"{name}: {features_text(features)}"
    shown = spectrogram(features.values, text) if getattr(features.values, "ndim", 0) == 2 else ""
    return f"<div>{shown}</div>{small_line(html_text(text, 200))}"


def _floats(samples: Any) -> npt.NDArray[np.float32]:
    array = array_of(samples)
    scale = PEAK if array.dtype.kind == "i" else 1
    return array.astype(np.float32) / np.float32(scale)


def _mono(samples: Any) -> npt.NDArray[np.float32]:
    values = _floats(samples)
    return values if values.ndim == 1 else values.mean(axis=0)
