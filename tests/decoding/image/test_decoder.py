"""What becomes of every kind of odd image: shape, colour, orientation, or a refusal."""

from __future__ import annotations

import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, ImageOps

import mmstream as mm
from mmstream.converting.media.images import encode, target_of
from mmstream.converting.options import MediaOptions
from mmstream.display.text import file_kind
from mmstream.media.limits import Limits
from mmstream.media.pillow import _MEMORY, FORMATS
from mmstream.media.types import TYPES, MediaType, sniff
from tests.helpers.paths import DOCS
from tests.helpers.pictures import ODD, encoded, photo, read

# file -> (height, width) when it decodes, else a part of the reason
ODD_IMAGES: dict[str, tuple[int, int] | str] = {
    # whole files with odd labels
    "broken_exif_dpi.jpg": (100, 100),  # EXIF that points outside itself
    "exif_gps.jpg": (8, 8),
    "hopper_16bit_qtables.jpg": (128, 128),
    "icc-after-SOF.jpg": (10, 10),  # libjpeg: bad ICC marker
    "invalid-exif.jpg": (200, 200),
    "jpeg_ff00_header.jpg": (225, 300),  # libjpeg: 4 extraneous bytes before marker 0xdb
    "junk_jpeg_header.jpg": (768, 1024),  # libjpeg: 5 extraneous bytes before marker 0xdb
    "multiple_exif.jpg": (1, 1),
    "photoshop-200dpi-broken.jpg": (200, 200),  # 16 extraneous bytes before marker 0xe1
    "truncated_app14.jpg": (100, 100),  # the Adobe segment is too short; 1 extraneous byte
    "xmp_no_prefix.jpg": (1, 1),
    "no_palette.gif": (1, 1),
    "no_palette_with_transparency.gif": (2, 2),
    "background_outside_palette.gif": (1, 1),
    "missing_background.gif": (32, 32),
    "decompression_bomb_extents.gif": (100, 100),  # its frame reaches beyond the screen
    "hopper-missing-pixi.avif": (128, 128),
    # orientation
    "orientation_rectangle.jpg": (2, 1),  # stored as 1 x 2
    **{f"hopper_orientation_{i}.jpg": (128, 128) for i in range(2, 9)},
    "hopper_orientation_5.webp": (128, 128),
    "hopper_orientation_6.webp": (128, 128),
    "rot1mir0.avif": (427, 640),
    "xmp_tags_orientation.avif": (268, 326),
    # colour, transparency, animation
    "pil_sample_cmyk.jpg": (100, 100),  # YCCK
    "hopper_gray.jpg": (128, 128),
    "transparent.gif": (150, 200),
    "transparent.webp": (150, 200),
    "transparency.avif": (64, 64),
    "text_mono.gif": (30, 100),
    "anim_frame1.webp": (82, 82),
    "hopper.jpg": (128, 128),
    "hopper.gif": (128, 128),
    "hopper.webp": (128, 128),
    "hopper.avif": (128, 128),
    # refused
    "truncated_jpeg.jpg": "Premature end of JPEG file",
    "ultrahdr.jpg": "Premature end of JPEG file",  # cut in the last rows
    "hopper_bad_exif.jpg": "extraneous bytes before marker 0xd0",  # inside the picture
    "decompression_bomb.gif": "exceeds limit",
    "zero_width.gif": "not identified",
}

decode = mm.ImageDecoder()


@pytest.mark.parametrize("name", sorted({path.name for path in ODD.iterdir()} - {"LICENSES.md"}))
def test_each_odd_image_decodes_or_is_refused_as_decided(name: str) -> None:
    """The pixels are those that Pillow decodes, laid on white."""
    expected = ODD_IMAGES[name]
    if isinstance(expected, str):
        with pytest.raises(mm.errors.DecodeError, match=expected):
            decode(read(name))
        return
    image = decode(read(name))
    assert (image.shape, image.dtype) == ((*expected, 3), np.uint8)
    assert image.flags.c_contiguous
    assert image.flags.writeable
    with Image.open(ODD / name) as original:
        upright = ImageOps.exif_transpose(original)
        if upright.has_transparency_data:
            white = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(white, upright.convert("RGBA"))
        np.testing.assert_array_equal(image, np.asarray(upright.convert("RGB")))


def test_sixteen_bit_grey_keeps_its_high_byte() -> None:
    values = np.array([[0, 255, 256, 65535]], dtype=np.uint16)
    image = decode(encoded(Image.fromarray(values), "png"))
    np.testing.assert_array_equal(image[0], [[0] * 3, [0] * 3, [1] * 3, [255] * 3])


def with_palette() -> Image.Image:
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([10, 20, 30, 9, 9, 9])
    palette.putpixel((1, 0), 1)
    return palette


def with_alpha(mode: str) -> Image.Image:
    picture = Image.new("RGBA", (2, 1), (10, 20, 30, 255))
    picture.putpixel((1, 0), (10, 20, 30, 0))
    return picture.convert(mode)


@pytest.mark.parametrize(
    ("data", "opaque"),
    [
        (encoded(with_alpha("RGBA"), "png"), [10, 20, 30]),
        (encoded(with_alpha("RGBA"), "webp", lossless=True), [10, 20, 30]),
        (encoded(with_alpha("LA"), "png"), [18] * 3),
        (encoded(with_palette(), "png", transparency=1), [10, 20, 30]),
    ],
    ids=["png", "webp", "grey", "palette"],
)
def test_transparency_is_laid_on_white(data: bytes, opaque: list[int]) -> None:
    np.testing.assert_array_equal(decode(data), [[opaque, [255] * 3]])


@pytest.mark.parametrize(
    ("format", "mode"),
    [(f, m) for f in ("png", "bmp", "gif") for m in ("1", "L", "P", "RGB")][:-1],
)
def test_black_white_grey_and_palettes_become_rgb(format: str, mode: str) -> None:
    """GIF has no RGB: Pillow chooses a palette when it writes."""
    image = photo().convert(mode)
    np.testing.assert_array_equal(decode(encoded(image, format)), np.asarray(image.convert("RGB")))


def test_cmyk_jpegs_are_read_as_inverted_and_converted() -> None:
    cmyk = encoded(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "jpeg", quality=100)
    assert np.abs(decode(cmyk).astype(int) - [0, 255, 255]).max() <= 2


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    for format, options in (("gif", {}), ("webp", {"lossless": True}), ("png", {})):
        data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
        np.testing.assert_array_equal(decode(data), np.full((4, 4, 3), [255, 0, 0]))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html><body>404 Not Found</body></html>",
        b'{"error": "expired"}',
        b"\xff\xd8",
        b"\xff\xd8\xff\xd9",
        b"\x89PNG\r\n\x1a\n",
        b"BM",
        b"BMW is a car maker, and this is a caption",
        b"GIF89a",
        b"RIFF\0\0\0\0WEBP",
        b"\0\0\0\x1cftypavif",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        bytes(1000),
    ],
)
def test_what_is_no_image_is_a_decode_error_of_one_line(data: bytes) -> None:
    with pytest.raises(mm.errors.DecodeError) as caught:
        decode(data)
    assert 0 < len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"size": 0},
        {"size": (0, 3)},
        {"size": (1, 2, 3)},
        {"size": 2.5},
        {"size": True},
        {"resize_size": 256},
        {"size": 224, "resize_size": 223},
        {"size": (10, 20), "resize_size": 19},
        {"max_pixels": 0},
        {"max_bytes": None},
        {"resize": "longest", "size": 8},
        {"resize": "shortest"},
        {"resize": "exact"},
        {"resize": "letterbox"},
        {"resize": "native", "size": 8},
        {"resize": "max_pixels", "size": 8},
        {"resize": "max_pixels", "multiple_of": 0},
        {"resize": "max_pixels", "pixel_budget": (100, 10)},
        {"crop": "random"},
        {"crop": "corner", "size": 8},
        {"crop": "random", "size": 8, "resize": "exact"},
        {"crop": "random", "size": 8, "resize_size": 9},
        {"crop": None, "size": (8, 9)},
        {"crop": None, "size": 8, "resize_size": 9},
        {"crop_rounding": "up"},
        {"scale": (0.0, 1.0)},
        {"scale": (0.5, 1.1)},
        {"ratio": (2.0, 1.0)},
        {"flip": 1.1},
        {"flip": -0.1},
        {"flip": "half"},
        {"flip": None},
        {"timeout_s": "5"},
        {"pixel_budget": 5},
        {"size": 8, "crop": "random", "scale": 0.5},
        {"size": 8, "crop": "random", "ratio": ("a", "b")},
        {"interpolation": "hamming"},
        {"interpolation": ["bilinear"]},
        {"fill": (0, 0, 256)},
        {"fill": (0, 0)},
        {"scaled_decoding": 1},
        {"tiles": mm.families.llava.LlavaNextTiles()},
        {"tiles": mm.families.llava.LlavaNextTiles(), "size": 224},
        {"tiles": mm.families.llava.LlavaOnevisionTiles(), "size": 336},
        {"tiles": mm.families.internvl.InternVLTiles(), "size": (8, 8)},
        {"tiles": mm.families.internvl.InternVLTiles(), "size": 8, "resize": "exact"},
        {"tiles": mm.families.internvl.InternVLTiles(), "size": 8, "flip": 0.5},
        {"tiles": 3, "size": 8},
        {"tiles": mm.families.internvl.InternVLTiles(), "size": 8, "resize_size": 9},
    ],
)
def test_impossible_arguments_are_config_errors(arguments: dict[str, object]) -> None:
    with pytest.raises(mm.ConfigError):
        mm.ImageDecoder(**arguments)


def test_a_decoder_can_be_pickled_and_shared_by_threads() -> None:
    tiles = mm.ImageDecoder(
        size=8, tiles=mm.families.internvl.InternVLTiles(max_tiles=3), fill=(1, 2, 3)
    )
    assert pickle.loads(pickle.dumps(tiles)) == tiles
    assert hash(tiles) != hash(mm.ImageDecoder(size=8))
    decoder = pickle.loads(pickle.dumps(mm.ImageDecoder(size=40, resize_size=48)))
    files = [read(name) for name, expected in ODD_IMAGES.items() if isinstance(expected, tuple)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(decoder, files))
    for data, image in zip(files, together, strict=True):
        np.testing.assert_array_equal(image, decoder(data))


# -- every type of images is known wherever types are told apart -----------------------------------

IMAGES = [each for each in TYPES if each.kind == "image"]
PILLOW_NAMES = {"jpg": "JPEG", "heic": "HEIF"}
SMALLER = MediaOptions(max_image_side=30)


def ids(media_type: MediaType) -> str:
    return media_type.extension


def file_of(media_type: MediaType) -> bytes:
    if media_type.extension == "heic":
        pytest.importorskip("pillow_heif").register_heif_opener()
    return encoded(photo(60, 90), pillow_name(media_type))


def pillow_name(media_type: MediaType) -> str:
    return PILLOW_NAMES.get(media_type.extension, media_type.extension.upper())


@pytest.mark.parametrize("media_type", IMAGES, ids=ids)
def test_an_image_type_is_recognised_converted_and_counted(media_type: MediaType) -> None:
    data = file_of(media_type)
    assert sniff(data[:64]) == media_type
    assert file_kind(data)
    assert pillow_name(media_type) in _MEMORY
    target = target_of(media_type.extension, (60, 90), SMALLER)
    assert target is not None
    limits = Limits.start(10**6, 2**26, None)
    _, size, _ = encode(data, media_type.extension, (60, 90), target, SMALLER, limits)
    assert size == (20, 30)


@pytest.mark.parametrize("media_type", [each for each in IMAGES if each.is_decoded], ids=ids)
def test_an_image_type_is_decoded_and_documented(media_type: MediaType) -> None:
    data = file_of(media_type)
    assert file_kind(data).endswith(" 90x60")
    decoder = mm.ImageDecoder()
    shape = decoder.prepared_shape(data)
    assert shape is not None
    assert shape.picture == decoder(data).shape[:2] == (60, 90)
    name = pillow_name(media_type)
    assert name in ("JPEG", *(each.name for each in FORMATS))  # the fuzzer mutates all of these
    safety = (DOCS / "decoder-safety.md").read_text("utf-8")
    assert re.search(rf"^\| formats \|.*\b{name}\b", safety, re.M | re.I)
    assert re.search(rf"^\| [^|]*\b{name}\b[^|]* \| [\d, to]+ \|", safety, re.M | re.I)
    with pytest.raises(mm.errors.DecodeError, match=f"^{name}: ") as raised:
        decoder(data[: len(data) * 2 // 3])
    assert str(raised.value).isprintable()
    assert "(0 bytes" not in str(raised.value)
