"""Hashes of what a sample holds, and the rule that says what its text is.

    fields of a sample -> HASHES -> sidecar, duplicates

The rule needs the fields alone. So samples of a conversion and samples of any other tar have the
same hashes where they say the same.

Perceptual hashes: 256 bits that hardly change when a picture is encoded again or resized.

    image -> grey, 64 x 64 -> its 16 x 16 lowest frequencies -> 1 bit each: above their median

The idea is that of PDQ (Facebook, 2019) and of pHash. Two pictures are compared by the number of
bits that differ, their Hamming distance. Two unrelated pictures differ in about 128 bits.

Pictures are decoded as small as the format can (JPEG: scaled while it is decoded), so a hash costs
a fraction of a full decoding.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from mmstream.decoding.fields import json_object
from mmstream.errors import DecodeError

if TYPE_CHECKING:
    from PIL import Image, ImageFile

_DIALOGUES = ("messages", "conversations", "chosen", "rejected")
_TEXTS = ("captions", "caption", "text")


def content_hash(data: bytes | bytearray | memoryview) -> bytes:
    """Return 16 bytes that tell contents apart: xxh3 of 128 bits.

    Two different contents have the same hash with a chance of 2^-128. It is no protection against
    somebody who makes such contents on purpose.
    """
    return xxh3_128_digest(data)


def text_of(fields: Mapping[str, Any]) -> bytes | None:
    r"""Return the text of a sample in UTF-8, or None if it has none.

    It is what its ``json`` says: all texts of a conversation, or all captions, with a line end
    between them. Without such a ``json``, it is the field ``txt``.

    Args:
        fields: {field: bytes} of the sample. Other values are ignored.

    Examples:
        >>> text_of({"jpg": b"", "txt": b"a cat", "json": b'{"captions": ["a cat", "a pet"]}'})
        b'a cat\na pet'
        >>> text_of({"txt": b"a cat"})
        b'a cat'
    """
    data = fields.get("json")
    if isinstance(data, bytes):
        text = "\n".join(_texts(json_object(data)))
        if text:
            return text.encode("utf-8", "surrogatepass")
    text_field = fields.get("txt", fields.get("text"))
    return text_field if isinstance(text_field, bytes) and text_field else None


def _texts(content: Mapping[str, Any]) -> Iterator[str]:
    is_dialogue = False
    for name in _DIALOGUES:
        turns = content.get(name)
        for turn in turns if isinstance(turns, list) else ():
            is_dialogue = True
            yield from _texts_of_turn(turn)
    if is_dialogue:
        return
    for name in _TEXTS:
        value = content.get(name)
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) for text in texts):
            yield from (text for text in texts if isinstance(text, str))
            return


def _texts_of_turn(turn: Any) -> Iterator[str]:
    """Yield the texts of a message: ``content`` (text, or parts), or LLaVA's ``value``."""
    if not isinstance(turn, dict):
        return
    content = turn.get("content", turn.get("value"))
    for item in content if isinstance(content, list) else [content]:
        text = item.get("text") if isinstance(item, dict) else item
        if isinstance(text, str):
            yield text


HASH_BYTES = 32

SIDE = 64
"""Pixels a side of the small picture."""

FREQUENCIES = 16
"""Lowest frequencies a side, without the constant one."""

MAX_PIXELS = 50_000_000
"""Larger pictures get no hash: decoding them takes too much memory."""

MIN_CONTRAST = 4.0
"""Least standard deviation of grey levels (0 to 255). A flatter picture has noise to compare."""


def perceptual_hash(data: bytes) -> bytes | None:
    """Return the 32 bytes of a picture's hash.

    The first frame of an animation counts. The picture is that of training: see `decoding.image`.

    Args:
        data: The bytes of an image file.

    Returns:
        256 bits, or None for a picture that cannot be decoded, is too large, or is almost of one
        colour: its bits would be noise.
    """
    try:
        pixels = _small_grey(data)
    except DecodeError:
        return None
    if float(pixels.std()) < MIN_CONTRAST:
        return None
    frequencies = _DCT @ pixels @ _DCT.T
    bits = frequencies > np.median(frequencies)
    return np.packbits(bits).tobytes()


def _small_grey(data: bytes) -> npt.NDArray[np.float32]:
    """Return the picture as training sees it, made small: upright, transparency on white."""
    from mmstream.converting.media.images import unwarned  # planning does without Pillow
    from mmstream.decoding.image import formats, pillow
    from mmstream.decoding.image.limits import MAX_MEMORY, Limits
    from mmstream.decoding.image.orientation import upright

    is_jpeg = data.startswith(formats.JPEG_START)
    plugin = _drafted_jpeg if is_jpeg else formats.plugin_of(data)
    with unwarned:
        picture = pillow.decode_with_pillow(
            plugin, data, Limits.start(MAX_PIXELS, MAX_MEMORY, None), convert=_shrunk
        )
    return upright(picture.pixels, picture.orientation)[:, :, 0].astype(np.float32)


def _drafted_jpeg(file: io.BytesIO) -> ImageFile.ImageFile:
    from PIL.JpegImagePlugin import JpegImageFile

    image = JpegImageFile(file)
    image.draft("L", (2 * SIDE, 2 * SIDE))
    return image


def _shrunk(image: Image.Image) -> npt.NDArray[np.uint8]:
    from PIL import Image

    from mmstream.decoding.image.pillow import to_rgb

    grey = Image.fromarray(to_rgb(image)).convert("L")
    return np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.BILINEAR))[:, :, None]


def _dct_rows() -> npt.NDArray[np.float32]:
    """Return the rows 1 to 16 of the cosine transform (DCT-II) of 64 values: float32 [16, 64]."""
    frequency = np.arange(1, FREQUENCIES + 1)[:, None]
    position = 2 * np.arange(SIDE)[None, :] + 1
    return np.cos(np.pi * frequency * position / (2 * SIDE)).astype(np.float32)


_DCT = _dct_rows()
