"""Damaged, truncated and oddly marked files: nothing but DecodeError ever comes out."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

import mmstream as mm
from mmstream.decoding.image import decoder
from mmstream.media import image
from tests.helpers.pictures import JPEG, PNG, damaged, encoded, read
from tools.prove import fuzz, fuzz_images

SAMPLES = ["hopper.jpg", "hopper.gif", "hopper.webp", "hopper.avif"]

decode = mm.ImageDecoder()


@given(length=st.integers(0, len(JPEG) - 1))
@settings(max_examples=60)
def test_a_truncated_jpeg_is_a_decode_error(length: int) -> None:
    for data in (JPEG[:length], JPEG[:length].ljust(len(JPEG), b"\0")):
        with pytest.raises(mm.errors.DecodeError):
            decode(data)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.1, 0.5, 0.9, 0.97])
def test_a_truncated_file_of_any_format_is_a_decode_error(name: str, fraction: float) -> None:
    data = read(name)
    with pytest.raises(mm.errors.DecodeError):
        decode(data[: int(len(data) * fraction)])


@given(position=st.integers(0, len(PNG) - 1), bit=st.integers(0, 7))
@settings(max_examples=100)
def test_a_flipped_bit_in_a_png_is_noticed_or_harmless(position: int, bit: int) -> None:
    file = damaged(PNG, [(position, PNG[position] ^ (1 << bit))])
    try:
        image = decode(file)
    except mm.errors.DecodeError:
        return
    np.testing.assert_array_equal(image, decode(PNG))


@given(length=st.integers(0, len(PNG) - 1))
@settings(max_examples=60)
def test_a_truncated_png_is_a_decode_error_unless_only_its_end_mark_is_gone(length: int) -> None:
    try:
        image = decode(PNG[:length])
    except mm.errors.DecodeError:
        return
    assert length >= len(PNG) - 12
    np.testing.assert_array_equal(image, decode(PNG))


def with_segment(marker: int, payload: bytes) -> bytes:
    length = (len(payload) + 2).to_bytes(2, "big")
    return JPEG[:2] + bytes((0xFF, marker)) + length + payload + JPEG[2:]


def jpeg_oddities() -> dict[str, bytes]:
    sos = JPEG.index(b"\xff\xda")
    sos_end = sos + 2 + int.from_bytes(JPEG[sos + 2 : sos + 4], "big")
    jfif = JPEG.index(b"JFIF\0") + 5
    return {
        "junk between segments": JPEG[:2] + b"abc" + JPEG[2:],
        "zeroes before the end": JPEG[:-2] + bytes(64) + JPEG[-2:],
        "bytes after the end": JPEG + b"trailing video",
        "an unknown JFIF revision": JPEG[:jfif] + b"\7" + JPEG[jfif + 1 :],
        "a bad ICC profile": with_segment(0xE2, b"ICC_PROFILE\0\0\0broken"),
        "wrong scan parameters": JPEG[: sos_end - 3] + b"\0\0\0" + JPEG[sos_end:],
        "an unknown Adobe transform": with_segment(0xEE, b"Adobe\0\x64\0\0\0\0\x07"),
    }


@pytest.mark.parametrize("name", jpeg_oddities())
def test_an_oddly_marked_jpeg_gives_the_same_pixels(name: str) -> None:
    np.testing.assert_array_equal(decode(jpeg_oddities()[name]), decode(JPEG))


@pytest.mark.parametrize("name", [n for n in jpeg_oddities() if n != "bytes after the end"])
def test_an_oddly_marked_jpeg_that_is_also_truncated_is_a_decode_error(name: str) -> None:
    data = jpeg_oddities()[name]
    with pytest.raises(mm.errors.DecodeError):
        decode(data[: int(len(data) * 0.8)])


def test_sampling_factors_unknown_to_turbojpeg_are_left_to_pillow() -> None:
    plain = encoded(Image.new("RGB", (8, 8), (128, 128, 128)), "jpeg", subsampling=0)
    frame = plain.index(b"\xff\xc0")
    scan = plain.index(b"\xff\xda") + 14
    odd = bytearray(plain[:scan]) + b"\x28\x00\x3f\xff\xd9"  # one more empty block
    odd[frame + 14] = 0x12  # the first chroma plane is sampled twice as finely as the luma
    np.testing.assert_array_equal(decode(bytes(odd)), np.full((8, 8, 3), 128))


@pytest.mark.parametrize("error", [MemoryError(), ValueError("Insufficient memory (case 4)")])
def test_a_picture_that_runs_out_of_memory_is_refused(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image.simplejpeg, "decode_jpeg", Mock(side_effect=error))
    with pytest.raises(mm.errors.DecodeError, match=r"^out of memory"):
        decode(JPEG)


def test_a_picture_for_whose_plan_there_is_no_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoder, "check_jpeg", Mock(side_effect=MemoryError()))
    with pytest.raises(mm.errors.DecodeError, match=r"^out of memory"):
        mm.ImageDecoder(size=8).plan_picture(JPEG)


@pytest.mark.parametrize("data", [JPEG, PNG, read("hopper.gif"), read("hopper.webp")])
def test_limits_hold_before_decoding(data: bytes) -> None:
    for limit in ("max_pixels", "max_bytes"):
        with pytest.raises(mm.errors.DecodeError, match=f"exceeds {limit}=100"):
            mm.ImageDecoder(**{limit: 100})(data)


# -- mutated files, as tools/prove/fuzz_images.py makes them ---------------------------------------


@pytest.mark.slow
def test_mutated_files_decode_or_are_refused_in_one_line(tmp_path: Path) -> None:
    images = fuzz.Parser(fuzz_images.parse, fuzz_images.seeds(), mutate=fuzz_images.mutate)
    report = fuzz.fuzz(images, 0, seed=1, save=tmp_path / "image", min_inputs=100)
    assert 8 < report.num_accepted < 92


@pytest.mark.parametrize("error", [ValueError("x"), mm.errors.DecodeError(""), MemoryError("x")])
def test_a_planted_bug_is_noticed(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_args: object) -> None:
        raise error

    monkeypatch.setattr(mm.ImageDecoder, "__call__", decode)
    if isinstance(error, mm.errors.DecodeError):
        monkeypatch.setattr(fuzz, "MAX_SECONDS", -1.0)
    with pytest.raises(fuzz.BrokenPromiseError, match=r"Error: x|processor time"):
        fuzz.accepts(fuzz.Parser(fuzz_images.parse, []), PNG)
