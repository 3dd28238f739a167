"""What `tools.prove.fuzz` gives to the image decoder: mutated files of every format.

    python -m tools.prove.fuzz image --seconds 3600 --seed 7

Seeds are small pictures of each format, the odd pictures of the tests, and small image bombs. After
a mutation, the checksums of a PNG are repaired, so that damage reaches the code behind them.
"""

from __future__ import annotations

import random
import zlib
from functools import cache

import numpy as np
from PIL import Image

from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.media.pillow import FORMATS
from tests.helpers.image_bombs import BOMBS
from tests.helpers.paths import DATA
from tests.helpers.pictures import encoded, photo

MAX_SEED_BYTES = 100_000

DECODERS = (
    ImageDecoder(),
    ImageDecoder(size=32),
    ImageDecoder(size=32, scaled_decoding=False),
    ImageDecoder(resize="max_pixels", max_pixels=10**6, max_memory=2**20),
)


@cache
def seeds() -> list[bytes]:
    """Return the files that mutations start from."""
    picture = photo()
    alpha = picture.copy()
    alpha.putalpha(picture.convert("L"))
    files = [
        encoded(image, format)
        for format in ("jpeg", *(each.name for each in FORMATS))
        for image in (picture, picture.convert("L"))
    ]
    files += [encoded(alpha, format) for format in ("png", "webp", "avif")]
    files += [encoded(picture.convert("P"), format) for format in ("png", "gif", "bmp")]
    files += [
        encoded(picture, "jpeg", progressive=True, subsampling=0),
        encoded(picture.convert("CMYK"), "jpeg"),
        encoded(picture, "webp", lossless=True),
        encoded(Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000), "png"),
    ]
    for format in ("png", "gif", "webp"):
        frames = [picture.rotate(90 * turn) for turn in range(3)]
        files.append(encoded(frames[0], format, save_all=True, append_images=frames[1:]))
    files += [path.read_bytes() for path in sorted(DATA.glob("odd_images/*.*"))]
    cheap = [name for name in BOMBS if not any(word in name for word in ("mega", "M", "profiles"))]
    files += [BOMBS[name].make() for name in cheap]
    return [data for data in files if len(data) <= MAX_SEED_BYTES]


def mutate(data: bytes, random_draws: random.Random) -> bytes:
    """Change a file in one to four places, then repair the checksums of a PNG."""
    changed = bytearray(data)
    for _ in range(random_draws.randint(1, 4)):
        # Headers are short and decide most, so half of the changes lie at the start.
        end = min(len(changed), random_draws.choice((64, len(changed))))
        position = random_draws.randrange(end) if end else 0
        kind = random_draws.randrange(6)
        if kind == 0 and changed:
            changed[position] ^= 1 << random_draws.randrange(8)
        elif kind == 1:
            changed[position : position + 4] = random_draws.choice(
                (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\x10\0")
            )
        elif kind == 2:
            changed[position : position + 8] = random_draws.randbytes(random_draws.randint(0, 16))
        elif kind == 3:
            del changed[random_draws.randrange(len(changed) + 1) :]
        elif kind == 4:
            size = random_draws.randint(1, 256)
            changed[position:position] = changed[position : position + size] * 3
        else:
            source = random_draws.randrange(len(changed) + 1)
            changed[position : position + 32] = changed[source : source + 32]
    return _with_checksums(bytes(changed))


def _with_checksums(data: bytes) -> bytes:
    """Return a PNG whose chunks have the checksums of what they hold. Other files stay."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    repaired, position = bytearray(data), 8
    while position + 12 <= len(data):
        stop = position + 8 + int.from_bytes(data[position : position + 4], "big")
        if stop + 4 <= len(data):
            checksum = zlib.crc32(data[position + 4 : stop])
            repaired[stop : stop + 4] = checksum.to_bytes(4, "big")
        position = stop + 4
    return bytes(repaired)


def parse(data: bytes) -> None:
    """Decode a file, by one of the decoders that depends on the file alone."""
    image = DECODERS[zlib.crc32(data) % len(DECODERS)](data)
    assert image.dtype == np.uint8, f"the result is {image.dtype}"
    assert image.shape[2:] == (3,), f"the result has the shape {image.shape}"
