"""Transparency and orientation: the same picture wherever one is read, and the one Pillow shows."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pillow_heif
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps, PngImagePlugin

import mmstream as mm
from mmstream.converting.media.load import checked
from mmstream.converting.sidecar import perceptual_hash
from mmstream.display.html import pixels_of
from mmstream.media.image import header_shape
from mmstream.media.limits import Limits
from tests.helpers.image_bombs import chunk
from tests.helpers.pictures import encoded

decode = mm.ImageDecoder()
mask = mm.ImageDecoder(mask=True)
MARKED = Image.fromarray(np.arange(8 * 6 * 3, dtype=np.uint8).reshape(6, 8, 3))
"""Eight ways to turn it give eight pictures."""


def png(levels: NDArray[Any], bits: int, key: list[int]) -> bytes:
    """Return a PNG [H, W] or [H, W, 3] with a transparent colour."""
    height, width = levels.shape[:2]
    colour = 2 if levels.ndim == 3 else 0
    numbers = np.unpackbits(levels.astype(">u2").view(np.uint8).reshape(height, -1, 2), axis=2)
    rows = np.packbits(numbers[:, :, 16 - bits :].reshape(height, -1), axis=1)
    pixels = zlib.compress(np.pad(rows, ((0, 0), (1, 0))).tobytes())
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    transparent = chunk(b"tRNS", struct.pack(f">{len(key)}H", *key))
    pieces = (chunk(b"IHDR", head), transparent, chunk(b"IDAT", pixels), chunk(b"IEND"))
    return b"\x89PNG\r\n\x1a\n" + b"".join(pieces)


@pytest.mark.parametrize(
    ("bits", "channels"), [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (8, 3), (16, 3)]
)
def test_a_transparent_colour_of_any_depth_is_white(bits: int, channels: int) -> None:
    most = (1 << bits) - 1
    levels = np.random.default_rng(0).integers(0, most + 1, (40, 64, channels))
    key = levels[3, 5]
    data = png(levels if channels == 3 else levels[:, :, 0], bits, key.tolist())
    is_clear = (levels == key).all(axis=2)
    stored = levels >> 8 if bits == 16 else levels * 255 // most
    shown = np.broadcast_to(np.where(is_clear[:, :, None], 255, stored), (40, 64, 3))
    np.testing.assert_array_equal(decode(data), shown)
    np.testing.assert_array_equal(pixels_of(data), shown)  # of cards
    as_shown = encoded(Image.fromarray(shown.astype(np.uint8)), "PNG")
    assert perceptual_hash(data) == perceptual_hash(as_shown) is not None
    if bits == 16:
        with pytest.raises(mm.MMStreamError, match="more than 8 bits"):
            checked("image", data, mm.MediaOptions(image_format="webp"))
        return
    kept = checked("image", data, mm.MediaOptions(max_image_side=64, image_format="webp")).data
    alpha = np.asarray(Image.open(io.BytesIO(kept)).getchannel("A"))
    np.testing.assert_array_equal(alpha == 0, is_clear)
    if channels == 1:  # class numbers stay
        np.testing.assert_array_equal(mask(data), levels[:, :, 0])


def exif_of(kind: int, value: bytes, count: int = 1, order: str = ">") -> bytes:
    """Return EXIF with an orientation of a type of TIFF. Values beyond 4 bytes stand behind it."""
    head = b"MM\0*" if order == ">" else b"II*\0"
    place = value.ljust(4, b"\0") if len(value) <= 4 else struct.pack(order + "I", 26)
    entry = struct.pack(order + "IHHHI", 8, 1, 0x0112, kind, count) + place
    return head + entry + bytes(4) + (value if len(value) > 4 else b"")


def raw_profile(exif: bytes) -> str:
    return f"\nexif\n{len(exif):8}\n{exif.hex()}\n"


VALUES = {
    "short": exif_of(3, struct.pack(">H", 6)),
    "long": exif_of(4, struct.pack(">I", 6)),
    "long, little": exif_of(4, struct.pack("<I", 8), order="<"),
    "signed": exif_of(9, struct.pack(">i", 5)),
    "float": exif_of(11, struct.pack(">f", 7)),
    "double": exif_of(12, struct.pack(">d", 2)),
    "fraction": exif_of(5, struct.pack(">II", 6, 2)),
    "no fraction": exif_of(5, struct.pack(">II", 6, 0)),
    "bytes": exif_of(1, b"\6"),
    "two values": exif_of(3, struct.pack(">HH", 6, 8), 2),
    "no value": exif_of(3, b"", 0),
    "beyond the end": exif_of(12, struct.pack(">d", 6))[:-4],
    "nine": exif_of(3, struct.pack(">H", 9)),
    "with a prefix": b"Exif\0\0" + exif_of(4, struct.pack(">I", 4)),
}
XMP = '<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def with_text(exif: bytes, xmp: str = "") -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("Raw profile type exif", raw_profile(exif), zip=True)
    info.add_itxt("XML:com.adobe.xmp", xmp)
    return encoded(MARKED, "PNG", pnginfo=info)


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "jpg": lambda exif: encoded(MARKED, "JPEG", exif=b"Exif\0\0" + exif, quality=95, subsampling=0),
    "mpo": lambda exif: encoded(
        MARKED, "MPO", exif=b"Exif\0\0" + exif, save_all=True, append_images=[MARKED]
    ),
    "png": lambda exif: encoded(MARKED, "PNG", exif=exif),
    "webp": lambda exif: encoded(MARKED, "WEBP", exif=exif, lossless=True),
    "text": with_text,
    "text and xmp": partial(with_text, xmp=XMP),
    "late text": lambda exif: encoded(MARKED, "PNG").replace(
        chunk(b"IEND"),
        chunk(b"tEXt", b"Raw profile type exif\0" + raw_profile(exif).encode()) + chunk(b"IEND"),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.filterwarnings("ignore")
def test_the_orientation_is_that_of_pillow(form: str, value: str) -> None:
    data = FORMS[form](VALUES[value])
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    pixels = decode(data)
    assert pixels.shape == expected.shape
    assert np.abs(pixels.astype(int) - expected).max() <= (4 if form in ("jpg", "mpo") else 0)
    assert header_shape(data, Limits.start()) in (pixels.shape[:2], None)
    medium = checked(
        "image", data, mm.MediaOptions(image_format="png" if form[0] in "jmw" else "webp")
    )
    assert (medium.facts["height"], medium.facts["width"]) == pixels.shape[:2]
    assert np.abs(decode(medium.data).astype(int) - pixels).max() < 60  # turned alike
    np.testing.assert_array_equal(pixels_of(data), pixels)


@pytest.mark.parametrize("xmp", [None, XMP.encode()], ids=["tag", "tag and xmp"])
@pytest.mark.parametrize("orientation", [None, 1, 3, 6])
def test_a_tiff_is_turned_once(orientation: int | None, xmp: bytes | None) -> None:
    tags = {} if orientation is None else {0x0112: orientation}
    data = encoded(MARKED, "TIFF", tiffinfo=tags | ({700: xmp} if xmp else {}))
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    medium = checked("image", data, mm.MediaOptions(image_format="png"))
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(medium.data))), expected)


def test_a_heic_is_turned_as_its_library_does() -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    pillow_heif.from_pillow(MARKED.resize((64, 48))).save(file, exif=exif.tobytes())
    medium = checked("image", file.getvalue(), mm.MediaOptions(image_format="png"))
    opened = pillow_heif.open_heif(file.getvalue())
    assert (medium.facts["width"], medium.facts["height"]) == opened.size == (48, 64)
