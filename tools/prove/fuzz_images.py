"""Fuzz the image decoder with mutated files of every format.

    python -m tools.prove.fuzz_images                  # a minute
    python -m tools.prove.fuzz_images 3600 --seed 7

Seeds are small pictures of each format, the odd pictures of the tests, and small image bombs. After
a mutation, the checksums of a PNG are repaired, so that damage reaches the code behind them.

A file may decode, or raise a DecodeError of one printable line. Anything else is a failure, and so
is a file that takes more than `MAX_SECONDS` of processor time. Then the file is saved, and the exit
code is 1.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from functools import cache

import numpy as np
from PIL import Image

from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.errors import DecodeError, TimeoutError
from mmstream.media.pillow import FORMATS
from tests.helpers.image_bombs import BOMBS
from tests.helpers.paths import DATA
from tests.helpers.pictures import encoded, photo

MAX_SECONDS = 10.0
"""Longest time of one file. Files within all limits take up to 3 seconds."""
MAX_SEED_BYTES = 100_000

DECODERS = (
    ImageDecoder(),
    ImageDecoder(size=32),
    ImageDecoder(size=32, scaled_decoding=False),
    ImageDecoder(resize="max_pixels", max_pixels=10**6, max_memory=2**20),
)


class Failure(Exception):  # noqa: N818 - what the fuzzer looks for
    """A file that breaks a rule, and how."""

    def __init__(self, data: bytes, reason: str) -> None:
        super().__init__(reason)
        self.data = data


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


def check(data: bytes, decoder: ImageDecoder) -> str:
    """Decode a file. Return what became of it.

    Raises:
        Failure: It broke a rule.
    """
    start = time.process_time()
    try:
        image = decoder(data)
    except TimeoutError:
        outcome = "timed out"
    except DecodeError as error:
        if not str(error).isprintable():
            raise Failure(data, f"the message is not one printable line: {error!r}") from error
        outcome = "refused"
    except Exception as error:
        raise Failure(data, f"{type(error).__name__}: {error}") from error
    else:
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise Failure(data, f"the result is {image.dtype} {image.shape}")
        outcome = "decoded"
    seconds = time.process_time() - start
    if seconds > MAX_SECONDS:
        raise Failure(data, f"it took {seconds:.1f} s of processor time")
    return outcome


def fuzz(seconds: float, seed: int = 1, max_inputs: float = math.inf) -> Counter[str]:
    """Decode mutated files for some time. Return how many decoded, and how many were refused.

    Args:
        seconds: The time, at most.
        seed: Of the mutations.
        max_inputs: Number of files, at most.

    Raises:
        Failure: A file broke a rule.
    """
    random_draws = random.Random(seed)
    files, outcomes, end = seeds(), Counter[str](), time.monotonic() + seconds
    while time.monotonic() < end and outcomes.total() < max_inputs:
        data = mutate(random_draws.choice(files), random_draws)
        outcomes[check(data, random_draws.choice(DECODERS))] += 1
    return outcomes


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Fuzz the image decoder.")
    parser.add_argument("seconds", type=float, nargs="?", default=60)
    parser.add_argument("--seed", type=int, default=1, help="of the mutations (default: 1)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # Pillow's, about damaged metadata
    try:
        outcomes = fuzz(args.seconds, args.seed)
    except Failure as failure:
        with tempfile.NamedTemporaryFile(prefix="image-", delete=False) as file:
            file.write(failure.data)
        print(f"FAILED: {failure}\nthe file: {file.name}")
        return 1
    print(", ".join(f"{count:,} {name}" for name, count in outcomes.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
