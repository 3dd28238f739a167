"""HTML: jinja2 templates that escape every value, one stylesheet, and images, videos and sounds.

    samples.py, packs.py, the pages of `view` -> html.py -> templates/

The data may come from strangers. Autoescaping is always on, long values are cut, and characters
that nobody would see are shown by their numbers. The HTML refers to no other file and to no network
address.

Files are opened within limits, only a part of them is decoded, and images are encoded again. What
cannot be decoded says why. A decoded recording is shown as the model gets it: the frames that were
chosen. A decoded sound is a tensor, as other fields.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

from mmstream.display.contents import Clip, Recording, array_of
from mmstream.display.text import count_text, kind_of, size_text
from mmstream.errors import DecodeError, escaped
from mmstream.media.frames import FrameList
from mmstream.media.limits import Deadline, Limits
from mmstream.media.types import BY_EXTENSION, VIDEO_EXTENSIONS

Pixels = npt.NDArray[np.uint8]

# -- templates -------------------------------------------------------------------------------------

MAX_CHARACTERS = 400
"""Longest value in a page, where a template does not say another length."""

_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters but for tab and line ends, and those that embed or override a direction."""


def cut(value: object, max_characters: int = MAX_CHARACTERS) -> Markup:
    """Return a value as escaped text of some length. Bytes are read as UTF-8, HTML stays as it is.

    Control characters, and those that would change the direction of the text after them, are shown
    by their numbers.
    """
    if isinstance(value, Markup):
        return value
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    num_left_out = len(text) - max_characters
    if num_left_out > 0:
        text = f"{text[:max_characters]} ... {num_left_out:,} more"
    text = _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return escape(text.encode("utf-8", "replace").decode())


def environment(*folders: Path) -> jinja2.Environment:
    """Return the templates of folders and those of ``templates/``. They escape all values."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, Path(__file__).with_name("templates")]),
        autoescape=True,
        finalize=cut,  # of whatever is printed
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"cut": cut, "size": size_text, "count": count_text}
    return templates


_TEMPLATES = environment()

_ELEMENTS = _TEMPLATES.get_template("elements.html").module


def element(name: str, *values: Any) -> Markup:
    """Return the HTML of a macro of ``elements.html``, such as ``element("table", rows)``."""
    return Markup(getattr(_ELEMENTS, name)(*values))


def render(template: str, **values: Any) -> Markup:
    """Return the HTML of a template."""
    return Markup(_TEMPLATES.get_template(template).render(values))


def page(*sections: Markup) -> str:
    """Return the output of a notebook cell, with the stylesheet and the parts below each other."""
    return str(render("page.html", sections=sections))


def document(title: str, *pages: str) -> str:
    """Return a whole page that needs no other file.

    Its content security policy forbids every script, and forbids the browser to load anything.

    Args:
        title: Text of the title, not yet escaped.
        pages: The body, as `page` returns it.
    """
    return str(render("document.html", title=escaped(title), pages=map(Markup, pages)))


# -- images ----------------------------------------------------------------------------------------

MAX_IMAGE_BYTES = 32 * 2**20
MAX_IMAGE_PIXELS = 64 * 2**20
MAX_FILE_BYTES = 2_000_000
"""Larger recordings are named, not embedded: a notebook file holds all that it shows."""


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
    buffer = io.BytesIO()
    image.save(buffer, "jpeg", quality=80)
    source = _data_url("image/jpeg", buffer.getvalue())
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

TILE_FRAMES, TILE_FRAME_SIDE = 4, 68
"""The same of a clip in a tile."""


def recording_html(name: str, recording: Recording, max_bytes: int = MAX_FILE_BYTES) -> Markup:
    """Return frames of a recording, a player, and what it is.

    Args:
        name: Of its field. The extension says whether a file is a video or a sound.
        recording: A file, or what a decoder made of it.
        max_bytes: Larger files get no player.
    """
    text = f"{name}: {recording_text(recording)}"
    player, note = _player(name, recording, max_bytes)
    pictures = _pictures(name, recording, MAX_FRAMES, FRAME_SIDE)
    return element("recording", pictures, player, text + note)


def recording_tile(name: str, recording: Recording) -> Markup:
    """Return a recording as a tile: some frames, or what the sound is."""
    pictures = _pictures(name, recording, TILE_FRAMES, TILE_FRAME_SIDE)
    return pictures or cut(f"{name}: {recording_text(recording)}", 100)


def _pictures(name: str, recording: Recording, num_frames: int, side: int) -> Markup:
    """Return frames of a video, or why there are none. Of a sound there is nothing."""
    if isinstance(recording, bytes) and name.rpartition(".")[2] not in VIDEO_EXTENSIONS:
        return Markup()
    try:
        clip = recording if isinstance(recording, Clip) else _clip_of(recording, num_frames)
    except DecodeError as error:
        return element("problem", error)
    return element("frames", list(_frame_tiles(clip, num_frames, side, name)))


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


def _player(name: str, recording: Recording, max_bytes: int) -> tuple[Markup, str]:
    """Return a player of what browsers play, and a note where it would be too large."""
    kind = played_as(name)
    if not isinstance(recording, bytes) or kind is None:
        return Markup(), ""
    if len(recording) > max_bytes:
        return Markup(), f"; not embedded: more than {size_text(max_bytes)}"
    return element(kind.partition("/")[0], _data_url(kind, recording), name), ""


def played_as(name: str) -> str | None:
    """Return the media type that a browser plays a file as. None: it plays none."""
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


# -- what recordings are, in words -----------------------------------------------------------------


def recording_text(recording: Recording) -> str:
    """Return what a recording is.

    ``481.2 kB MP4: h264 640x360, 30 fps, ...``, or ``8 frames of 640x360, 0.00 to 7.00 s``.
    """
    if isinstance(recording, bytes):
        return f"{kind_of(recording)}: {_file_text(recording)}"
    if isinstance(recording, FrameList):
        seconds = f"{recording.times_s[0]:.2f} to {recording.times_s[-1]:.2f} s"
        return (
            f"{size_text(len(recording))} of {count_text(len(recording.files), 'frame')}, {seconds}"
        )
    num_frames, _, height, width = recording.frames.shape
    if not num_frames:
        return "no video"
    text = f"{count_text(num_frames, 'frame')} of {width}x{height}"
    times = [] if recording.times_s is None else array_of(recording.times_s).tolist()
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
    if seconds > 0:
        facts.append(f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds))))
    return ", ".join(facts)


# -- spectrograms ----------------------------------------------------------------------------------
#
# Which frequencies of a sound are heard when, as a picture with axes. Only its start is decoded.

MAX_SECONDS = 60
"""Of a sound that are drawn in a spectrogram."""

TILE_SECONDS = 20
"""The same in a tile."""

MAX_RATE = 192_000
"""Samples of a second, from which on fewer seconds are drawn."""

MAX_CHANNELS = 64

SPECTROGRAM_SIZE = 720, 180
"""Width and height of a spectrogram in pixels, without its axes."""

TILE_SPECTROGRAM_SIZE = 176, 72
"""The same in a tile, which has no axes."""

WINDOW_S = 0.03
"""Seconds that one spectrum is of, about."""

RANGE_DB = 80.0
"""What is so much quieter than the loudest place is as dark as silence."""

COLOURS = ((8, 10, 30), (66, 28, 110), (170, 50, 105), (240, 120, 60), (252, 245, 190))
"""From silence to the loudest place."""


class Spectrogram(NamedTuple):
    """The picture of a sound."""

    name: str
    """Of its file."""
    source: Markup = Markup()
    """The picture, as an address that holds it."""
    seconds: float = 0.0
    """That are drawn."""
    num_seconds: float = 0.0
    """Of the sound."""
    times: tuple[tuple[float, str], ...] = ()
    """The axis of seconds: its marks, in pixels from the left, and their texts."""
    frequencies: tuple[tuple[float, str], ...] = ()
    """The axis of Hz, in pixels from the top."""
    problem: str = ""
    """Why there is none."""

    @property
    def label(self) -> str:
        """What it shows, for those who cannot see it."""
        part = "" if self.seconds == self.num_seconds else f" of {self.num_seconds:,.1f}"
        return f"spectrogram of {self.name}, {self.seconds:,.1f}{part} s"


def spectrogram_of(
    name: str,
    data: bytes,
    size: tuple[int, int] = SPECTROGRAM_SIZE,
    max_seconds: int = MAX_SECONDS,
) -> Spectrogram:
    """Return the picture of the start of a sound, or why there is none.

    Args:
        name: Of its file.
        data: The file.
        size: Width and height of the picture.
        max_seconds: That are drawn.
    """
    try:
        samples, rate, num_seconds = _start_of(data, max_seconds)
    except DecodeError as error:
        return Spectrogram(name, problem=str(error))
    seconds = len(samples) / rate
    width, height = size
    frequencies = ((height - above, text) for above, text in _ticks(rate / 2, height, 4))
    return Spectrogram(
        name,
        _spectrogram(decibels(samples, rate, width), size),
        seconds,
        max(seconds, num_seconds),
        tuple(_ticks(seconds, width, 8)),
        tuple(frequencies),
    )


def _start_of(data: bytes, max_seconds: int) -> tuple[npt.NDArray[np.float32], int, float]:
    """Return the mean of the channels of the start of a sound, its rate, and its whole length.

    Raises:
        DecodeError: It is damaged, empty, or takes too long.
    """
    from mmstream.media.audio import open_audio  # loads libsndfile and FFmpeg

    with open_audio(data, Deadline.start(TIMEOUT_S)) as source:
        rate = source.sample_rate
        if source.num_channels > MAX_CHANNELS:
            raise DecodeError(f"the sound has {source.num_channels:,} channels")
        blocks = source.blocks(0, min(source.num_samples, max_seconds * min(rate, MAX_RATE)))
        means = [block.mean(axis=1) for block in blocks]
        samples = np.nan_to_num(np.concatenate(means)) if means else np.zeros(0, np.float32)
        if not samples.size:
            raise DecodeError("the sound has no samples")
        return samples, rate, source.num_samples / rate


def decibels(samples: npt.NDArray[Any], rate: int, width: int) -> npt.NDArray[np.float32]:
    """Return the loudness of each frequency, float32 [frequencies, at most `width`], 0 to 1.

    Each column has the loudest of its spectra, so that a click of a long sound is seen.

    Args:
        samples: Of one channel.
        rate: Samples of a second.
        width: Columns.
    """
    length = 1 << max(4, round(math.log2(rate * WINDOW_S)))
    padded = np.pad(samples, (0, max(0, length - len(samples))))
    num_spectra = len(padded) - length + 1
    step = max(1, min(length // 2, num_spectra // width))
    windows = np.lib.stride_tricks.sliding_window_view(padded, length)[::step]
    columns = min(width, len(windows))
    starts = np.arange(columns) * len(windows) // columns
    loudest = np.empty((length // 2 + 1, columns), np.float32)
    hann = np.hanning(length).astype(np.float32)
    stops = [*starts[1:].tolist(), len(windows)]
    for column, (start, stop) in enumerate(zip(starts.tolist(), stops, strict=True)):
        spectra = np.abs(np.fft.rfft(windows[start:stop] * hann, axis=1))
        loudest[:, column] = spectra.max(axis=0)
    peak = float(loudest.max()) or 1.0
    of_peak = 20 * np.log10(np.maximum(loudest / peak, 1e-9))
    scaled: npt.NDArray[np.float32] = np.clip(1 + of_peak / RANGE_DB, 0, 1)
    return scaled if loudest.any() else np.zeros_like(loudest)


def _spectrogram(loudness: npt.NDArray[np.float32], size: tuple[int, int]) -> Markup:
    """Return a PNG as an address that holds it, with the lowest frequency at the bottom."""
    from PIL import Image

    grey = Image.fromarray((loudness[::-1] * 255).astype(np.uint8))
    image = grey.resize(size, Image.Resampling.BILINEAR).convert("P")
    places = np.linspace(0, 255, len(COLOURS))
    table = [np.interp(np.arange(256), places, channel) for channel in zip(*COLOURS, strict=True)]
    image.putpalette(np.stack(table, axis=1).astype(np.uint8).tobytes())
    file = io.BytesIO()
    image.save(file, "png")
    return _data_url("image/png", file.getvalue())


def _ticks(most: float, pixels: int, count: int) -> Iterator[tuple[float, str]]:
    """Yield marks at round numbers from 0 to `most`, about `count`: their pixels and texts."""
    step = round_step(most / count)
    for number in range(math.floor(most / step * (1 + 1e-9)) + 1):
        value = number * step
        yield round(value / most * pixels, 1), f"{value:,.10g}"


def round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten from a positive number on."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
