"""Audio and video files that cost much more than they look: makers, by name.

Most are an MP4 whose tables state numbers that no bytes stand behind. FFmpeg believes some of them,
and builds an entry in memory for each frame that is stated.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import av

from tests.helpers.media_files import audio_file, video_file

_MATRIX = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 0x40000000)
HOUR = 3600


def box(name: bytes, *content: bytes) -> bytes:
    """Return a box of an MP4."""
    inner = b"".join(content)
    return struct.pack(">I4s", 8 + len(inner), name) + inner


def full_box(name: bytes, *content: bytes, version: int = 0, flags: int = 0) -> bytes:
    """Return a box with a version and flags."""
    return box(name, struct.pack(">I", version << 24 | flags), *content)


def table(name: bytes, form: str, *entries: Sequence[int]) -> bytes:
    """Return a box that counts its entries."""
    rows = b"".join(struct.pack(">" + form, *entry) for entry in entries)
    return full_box(name, struct.pack(">I", len(entries)), rows)


def mp4(
    num_samples: int = 1,
    *,
    sample_bytes: int = 1,
    width: int = 64,
    height: int = 64,
    timescale: int = 1000,
    durations: Sequence[tuple[int, int]] | None = None,
    offsets: Sequence[tuple[int, int]] = (),
    edits: Sequence[tuple[int, int, int]] = (),
    chunk_offsets: Sequence[int] = (8,),
    samples_per_chunk: int | None = None,
    entry: bytes | None = None,
    sizes: Sequence[int] = (),
    media: bytes = bytes(64),
    more: bytes = b"",
    in_moov: bytes = b"",
) -> bytes:
    """Return an MP4 with one video track, whose tables say what they are told.

    Args:
        num_samples: Samples (frames) that the table of sizes states.
        sample_bytes: Size of each, stated once for all.
        width: In pixels, as the headers say.
        height: In pixels, as the headers say.
        timescale: Ticks per second.
        durations: (count, ticks) of runs of samples. None: one tick each.
        offsets: (count, ticks) by which samples are shown later than they are decoded.
        edits: (ticks, first tick, rate) of an edit list.
        chunk_offsets: Where each chunk starts in the file. The media start at 32.
        samples_per_chunk: None: all samples are in the first chunk.
        entry: The description of the samples. None: MPEG-4.
        sizes: The size of each sample, in place of one for all.
        media: The content of ``mdat``.
        more: Boxes behind ``moov``, such as fragments.
        in_moov: Boxes at the end of ``moov``, such as ``mvex``.
    """
    ticks = num_samples if durations is None else sum(count * each for count, each in durations)
    ticks = min(ticks, 0xFFFFFFFF)
    entry = entry or _mpeg4_entry(width, height)
    stated = struct.pack(">II", 0 if sizes else sample_bytes, num_samples)
    stated += struct.pack(f">{len(sizes)}I", *sizes)
    tables = box(
        b"stbl",
        full_box(b"stsd", struct.pack(">I", 1), entry),
        table(b"stts", "II", *(durations if durations is not None else [(num_samples, 1)])),
        table(b"ctts", "II", *offsets) if offsets else b"",
        table(b"stsc", "III", (1, samples_per_chunk or num_samples, 1)),
        full_box(b"stsz", stated),
        table(b"stco", "I", *((offset,) for offset in chunk_offsets)),
    )
    return (
        box(b"ftyp", b"isom\0\0\2\0isommp41")
        + box(b"mdat", media)
        + (
            box(
                b"moov",
                full_box(
                    b"mvhd",
                    struct.pack(">IIIIIH", 0, 0, timescale, ticks, 65536, 256),
                    bytes(10),
                    _MATRIX,
                    bytes(24),
                    struct.pack(">I", 2),
                ),
                box(
                    b"trak",
                    full_box(
                        b"tkhd",
                        struct.pack(">IIIII", 0, 0, 1, 0, ticks),
                        bytes(16),
                        _MATRIX,
                        struct.pack(">II", width << 16 & 0xFFFFFFFF, height << 16 & 0xFFFFFFFF),
                        flags=7,
                    ),
                    box(b"edts", table(b"elst", "IiI", *edits)) if edits else b"",
                    box(
                        b"mdia",
                        full_box(b"mdhd", struct.pack(">IIIIHH", 0, 0, timescale, ticks, 0, 0)),
                        full_box(b"hdlr", struct.pack(">I4s", 0, b"vide"), bytes(12), b"v\0"),
                        box(
                            b"minf",
                            full_box(b"vmhd", bytes(8), flags=1),
                            box(
                                b"dinf",
                                full_box(b"dref", struct.pack(">I", 1), full_box(b"url ", flags=1)),
                            ),
                            tables,
                        ),
                    ),
                ),
                in_moov,
            )
            + more
        )
    )


MEDIA_START = 32
"""Where the media of `mp4` start: behind ``ftyp`` of 24 bytes and the header of ``mdat``."""


def _mpeg4_entry(width: int, height: int, name: bytes = b"mp4v", *more: bytes) -> bytes:
    size = struct.pack(">HHIIIH", width & 0xFFFF, height & 0xFFFF, 0x480000, 0x480000, 0, 1)
    head = bytes(6) + struct.pack(">H", 1) + bytes(16)
    return box(name, head, size, bytes(32), struct.pack(">HH", 24, 0xFFFF), *more)


def mp4_of_samples(
    samples: Sequence[bytes], order: Sequence[int], entry: bytes, **more: Any
) -> bytes:
    """Return an MP4 that shows coded samples again and again: each repeat costs eight bytes.

    Args:
        samples: Coded frames.
        order: The number of the sample that each frame of the file is.
        entry: The description of the samples, of a real file.
        more: Arguments of `mp4`.
    """
    starts = list(accumulate(map(len, samples), initial=MEDIA_START))
    size = struct.pack(">HH", more.get("width", 64), more.get("height", 64))
    entry = entry[:32] + size + entry[36:]
    return mp4(
        len(order),
        sizes=[len(samples[number]) for number in order],
        chunk_offsets=[starts[number] for number in order],
        samples_per_chunk=1,
        entry=entry,
        media=b"".join(samples),
        **more,
    )


def _fragments(num_samples: int, count: int = 1) -> bytes:
    """Return movie fragments whose samples have no byte of table each."""
    extends = box(b"mvex", full_box(b"trex", struct.pack(">IIIII", 1, 1, 1, 1, 0)))
    run = full_box(b"trun", struct.pack(">Ii", num_samples, 8), flags=1)
    header = full_box(b"tfhd", struct.pack(">I", 1), flags=0x020000)
    fragment = box(
        b"moof", full_box(b"mfhd", struct.pack(">I", 1)), box(b"traf", header, run)
    ) + box(b"mdat", b"\0" * 64)
    return mp4(0, durations=(), in_moov=extends, more=fragment * count)


@functools.cache
def _coded(width: int, height: int, num_frames: int) -> tuple[list[bytes], bytes]:
    """Return grey frames in H.264, each with its own header, and their description in an MP4."""
    encoder = av.CodecContext.create("libx264", "w")
    encoder.width, encoder.height, encoder.pix_fmt = width, height, "yuv420p"
    encoder.time_base = Fraction(1, 10)
    encoder.options = {"preset": "ultrafast", "threads": "1", "x264-params": "keyint=100"}
    frame = av.VideoFrame(width, height, "yuv420p")
    for plane in frame.planes:
        plane.update(bytes([128]) * plane.buffer_size)
    packets: list[bytes] = []
    for number in range(num_frames):
        frame.pts = number
        packets += map(bytes, encoder.encode(frame))
    packets += map(bytes, encoder.encode(None))
    samples = [
        b"".join(len(unit).to_bytes(4, "big") + unit for unit in _units(packet))
        for packet in packets
    ]
    return samples, _entry(video_file())


def _units(packet: bytes) -> list[bytes]:
    """Return the units between the start codes of H.264."""
    return [unit.rstrip(b"\0") for unit in packet.split(b"\0\0\1")[1:]]


def _entry(data: bytes) -> bytes:
    """Return the description of the samples of an MP4."""
    start = data.index(b"stsd") + 12
    return data[start : start + int.from_bytes(data[start : start + 4], "big")]


def _many_large_frames() -> bytes:
    """20,000 frames of 16 megapixels in a few kilobytes: each repeats the one before."""
    samples, entry = _coded(4096, 4096, 2)
    return mp4_of_samples(samples, [0] + [1] * 20_000, entry, width=4096, height=4096)


def _one_large_frame() -> bytes:
    samples, entry = _coded(8190, 8190, 1)
    return mp4_of_samples(samples, [0], entry, width=8190, height=8190)


def _size_that_grows() -> bytes:
    """The header says 64 x 64. So does the first frame, and then a frame has 64 megapixels."""
    small, entry = _coded(64, 64, 1)
    large, _ = _coded(8190, 8190, 1)
    return mp4_of_samples([small[0], large[0]], [0, 0, 1, 0], entry)


def _slow_wav() -> bytes:
    """Eight hours of sound with one sample a second: 1.8 GB at 16 kHz."""
    return wav(b"\1\0" * 8 * HOUR, sample_rate=1)


def wav(samples: bytes, sample_rate: int = 16_000, channels: int = 1, bits: int = 16) -> bytes:
    """Return a WAV with a header that says what it is told."""
    frame_bytes = channels * bits // 8
    form = struct.pack(
        "<HHIIHH",
        1,
        channels & 0xFFFF,
        sample_rate,
        0xFFFFFFFF & sample_rate * frame_bytes,
        frame_bytes & 0xFFFF,
        bits,
    )
    content = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data"
    content += struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(content)) + content


def _long_flac() -> bytes:
    """A FLAC that states 2**36 - 1 samples: 49 days at 16 kHz."""
    data = bytearray(audio_file("flac"))
    data[21] |= 0x0F
    data[22:26] = b"\xff\xff\xff\xff"
    return bytes(data)


def _long_mp3() -> bytes:
    """Eight hours of silence in 6 MB: one coded frame, again and again."""
    silent = bytes(audio_file("mp3", seconds=0.5, sample_rate=8000))
    frame = silent[silent.index(b"\xff\xe3") :] if b"\xff\xe3" in silent else silent[-144:]
    return frame * (6_000_000 // max(1, len(frame)))


def _long_ogg() -> bytes:
    """An Opus file of a second whose last page says that it has ended after a year."""
    data = bytearray(audio_file("opus"))
    last = data.rindex(b"OggS")
    struct.pack_into("<q", data, last + 6, 365 * 24 * HOUR * 48_000)
    struct.pack_into("<I", data, last + 22, 0)
    struct.pack_into("<I", data, last + 22, ogg_checksum(bytes(data[last:])))
    return bytes(data)


def ogg_checksum(page: bytes) -> int:
    """Return the checksum of a page of an Ogg, whose own field is zero."""
    crc = 0
    for byte in page:
        crc = (crc << 8 & 0xFFFFFFFF) ^ _OGG_TABLE[crc >> 24 ^ byte]
    return crc


def _ogg_entry(byte: int) -> int:
    crc = byte << 24
    for _ in range(8):
        crc = (crc << 1 ^ 0x04C11DB7 if crc & 1 << 31 else crc << 1) & 0xFFFFFFFF
    return crc


_OGG_TABLE = [_ogg_entry(byte) for byte in range(256)]


def _compressed_moov(num_blocks: int = 120) -> bytes:
    """An MP4 whose header is compressed: 2 MB that become 2 GB of zeros."""
    packer = zlib.compressobj(9, wbits=-15)
    block = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    size = num_blocks << 24
    end = packer.flush() + struct.pack(">HH", size % 65521, 1)
    header = box(b"cmvd", struct.pack(">I", size), b"\x78\xda", block * num_blocks, end)
    return box(b"ftyp", b"qt  \0\0\2\0qt  ") + box(
        b"moov", box(b"cmov", box(b"dcom", b"zlib"), header)
    )


def _many_streams(count: int = 5000) -> bytes:
    """A transport stream with thousands of programs."""
    packets = []
    for number in range(count):
        head = struct.pack(">BHB", 0x47, 0x4000 | (0x20 + number) & 0x1FFF, 0x10)
        pes = b"\0\0\1\xe0\0\0\x80\x80\5\x21\0\1\0\1"
        packets.append((head + pes).ljust(188, b"\xff"))
    return b"".join(packets)


def _deep_boxes(depth: int = 20_000) -> bytes:
    """Boxes in boxes. A parser that calls itself for each overflows its stack."""
    data = b""
    for _ in range(depth):
        data = struct.pack(">I4s", 8 + len(data), b"moov") + data
    return box(b"ftyp", b"isom\0\0\2\0isom") + data


def _tiny_edits() -> bytes:
    """An edit list that shows all 100,000 frames 10,000 times."""
    return mp4(100_000, edits=[(100_000, 0, 65536)] * 10_000)


BOMBS: dict[str, Callable[[], bytes]] = {
    "10 million frames": lambda: mp4(10_000_000),
    "80 million frames": lambda: mp4(80_000_000),
    "4 billion frames": lambda: mp4(0xFFFFFFFF, durations=[(0xFFFFFFFF, 1)]),
    "80 million frames in a fragment": lambda: _fragments(80_000_000),
    "a million frames in each of 100 fragments": lambda: _fragments(1_000_000, 100),
    "runs of 4 billion frames": lambda: mp4(1, durations=[(0xFFFFFFFF, 1)] * 1000),
    "offsets of 4 billion frames": lambda: mp4(1, offsets=[(0xFFFFFFFF, 1)] * 1000),
    "10,000 edits of 100,000 frames": _tiny_edits,
    "compressed header": _compressed_moov,
    "boxes in boxes": _deep_boxes,
    "20,000 large frames": _many_large_frames,
    "a large frame": _one_large_frame,
    "a frame that is larger than the header says": _size_that_grows,
    "frames of 65535x65535 in the header": lambda: mp4(1, width=65535, height=65535),
    "8 hours in two frames": lambda: video_file(times_s=(0.0, 8.0 * HOUR)),
    "a year in two frames": lambda: mp4(2, durations=[(2, 0x7FFFFFFF)], timescale=1),
    "8 hours at one sample a second": _slow_wav,
    "65,535 channels": lambda: wav(bytes(65535 * 2 * 16), channels=65535),
    "no channel": lambda: wav(bytes(64), channels=0),
    "4 GHz": lambda: wav(bytes(64_000), sample_rate=0xFFFFFFFF),
    "49 days of flac": _long_flac,
    "hours of mp3": _long_mp3,
    "a year of opus": _long_ogg,
    "5,000 streams": _many_streams,
}
"""Makers of files, by what is wrong with them."""
