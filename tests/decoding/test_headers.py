"""What a picture's header tells before it is decoded, and what becomes of text that needs it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import mmstream as mm
from mmstream.decoding.sample import decode_sample
from tests.helpers.decodings import decode_texts
from tests.helpers.families import PICTURES, SIZES, conversation, native, num_image_tokens
from tests.helpers.image_bombs import chunk
from tests.helpers.pictures import JPEG, ODD, PNG, encoded, photo, read

DECODERS = [
    mm.ImageDecoder(),
    mm.ImageDecoder(
        scaled_decoding=False, resize="max_pixels", pixel_budget=(56 * 56, 28 * 28 * 16)
    ),
    mm.ImageDecoder(
        size=56, tiles=mm.families.llava.LlavaNextTiles(((56, 112), (112, 56), (112, 112)))
    ),
    mm.ImageDecoder(size=56, tiles=mm.families.internvl.InternVLTiles(max_tiles=6)),
    mm.ImageDecoder(size=56, crop=None),
    mm.ImageDecoder(size=56, crop="random", flip=0.5),
    mm.ImageDecoder(
        size=56, tiles=mm.families.llava.LlavaOnevisionTiles(((56, 112), (112, 56)))
    ).of_sample(2),
]
ODD_HEADERS = {
    "icc-after-SOF.jpg",
    "truncated_app14.jpg",
    "jpeg_ff00_header.jpg",
    "junk_jpeg_header.jpg",
    "photoshop-200dpi-broken.jpg",
}
"""Good pictures that libjpeg decodes only when their headers are put in order."""


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.resize or decoder.size)
def test_what_a_header_tells_is_what_decoding_makes(decoder: mm.ImageDecoder) -> None:
    pictures = {path.name: path.read_bytes() for path in sorted(ODD.glob("*.*"))}
    pictures |= {str(size): data for size, data in zip(SIZES, PICTURES, strict=True)}
    results, refused = {}, set()
    for name, data in pictures.items():
        try:
            results[name] = decoder.decode(data, rng=np.random.default_rng(0))
        except mm.errors.DecodeError:
            refused.add(name)
    assert len(refused) < 10 < len(pictures)
    shapes = {name: decoder.prepared_shape(pictures[name]) for name in results}
    assert {name for name, shape in shapes.items() if shape is None} == ODD_HEADERS
    for name in results.keys() - ODD_HEADERS:
        result, shape = results[name], shapes[name]
        *tiles, height, width, _ = result.pixels.shape
        told = (shape.height, shape.width, shape.num_tiles, shape.picture)
        assert told == (height, width, *(tiles or [1]), result.picture)


def test_damage_never_makes_a_header_tell_another_shape() -> None:
    random = np.random.default_rng(0)
    originals = [encoded(photo(30, 48), kind) for kind in ("jpeg", "png", "webp", "gif", "bmp")]
    originals += [read("hopper_orientation_6.jpg"), read("hopper_orientation_6.webp"), late_exif()]
    num_equal = 0
    for _ in range(700):
        data = bytearray(originals[random.integers(len(originals))])
        for position in random.integers(0, min(len(data), 900), 2):
            data[position] = random.integers(256)
        shape = mm.ImageDecoder().prepared_shape(bytes(data))
        try:
            result = mm.ImageDecoder()(bytes(data))
        except mm.errors.DecodeError:
            continue
        assert shape is None or result.shape[:2] == shape[:2]
        num_equal += shape is not None
    assert num_equal > 140


def late_exif() -> bytes:
    """A PNG of 90x60 that says behind its picture data that it is lying on its side."""
    exif = Image.Exif()
    exif[0x0112] = 6
    end = PNG.index(b"IEND") - 4
    return PNG[:end] + chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + PNG[end:]


@pytest.mark.parametrize("data", [read("jpeg_ff00_header.jpg"), late_exif()], ids=["jpeg", "png"])
def test_a_picture_whose_header_does_not_tell_is_counted_all_the_same(data: bytes) -> None:
    decode, sample = native(), conversation(JPEG, data, PNG)
    assert decode.image.prepared_shape(data) is None
    [(_, tokens)] = decode_texts([sample], decode)
    assert tokens is None  # nothing is known before the picture is decoded
    decoded = decode_sample(sample, decode)
    pictures = [image.shape[1:] for image in decoded["image"]]
    assert pictures[0] == pictures[2] == (60, 90)
    assert num_image_tokens(decode, decoded) == sum(h * 3 + w for h, w in pictures)
    if data.startswith(b"\x89PNG"):
        assert pictures[1] == (90, 60)


BAD = {
    "truncated": JPEG[:-40],
    "no picture": b"hello",
    "empty": b"",
    "damaged": PNG[:60] + bytes([PNG[60] ^ 1]) + PNG[61:],
    "without pixels": read("zero_width.gif"),
    "no header": JPEG[:20],
    "thin": encoded(Image.new("RGB", (401, 2)), "png"),
    "damaged and thin": encoded(Image.new("RGB", (401, 2)), "png")[:-16],
    "large": encoded(Image.new("RGB", (4000, 4000)), "png"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_refused_as_it_is_without_text(name: str) -> None:
    decoder = mm.ImageDecoder(resize="max_pixels", max_pixels=3000 * 3000)
    decode = replace(native(), image=decoder)
    sample = {"__key__": "007"} | conversation(JPEG, BAD[name], PNG)
    [(parsed, tokens)] = decode_texts([sample], decode)
    messages = set()
    for given in (
        {"sample": sample, "decode": mm.Decode(image=decoder)},
        {"sample": parsed, "decode": decode},
        {"sample": parsed, "decode": decode, "tokens": tokens},
    ):
        with pytest.raises(mm.errors.DecodeError) as error:
            decode_sample(**given)
        messages.add(str(error.value))
    (message,) = messages
    assert message.startswith("007.1.jpg: ")


@pytest.mark.parametrize("limit", [{"max_pixels": 60 * 90 - 1}, {"max_bytes": len(JPEG) - 1}])
def test_a_header_tells_nothing_of_a_picture_beyond_a_limit(limit: dict[str, int]) -> None:
    assert mm.ImageDecoder().prepared_shape(JPEG) == (60, 90, (60, 90), 1, (1, 1))
    assert mm.ImageDecoder(**limit).prepared_shape(JPEG) is None
