"""Small audio and video files of many kinds. Each takes milliseconds to make, and is made once.

Each frame of a video shows its number: `frame_number` reads it back from decoded pixels, however
strongly they were compressed, as long as the frame is not below 32 x 16 pixels.
"""

from __future__ import annotations

import functools
import io
import struct
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

import mmstream as mm

VIDEO_KINDS = {
    "mp4": ("mp4", "libx264"),
    "mov": ("mov", "libx264"),
    "fragmented mp4": ("mp4", "libx264"),
    "mkv": ("matroska", "libx264"),
    "webm": ("webm", "libvpx-vp9"),
    "avi": ("avi", "mpeg4"),
    "ts": ("mpegts", "libx264"),
}
"""FFmpeg's names of a container and of a codec, by the kind of video."""

OLD_VIDEO_KINDS = {"flv": ("flv", "flv"), "asf": ("asf", "mpeg4"), "vob": ("vob", "mpeg2video")}
"""Kinds that are opened, and that few tests need."""

AUDIO_KINDS = {
    "wav": ("wav", "pcm_s16le"),
    "flac": ("flac", "flac"),
    "mp3": ("mp3", "libmp3lame"),
    "opus": ("ogg", "libopus"),
    "vorbis": ("ogg", "vorbis"),
    "m4a": ("ipod", "aac"),
    "aac": ("adts", "aac"),
    "mka": ("matroska", "libopus"),
}
"""FFmpeg's names of a container and of a codec, by the kind of audio."""

_SAME_BYTES = {"fflags": "+bitexact"}
"""Without it FFmpeg writes random names of tracks, and its version."""
_BITS = 16
_COLUMNS = 8
_FINE_CLOCK = Fraction(1, 90_000)
_FASTEST = {
    "libx264": {"preset": "ultrafast"},
    "libx265": {"preset": "ultrafast"},
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8"},
}


def frame_pixels(number: int, height: int = 48, width: int = 64) -> NDArray[np.uint8]:
    """Return a picture, uint8 [height, width, 3], that shows a number in blocks of black and white.

    Two rows of eight blocks are the bits, the lowest first. A gradient around moves with it.
    """
    bits = np.array([number >> bit & 1 for bit in range(_BITS)], np.uint8).reshape(2, _COLUMNS)
    blocks = np.repeat(np.repeat(bits, height // 4, 0), width // _COLUMNS, 1) * 205 + 25
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack(
        [
            (rows * 2 + number * 3) % 200,
            (columns + number * 5) % 200,
            (rows + columns) % 200,
        ],
        axis=2,
    ).astype(np.uint8)
    pixels[: blocks.shape[0], : blocks.shape[1]] = blocks[..., None]
    return pixels


def frame_number(pixels: Any) -> int:
    """Return the number that a decoded frame shows, from pixels [H, W, 3] of any size."""
    array = np.asarray(pixels).astype(np.float64).mean(axis=2)
    height, width = array.shape
    number = 0
    for bit in range(_BITS):
        row, column = divmod(bit, _COLUMNS)
        y, x = (row + 0.5) * height / 4, (column + 0.5) * width / _COLUMNS
        number |= int(array[int(y), int(x)] > 128) << bit
    return number


def tone(
    seconds: float, sample_rate: int = 16_000, channels: int = 1, hertz: float = 440.0
) -> NDArray[np.float32]:
    """Return a tone with noise, float32 [channels, T]: the same one for the same arguments."""
    times = np.arange(round(seconds * sample_rate)) / sample_rate
    noise = np.random.default_rng(0).normal(scale=0.05, size=(channels, len(times)))
    return (0.4 * np.sin(2 * np.pi * hertz * times) + noise).astype(np.float32)


@functools.cache
def video_file(
    kind: str = "mp4",
    *,
    codec: str | None = None,
    num_frames: int = 12,
    fps: int | Fraction = 10,
    times_s: tuple[float, ...] | None = None,
    width: int = 64,
    height: int = 48,
    pixel_format: str = "yuv420p",
    gop: int = 6,
    b_frames: int = 0,
    open_gop: bool = False,
    rotation: int = 0,
    is_flipped: bool = False,
    pixel_aspect: tuple[int, int] | None = None,
    audio_codec: str | None = None,
    moov_first: bool = False,
    start_s: float = 0.0,
    first_number: int = 0,
) -> bytes:
    """Return a video whose frames show their numbers.

    Args:
        kind: One of `VIDEO_KINDS` or `OLD_VIDEO_KINDS`.
        codec: FFmpeg's name of the encoder. None: that of the kind.
        num_frames: Number of frames. 0 gives a track without frames, where the container can.
        fps: Frames per second.
        times_s: When each frame is shown: a variable frame rate. `num_frames` and `fps` do not
            count then.
        width: In pixels.
        height: In pixels.
        pixel_format: FFmpeg's name: "yuv420p10le" has 10 bits.
        gop: Frames from one key frame to the next.
        b_frames: Frames between two others that are predicted from both (x264 and x265 only).
        open_gop: Frames before a key frame, in the order of display, may need the GOP before it.
        rotation: Degrees clockwise by which the frames are turned when shown (mp4 and mov only).
        is_flipped: They are turned upside down before that, as in a mirror.
        pixel_aspect: Width and height of a pixel.
        audio_codec: Adds an audio track as long as the video.
        moov_first: The index of an mp4 comes first ("faststart").
        start_s: Time of the first frame.
        first_number: The number that the first frame shows.
    """
    container, default_codec = (VIDEO_KINDS | OLD_VIDEO_KINDS)[kind]
    codec = codec or default_codec
    if times_s is None:
        times_s = tuple(float(start_s + number / fps) for number in range(num_frames))
    options = dict(_SAME_BYTES)
    if kind == "fragmented mp4":
        options["movflags"] = "frag_keyframe+empty_moov"
    if moov_first:
        options["movflags"] = "faststart"
    seconds = max(times_s, default=0.0) + 1 / float(fps) if num_frames else 1.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "video")  # faststart writes the file a second time
        with av.open(str(path), "w", format=container, options=options) as out:
            video, clock = _add_video(out, codec, fps, width, height, pixel_format)
            video.codec_context.options = _codec_options(codec, gop, b_frames, open_gop)
            video.codec_context.gop_size = gop
            if pixel_aspect:
                video.codec_context.sample_aspect_ratio = Fraction(*pixel_aspect)
            sound = _add_audio(out, audio_codec) if audio_codec else None
            packets = []
            for number, time_s in enumerate(times_s, start=first_number):
                frame = av.VideoFrame.from_ndarray(frame_pixels(number, height, width), "rgb24")
                frame.pts, frame.time_base = round(time_s / clock), clock
                packets += video.encode(frame)
            packets += video.encode()
            if sound is not None:
                packets += _coded_audio(sound, tone(seconds, sound.rate), sound.rate)
            # The first packet of all decides by how much all times are shifted.
            out.mux(sorted(packets, key=_decoding_time_s))
        data = path.read_bytes()
    return _turned(data, rotation, is_flipped) if rotation or is_flipped else data


def _add_video(
    out: Any, codec: str, fps: int | Fraction, width: int, height: int, pixel_format: str
) -> tuple[Any, Fraction]:
    video = out.add_stream(codec, rate=Fraction(fps))
    video.width, video.height, video.pix_fmt = width, height, pixel_format
    # The others count frames: their files have a constant rate.
    clock = _FINE_CLOCK if codec in ("libx264", "libx265", "libvpx-vp9") else 1 / Fraction(fps)
    video.codec_context.time_base = video.time_base = clock
    return video, clock


def _codec_options(codec: str, gop: int, b_frames: int, open_gop: bool) -> dict[str, str]:
    options = dict(_FASTEST.get(codec, {}))
    if codec == "libx264":
        # A scene cut would put key frames where no test expects them.
        options["x264-params"] = (
            f"keyint={gop}:min-keyint={gop}:scenecut=0:bframes={b_frames}:b-adapt=0"
            f":open-gop={int(open_gop)}:threads=1"
        )
    if codec == "libx265":
        options["x265-params"] = (
            f"keyint={gop}:min-keyint={gop}:scenecut=0:bframes={b_frames}:b-adapt=0"
            f":open-gop={int(open_gop)}:pools=1:frame-threads=1:log-level=none"
        )
    return options


@functools.cache
def audio_file(
    kind: str = "wav",
    *,
    seconds: float = 1.0,
    sample_rate: int | None = None,
    channels: int = 1,
    codec: str | None = None,
    cover: bool = False,
) -> bytes:
    """Return an audio file with the samples of `tone`.

    Args:
        kind: One of `AUDIO_KINDS`.
        seconds: Its length.
        sample_rate: None: 16,000; 48,000 for Opus.
        channels: 1 or 2.
        codec: FFmpeg's name of the encoder. None: that of the kind.
        cover: Adds the picture of a cover (mp3, m4a and flac only).
    """
    container, default_codec = AUDIO_KINDS[kind]
    if cover and kind == "m4a":
        container = "mp4"  # FFmpeg's "ipod" takes no JPEG
    codec = codec or default_codec
    rate = sample_rate or (48_000 if codec == "libopus" else 16_000)
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=dict(_SAME_BYTES)) as out:
        stream = _add_audio(out, codec, rate, channels)
        picture = _add_cover(out) if cover else None
        out.start_encoding()
        if picture is not None:
            out.mux(picture[1])
        out.mux(_coded_audio(stream, tone(seconds, rate, channels), rate))
    return file.getvalue()


def _add_audio(out: Any, codec: str, rate: int = 48_000, channels: int = 1) -> Any:
    options = {"strict": "experimental"} if codec in ("vorbis", "opus") else {}
    layout = "stereo" if channels == 2 or codec == "vorbis" else "mono"
    stream = out.add_stream(codec, rate=rate, layout=layout)
    stream.codec_context.options = options
    return stream


def _add_cover(out: Any) -> tuple[Any, Any]:
    encoder = av.CodecContext.create("mjpeg", "w")
    encoder.width, encoder.height, encoder.pix_fmt = 32, 32, "yuvj420p"
    encoder.time_base = Fraction(1, 1)
    picture = av.VideoFrame.from_ndarray(frame_pixels(1, 32, 32), "rgb24").reformat(
        format="yuvj420p"
    )
    [packet] = [*encoder.encode(picture), *encoder.encode(None)]
    stream = out.add_stream("mjpeg", rate=1)
    stream.width, stream.height, stream.pix_fmt = 32, 32, "yuvj420p"
    stream.disposition = av.stream.Disposition.attached_pic
    packet.stream = stream
    return stream, packet


def _coded_audio(stream: Any, samples: NDArray[np.float32], rate: int) -> list[Any]:
    channels = stream.codec_context.layout.nb_channels
    if len(samples) < channels:
        samples = np.repeat(samples, channels, 0)
    layout = "stereo" if channels == 2 else "mono"
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), "fltp", layout)
    frame.sample_rate = rate
    # Without a time, encoders do not tell what they put before the first sample.
    frame.pts, frame.time_base = 0, Fraction(1, rate)
    resampler = av.AudioResampler(
        stream.codec_context.format, layout, rate, stream.codec_context.frame_size or None
    )
    pieces = [*resampler.resample(frame), *resampler.resample(None), None]
    return [packet for piece in pieces for packet in stream.encode(piece)]


def _decoding_time_s(packet: av.Packet[Any]) -> Fraction:
    assert packet.dts is not None
    assert packet.time_base is not None
    return packet.dts * packet.time_base


def _turned(data: bytes, rotation: int, is_flipped: bool) -> bytes:
    """Return an mp4 whose first track is turned: its header holds a matrix in 16.16 fixed point."""
    changed = bytearray(data)
    matrix = data.index(b"tkhd") + 4 + 40
    cosine, sine = {0: (1, 0), 90: (0, 1), 180: (-1, 0), 270: (0, -1)}[rotation]
    down = -1 if is_flipped else 1
    numbers = (value << 16 for value in (cosine, sine, 0, -sine * down, cosine * down, 0, 0, 0))
    struct.pack_into(">9i", changed, matrix, *numbers, 1 << 30)
    return bytes(changed)


def read_by_ranges(content: bytes) -> tuple[mm.LazyBytes, list[tuple[int, int]]]:
    """Return a file that is read by ranges, and the ranges that were read of it so far."""
    ranges: list[tuple[int, int]] = []

    def read(wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        ranges.extend(wanted)
        return [content[start:stop] for start, stop in wanted]

    return mm.LazyBytes(len(content), read), ranges


def num_bytes(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)
