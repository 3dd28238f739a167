"""Images, videos and sounds as HTML: thumbnails, frames, waveforms, players, and what they are.

    samples.py, packs.py -> media.py -> html.py

The files may come from strangers: they are opened within limits, only a part of them is decoded,
and images are encoded again. What cannot be decoded says why. A decoded recording is shown as the
model gets it: the frames that were chosen, and the samples after resampling.
"""

from __future__ import annotations

import base64
import io
import math
import wave
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from mmstream.display.contents import Clip, Features, Recording, Sound, array_of
from mmstream.display.html import element
from mmstream.display.text import count_text, file_kind, size_text
from mmstream.errors import DecodeError, escaped
from mmstream.media.audio_headers import refuse_short
from mmstream.media.frames import FrameList
from mmstream.media.limits import Deadline, Limits
from mmstream.media.types import BY_EXTENSION, VIDEO_EXTENSIONS

Pixels = npt.NDArray[np.uint8]

MAX_IMAGE_BYTES = 32 * 2**20
MAX_IMAGE_PIXELS = 64 * 2**20
MAX_FILE_BYTES = 2_000_000
"""Larger recordings are named, not embedded: a notebook file holds all that it shows."""

DEFAULT_SAMPLE_RATE = 16_000
"""Of decoded sounds, as of `AudioDecoder`."""

# -- images ----------------------------------------------------------------------------------------


def pixels_of(value: Any) -> Pixels:
    """Return the pixels of an encoded or decoded image, uint8 [H, W, 3].

    Args:
        value: the bytes of a file, or a tensor [3, H, W]. A tensor is uint8, or floating after
            normalisation: then its values are stretched to 0..255. A mask [H, W] is shown in grey
            levels, the highest number in white.

    Raises:
        DecodeError: `value` is not an image, or too large.
    """
    if isinstance(value, bytes):
        from mmstream.media.image import decode_whole  # loads Pillow

        if len(value) > MAX_IMAGE_BYTES:
            raise DecodeError(f"image of {len(value)} bytes exceeds {MAX_IMAGE_BYTES}")
        return decode_whole(value, Limits.start(MAX_IMAGE_PIXELS))
    if not hasattr(value, "detach"):
        raise DecodeError(f"no picture: {type(value).__name__}")
    tensor = value.detach().cpu()
    if tensor.ndim == 2 and "uint8" in str(tensor.dtype):
        tensor = (tensor * (255 // max(1, int(tensor.max())))).expand(3, -1, -1)
    is_floating = tensor.is_floating_point()
    array: Pixels = stretched(tensor.float().numpy()) if is_floating else tensor.numpy()
    if array.ndim != 3 or array.shape[0] != 3 or array.dtype != np.uint8:
        raise DecodeError(f"no picture: {tensor.dtype} {list(tensor.shape)}")
    return np.ascontiguousarray(array.transpose(1, 2, 0))


def stretched(values: npt.NDArray[Any]) -> Pixels:
    """Return numbers, such as those of normalised pixels, stretched to 0..255."""
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    scaled = (values - low) * (255 / max(high - low, 1e-12))
    return np.nan_to_num(scaled).astype(np.uint8)


def thumbnail(value: Any, side: int, label: str = "") -> Markup:
    """Return a thumbnail of at most `side` x `side` pixels, or the reason why there is none."""
    try:
        return _thumbnail(pixels_of(value), side, label)
    except DecodeError as error:
        return element("problem", error)


def _thumbnail(pixels: Pixels, side: int, label: str) -> Markup:
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return _encoded(image, "jpeg", label, quality=80)


def drawing(pixels: Pixels, label: str = "") -> Markup:
    """Return pixels as they are, uint8 [H, W] or [H, W, 4]: nothing is blurred."""
    from PIL import Image

    if not pixels.size:
        return Markup()
    return _encoded(Image.fromarray(pixels), "png", label, optimize=True)


def _encoded(image: Any, kind: str, label: str, **settings: Any) -> Markup:
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    source = _data_url(f"image/{kind}", buffer.getvalue())
    return element("image", source, image.width, image.height, escaped(label))


def _data_url(kind: str, data: bytes) -> Markup:
    return Markup("data:{};base64,{}").format(kind, base64.b64encode(data).decode())


# -- videos and sounds -----------------------------------------------------------------------------

TIMEOUT_S = 5.0
"""Longest time to open a file, and to decode some of it."""

MAX_FRAME_PIXELS = 36 * 2**20
MAX_DECODED_FRAMES = 50_000

MAX_FRAMES, FRAME_SIDE = 8, 112
"""Frames of a clip that are shown, spread over all, and the pixels of their longer side."""

TILE_FRAMES, TILE_FRAME_SIDE, TILE_WIDTH = 4, 68, 144
"""The same of a clip in a tile, and the width of a tile."""

WIDTH, HEIGHT = 480, 56
"""Pixels of a waveform."""

WAVEFORM_S, WAVEFORM_RATE = 60.0, 8000
"""Seconds of a sound file that are drawn, and samples per second: enough for a picture."""

BLUE = (70, 130, 220)
"""Seen on light and on dark ground."""

PEAK = 32767
"""Of 16-bit samples."""


def recording_html(
    name: str, recording: Recording, max_bytes: int = MAX_FILE_BYTES, sample_rate: int = 16_000
) -> Markup:
    """Return frames or a waveform of a recording, a player, and what it is.

    Args:
        name: Of its field. The extension says whether a file is a video or a sound.
        recording: A file, or what a decoder made of it.
        max_bytes: Larger files and sounds get no player.
        sample_rate: Samples per second of decoded sounds, which they do not say themselves.
    """
    text = f"{name}: {recording_text(recording, sample_rate)}"
    player, note = _player(name, recording, max_bytes, sample_rate)
    return element("recording", _drawn(name, recording, text), player, text + note)


def recording_tile(name: str, recording: Recording) -> Markup:
    """Return frames or a waveform of a recording as a tile."""
    return _drawn(name, recording, name, TILE_FRAMES, TILE_FRAME_SIDE, TILE_WIDTH)


def _drawn(
    name: str,
    recording: Recording,
    label: str,
    num_frames: int = MAX_FRAMES,
    side: int = FRAME_SIDE,
    width: int = WIDTH,
) -> Markup:
    """Return frames of a video, the waveform of a sound, or why there are none."""
    try:
        decoded = _decoded(name, recording, num_frames)
    except DecodeError as error:
        return element("problem", error)
    if isinstance(decoded, Clip):
        return element("frames", list(_frame_tiles(decoded, num_frames, side, name)))
    if isinstance(decoded, Features):
        return spectrogram(decoded.values, label, width)
    return waveform(decoded.samples, width, label=label)


def _decoded(name: str, recording: Recording, num_frames: int) -> Clip | Sound | Features:
    """Return a decoded recording: of a file some frames, or the start of the sound."""
    if not isinstance(recording, bytes | FrameList):
        return recording
    if isinstance(recording, FrameList) or name.rpartition(".")[2] in VIDEO_EXTENSIONS:
        return _clip_of(recording, num_frames)
    return _start_of_sound(recording)


def _clip_of(data: bytes | FrameList, num_frames: int) -> Clip:
    """Return frames that are spread over the file of a video."""
    from mmstream.media.video import pictures, read_video_file, refuse_many_decoded  # PyAV

    deadline = Deadline.start(TIMEOUT_S)
    file = read_video_file(data, deadline, MAX_FRAME_PIXELS)
    timeline = file.timeline
    numbers = np.unique(np.linspace(0, timeline.num_frames - 1, num_frames).round().astype(int))
    packets = timeline.display_order[numbers].tolist()
    refuse_many_decoded(timeline, packets, MAX_DECODED_FRAMES)
    frames = np.empty((len(packets), *file.picture, 3), np.uint8)
    for packet, pixels in pictures(file, data, packets, deadline, MAX_DECODED_FRAMES):
        frames[packets.index(packet)] = pixels
    return Clip(frames.transpose(0, 3, 1, 2), timeline.times_s[numbers])


def _start_of_sound(data: bytes) -> Sound:
    """Return the first `WAVEFORM_S` of a file of sound, in about `WAVEFORM_RATE` pairs a second.

    They are the lowest and the highest of so many samples, all that a waveform shows of them.
    """
    from mmstream.media.audio import open_audio  # loads libsndfile

    with open_audio(data, Deadline.start(TIMEOUT_S)) as source:
        rate = source.sample_rate
        stop = min(source.num_samples, round(WAVEFORM_S * rate))
        if not stop:
            raise DecodeError("no audio in it: the file has 0 s")
        blocks, num_read = [np.zeros((0, 2), np.float32)], 0
        for block in source.blocks(0, stop):
            mono = block.mean(axis=1)
            starts = np.arange(0, len(mono), max(1, rate // WAVEFORM_RATE))
            lowest, highest = np.minimum.reduceat(mono, starts), np.maximum.reduceat(mono, starts)
            blocks.append(np.stack((lowest, highest), axis=1))
            num_read += len(block)
        refuse_short(stop / rate, num_read / rate)
    samples = np.concatenate(blocks).ravel()
    if not np.isfinite(samples).all():
        raise DecodeError("holds samples that are NaN or infinite")
    return Sound(samples)


def _player(
    name: str, recording: Recording, max_bytes: int, sample_rate: int
) -> tuple[Markup, str]:
    """Return a player of what browsers play, and a note where it would be too large."""
    if isinstance(recording, Sound):
        kind, num_bytes = "audio/wav", 2 * math.prod(recording.samples.shape)
    elif isinstance(recording, bytes) and (played := _played_as(name)) is not None:
        kind, num_bytes = played, len(recording)
    else:
        return Markup(), ""
    if num_bytes > max_bytes:
        return Markup(), f"; not embedded: more than {size_text(max_bytes)}"
    data = wav_of(recording.samples, sample_rate) if isinstance(recording, Sound) else recording
    return element(kind.partition("/")[0], _data_url(kind, data)), ""


def _played_as(name: str) -> str | None:
    """Return the media type that a browser plays a field as."""
    media_type = BY_EXTENSION.get(name.rpartition(".")[2])
    return None if media_type is None else media_type.played_as


def _frame_tiles(
    clip: Clip, max_frames: int, side: int, label: str
) -> Iterator[tuple[Markup, str]]:
    """Yield thumbnails of frames that are spread over a clip, with their times.

    The values of normalised frames are stretched to 0..255, those of all frames alike.
    """
    count = min(max_frames, len(clip.frames))
    if not count:
        return
    numbers = np.unique(np.linspace(0, len(clip.frames) - 1, count).round().astype(np.int64))
    frames = array_of(clip.frames[numbers.tolist()])
    if frames.dtype.kind == "f":
        frames = stretched(frames)
    times = None if clip.times_s is None else array_of(clip.times_s)
    for number, pixels in zip(numbers.tolist(), frames, strict=True):
        time = "" if times is None else f"{float(times[number]):.2f} s"
        upright = np.ascontiguousarray(pixels.transpose(1, 2, 0))
        yield _thumbnail(upright, side, f"{label} {time}".strip()), time


def waveform(samples: Any, width: int = WIDTH, height: int = HEIGHT, label: str = "") -> Markup:
    """Return the picture of a sound: the range of its samples in each column of pixels.

    Args:
        samples: Floating in -1..1 or int16, [T] or [C, T]. Channels are mixed.
        width: In pixels; shorter sounds are stretched to it.
        height: In pixels.
        label: What it is, for those who do not see it.
    """
    channels = _floats(samples)
    mono = channels if channels.ndim == 1 else channels.mean(axis=0)
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
    return drawing(pixels, label)


def spectrogram(values: Any, label: str = "", width: int = WIDTH) -> Markup:
    """Return features as a picture: time from left to right, low bins below, high values bright."""
    grey = stretched(array_of(values).astype(np.float32))
    step = max(1, -(-grey.shape[1] // width))
    return drawing(np.ascontiguousarray(grey[::-1, ::step]), label)


def wav_of(samples: Any, sample_rate: int) -> bytes:
    """Return a WAV of 16 bits. Samples beyond -1..1 are cut off.

    Args:
        samples: Floating in -1..1 or int16, [T] or [C, T].
        sample_rate: Samples per second.
    """
    values = _floats(samples)
    channels = values[None] if values.ndim == 1 else values
    integers = np.rint(np.clip(channels, -1, 1) * PEAK).astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((len(channels), 2, sample_rate, 0, "NONE", ""))
        file.writeframes(np.ascontiguousarray(integers.T).tobytes())
    return buffer.getvalue()


def _floats(samples: Any) -> npt.NDArray[np.float32]:
    array = array_of(samples)
    scale = PEAK if array.dtype.kind == "i" else 1
    return array.astype(np.float32) / np.float32(scale)


# -- what recordings are, in words -----------------------------------------------------------------


def recording_text(recording: Recording, sample_rate: int = DEFAULT_SAMPLE_RATE) -> str:
    """Return what a recording is.

    ``481.2 kB MP4: h264 640x360, 30 fps, ...``, ``8 frames of 640x360, 0.00 to 7.00 s``,
    ``48,000 samples, 3.00 s at 16,000 Hz``, or ``80 bins x 3,000 frames``.
    """
    if isinstance(recording, bytes):
        kind = f"{size_text(len(recording))} {file_kind(recording)}".rstrip()
        return f"{kind}: {_file_text(recording)}"
    if isinstance(recording, FrameList):
        seconds = f"{recording.times_s[0]:.2f} to {recording.times_s[-1]:.2f} s"
        return (
            f"{size_text(len(recording))} of {count_text(len(recording.files), 'frame')}, {seconds}"
        )
    if isinstance(recording, Clip):
        return _clip_text(recording)
    if isinstance(recording, Features):
        num_bins, num_frames = recording.values.shape
        return f"{num_bins} bins x {num_frames:,} frames"
    *channels, num_samples = recording.samples.shape
    of_channels = f", {channels[0]} channels" if channels else ""
    seconds = num_samples / sample_rate
    return f"{num_samples:,} samples{of_channels}, {seconds:.2f} s at {sample_rate:,} Hz"


def _clip_text(clip: Clip) -> str:
    num_frames, _, height, width = clip.frames.shape
    if not num_frames:
        return "no video"
    text = f"{count_text(num_frames, 'frame')} of {width}x{height}"
    times = [] if clip.times_s is None else array_of(clip.times_s).tolist()
    return f"{text}, {times[0]:.2f} to {times[-1]:.2f} s" if times else text


def _file_text(data: bytes) -> str:
    """Return what a file holds, from its headers, or why they cannot be read.

    For example: ``h264 640x360, 30 fps, 276 frames, 9.2 s; aac 44,100 Hz, 2 channels, 9.2 s``.
    """
    from mmstream.media.ffmpeg import is_cover, open_media

    try:
        with open_media(data, Deadline.start(TIMEOUT_S)) as container:
            streams = [*container.streams.video, *container.streams.audio]
            texts = [_stream_text(s, container.duration) for s in streams if not is_cover(s)]
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
    if stream.type == "video":
        facts = [f"{name} {context.width}x{context.height}"]
        facts += [f"{float(stream.average_rate):.4g} fps"] if stream.average_rate else []
        facts += [count_text(stream.frames, "frame")] if stream.frames else []
    else:
        facts = [f"{name} {context.sample_rate:,} Hz", count_text(context.channels, "channel")]
    seconds = (duration or 0) / 1e6
    if stream.duration and stream.time_base:
        seconds = float(stream.duration * stream.time_base)
    return ", ".join([*facts, _seconds_text(seconds)] if seconds > 0 else facts)


def _seconds_text(seconds: float) -> str:
    """Return a duration: ``4.2 s``, ``2:05`` from a minute on, ``1:02:05`` from an hour on."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"
