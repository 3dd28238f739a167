"""JPEGs decoded smaller than they are: what is refused at full size is refused here too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import mmstream as mm
from mmstream.media.image import header_shape
from mmstream.media.jpeg import decode_jpeg
from mmstream.media.limits import Limits
from tests.helpers.pictures import ODD, damaged, encoded, photo, read

FULL = mm.ImageDecoder()
SMALL = mm.ImageDecoder(size=8)  # of pictures from 64 pixels: decoded at 1/8
LARGE = photo(480, 640)
FILES = {
    "baseline": encoded(LARGE, "jpeg", quality=85),
    "progressive": encoded(LARGE, "jpeg", quality=85, progressive=True),
    "no subsampling": encoded(LARGE, "jpeg", quality=85, subsampling=0),
    "grey": encoded(LARGE.convert("L"), "jpeg", quality=85),
    "restart markers": encoded(LARGE, "jpeg", quality=85, restart_marker_rows=2),
}


def refused(decoder: mm.ImageDecoder, data: bytes) -> bool:
    try:
        decoder(data)
    except mm.errors.DecodeError:
        return True
    return False


LIMITS = Limits.start(10**9, 10**9, None)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.9, 0.999])
def test_a_truncated_jpeg_is_a_decode_error_at_every_scale(name: str, fraction: float) -> None:
    data = FILES[name]
    cut = data[: int(len(data) * fraction)]
    for file in (cut, cut.ljust(len(data), b"\0"), cut[: len(data) - 2] + b"\xff\xd9"):
        for size in (60, 120, 240, None):
            with pytest.raises(mm.errors.DecodeError):
                mm.ImageDecoder(size=size)(file)


@pytest.mark.slow
@given(
    name=st.sampled_from(sorted(FILES)),
    damage=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6),
)
@settings(max_examples=300)
def test_damage_is_noticed_at_every_scale_or_at_none(
    name: str, damage: list[tuple[int, int]]
) -> None:
    file = damaged(FILES[name], damage)
    assert refused(SMALL, file) == refused(FULL, file)


@pytest.mark.parametrize("path", sorted(ODD.glob("*.jpg")), ids=lambda path: path.name)
def test_odd_files_are_accepted_or_refused_as_at_full_size(path: object) -> None:
    data = read(path.name)
    sides = (1, 4, 8, 16)
    assert [refused(mm.ImageDecoder(size=n), data) for n in sides] == [refused(FULL, data)] * 4


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_small_decoding_is_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    smooth = Image.radial_gradient("L").convert("RGB").resize((640, 480)).crop((0, 0, 500, 300))
    data = encoded(smooth, "jpeg", quality=95, exif=exif.tobytes())
    full, _ = decode_jpeg(data, LIMITS)
    assert header_shape(data, Limits.start()) == full.shape[:2]
    for factor in (2, 4, 8):
        small, used = decode_jpeg(data, LIMITS, factor)
        assert used == factor
        assert small.shape[:2] == tuple(-(-side // factor) for side in full.shape[:2])
        expected = Image.fromarray(full).resize(small.shape[1::-1], Image.Resampling.BOX)
        assert np.abs(small.astype(int) - np.asarray(expected)).max() < 16


def test_tiny_pictures_and_cmyk_are_decoded_at_full_size() -> None:
    for size in ((1, 1), (1, 2), (2, 3)):
        data = encoded(photo(9, 9).resize(size), "jpeg")
        for factor in (2, 4, 8):
            image, used = decode_jpeg(data, LIMITS._replace(max_pixels=100), factor)
            assert image.shape[:2] == tuple(-(-side // used) for side in size[::-1])
    image, used = decode_jpeg(encoded(photo(64, 96).convert("CMYK"), "jpeg"), LIMITS, 4)
    assert (image.shape, used) == ((64, 96, 3), 1)
