"""Images that are checked, made smaller or encoded again: never larger, never silently wrong."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageCms, ImageOps

import mmstream as mm
from mmstream.converting.draft import MediaRef, RowError
from mmstream.dataset.manifest import MANIFEST_NAME
from mmstream.storage import open_store
from tests.helpers.convert_corpus import rejects, run, write_rows
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
    facts = {"width": 400, "height": 300, "original_width": 400, "original_height": 300}
    for check in ("header", "full"):
        medium = store(data, check=check)
        assert (medium.data, medium.facts) == (data, facts)
        assert medium.extension == {"JPEG": "jpg"}.get(format, format.lower())
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


@pytest.mark.parametrize(
    ("height", "side", "new_height"),
    [(601, 3, 2), (601, 10, 8), (601, 20, 15), (601, 40, 30), (601, 99, 74), (2, 10, 1)],
)
def test_any_reduction_gives_the_right_size(height, side, new_height):
    medium = store(encoded(picture(799, height), "JPEG"), max_image_side=side)
    assert opened(medium).size == (side, new_height)


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


@pytest.mark.parametrize(
    ("mode", "format", "expected", "tolerance"),
    [
        ("P", "PNG", "RGB", 20),
        ("1", "PNG", "L", 20),
        ("L", "PNG", "L", 3),
        ("L", "JPEG", "L", 3),
        ("CMYK", "JPEG", "RGB", 6),  # as in training
    ],
)
def test_palettes_and_cmyk_become_colours_and_grey_stays_grey(mode, format, expected, tolerance):
    image = opened(store(encoded(picture(mode=mode), format), max_image_side=100))
    assert image.mode == expected
    assert mean_error(image, picture(100, 75, expected)) < tolerance


SMALL_PROFILE = SRGB.replace(b"s\0R\0G\0B", b"w\0i\0d\0e").replace(b"sRGB", b"wide")
PROFILE = SMALL_PROFILE + bytes(150_000)


@pytest.mark.parametrize(
    ("profile", "format", "kept"),
    [
        *((PROFILE, format, PROFILE) for format in ("JPEG", "PNG", "WEBP")),
        (SMALL_PROFILE, "JPEG", SMALL_PROFILE),
        (SRGB + b"sRGB IEC61966-2.1", "JPEG", b""),
        (PROFILE[:16] + b"CMYK" + PROFILE[20:], "JPEG", b""),
    ],
    ids=["large", "large in PNG", "large in WEBP", "small", "sRGB", "of CMYK"],
)
def test_a_colour_profile_is_kept_unless_it_says_nothing_new(profile, format, kept):
    medium = store(encoded(picture(), format, icc_profile=profile), max_image_side=100)
    assert opened(medium).info.get("icc_profile", b"")[:4000] == kept[:4000]


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
    file = io.BytesIO()
    pillow_heif.from_pillow(picture()).save(file, quality=90)
    medium = store(file.getvalue(), image_format="png")
    assert (medium.extension, medium.facts["original_width"]) == ("png", 400)
    assert mean_error(opened(medium), picture()) < 5


def test_heic_without_its_library_is_a_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    data = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)
    with pytest.raises(RowError, match="pip install pillow-heif"):
        store(data, image_format="jpg")


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_a_smaller_jpeg_has_chroma_of_half_the_size(subsampling):
    data = encoded(picture(), "JPEG", subsampling=subsampling, quality=90)
    medium = store(data, max_image_side=201)
    assert opened(medium).layer[0][1:3] == (2, 2)
    assert mean_error(opened(medium), picture(201, 151)) < 2


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
        ({"image_quality": 101, "max_image_side": 9}, "give a whole number from 1 to 100"),
        ({"image_quality": 90}, "changes nothing by itself"),
        ({"image_quality": 90, "image_format": "png"}, "PNG has no quality"),
        ({"max_aspect": 0.5}, "give a number from 1 up"),
        ({"max_aspect": float("nan")}, "give a number from 1 up"),
        ({"check": "none", "min_image_side": 9}, "needs the headers"),
        ({"min_duration_s": 5, "max_duration_s": 4}, "no file fits"),
    ],
)
def test_impossible_options_are_config_errors(options, reason):
    with pytest.raises(mm.ConfigError, match=reason):
        mm.MediaOptions(**options)


# -- options: from the call or the command line to the shards


SMALL = mm.MediaOptions(max_image_side=16)


def test_a_conversion_goes_on_with_the_same_options_only(corpus, tmp_path):
    run(corpus, tmp_path / "out", media=SMALL)
    path = tmp_path / "out" / MANIFEST_NAME
    manifest = json.loads(path.read_bytes())
    plan = manifest["source"]["media"]
    assert plan["max_image_side"] == 16
    assert set(plan["libraries"]) == {"pillow", "simplejpeg", "torch"}
    assert run(corpus, tmp_path / "out", media=SMALL).was_finished
    for media in (None, mm.MediaOptions(max_image_side=17)):
        with pytest.raises(mm.ConfigError, match="media was"):
            run(corpus, tmp_path / "out", media=media)
    plan["compiled"] = True  # of the module in C of earlier versions
    path.write_text(json.dumps(manifest))
    with pytest.raises(mm.ConfigError, match=r"media was .*'compiled': True.* or replace it with"):
        run(corpus, tmp_path / "out", media=SMALL)


def test_the_flags_are_the_options(corpus, tmp_path, mmstream):
    flags = "--max-image-side 16 --image-format webp --media-check full --num-workers 0"
    words = ["convert", corpus, tmp_path / "out", *flags.split(), "--max-rejects", "50%"]
    assert mmstream(*words)[0] == 0
    plan = json.loads((tmp_path / "out" / MANIFEST_NAME).read_bytes())["source"]
    del plan["media"]["libraries"]
    assert plan["media"] == {"check": "full", "max_image_side": 16, "image_format": "webp"}
    assert set(mm.open_dataset(tmp_path / "out").manifest.fields) == {"webp", "txt", "json"}


def test_media_in_an_object_store_are_read_from_root_and_allowed_prefixes(tmp_path):
    root = f"memory://{tmp_path.name}"
    for path in ("photos/a.png", "others/b.png"):
        open_store(root).write(path, encoded(picture(), "PNG"))
    paths = ["a.png", f"{root}/others/b.png", f"{root}/third/c.png", "../others/b.png"]
    rows = write_rows(tmp_path / "rows.jsonl", [{"image": p, "text": "t"} for p in paths])
    options = {"media_root": f"{root}/photos", "allow_urls": [f"{root}/others/"]}
    report = run(rows, tmp_path / "out", **options)
    assert (report.num_samples, report.num_rejects) == (2, 2)
    assert f"--allow-url {root}/" in rejects(tmp_path / "out")[3]
    assert "outside the media root" in rejects(tmp_path / "out")[4]
