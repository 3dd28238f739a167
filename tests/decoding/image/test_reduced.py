"""The compiled decoder of reduced JPEGs: libjpeg's pixels bit for bit, or none at all."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmstream.decoding.image import jpeg
from mmstream.decoding.image.compiled import load_compiled
from mmstream.decoding.image.jpeg import decode_jpeg
from mmstream.decoding.image.limits import Limits
from mmstream.decoding.image.reduced import decode_reduced
from mmstream.errors import DecodeError
from tests.helpers.paths import PHOTOS
from tests.helpers.pictures import ODD, damaged, encoded, photo, read

built = pytest.mark.skipif(
    load_compiled() is None, reason="mmstream.decoding.image._reduced is not built"
)
PHOTO = photo(83, 131)
PLAIN = encoded(PHOTO, "jpeg", quality=85)
FILES = {
    f"quality {quality}, subsampling {subsampling}, {options or 'plain'}": encoded(
        PHOTO, "jpeg", quality=quality, subsampling=subsampling, **options
    )
    for quality in (5, 30, 75, 90, 100)
    for subsampling in (0, 1, 2)
    for options in ({}, {"optimize": True}, {"restart_marker_blocks": 3})
} | {
    "grey": encoded(PHOTO.convert("L"), "jpeg", quality=85),
    "restart markers by rows": encoded(PHOTO, "jpeg", quality=85, restart_marker_rows=1),
    "a profile": encoded(PHOTO, "jpeg", icc_profile=b"profile" * 9),
    "EXIF and a comment": encoded(PHOTO, "jpeg", exif=b"Exif\0\0MM", comment=b"hello"),
}


def by_libjpeg(data: bytes, factor: int) -> np.ndarray:
    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    small = {"min_height": -(-height // factor), "min_width": -(-width // factor)}
    return simplejpeg.decode_jpeg(data, "RGB", **small)


def agrees(data: bytes, factor: int) -> bool:
    """False where there is no picture; a picture that libjpeg does not give is an error."""
    image = decode_reduced(data, factor)
    if image is None:
        return False
    np.testing.assert_array_equal(image, by_libjpeg(data, factor))
    return True


@built
@pytest.mark.parametrize("factor", [4, 8])
@pytest.mark.parametrize("name", FILES)
def test_a_plain_file_gives_the_pixels_of_libjpeg(name: str, factor: int) -> None:
    assert agrees(FILES[name], factor)


@built
@pytest.mark.parametrize("factor", [4, 8])
def test_photographs_give_the_pixels_of_libjpeg(factor: int) -> None:
    assert sum(agrees(path.read_bytes(), factor) for path in PHOTOS) >= len(PHOTOS) // 2


@built
@pytest.mark.parametrize("path", sorted(ODD.glob("*.jpg")), ids=lambda path: path.name)
def test_odd_files_give_the_pixels_of_libjpeg_or_none(path: Path) -> None:
    for factor in (4, 8):
        agrees(read(path.name), factor)


@built
def test_pictures_of_all_small_sizes_give_the_pixels_of_libjpeg_or_none() -> None:
    for width in range(1, 42):
        for height in {1, 8, 23, 24, 25, 31, 32, 33, width}:
            crop = PHOTO.crop((0, 0, width, height))
            data = encoded(crop, "jpeg", subsampling=width % 3)
            for factor in (4, 8):
                assert agrees(data, factor) == (min(width, height) >= 24)


@built
@pytest.mark.parametrize("factor", [4, 8])
def test_hard_edges_and_noise_give_the_pixels_of_libjpeg(factor: int) -> None:
    noise = np.random.default_rng(0).integers(0, 2, (64, 80, 3), dtype=np.uint8) * 255
    stripes = np.broadcast_to(
        (np.arange(80) % 2 * 255).astype(np.uint8)[None, :, None], noise.shape
    )
    for pixels in (noise, stripes, np.zeros_like(noise), np.full_like(noise, 255)):
        for quality in (10, 50, 95, 100):
            for subsampling in (0, 1, 2):
                picture = Image.fromarray(np.ascontiguousarray(pixels))
                data = encoded(picture, "jpeg", quality=quality, subsampling=subsampling)
                assert agrees(data, factor)


def without(data: bytes, marker: int) -> bytes:
    at = data.index(bytes((0xFF, marker)))
    return data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]


DC_LENGTHS = (
    bytes([0, 0, 1, 5, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]),
    bytes([0, 0, 1, 5, 1, 1, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0]),
)
"""How many codes there are of each length: the table that all use, and with one of ones alone."""

AC_LENGTHS = (
    bytes([0x10, 0, 2, 1, 3, 3, 2, 4, 3, 5, 5, 4, 4, 0, 0, 1, 0x7D]),
    bytes([0x10, 0, 2, 1, 3, 3, 2, 4, 3, 5, 5, 4, 4, 0, 0, 2, 0x7C]),
)


def left_to_libjpeg() -> dict[str, bytes]:
    table = b"\xff\xc4\x00\x13\x00" + bytes(16)
    start, frame = PLAIN.index(b"\xff\xda"), PLAIN.index(b"\xff\xc0")
    restarts = FILES["restart markers by rows"]
    swapped = bytearray(restarts)
    swapped[restarts.index(b"\xff\xd0") + 1] = 0xD1
    jfif = PLAIN.index(b"JFIF\0") + 5
    rgb = b"\xff\xee\x00\x0eAdobe\0\x64\0\0\0\0\0"
    return {
        "empty": b"",
        "no JPEG": b"\x89PNG\r\n\x1a\n" * 9,
        "progressive": encoded(PHOTO, "jpeg", progressive=True),
        "CMYK": encoded(PHOTO.convert("CMYK"), "jpeg"),
        "Adobe's RGB": PLAIN[:2] + rgb + PLAIN[2:],
        "an unknown JFIF revision": PLAIN[:jfif] + b"\7" + PLAIN[jfif + 1 :],
        "a bad ICC profile": PLAIN[:2] + b"\xff\xe2\x00\x14ICC_PROFILE\0\1\2dat" + PLAIN[2:],
        "junk between segments": PLAIN[:2] + b"abc" + PLAIN[2:],
        "12 bits": PLAIN[: frame + 4] + b"\x0c" + PLAIN[frame + 5 :],
        "no quantization tables": without(without(PLAIN, 0xDB), 0xDB),
        "no Huffman tables": without(PLAIN, 0xC4),
        "a Huffman code of ones alone, of DC": PLAIN.replace(*DC_LENGTHS, 1),
        "a Huffman code of ones alone, of AC": PLAIN.replace(*AC_LENGTHS, 1),
        "a hundred Huffman tables": PLAIN[:2] + table * 100 + PLAIN[2:],
        "no end": PLAIN[:-2],
        "zeroes before the end": PLAIN[:-2] + bytes(9) + PLAIN[-2:],
        "a byte before the end": PLAIN[:-2] + b"\x55" + PLAIN[-2:],
        "two bytes missing": PLAIN[:-4] + PLAIN[-2:],
        "a marker inside": PLAIN[: start + 90] + b"\xff\xd9" + PLAIN[start + 90 :],
        "a restart out of order": bytes(swapped),
        "a header alone": PLAIN[:start],
        "wrong scan parameters": PLAIN[: start + 11] + b"\1" + PLAIN[start + 12 :],
    }


@built
@pytest.mark.parametrize("name", left_to_libjpeg())
def test_what_is_not_plain_and_whole_is_left_to_libjpeg(name: str) -> None:
    data = left_to_libjpeg()[name]
    assert decode_reduced(data, 4) is None
    assert decode_reduced(data, 8) is None


@built
def test_a_file_cut_anywhere_is_left_to_libjpeg() -> None:
    for name in ("grey", "restart markers by rows"):
        data = FILES[name]
        for length in range(0, len(data) - 2, 7):
            assert decode_reduced(data[:length], 8) is None
            assert decode_reduced(data[:length] + b"\xff\xd9", 4) is None


@built
def test_bytes_after_the_end_are_not_looked_at() -> None:
    assert agrees(PLAIN + b"trailing video", 8)


@built
@given(
    name=st.sampled_from(sorted(FILES)),
    damage=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.sampled_from([0, 0, 0, 1, 2, 40]),
    factor=st.sampled_from([4, 8]),
)
@settings(max_examples=600)
def test_damaged_files_give_what_libjpeg_gives_and_none_that_it_refuses(
    name: str, damage: list[tuple[int, int]], cut: int, factor: int
) -> None:
    file = damaged(FILES[name], damage)
    agrees(file[: len(file) - cut], factor)


@built
def test_the_pixels_are_writable_and_the_factor_is_checked() -> None:
    image = decode_reduced(PLAIN, 8)
    assert image is not None
    assert image.flags.writeable
    assert image.flags.c_contiguous
    assert decode_reduced(PLAIN, 2) is None
    compiled = load_compiled()
    assert compiled is not None
    with pytest.raises(ValueError, match="factor is 4 or 8"):
        compiled.decode_reduced(PLAIN, 3)


def test_without_the_compiled_module_libjpeg_decodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = {
        factor: decode_jpeg(PLAIN, Limits.start(10**6, 10**8, None), factor)[0] for factor in (4, 8)
    }
    monkeypatch.setitem(sys.modules, "mmstream.decoding.image._reduced", None)
    load_compiled.cache_clear()
    try:
        with caplog.at_level(logging.DEBUG, "mmstream"):
            for factor, image in expected.items():
                assert decode_reduced(PLAIN, factor) is None
                np.testing.assert_array_equal(
                    decode_jpeg(PLAIN, Limits.start(10**6, 10**8, None), factor)[0], image
                )
        assert [record.levelname for record in caplog.records] == ["DEBUG"]
    finally:
        load_compiled.cache_clear()


def test_limits_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(jpeg, "decode_reduced", never)
    with pytest.raises(DecodeError, match="exceeds max_pixels"):
        decode_jpeg(PLAIN, Limits.start(100, 10**8, None), 8)
