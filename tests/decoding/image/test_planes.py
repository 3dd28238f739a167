"""JPEGs made smaller as planes: libjpeg's samples, the pixels of a resized RGB picture, or none."""

from __future__ import annotations

import hashlib
import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmstream.decoding.image import planes as planes_module
from mmstream.decoding.image.compiled import load_compiled
from mmstream.decoding.image.jpeg import jpeg_shape
from mmstream.decoding.image.limits import Limits
from mmstream.decoding.image.planes import decode_planes, is_built
from mmstream.errors import DecodeError
from tests.decoding.image.test_reduced import FILES, PHOTO, PLAIN, left_to_libjpeg
from tests.helpers.paths import DATA, PHOTOS
from tests.helpers.pictures import damaged, encoded, photo, psnr

pytestmark = pytest.mark.skipif(
    not is_built(), reason="mmstream.decoding.image._reduced is not built"
)
SUBSAMPLINGS = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}
LIMITS = Limits.start(10**8, 10**9, None)


def planes_of(data: bytes, shape=None, factors=(1, 1)) -> list[np.ndarray] | None:
    """Planes in the given (height, width), or in that of the picture / factor."""
    original = jpeg_shape(data)
    assert original is not None
    if shape is None:
        shape = tuple(-(-length // factors[0]) for length in original)
    return decode_planes(data, original, factors, shape, LIMITS)


def luma_of_libjpeg(data: bytes, factor: int) -> np.ndarray:
    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    small = {"min_height": -(-height // factor), "min_width": -(-width // factor)}
    return simplejpeg.decode_jpeg(data, "GRAY", **(small if factor > 1 else {}))[:, :, 0]


def rgb(planes: list[np.ndarray]) -> np.ndarray:
    """The picture that the planes stand for, nearly as a decoder shows it."""
    height, width = planes[0].shape
    if len(planes) == 1:
        return np.repeat(planes[0][:, :, None], 3, 2)
    chroma = [
        Image.fromarray(plane).resize(
            (2 * plane.shape[1], 2 * plane.shape[0]), Image.Resampling.BILINEAR
        )
        for plane in planes[1:]
    ]
    channels = [Image.fromarray(planes[0].copy()), *(c.crop((0, 0, width, height)) for c in chroma)]
    return np.asarray(Image.merge("YCbCr", channels).convert("RGB"))


@pytest.mark.parametrize("name", FILES)
def test_luma_that_keeps_its_size_is_that_of_libjpeg(name: str) -> None:
    planes = planes_of(FILES[name])
    assert planes is not None
    np.testing.assert_array_equal(planes[0], luma_of_libjpeg(FILES[name], 1))


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_luma_of_whole_blocks_is_that_of_libjpeg_at_every_factor(factor: int) -> None:
    for quality in (5, 75, 95, 100):
        data = encoded(PHOTO.resize((136, 88)), "jpeg", quality=quality)
        planes = planes_of(data, factors=(factor, factor))
        assert planes is not None
        np.testing.assert_array_equal(planes[0], luma_of_libjpeg(data, factor))


def test_chroma_of_half_the_size_is_that_of_libjpeg() -> None:
    for path in PHOTOS[:9]:
        data = path.read_bytes()
        planes = planes_of(data)
        assert planes is not None
        with Image.open(io.BytesIO(data)) as image:
            if image.layer[0][1:3] != (2, 2):
                continue
            image.draft("YCbCr", (image.width // 2, image.height // 2))
            expected = np.asarray(image)
        np.testing.assert_array_equal(planes[1], expected[:, :, 1])
        np.testing.assert_array_equal(planes[2], expected[:, :, 2])


@pytest.mark.parametrize("share", [0.2, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1])
@pytest.mark.parametrize("subsampling", [*SUBSAMPLINGS, "grey"])
def test_the_result_is_near_the_resized_rgb_picture(subsampling: str, share: float) -> None:
    picture = Image.open(PHOTOS[0]).convert("L" if subsampling == "grey" else "RGB")
    options = {} if subsampling == "grey" else {"subsampling": SUBSAMPLINGS[subsampling]}
    data = encoded(picture, "jpeg", quality=95, **options)
    with Image.open(io.BytesIO(data)) as image:
        size = tuple(round(length * share) for length in image.size)
        reference = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        usual = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    # What is lost where chroma is stored at half the size, and by a bicubic filter.
    file = io.BytesIO()
    usual.save(file, "jpeg", quality=100, subsampling=2)
    least = psnr(np.asarray(Image.open(file)), reference)
    factor = next((f for f in (8, 4, 2) if 1 / share >= 2 * f), 1)
    chroma_factor = next((f for f in (8, 4, 2) if 1 / share >= f), 1)
    planes = planes_of(data, size[::-1], (factor, chroma_factor))
    assert planes is not None
    assert psnr(rgb(planes), reference) > least - (1 if factor == 1 else 3)


def test_pictures_of_all_small_sizes_have_no_seams_and_no_shift() -> None:
    y, x = np.mgrid[0:60, 0:60]
    slope = np.stack([x * 3, y * 3, 90 + x + y], 2).astype(np.uint8)
    for width in range(24, 58, 3):
        for height in (24, 31, 40):
            picture = Image.fromarray(slope).crop((0, 0, width, height))
            data = encoded(picture, "jpeg", quality=98, subsampling=width % 3)
            for shape in ((height, width), (height - 5, width - 8), (height // 2, width // 3)):
                planes = planes_of(data, shape, (1, 2 if shape[0] <= height // 2 else 1))
                assert planes is not None
                expected = picture.resize(shape[::-1], Image.Resampling.BICUBIC)
                difference = np.abs(rgb(planes).astype(int) - np.asarray(expected))
                assert difference.mean() < 3
                assert difference.max() < 24


def test_flat_pictures_stay_flat() -> None:
    for color in ((0, 0, 0), (255, 255, 255), (200, 30, 90)):
        data = encoded(Image.new("RGB", (101, 67), color), "jpeg", quality=95)
        original = planes_of(data)
        for shape in ((66, 100), (31, 47), (5, 9)):
            planes = planes_of(data, shape)
            assert planes is not None
            assert original is not None
            for plane, whole in zip(planes, original, strict=True):
                assert set(np.unique(plane)) == {whole[0, 0]}


def test_luma_has_memory_for_pairs_of_rows_and_columns() -> None:
    planes = planes_of(PLAIN, (33, 51))
    assert planes is not None
    assert [plane.shape for plane in planes] == [(33, 51), (17, 26), (17, 26)]
    assert planes[0].strides == (52, 1)
    whole = np.lib.stride_tricks.as_strided(planes[0], (34, 52))
    np.testing.assert_array_equal(whole[33], whole[32])
    np.testing.assert_array_equal(whole[:, 51], whole[:, 50])


def cubic(x: float) -> float:
    x = abs(x)
    if x < 1:
        return (1.5 * x - 2.5) * x * x + 1
    return ((-0.5 * x + 2.5) * x - 4) * x + 2 if x < 2 else 0


def halved(samples: np.ndarray, shift: int) -> np.ndarray:
    """The rows halved by the filter as it is written, for any size."""
    size, sums = len(samples), []
    for center in range(1, size, 2):
        taps = range(max(0, center - 4), min(size, center + 4))
        values = [cubic((tap + 0.5 - center) / 2) for tap in taps]
        weights = [int(value / sum(values) * 2**14 + 65536.5) - 65536 for value in values]
        weights[weights.index(max(weights))] += 2**14 - sum(weights)
        sums.append(np.tensordot(weights, samples[taps[0] : taps[-1] + 1].astype(np.int64), 1))
    return (np.array(sums) + (1 << shift - 1)) >> shift


@pytest.mark.parametrize("size", [(24, 32), (46, 34), (50, 98), (96, 70)])
def test_halves_are_those_of_the_filter_for_any_size(size: tuple[int, int]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (size[0] // 2, size[1] // 2), np.uint8)
    picture = Image.fromarray(noise).resize(size[::-1], Image.Resampling.NEAREST)
    data = encoded(picture, "jpeg", quality=95)
    planes = planes_of(data, (size[0] // 2, size[1] // 2))
    assert planes is not None
    rows = halved(luma_of_libjpeg(data, 1), 9)
    np.testing.assert_array_equal(planes[0], halved(rows.T, 19).T.clip(0, 255))


GOLDEN = {
    "420_odd_size": "890e5fe3fe3bb9e6",
    "422_odd_size": "9624bf3c18304591",
    "444_odd_size": "c3015720f9898300",
    "gray": "e5f98a4f48dc4e90",
}
"""Start of the sha256 of the planes. If they change, raise CONVERTER_VERSION."""


@pytest.mark.parametrize("name", GOLDEN)
def test_the_samples_are_golden(name: str) -> None:
    data = (DATA / "jpeg_corpus" / f"{name}.jpg").read_bytes()
    height, width = jpeg_shape(data) or (0, 0)
    digest = hashlib.sha256()
    for share in (3, 5, 6, 8):
        planes = planes_of(data, (height * share // 8, width * share // 8))
        assert planes is not None
        for plane in planes:
            digest.update(plane.tobytes())
    assert digest.hexdigest()[:16] == GOLDEN[name]


@pytest.mark.parametrize("name", sorted(left_to_libjpeg().keys() - {"empty", "no JPEG"}))
def test_what_is_not_plain_and_whole_has_no_planes(name: str) -> None:
    data = left_to_libjpeg()[name]
    assert decode_planes(data, (83, 131), (1, 1), (40, 60), LIMITS) is None


def test_a_file_cut_anywhere_has_no_planes() -> None:
    for name in ("grey", "restart markers by rows"):
        data = FILES[name]
        for length in range(0, len(data) - 2, 37):
            for cut in (data[:length], data[:length] + b"\xff\xd9"):
                assert decode_planes(cut, (83, 131), (1, 1), (40, 60), LIMITS) is None


@given(
    name=st.sampled_from(sorted(FILES)),
    damage=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6),
)
@settings(max_examples=200)
def test_damaged_files_give_the_luma_of_libjpeg_and_none_that_it_refuses(
    name: str, damage: list[tuple[int, int]]
) -> None:
    data = damaged(FILES[name], damage)
    try:
        shape = jpeg_shape(data)
    except DecodeError:
        return
    if shape is None or shape[0] * shape[1] > 10**6:
        return
    planes = planes_of(data)
    if planes is not None:
        np.testing.assert_array_equal(planes[0], luma_of_libjpeg(data, 1))


def test_a_picture_that_exif_turns_has_no_planes() -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(PHOTO, "jpeg", exif=exif)
        planes = decode_planes(data, (83, 131), (1, 1), (40, 60), LIMITS)
        assert (planes is None) == (orientation > 1)


def test_a_result_larger_than_the_picture_has_no_planes() -> None:
    assert planes_of(PLAIN, (83, 132)) is None
    assert planes_of(PLAIN, (42, 67), (2, 2)) is None
    assert planes_of(PLAIN, (42, 66), (2, 2)) is not None


def test_impossible_settings_are_errors() -> None:
    compiled = load_compiled()
    assert compiled is not None
    for settings_ in ((3, 1, 9, 9), (1, 16, 9, 9)):
        with pytest.raises(ValueError, match="factors are 1, 2, 4 or 8"):
            compiled.decode_planes(PLAIN, *settings_)
    with pytest.raises(ValueError, match="at least 1"):
        compiled.decode_planes(PLAIN, 1, 1, 0, 9)


def test_limits_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(
        planes_module, "load_compiled", lambda: SimpleNamespace(decode_planes=never)
    )
    for limits, message in (
        (Limits.start(100, 10**8, None), "exceeds max_pixels"),
        (Limits.start(10**6, 3 * 83 * 131 - 1, None), "max_memory"),
    ):
        with pytest.raises(DecodeError, match=message):
            decode_planes(PLAIN, (83, 131), (1, 1), (40, 60), limits)


def test_without_the_compiled_module_there_are_no_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mmstream.decoding.image._reduced", None)
    load_compiled.cache_clear()
    try:
        assert not is_built()
        assert planes_of(PLAIN) is None
    finally:
        load_compiled.cache_clear()


def test_a_very_long_picture_keeps_its_shape() -> None:
    data = encoded(photo(24, 9000), "jpeg")
    planes = planes_of(data, (1, 100), (8, 8))
    assert planes is not None
    assert planes[0].shape == (1, 100)
    assert 90 < planes[0].mean() < 165
