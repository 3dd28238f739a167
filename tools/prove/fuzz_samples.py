"""Mutated tars for the compiled parser of samples: ``python -m tools.prove.fuzz_samples MODULE S``.

`tools/prove/fuzz_samples.sh` builds the module with sanitizers, which end the process at the first
read outside a tar. Each sample that it makes must be that of the careful parser.
"""

from __future__ import annotations

import importlib.util
import io
import os
import random
import sys
import tarfile
import time
from collections.abc import Sequence
from types import ModuleType

from mmstream.tar.samples import parse_sample

NAMES = (
    ["a.b"],
    ["0.jpg", "0.txt"],
    ["k.a", "k.b", "k.C"],
    ["n" * 90 + ".x"],
    ["a.b.c", "a.image_x"],
)
SIZES = (0, 1, 511, 512, 513)
ODD_BYTES = (0, 32, 46, 47, 48, 49, 55, 56, 65, 95, 128, 255)
"""Ends of text, separators, digits, and what no ASCII is."""


def load(path: str) -> ModuleType:
    """Import a compiled module from a file."""
    spec = importlib.util.spec_from_file_location("_plain_samples", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tar_of(names: Sequence[str], size: int) -> bytes:
    """Return one sample: a member of each name, without the end of an archive."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(b"A" * size))
        end = tar.offset
    return file.getvalue()[:end]


def mutate(sample: bytes, rng: random.Random) -> tuple[bytes, int, int]:
    """Return other bytes, and where a sample is said to start and stop in them."""
    data = bytearray(sample)
    for _ in range(rng.randrange(6)):
        header = 512 * rng.randrange(len(data) // 512)
        name, size, checksum = rng.randrange(100), rng.randrange(124, 136), rng.randrange(148, 158)
        offset = rng.choice([name, size, checksum, rng.randrange(512)])
        data[header + offset] = rng.choice([*ODD_BYTES, rng.randrange(256)])
        if rng.random() < 0.7:  # otherwise nothing behind the checksum is reached
            block = data[header : header + 512]
            total = sum(block) - sum(block[148:156]) + 8 * ord(" ")
            data[header + 148 : header + 156] = b"%06o\0 " % total
    if rng.random() < 0.2:
        del data[rng.randrange(len(data) + 1) :]
    if rng.random() < 0.8:
        return bytes(data), 0, len(data)
    start, stop = (rng.randrange(-600, len(data) + 600) for _ in range(2))
    return bytes(data), start, stop


def fuzz(module: ModuleType, seconds: float, seed: int) -> tuple[int, int]:
    """Return how many tars were read in a time, and how many samples were made."""
    rng = random.Random(seed)
    seeds = [tar_of(names, size) for names in NAMES for size in SIZES]
    num_tars = num_samples = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        data, start, stop = mutate(rng.choice(seeds), rng)
        (sample,) = module.plain_samples(memoryview(data), [start], [stop], ["url"])
        num_tars += 1
        if sample is not None:
            num_samples += 1
            expected = list(parse_sample(data[start:stop], "url").items())
            if list(sample.items()) != expected:
                raise SystemExit(f"another sample (seed {seed}, tar {num_tars}): {data!r}")
    return num_tars, num_samples


def main(arguments: Sequence[str]) -> None:
    """Fuzz a compiled module, and say how much of it was tried."""
    path, seconds = arguments
    num_tars, num_samples = fuzz(load(path), float(seconds), int(os.environ.get("SEED", "0")))
    print(f"{num_tars:,} tars, {num_samples:,} samples made: no failure")


if __name__ == "__main__":
    main(sys.argv[1:])
