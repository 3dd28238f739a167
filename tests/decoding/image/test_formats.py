"""A type of images is known in every place that treats types apart."""

from __future__ import annotations

import re

import pytest

import mmstream as mm
from mmstream.converting.media.images import encode, target_of
from mmstream.converting.options import MediaOptions
from mmstream.display.text import file_kind
from mmstream.media.limits import Limits
from mmstream.media.pillow import _MEMORY, FORMATS
from mmstream.media.types import TYPES, MediaType, sniff
from tests.helpers.paths import DOCS
from tests.helpers.pictures import encoded, photo

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
    small = encode(data, media_type.extension, (60, 90), target, SMALLER, limits)
    assert small.shape == (20, 30)


@pytest.mark.parametrize("media_type", [each for each in IMAGES if each.is_decoded], ids=ids)
def test_an_image_type_is_decoded_and_documented(media_type: MediaType) -> None:
    data = file_of(media_type)
    assert file_kind(data).endswith(" 90x60")
    decoder = mm.ImageDecoder()
    shape = decoder.prepared_shape(data)
    assert shape is not None
    assert shape.picture == decoder(data).shape[:2] == (60, 90)
    safety = (DOCS / "decoder-safety.md").read_text("utf-8")
    name = pillow_name(media_type)
    assert name in ("JPEG", *(each.name for each in FORMATS))  # the fuzzer mutates all of these
    assert re.search(rf"^\| formats \|.*\b{name}\b", safety, re.M | re.I)
    assert re.search(rf"^\| [^|]*\b{name}\b[^|]* \| [\d, to]+ \|", safety, re.M | re.I)
    with pytest.raises(mm.errors.DecodeError, match=f"^{name}: ") as raised:
        decoder(data[: len(data) * 2 // 3])
    assert str(raised.value).isprintable()
    assert "(0 bytes" not in str(raised.value)
