"""Image files that cost much more than they look: generators, by name.

A bomb either exceeds a limit of `ImageDecoder`, and `reason` matches the message. Or it lies within
all limits, and decodes.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.errors import DecodeError
from tests.helpers.pictures import encoded

SIDE = 11_584
"""A square of this side is just within the default of max_pixels."""


class Bomb(NamedTuple):
    make: Callable[[], bytes]
    reason: str | None = None
    """A pattern of the message. None: the image is within all limits."""


class Cost(NamedTuple):
    """What decoding a file took."""

    outcome: str
    """The shape of the result, or the kind and message of the error."""
    peak_bytes: int
    """Memory that was needed besides the file."""
    total_bytes: int
    """Memory of the whole process at its peak, with the file, torch and numpy."""


# ---- JPEG, marker by marker


def segment(marker: int, payload: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(payload) + 2) + payload


def frame(marker: int, height: int, width: int, sampling: bytes, bits: int = 8) -> bytes:
    components = b"".join(bytes((i + 1, factors, 0)) for i, factors in enumerate(sampling))
    return segment(marker, struct.pack(">BHHB", bits, height, width, len(sampling)) + components)


def scan(components: bytes, first: int, last: int, approximation: int = 0) -> bytes:
    tables = b"".join(bytes((component, 0)) for component in components)
    return segment(0xDA, bytes((len(components), *tables, first, last, approximation)))


def entropy_coded(bits: str) -> bytes:
    bits += "1" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")


START, END = b"\xff\xd8", b"\xff\xd9"
QUANTIZERS = segment(0xDB, b"\0" + b"\1" * 64)
ONE_CODE = bytes((1, *[0] * 15))
"""Lengths of a Huffman table with one symbol, whose code is the bit 0."""
TABLES = segment(0xC4, b"\x00" + ONE_CODE + b"\x00") + segment(0xC4, b"\x10" + ONE_CODE + b"\xe0")
"""DC: the difference is zero. AC: the next 16384 to 32767 blocks have no coefficient."""


def num_blocks(height: int, width: int) -> int:
    return -(-height // 8) * -(-width // 8)


def empty_scan(height: int, width: int, component: int = 1, approximation: int = 0) -> bytes:
    """All AC coefficients of a component, which are zero."""
    runs = -(-num_blocks(height, width) // 32767)
    return scan(bytes((component,)), 1, 63, approximation) + entropy_coded(("0" + "1" * 14) * runs)


def progressive(height: int, width: int, scans: bytes, sampling: bytes = b"\x11") -> bytes:
    """A grey picture in several scans. The first ones give the DC coefficients."""
    dc = bytes(-(-num_blocks(height, width) // 8))
    firsts = b"".join(scan(bytes((i + 1,)), 0, 0) + dc for i in range(len(sampling)))
    head = START + QUANTIZERS + frame(0xC2, height, width, sampling) + TABLES
    return head + firsts + scans + END


def many_scans(side: int, count: int) -> bytes:
    return progressive(side, side, empty_scan(side, side) * count)


def refining_scans(side: int, num_components: int = 3) -> bytes:
    """Each AC coefficient in 14 steps: the dearest scans that libjpeg does not warn about."""
    steps = [13, *(step << 4 | step - 1 for step in range(13, 0, -1))]
    scans = [
        empty_scan(side, side, component + 1, step)
        for component in range(num_components)
        for step in steps
    ]
    return progressive(side, side, b"".join(scans), b"\x11" * num_components)


def arithmetic_scans(side: int, count: int) -> bytes:
    """Arithmetic coding, in which a scan without data is a valid one."""
    head = START + QUANTIZERS + frame(0xCA, side, side, b"\x11")
    return head + scan(b"\1", 0, 0) + (scan(b"\1", 1, 63) + b"\x80" * 4) * count + END


def jpeg_of(height: int, width: int, marker: int = 0xC0, bits: int = 8) -> bytes:
    """A grey sequential picture."""
    tables = TABLES[:-1] + b"\0"  # AC: the block ends
    data = entropy_coded("00" * num_blocks(height, width))
    return (
        START
        + QUANTIZERS
        + frame(marker, height, width, b"\x11", bits)
        + tables
        + scan(b"\1", 0, 63)
        + data
        + END
    )


def exif_of(num_entries: int) -> bytes:
    """A directory of entries that say nothing."""
    entry = struct.pack("<HHII", 0x9999, 3, 1, 0)
    return b"II*\0" + struct.pack("<IH", 8, num_entries) + entry * num_entries


def exif_that_repeats(num_entries: int) -> bytes:
    """A directory whose entries all point at the whole block. Reading them all squares its size."""
    size = 12 * num_entries
    entries = b"".join(struct.pack("<HHII", i, 7, size, 0) for i in range(num_entries))
    return b"II*\0" + struct.pack("<IH", 8, num_entries) + entries + bytes(4)


def in_header(jpeg: bytes, segments: bytes) -> bytes:
    return jpeg[:2] + segments + jpeg[2:]


# ---- PNG


def chunk(name: bytes, payload: bytes = b"") -> bytes:
    return (
        struct.pack(">I", len(payload))
        + name
        + payload
        + struct.pack(">I", zlib.crc32(name + payload))
    )


def png_of(
    height: int,
    width: int,
    *,
    before: bytes = b"",
    after: bytes = b"",
    bits: int = 8,
    colour: int = 0,
    interlaced: int = 0,
) -> bytes:
    """A black PNG. ``colour``: 0 grey, 2 RGB, 3 palette, 6 RGBA."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlaced))
    channels = {0: 1, 2: 3, 3: 1, 6: 4}[colour]
    row = bytes(1 + -(-width * channels * bits // 8))
    packer = zlib.compressobj(1)
    rows_at_once = max(1, 2**20 // len(row))
    data = bytearray()
    for top in range(0, height, rows_at_once):
        data += packer.compress(row * min(rows_at_once, height - top))
    pixels = chunk(b"IDAT", bytes(data + packer.flush()))
    return b"\x89PNG\r\n\x1a\n" + head + before + pixels + after + chunk(b"IEND")


def inflating(num_bytes: int) -> bytes:
    packer = zlib.compressobj(9)
    packed = [packer.compress(bytes(2**20)) for _ in range(-(-num_bytes // 2**20))]
    return b"".join(packed) + packer.flush()


# ---- GIF


def gif_of(
    height: int, width: int, *, before: bytes = b"", frames: int = 1, bits: int = 1
) -> bytes:
    """Frames of the screen's size, whose data is cut off at once."""
    head = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    picture = b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\2\2\x4c\1\0"
    return head + before + picture * frames + b";"


# ---- BMP


def rle_bmp(height: int, width: int, data: bytes) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(data), 0, 0, 256, 0)
    palette = bytes(range(256)) * 4
    offset = 14 + len(head) + len(palette)
    return b"BM" + struct.pack("<IHHI", offset + len(data), 0, 0, offset) + head + palette + data


# ---- WebP and AVIF


def lossless_webp(side: int) -> bytes:
    """One colour: every symbol has zero bits, so the file of 16 x 16 pixels has any size."""
    data = bytearray(encoded(Image.new("RGB", (16, 16), (9, 9, 9)), "webp", lossless=True))
    start = data.index(b"VP8L") + 9  # after the name, the length and the signature
    (word,) = struct.unpack_from("<I", data, start)
    word = word >> 28 << 28 | (side - 1) << 14 | side - 1
    struct.pack_into("<I", data, start, word)
    return bytes(data)


def animated_webp(frames: int) -> bytes:
    pictures = [Image.new("RGB", (64, 64), (i % 256, i // 256, 0)) for i in range(frames)]
    return encoded(pictures[0], "webp", save_all=True, append_images=pictures[1:], lossless=True)


def avif(side: int, **options: object) -> bytes:
    return encoded(Image.new("RGB", (side, side)), "avif", speed=10, **options)


def noise(side: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


SMALL = encoded(noise(64), "jpeg", quality=90)


def cost(data: bytes, decoder: ImageDecoder) -> Cost:
    """Decode a file and measure the memory. Linux only; meant for a child process."""
    decoder(SMALL)  # what is imported and allocated once
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
    before = _memory("VmRSS")
    try:
        outcome = str(decoder(data).shape)
    except DecodeError as error:
        outcome = f"{type(error).__name__}: {error}"
    peak = _memory("VmHWM")
    return Cost(outcome, peak - before, peak)


def bomb_cost(name: str) -> Cost:
    """The cost of a bomb, however long a busy machine takes."""
    return cost(BOMBS[name].make(), ImageDecoder(size=224, timeout_s=None))


def _memory(key: str) -> int:
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"^{key}:\s+(\d+) kB", status, re.MULTILINE)
    assert match
    return 1024 * int(match[1])


BOMBS: dict[str, Bomb] = {
    # JPEG: scans
    "jpeg: 501 scans": Bomb(lambda: many_scans(512, 501), "more than 500 scans"),
    "jpeg: 10000 scans of 16 megapixels": Bomb(
        lambda: many_scans(4000, 10_000), "more than 268 scans"
    ),
    "jpeg: 100 scans of 134 megapixels": Bomb(lambda: many_scans(SIDE, 100), "more than 32 scans"),
    "jpeg: arithmetic scans": Bomb(lambda: arithmetic_scans(4096, 400), "more than 32 scans"),
    "jpeg: 450 scans": Bomb(lambda: many_scans(512, 449)),
    "jpeg: refining scans": Bomb(lambda: refining_scans(1024)),
    "jpeg: tables between scans": Bomb(
        lambda: progressive(512, 512, (TABLES * 100 + empty_scan(512, 512)) * 100)
    ),
    "jpeg: a million tables": Bomb(
        lambda: progressive(64, 64, TABLES * 300_000 + empty_scan(64, 64))
    ),
    # JPEG: header
    "jpeg: 64 MiB of FF": Bomb(lambda: START + b"\xff" * 2**26, "bytes of junk in the header"),
    "jpeg: 64 MiB of zeros": Bomb(lambda: START + bytes(2**26), "bytes of junk in the header"),
    "jpeg: 64 MiB of FF 00": Bomb(lambda: START + b"\xff\0" * 2**25, "bytes of junk in the header"),
    "jpeg: 8M empty segments": Bomb(
        lambda: in_header(SMALL, b"\xff\xe1\0\2" * 2**23), "more than 1000 segments"
    ),
    "jpeg: 8M restart markers": Bomb(
        lambda: in_header(SMALL, b"\xff\xd0" * 2**23), "more than 1000 segments"
    ),
    "jpeg: 990 directories of EXIF": Bomb(
        lambda: in_header(SMALL, segment(0xE1, b"Exif\0\0" + exif_of(5000)) * 990)
    ),
    "jpeg: EXIF that repeats, odd sampling": Bomb(
        lambda: in_header(
            progressive(64, 64, b"", b"\x41\x11\x12"),
            segment(0xE1, b"Exif\0\0" + exif_that_repeats(5000)),
        ),
        "JPEG",
    ),
    # JPEG: sizes and kinds
    "jpeg: 65500 x 65500": Bomb(
        lambda: START + QUANTIZERS + frame(0xC0, 65500, 65500, b"\x11") + scan(b"\1", 0, 63) + END,
        "exceeds max_pixels",
    ),
    "jpeg: 134 megapixels, progressive 4:4:4": Bomb(
        lambda: progressive(SIDE, SIDE, b"", b"\x11\x11\x11"), "max_memory"
    ),
    "jpeg: 134 megapixels, nothing in it": Bomb(
        lambda: START + QUANTIZERS + frame(0xC0, SIDE, SIDE, b"\x11") + TABLES + scan(b"\1", 0, 63),
        "JPEG",
    ),
    "jpeg: 1 x 65500": Bomb(lambda: jpeg_of(65500, 1), "exceeds max_pixels"),
    "jpeg: 65500 x 1, 500 scans": Bomb(
        lambda: progressive(1, 65500, empty_scan(1, 65500) * 499, b"\x44"),
        "exceeds max_pixels",
    ),
    "jpeg: lossless": Bomb(lambda: jpeg_of(4096, 4096, 0xC3), "JPEG"),
    "jpeg: 12 bits": Bomb(lambda: jpeg_of(4096, 4096, 0xC1, 12), "JPEG"),
    "jpeg: height in DNL": Bomb(
        lambda: (
            jpeg_of(64, 64).replace(b"\x08\0\x40", b"\x08\0\0")[:-2]
            + segment(0xDC, b"\xff\xdc")
            + END
        ),
        "JPEG",
    ),
    "jpeg: two frames": Bomb(
        lambda: in_header(jpeg_of(SIDE, SIDE), frame(0xC0, 8, 8, b"\x11")), "JPEG|max_memory"
    ),
    "jpeg: cut": Bomb(lambda: encoded(noise(2048), "jpeg")[:-100_000], "JPEG"),
    # PNG
    "png: 2M empty chunks": Bomb(
        lambda: png_of(8, 8, before=chunk(b"teSt") * 2_000_000), "more than 500 chunks of metadata"
    ),
    "png: 2M empty IDAT": Bomb(
        lambda: png_of(8, 8, after=chunk(b"IDAT") * 2_000_000), "more than 100000 chunks"
    ),
    "png: 90000 empty IDAT": Bomb(lambda: png_of(8, 8, before=chunk(b"IDAT") * 90_000)),
    "png: 2M chunks after the picture": Bomb(
        lambda: png_of(8, 8, after=chunk(b"teSt") * 2_000_000), "more than 500 chunks of metadata"
    ),
    "png: 490 profiles of 1 MB": Bomb(
        lambda: png_of(8, 8, before=chunk(b"iCCP", b"x\0\0" + inflating(10**6)) * 490)
    ),
    "png: a profile of 128 MB": Bomb(
        lambda: png_of(8, 8, before=chunk(b"iCCP", b"x\0\0" + inflating(2**27))), "PNG"
    ),
    "png: a text of 128 MB": Bomb(
        lambda: png_of(8, 8, before=chunk(b"zTXt", b"x\0\0" + inflating(2**27))), "PNG"
    ),
    "png: 490 texts of 1 MB": Bomb(
        lambda: png_of(8, 8, before=chunk(b"zTXt", b"x\0\0" + inflating(10**6)) * 490), "PNG"
    ),
    "png: a late text of 128 MB": Bomb(
        lambda: png_of(
            8, 8, after=chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + inflating(2**27))
        ),
        "PNG",
    ),
    "png: 100 MB of text": Bomb(
        lambda: png_of(8, 8, before=chunk(b"iTXt", b"x\0\0\0\0\0" + "😀".encode() + b"x" * 10**8)),
        "bytes of metadata",
    ),
    "png: 144 megapixels": Bomb(lambda: png_of(12_000, 12_000, bits=1), "exceeds max_pixels"),
    "png: 134 megapixels": Bomb(lambda: png_of(SIDE, SIDE, colour=2), "max_memory"),
    "png: 134 megapixels, 16 bits": Bomb(lambda: png_of(SIDE, SIDE, bits=16)),
    "png: 4e9 x 1": Bomb(
        lambda: png_of(1, 8).replace(struct.pack(">I", 8), b"\xff\xff\xff\xff", 1), "PNG|max_pixels"
    ),
    "png: 1 x 1000000": Bomb(lambda: png_of(10**6, 1), "exceeds 65535 pixels"),
    "png: interlaced": Bomb(lambda: png_of(4096, 4096, interlaced=1), "PNG"),
    "png: 49000 frames": Bomb(
        lambda: png_of(
            8,
            8,
            before=chunk(b"acTL", struct.pack(">II", 49_000, 0)),
            after=b"".join(
                chunk(b"fcTL", struct.pack(">IIIIIHHBB", i, 8, 8, 0, 0, 1, 1, 0, 0))
                + chunk(b"fdAT", struct.pack(">I", i + 1))
                for i in range(0, 98_000, 2)
            ),
        )
    ),
    # GIF
    "gif: 65535 x 65535": Bomb(lambda: gif_of(65535, 65535), "exceeds|GIF"),
    "gif: 134 megapixels": Bomb(lambda: gif_of(SIDE, SIDE), "GIF"),
    "gif: 10000 frames": Bomb(lambda: gif_of(64, 64, frames=10_000), "GIF"),
    "gif: comments of one byte": Bomb(
        lambda: gif_of(64, 64, before=b"!\xfe" + b"\1x" * 2**20 + b"\0"),
        "GIF: metadata in more than 10000 pieces",
    ),
    "gif: a million comments": Bomb(
        lambda: gif_of(64, 64, before=b"!\xfe\1x\0" * 10**6),
        "GIF: metadata in more than 10000 pieces",
    ),
    # WebP
    "webp: 134 megapixels in 34 bytes": Bomb(lambda: lossless_webp(SIDE), "max_memory"),
    "webp: 16383 x 16383": Bomb(lambda: lossless_webp(16383), "WEBP|max_pixels"),
    "webp: 30 megapixels in 34 bytes": Bomb(lambda: lossless_webp(5500)),
    "webp: 2000 frames": Bomb(lambda: animated_webp(2000)),
    # AVIF
    "avif: 49 megapixels": Bomb(lambda: avif(7000), "max_memory"),
    "avif: 16 megapixels": Bomb(lambda: avif(4096)),
    # BMP
    "bmp: 134 megapixels, run-length encoded": Bomb(
        lambda: rle_bmp(SIDE, SIDE, b"\0\1"), "run-length"
    ),
    "bmp: lines that are filled": Bomb(lambda: rle_bmp(2800, 2900, b"\1\1\0\0" * 2800 + b"\0\1")),
    "bmp: 8M steps that do nothing": Bomb(lambda: rle_bmp(64, 64, b"\0\0" * 2**23), "run-length"),
    "bmp: 2^31 x 2^31": Bomb(lambda: rle_bmp(2**31 - 1, 2**31 - 1, b""), "max_pixels"),
    # what is not an image, or several
    "tiff": Bomb(lambda: encoded(noise(64), "tiff"), "not an image of a known format"),
    "ico": Bomb(lambda: encoded(noise(64), "ico"), "not an image of a known format"),
    "eps": Bomb(lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "known format"),
    "svg": Bomb(lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "known format"),
    "png and jpeg": Bomb(lambda: b"\x89PNG\r\n\x1a\n" + SMALL, "PNG"),
    "gif and jpeg": Bomb(lambda: b"GIF89a" + SMALL, "GIF|max_pixels|max_memory"),
    "jpeg and 64 MiB": Bomb(lambda: SMALL + b"PK\3\4" + bytes(2**26)),
}
