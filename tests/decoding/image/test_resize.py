"""Pictures of a fixed size: torchvision's bytes, written where they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

import mmstream as mm
from mmstream.decoding.image.geometry import random_box
from mmstream.families.family import import_torchvision
from mmstream.media.image import decode_jpeg, header_shape
from mmstream.media.limits import Limits
from tests.helpers.paths import PHOTOS
from tests.helpers.pictures import JPEG, ODD, damaged, encoded, photo, psnr, read

import_torchvision()
from torchvision.transforms import InterpolationMode, v2  # noqa: E402

BICUBIC = InterpolationMode.BICUBIC
Reference = Callable[[torch.Tensor], torch.Tensor]


def pixels_of(data: bytes) -> torch.Tensor:
    """The decoded original, for torchvision: uint8 [3, H, W]."""
    return torch.from_numpy(mm.ImageDecoder()(data)).permute(2, 0, 1)


def noise() -> list[bytes]:
    """Pictures of many shapes in which every pixel counts."""
    random = np.random.default_rng(1)
    shapes = random.integers(1, 400, (40, 2))
    pixels = [random.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in shapes]
    return [encoded(Image.fromarray(image), "png", compress_level=1) for image in pixels]


def letterboxed(image: torch.Tensor) -> torch.Tensor:
    height, width = image.shape[1:]
    scale = 96 / max(height, width)
    new = [max(1, min(96, int(np.ceil(side * scale)))) for side in (height, width)]
    resized = v2.functional.resize(image, new, antialias=True)
    top, left = (96 - new[0]) // 2, (96 - new[1]) // 2
    padding = [left, top, 96 - new[1] - left, 96 - new[0] - top]
    return v2.functional.pad(resized, padding, fill=[1, 2, 3])


PATHS: list[tuple[dict[str, Any], Reference]] = [
    ({"size": 100}, v2.Compose([v2.Resize(100, antialias=True), v2.CenterCrop(100)])),
    (
        {"size": 96, "resize_size": 110},
        v2.Compose([v2.Resize(110, antialias=True), v2.CenterCrop(96)]),
    ),
    (
        {"size": (60, 90), "resize_size": 97, "interpolation": "bicubic"},
        v2.Compose([v2.Resize(97, BICUBIC, antialias=True), v2.CenterCrop((60, 90))]),
    ),
    ({"size": (70, 110), "resize": "exact"}, v2.Resize((70, 110), antialias=True)),
    ({"size": 77, "crop": None}, v2.Resize(77, antialias=True)),
    ({"size": 96, "resize": "letterbox", "fill": (1, 2, 3)}, letterboxed),
    ({"resize": "native"}, v2.Identity()),
    (
        {"size": 64, "flip": 1.0},
        v2.Compose([v2.Resize(64), v2.CenterCrop(64), v2.functional.hflip]),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "reference"), PATHS, ids=[str(path[0]) for path in PATHS])
def test_without_scaled_decoding_every_way_to_resize_is_bit_equal_to_torchvision(
    settings: dict[str, Any], reference: Reference
) -> None:
    decoder = mm.ImageDecoder(**settings, scaled_decoding=False)
    for data in [*(path.read_bytes() for path in PHOTOS[:25]), *noise()]:
        expected = reference(pixels_of(data)).permute(1, 2, 0).numpy()
        actual = decoder(data, rng=np.random.default_rng(0))
        np.testing.assert_array_equal(actual, expected)
        assert actual.flags.c_contiguous
        assert actual.flags.writeable


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_random_crop_is_bit_equal_to_torchvisions_of_the_same_box(interpolation: str) -> None:
    decoder = mm.ImageDecoder(
        size=80, crop="random", flip=0.5, interpolation=interpolation, scaled_decoding=False
    )
    flipped = 0
    for seed, path in enumerate(PHOTOS):
        image = pixels_of(path.read_bytes())
        rng = np.random.default_rng(seed)
        box = random_box((image.shape[1], image.shape[2]), decoder.scale, decoder.ratio, rng)
        mode = InterpolationMode(interpolation)
        expected = v2.functional.resized_crop(image, *box, [80, 80], mode, antialias=True)
        if rng.random() < 0.5:
            expected, flipped = v2.functional.hflip(expected), flipped + 1
        actual = decoder(path.read_bytes(), rng=np.random.default_rng(seed))
        np.testing.assert_array_equal(actual, expected.permute(1, 2, 0).numpy())
    assert 0.25 < flipped / len(PHOTOS) < 0.75


@cache
def large_photos() -> list[bytes]:
    """Real photographs at up to four times their size, as cameras store them."""
    files = []
    for number, path in enumerate(PHOTOS[:24]):
        with Image.open(path) as image:
            size = [side * (2 + number % 3) for side in image.size]
            files.append(encoded(image.convert("RGB").resize(size), "jpeg", quality=92))
    return files


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"size": 224},
        {"size": 64},
        {"size": 112, "resize_size": 128, "interpolation": "bicubic"},
        {"size": (100, 160), "resize": "exact"},
        {"size": 96, "resize": "letterbox"},
        {"resize": "max_pixels", "pixel_budget": (10_000, 60_000)},
        {"size": 56, "tiles": mm.families.internvl.InternVLTiles(max_tiles=4)},
        {"size": 112, "crop": "random", "flip": 0.5},
        {"size": 64, "crop": "random", "interpolation": "bicubic"},
    ],
    ids=str,
)
def test_scaled_decoding_is_near_the_exact_picture(settings: dict[str, Any]) -> None:
    scaled, exact = mm.ImageDecoder(**settings), mm.ImageDecoder(**settings, scaled_decoding=False)
    ratios = []
    for seed, data in enumerate([*large_photos(), *(path.read_bytes() for path in PHOTOS)]):
        images = [one(data, rng=np.random.default_rng(seed)) for one in (scaled, exact)]
        assert images[0].shape == images[1].shape
        if not np.array_equal(*images):
            ratios.append(psnr(*images))
    assert len(ratios) >= 12
    assert np.mean(ratios) >= 32
    assert np.min(ratios) >= 20


def test_tiles_are_the_parts_of_one_resized_picture() -> None:
    data = encoded(photo(300, 600), "png")
    few = mm.ImageDecoder(size=64, tiles=mm.families.internvl.InternVLTiles(max_tiles=6))
    whole = mm.ImageDecoder(size=(64, 128), resize="exact")(data)
    thumbnail = mm.ImageDecoder(size=(64, 64), resize="exact")(data)
    np.testing.assert_array_equal(few(data), [whole[:, :64], whole[:, 64:], thumbnail])
    assert few(encoded(photo(60, 60), "png")).shape == (1, 64, 64, 3)  # without a thumbnail
    shapes = ((64, 192), (128, 64))
    tiles = mm.ImageDecoder(
        size=64, tiles=mm.families.llava.LlavaNextTiles(shapes), fill=(9, 9, 9)
    )(data)
    padded = mm.ImageDecoder(size=(64, 192), resize="letterbox", fill=(9, 9, 9))(data)
    parts = [padded[:, 64 * i : 64 * i + 64] for i in range(3)]
    np.testing.assert_array_equal(tiles, [thumbnail, *parts])


@pytest.mark.parametrize(
    "settings",
    [{}, {"resize": "letterbox"}, {"crop": "random", "flip": 1.0}, {"size": (60, 90)}],
    ids=str,
)
def test_a_result_is_written_where_it_is_asked_for(settings: dict[str, Any]) -> None:
    """Over something else. A picture of the right size is copied."""
    decoder = mm.ImageDecoder(**{"size": 32, **settings})
    batch = np.full((3, *decoder.output_shape, 3), 9, dtype=np.uint8)
    row = batch[1]
    assert decoder(JPEG, row, np.random.default_rng(0)) is row
    np.testing.assert_array_equal(row, decoder(JPEG, rng=np.random.default_rng(0)))
    assert (batch[[0, 2]] == 9).all()


@pytest.mark.parametrize(
    "row",
    [
        np.zeros((32, 33, 3), np.uint8),
        np.zeros((32, 32, 3), np.float32),
        np.zeros((3, 32, 32), np.uint8).transpose(1, 2, 0),
    ],
)
@pytest.mark.parametrize(
    "settings",
    [
        {"size": 32},
        {},
        {"size": 32, "crop": None},
        {"size": 32, "tiles": mm.families.internvl.InternVLTiles()},
    ],
    ids=str,
)
def test_a_row_that_cannot_hold_the_result_is_a_config_error(
    row: np.ndarray, settings: dict[str, Any]
) -> None:
    with pytest.raises(mm.ConfigError, match="out"):
        mm.ImageDecoder(**settings)(JPEG, row)


# -- JPEGs decoded smaller than they are -----------------------------------------------------------

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
@settings(max_examples=100)
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
