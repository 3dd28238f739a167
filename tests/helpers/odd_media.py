"""Odd values for the media of rows: what corpora, libraries and mistakes put where a file belongs.

`odd_media` makes some hundreds for each kind, the same ones every time: damaged files in every form
that a row may give them in, pictures in every mode, arrays, tensors, and values that are not media.
"""

from __future__ import annotations

import base64
import io
import pathlib
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.helpers.media_files import audio_file, video_file
from tests.helpers.pictures import encoded

MODES = (
    *("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB"),
    *("HSV", "I", "F", "I;16", "I;16B", "I;16L"),
)
SIZES = ((5, 4), (1, 1), (0, 0), (0, 3), (3, 0))
NUM_DAMAGED = 4

NO_MEDIA: list[Any] = [
    *("", " ", "\0", "a\nb", "x" * 5000, "file:///etc/passwd", "../a", "http://", "[", "a#b?c!d"),
    *(0, -1, 1.5, True, None, b"", np.bytes_(b""), {}, [], [[]], [None], object(), int, len),
    *({"bytes": b""}, {"bytes": None}, {"path": ""}, {"path": None, "bytes": None}, {"a": 2}),
    *({"array": [0.0], "sampling_rate": 8000}, {"path": ["a"]}, {"bytes": {"a": 1}}, {"url": 3}),
    *(pathlib.PurePosixPath("/"), io.BytesIO(b"x"), slice(3), ValueError("x")),
]


def odd_media(kind: str, folder: pathlib.Path) -> list[Any]:
    """Return odd values for a key of rows.

    Args:
        kind: "image", "audio" or "video".
        folder: Gets the files that some values name.
    """
    files = media_files(kind)
    damaged = [*files, *_damaged(files)]
    values = [*damaged, *NO_MEDIA, *_arrays(kind), *_pictures()]
    for i, data in enumerate(damaged[::2]):
        path = folder / f"{kind}{i}.bin"
        path.write_bytes(data)
        values += _forms(data, path)[i % 3 :: 3]
    return values


def media_files(kind: str) -> list[bytes]:
    """Return small files of a kind, one of each format."""
    if kind == "audio":
        return [audio_file(name, seconds=0.3) for name in ("wav", "flac", "mp3", "opus", "m4a")]
    if kind == "video":
        return [video_file(name, num_frames=6) for name in ("mp4", "mkv", "avi")]
    image = Image.fromarray(np.arange(240, dtype=np.uint8).reshape(8, 10, 3))
    return [encoded(image, name) for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")]


def _damaged(files: list[bytes]) -> Iterator[bytes]:
    """Yield files with a bit changed, bytes left out or put in, and cut ones."""
    rng = np.random.default_rng(0)
    for data, _ in product(files, range(NUM_DAMAGED)):
        start, num_bytes = int(rng.integers(min(200, len(data)))), int(rng.integers(1, 9))
        head, tail = data[:start], data[start:]
        yield from (head + bytes([tail[0] ^ 8]) + tail[1:], head + tail[num_bytes:])
        yield from (head + rng.bytes(num_bytes) + tail, data[: int(rng.integers(len(data)))])


def _forms(data: bytes, path: pathlib.Path) -> list[Any]:
    """Return a file in the forms that rows have."""
    text = base64.b64encode(data).decode()
    return [
        *(bytearray(data), memoryview(data), np.bytes_(data), np.frombuffer(data, np.uint8)),
        *(np.void(data or b"0"), {"bytes": data, "path": None}, {"bytes": None, "path": str(path)}),
        *({"bytes": data, "path": 3}, {"bytes": np.bytes_(data), "path": "a"}, str(path), path),
        *({"path": path}, {"bytes": text}, {"data": text, "format": "wav"}, [data], [data, None]),
        *({"url": f"data:;base64,{text}"}, f"data:x/y;base64,{text}", text, text[:-1], (data,)),
        *(
            memoryview(data)[::2],
            io.BytesIO(data),
            {"bytes": [*data[:50]]},
            {"bytes": io.BytesIO()},
        ),
    ]


def _pictures() -> list[Image.Image]:
    """Return pictures of Pillow in every mode and of odd sizes, and some that cannot be read."""
    pictures = [Image.new(mode, size) for mode, size in product(MODES, SIZES)]
    png = encoded(Image.new("L", (40, 30)), "PNG")
    lazy, closed, lost, cut = (Image.open(io.BytesIO(data)) for data in (png, png, png, png[:-20]))
    closed.close()
    lost.fp.close()  # type: ignore[union-attr]
    for mode, key in product(("L", "P", "RGB"), (-1, 300, 2**40, "x", (1, 2), b"", None)):
        image = Image.new(mode, (4, 4))
        image.info.update(transparency=key, exif=key, icc_profile=key, dpi=key)
        pictures.append(image)
    return [*pictures, lazy, closed, lost, cut, Image.Image()]


def _arrays(kind: str) -> list[Any]:
    """Return arrays and tensors of every type, and decoded sounds and videos."""
    shapes = ((), (0,), (7,), (4, 5), (4, 5, 3), (3, 4, 5), (2, 4, 5, 3))
    types = ("u1", "i2", "i8", "f2", "f4", "f8", "c8", "?", "S3", "U3", "M8[s]", "O", "u1,f4")
    arrays = [np.zeros(shape, dtype) for dtype, shape in product(types, shapes)]
    tensors = [torch.from_numpy(array) for array in arrays if array.dtype.kind in "iufb"]
    sounds = [{"array": array, "sampling_rate": 16_000, "path": None} for array in arrays[::3]]
    frames = [{"frames": array, "fps": 2.0, kind: array} for array in arrays[::3]]
    others = (torch.zeros(3, device="meta"), torch.zeros(2, 2).to_sparse())
    return [*arrays, *tensors, *sounds, *frames, *others, np.ma.masked_array([1, 2], [True, False])]
