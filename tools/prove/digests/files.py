"""The files and samples that the cases are made of: the same bytes, or pixels, on every machine."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.helpers.chats import assistant, user
from tests.helpers.media_files import audio_file, frame_pixels, video_file
from tests.helpers.paths import DATA, PHOTOS
from tests.helpers.pictures import encoded

Fields = dict[str, bytes]

HUGE_BYTES = 2 << 30
"""Size of a file that is read by ranges. It is sparse: nearly nothing of it is on the disk."""


def photo(number: int) -> bytes:
    """Return a JPEG of a camera, about 288 pixels wide."""
    return PHOTOS[number % len(PHOTOS)].read_bytes()


def png(number: int, height: int = 72, width: int = 100) -> bytes:
    """Return a PNG that shows a number."""
    return encoded(Image.fromarray(frame_pixels(number, height, width)), "png")


def picture(number: int) -> tuple[str, bytes, tuple[int, int]]:
    """Return extension, content, and (height, width): PNG and JPEG in turn."""
    if number % 2:
        data = photo(number)
        width, height = Image.open(io.BytesIO(data)).size
        return "jpg", data, (height, width)
    return "png", png(number), (72, 100)


def mask(number: int, shape: tuple[int, int]) -> bytes:
    """Return a PNG of class numbers, 0 to 6."""
    return encoded(Image.fromarray(frame_pixels(number, *shape)[..., 0] // 33), "png")


def cut(data: bytes) -> bytes:
    """Return a file whose header is right, and whose last third is missing."""
    return data[: len(data) * 2 // 3]


def with_late_exif(data: bytes, orientation: int) -> bytes:
    """Return a PNG whose orientation stands behind its pixels."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    return data[:-12] + chunk + data[-12:]


def turned(number: int) -> tuple[str, bytes]:
    """Return extension and content of a picture that its metadata turns."""
    odd = DATA / "odd_images"
    files = {
        "png": with_late_exif(png(number), number % 8 + 1),
        "jpg": photo(number) if number % 2 else (odd / "hopper_orientation_6.jpg").read_bytes(),
        "webp": (odd / "hopper_orientation_5.webp").read_bytes(),
    }
    return list(files.items())[number % 3]


def clip(number: int, *, audio_codec: str | None = "aac", faststart: bool = False) -> bytes:
    """Return a video of 64 x 48 pixels, 10 frames a second, whose frames show their numbers."""
    return video_file(
        "mp4",
        num_frames=8 + number % 5,
        audio_codec=audio_codec,
        first_number=10 * number,
        moov_first=faststart,
    )


def recording(number: int, kind: str = "wav") -> bytes:
    """Return a recording of a tone, 0.3 to 0.7 seconds long."""
    return audio_file(kind, seconds=0.3 + 0.1 * (number % 5))


def captioned(number: int, **fields: bytes) -> Fields:
    """Return a sample with a text, a number, and some more files."""
    text = f"caption {number} " + "word " * (number % 7)
    return {**fields, "txt": text.encode(), "json": json.dumps({"id": number}).encode()}


def chat(number: int, *media: tuple[str, str]) -> bytes:
    """Return the ``json`` of a conversation about some (kind, field)."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": f"question {number} "}]
    for kind, field in media:
        parts += [{"type": kind, "field": field}, {"type": "text", "text": f" and {field} "}]
    answer = assistant([{"type": "text", "text": "so it is" + " and more" * (number % 4)}])
    return json.dumps({"messages": [user(parts), answer]}).encode()


def array(number: int) -> bytes:
    """Return a ``.npy`` file."""
    file = io.BytesIO()
    np.save(file, np.arange(4, dtype=np.float32) + number)
    return file.getvalue()


def write_huge(path: Path, count: int) -> Path:
    """Write a tar of videos, the first of which is followed by 2 GB of nothing inside its file."""
    with path.open("wb") as out:
        for number in range(count):
            data = clip(number, faststart=True)
            size = HUGE_BYTES if number == 0 else len(data) + 16
            free = struct.pack(">I4sQ", 1, b"free", size - len(data))
            _write_member(out, f"{number:06d}.mp4", data + free, size)
            _write_member(out, f"{number:06d}.txt", b"a clip", 6)
        out.write(bytes(1024))
    return path


def _write_member(out: Any, name: str, start: bytes, size: int) -> None:
    info = tarfile.TarInfo(name)
    info.size = size
    out.write(info.tobuf(tarfile.USTAR_FORMAT))
    out.write(start)
    out.seek(-(-size // 512) * 512 - len(start), io.SEEK_CUR)
    out.truncate()
