"""Images that are checked, made smaller or encoded again: never larger, never silently wrong."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

import mmstream as mm
from mmstream.converting.draft import MediaRef, RowError
from mmstream.converting.media import images
from mmstream.decoding.image.planes import is_built
from mmstream.errors import ConfigError
from tests.helpers.media import load_media
from tests.helpers.pictures import encoded

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def picture(width=400, height=300, mode="RGB"):
    """A smooth picture: its corners have other colours."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    rgb = np.stack([x, y, 255 - x], 2).astype(np.uint8)
    return Image.fromarray(rgb).convert(mode)


def store(data, **options):
    [medium] = load_media([MediaRef("image", "a.jpg", data)], None, mm.MediaOptions(**options))
    return medium


def opened(medium):
    return Image.open(io.BytesIO(medium.data))


def mean_error(image, expected):
    difference = np.asarray(image.convert("RGB"), float) - np.asarray(expected.convert("RGB"))
    return np.abs(difference).mean()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF"])
def test_headers_tell_the_size_and_bytes_stay_as_they_are(format):
    data = encoded(picture(), format)
    for check in ("header", "full"):
        medium = store(data, check=check)
        assert medium.data == data
        assert medium.facts == {
            "width": 400,
            "height": 300,
            "original_width": 400,
            "original_height": 300,
        }
    assert store(data, check="none").facts == {}


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_an_image_that_needs_no_change_keeps_its_bytes(format):
    data = encoded(picture(), format)
    extension = {"JPEG": "jpg"}.get(format, format.lower())
    assert store(data, max_image_side=400, image_format=extension).data == data
    assert store(data, max_image_side=5000).data == data


@pytest.mark.parametrize(
    ("format", "extension"),
    [
        *(("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")),
        *(("GIF", "png"), ("BMP", "png"), ("AVIF", "jpg")),
    ],
)
def test_a_large_image_is_made_smaller_in_its_own_format_or_a_common_one(format, extension):
    data = encoded(picture(), format)
    medium = store(data, max_image_side=100)
    assert medium.extension == extension
    assert opened(medium).size == (100, 75)
    assert (medium.facts["width"], medium.facts["original_height"]) == (100, 300)
    assert mean_error(opened(medium), picture(100, 75)) < (12 if format == "GIF" else 4)
    assert store(data, max_image_side=100).data == medium.data


@pytest.mark.parametrize("side", [3, 10, 20, 40, 99])
def test_any_reduction_gives_the_right_size(side):
    medium = store(encoded(picture(799, 601), "JPEG"), max_image_side=side)
    assert opened(medium).size == (side, round(601 * side / 799))


def test_a_very_long_image_keeps_a_pixel():
    medium = store(encoded(picture(1000, 2), "PNG"), max_image_side=10)
    assert opened(medium).size == (10, 1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_the_orientation_is_applied_when_pixels_are_written(orientation, format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(), format, exif=exif)
    width, height = (300, 400) if orientation > 4 else (400, 300)
    unchanged = store(data)
    assert (unchanged.data, unchanged.facts["width"]) == (data, width)
    medium = store(data, max_image_side=200)
    assert opened(medium).size == (width // 2, height // 2)
    assert opened(medium).getexif().get(0x0112) is None
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    upright = upright.resize((width // 2, height // 2))
    assert mean_error(opened(medium), upright) < 3


def test_transparency_is_kept_or_laid_on_white():
    image = picture(mode="RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    data = encoded(image, "PNG")
    assert opened(store(data, max_image_side=100)).mode == "RGBA"
    assert opened(store(data, image_format="webp")).mode == "RGBA"
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image)
    assert mean_error(opened(store(data, image_format="jpg")), white) < 2


def test_a_palette_becomes_colours_and_grey_stays_grey():
    for mode, expected in {"P": "RGB", "L": "L", "1": "L"}.items():
        data = encoded(picture(mode=mode), "PNG")
        assert opened(store(data, max_image_side=100)).mode == expected
    grey = store(encoded(picture(mode="L"), "JPEG"), max_image_side=100)
    assert opened(grey).mode == "L"
    assert mean_error(opened(grey), picture(100, 75, "L")) < 3


def test_cmyk_becomes_rgb_as_in_training():
    medium = store(encoded(picture(mode="CMYK"), "JPEG"), max_image_side=100)
    assert opened(medium).mode == "RGB"
    assert mean_error(opened(medium), picture(100, 75)) < 6


def test_a_colour_profile_is_kept_unless_it_says_nothing_new():
    wide = SRGB.replace(b"s\0R\0G\0B", b"w\0i\0d\0e").replace(b"sRGB", b"wide") + bytes(150_000)
    for format in ("JPEG", "PNG", "WEBP"):
        medium = store(encoded(picture(), format, icc_profile=wide), max_image_side=100)
        assert opened(medium).info["icc_profile"][:4000] == wide[:4000]
    small = SRGB.replace(b"s\0R\0G\0B", b"w\0i\0d\0e").replace(b"sRGB", b"wide")
    medium = store(encoded(picture(), "JPEG", icc_profile=small), max_image_side=100)
    assert opened(medium).info["icc_profile"] == small
    iec = SRGB + b"sRGB IEC61966-2.1"
    medium = store(encoded(picture(), "JPEG", icc_profile=iec), max_image_side=100)
    assert "icc_profile" not in opened(medium).info
    cmyk = wide[:16] + b"CMYK" + wide[20:]
    medium = store(encoded(picture(), "JPEG", icc_profile=cmyk), max_image_side=100)
    assert "icc_profile" not in opened(medium).info


def test_what_would_be_lost_is_a_reject():
    frames = [picture(), picture().transpose(Image.Transpose.ROTATE_180)]
    deep = Image.fromarray(np.arange(120_000, dtype=np.uint16).reshape(300, 400))
    for data, reason in (
        (encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), "animation"),
        (encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]), "animation"),
        (encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]), "animation"),
        (encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:]), "several pictures"),
        (encoded(deep, "PNG"), "more than 8 bits"),
        (encoded(deep, "TIFF"), "more than 8 bits"),
    ):
        with pytest.raises(RowError, match=reason):
            store(data, image_format="jpg")
    assert store(encoded(deep, "PNG")).extension == "png"


def test_tiff_and_heic_are_read_where_they_become_something_else():
    data = encoded(picture(), "TIFF")
    with pytest.raises(RowError, match=r"tiff is not supported.*--image-format jpg"):
        store(data)
    assert opened(store(data, image_format="jpg", max_image_side=100)).size == (100, 75)
    pillow_heif = pytest.importorskip("pillow_heif")
    file = io.BytesIO()
    pillow_heif.from_pillow(picture()).save(file, quality=90)
    medium = store(file.getvalue(), image_format="png")
    assert (medium.extension, medium.facts["original_width"]) == ("png", 400)
    assert mean_error(opened(medium), picture()) < 5


def test_heic_without_its_library_is_a_clear_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pillow_heif", None)
    data = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)
    with pytest.raises(RowError, match="pip install pillow-heif"):
        store(data, image_format="jpg")


def as_rgb(data, monkeypatch, **options):
    """What is stored where planes are never used."""
    with monkeypatch.context() as patch:
        patch.setattr(images, "decode_planes", lambda *_: None)
        return store(data, **options).data


@pytest.mark.skipif(not is_built(), reason="mmstream.decoding.image._reduced is not built")
def test_plain_jpegs_become_smaller_as_planes_and_others_as_rgb(monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = 6
    for subsampling in (0, 1, 2):
        data = encoded(picture(), "JPEG", subsampling=subsampling, quality=90)
        medium = store(data, max_image_side=201)
        assert medium.data != as_rgb(data, monkeypatch, max_image_side=201)
        assert opened(medium).layer[0][1:3] == (2, 2)
        assert mean_error(opened(medium), picture(201, 151)) < 2
    grey = store(encoded(picture(mode="L"), "JPEG"), max_image_side=201)
    assert (opened(grey).mode, opened(grey).size) == ("L", (201, 151))
    for data in (
        encoded(picture(), "JPEG", progressive=True),
        encoded(picture(), "JPEG", exif=exif),
        encoded(picture(mode="CMYK"), "JPEG"),
    ):
        stored = store(data, max_image_side=201).data
        assert stored == as_rgb(data, monkeypatch, max_image_side=201)


def test_a_resized_jpeg_does_not_depend_on_memory_around_it():
    data = encoded(picture(399, 301), "JPEG")
    stored = set()
    for number in range(5):
        _held = [bytes([number]) * 40_000 for _ in range(20)]
        stored.add(store(data, max_image_side=201).data)
    assert len(stored) == 1


def test_quality_changes_the_size_and_lossless_stays_lossless():
    data = encoded(picture(), "JPEG", quality=98)
    sizes = [
        len(store(data, max_image_side=200, image_quality=quality).data) for quality in (50, 80, 95)
    ]
    assert sizes == sorted(sizes)
    assert len(store(data, max_image_side=200).data) == sizes[-1]
    lossless = encoded(picture(), "WEBP", lossless=True)
    assert store(lossless, max_image_side=200).data[12:16] == b"VP8L"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"min_image_side": 301}, "400x300 pixels; min_image_side is 301"),
        ({"max_aspect": 1.3}, "400x300 pixels; max_aspect is 1.3"),
        ({"min_image_side": 301, "max_image_side": 100}, ".*min_image_side"),
    ],
)
def test_small_and_long_images_are_rejects(options, reason):
    data = encoded(picture(), "PNG")
    with pytest.raises(RowError, match=f"^a.jpg: {reason}"):
        store(data, **options)
    assert store(data, min_image_side=300, max_aspect=4 / 3).data == data


def test_a_truncated_image_is_a_reject_where_it_is_decoded():
    data = encoded(picture(), "JPEG")[:-500]
    assert store(data).data == data
    for options in ({"check": "full"}, {"max_image_side": 100}, {"max_image_side": 20}):
        with pytest.raises(RowError, match=r"a\.jpg: JPEG: Premature end"):
            store(data, **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"check": "some"}, "check='some'"),
        ({"max_image_side": 0}, "max_image_side=0"),
        ({"max_image_side": True}, "max_image_side=True"),
        ({"image_format": "jpeg"}, "image_format='jpeg'"),
        ({"image_quality": 101, "max_image_side": 9}, "100 or less"),
        ({"image_quality": 90}, "changes nothing by itself"),
        ({"image_quality": 90, "image_format": "png"}, "PNG has no quality"),
        ({"max_aspect": 0.5}, "must be 1 or more"),
        ({"max_aspect": float("nan")}, "must be 1 or more"),
        ({"check": "none", "min_image_side": 9}, "needs the headers"),
        ({"min_duration_s": 5, "max_duration_s": 4}, "no file fits"),
    ],
)
def test_impossible_options_are_config_errors(options, reason):
    with pytest.raises(ConfigError, match=reason):
        mm.MediaOptions(**options)
