"""Pictures for the decoder's tests: the odd ones on disk, and one made up here."""

from __future__ import annotations

import io
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from tests.helpers.paths import DATA

ODD = DATA / "odd_images"


def read(name: str) -> bytes:
    return (ODD / name).read_bytes()


def damaged(data: bytes, damage: Iterable[tuple[int, int]]) -> bytes:
    """Return a file with other bytes in it: (position, value) of each. Positions go round."""
    changed = bytearray(data)
    for position, value in damage:
        changed[position % len(changed)] = value
    return bytes(changed)


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def photo(height: int = 60, width: int = 90) -> Image.Image:
    """A picture with structure in every part, so that damage anywhere shows."""
    noise = np.random.default_rng(0).integers(0, 256, (height // 3, width // 3, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR)


def psnr(image: ArrayLike, reference: ArrayLike) -> float:
    """Return the peak signal-to-noise ratio of two uint8 images in dB; 99 if they are equal."""
    error = np.mean((np.asarray(image, float) - np.asarray(reference, float)) ** 2)
    return float(10 * np.log10(255**2 / error)) if error else 99.0


JPEG = encoded(photo(), "jpeg", quality=85)
PNG = encoded(photo(), "png")
