"""Pictures for the decoder's tests: the odd ones on disk, and one made up here."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

ODD = Path(__file__).parent / "data" / "odd_images"


def read(name: str) -> bytes:
    return (ODD / name).read_bytes()


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def photo(height: int = 60, width: int = 90) -> Image.Image:
    """A picture with structure in every part, so that damage anywhere shows."""
    noise = np.random.default_rng(0).integers(0, 256, (height // 3, width // 3, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR)


JPEG = encoded(photo(), "jpeg", quality=85)
PNG = encoded(photo(), "png")
