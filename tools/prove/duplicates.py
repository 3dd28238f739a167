"""How many planted near-duplicates are found, and how many pairs are none; beside imagehash.

    python -m tools.prove.duplicates FOLDER... [--imagehash PYTHON]

Every picture of the folders is encoded again, resized, changed in format and cropped. A pair of
pictures is true if both come from the same file. Recall is the part of the changed pictures that
are near to their original. Precision is the part of all near pairs that are true. Pictures that are
almost of one colour count: they have no hash, so they lower the recall.

With --imagehash, an interpreter that has the package hashes the same files.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmstream.converting.quality.near import MAX_DISTANCE
from mmstream.converting.quality.perceptual_hash import perceptual_hash

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp"}

PEER = """
import imagehash, json, sys, time
from PIL import Image
hashes = {"phash": [], "dhash": []}
seconds = {}
for name, function in (("phash", imagehash.phash), ("dhash", imagehash.dhash)):
    start = time.perf_counter()
    for path in json.load(open(sys.argv[1])):
        with Image.open(path) as image:
            hashes[name].append(str(function(image)))
    seconds[name] = time.perf_counter() - start
print(json.dumps([hashes, seconds]))
"""

Hashes = npt.NDArray[np.uint8]


def changes(picture: Image.Image) -> Iterator[tuple[str, bytes]]:
    """Yield (name of the change, bytes of the changed picture)."""
    width, height = picture.size
    for quality in (95, 75, 50, 30):
        yield f"JPEG quality {quality}", _encoded(picture, quality=quality)
    yield "PNG", _encoded(picture, "PNG")
    yield "WebP quality 60", _encoded(picture, "WEBP", quality=60)
    for scale in (0.75, 0.5, 0.25, 1.5):
        size = max(1, round(width * scale)), max(1, round(height * scale))
        yield f"resized by {scale}", _encoded(picture.resize(size), quality=85)
    yield "resized to 256 x 256", _encoded(picture.resize((256, 256)), quality=85)
    for percent in (1, 2, 5):
        x, y = width * percent // 200, height * percent // 200
        cropped = picture.crop((x, y, width - x, height - y))
        yield f"cropped by {percent} %", _encoded(cropped, quality=90)


def _encoded(picture: Image.Image, kind: str = "JPEG", **options: int) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def plant(folders: list[Path], target: Path) -> tuple[list[Path], list[str], list[int]]:
    """Write originals and changed pictures. Return their paths, changes, and originals."""
    paths: list[Path] = []
    names: list[str] = []
    origins: list[int] = []
    contents: set[bytes] = set()
    files = sorted(p for f in folders for p in f.rglob("*") if p.suffix.lower() in SUFFIXES)
    for number, file in enumerate(files):
        data = file.read_bytes()
        try:
            with Image.open(file) as image:
                picture = image.convert("RGB")
        except (OSError, Image.DecompressionBombError):
            continue
        if data in contents or min(picture.size) < 64:
            continue
        contents.add(data)
        for name, changed in [("original", data), *changes(picture)]:
            path = target / f"{len(paths)}"
            path.write_bytes(changed)
            paths.append(path)
            names.append(name)
            origins.append(number)
    return paths, names, origins


def report(
    title: str, hashes: list[Hashes | None], names: list[str], origins: list[int], limit: int
) -> None:
    """Print the recall of each change, and the precision with and without crops."""
    num_bytes = len(next(h for h in hashes if h is not None))
    known = np.array([h is not None for h in hashes])
    matrix = np.stack([np.zeros(num_bytes, np.uint8) if h is None else h for h in hashes])
    origin = np.array(origins)
    is_near = np.zeros((len(hashes), len(hashes)), dtype=np.bool_)
    for row in range(len(hashes)):
        distance = np.bitwise_count(matrix[row] ^ matrix).sum(axis=1)
        is_near[row] = (distance <= limit) & known & known[row]
    is_original = np.array(names) == "original"
    original_of = {int(origin[i]): int(i) for i in np.flatnonzero(is_original)}
    hits: dict[str, list[bool]] = {}
    for number, name in enumerate(names):
        hits.setdefault(name, []).append(bool(is_near[number, original_of[origins[number]]]))
    upper = np.triu(is_near, 1)
    is_true = origin[:, None] == origin[None, :]
    precision = (upper & is_true).sum() / max(1, upper.sum())
    same = [
        hit for name, matched in hits.items() for hit in matched if name[:4] not in ("orig", "crop")
    ]
    print(f"{title}, at most {limit} of {8 * num_bytes} bits:")
    print(f"  precision {precision:.2%} of {upper.sum():,} pairs, recall {np.mean(same):.2%}")
    for name, matched in hits.items():
        print(f"    {name:22} {np.mean(matched):.1%}")


def main() -> None:
    """Plant, hash and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--imagehash", metavar="PYTHON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths, names, origins = plant(options.folders, Path(folder))
        print(f"{names.count('original')} pictures, {len(paths)} with the changed ones")
        start = time.perf_counter()
        digests = [perceptual_hash(path.read_bytes()) for path in paths]
        ms = (time.perf_counter() - start) / len(paths) * 1e3
        hashes = [None if h is None else np.frombuffer(h, np.uint8) for h in digests]
        report(f"mmstream, {ms:.2f} ms a picture", hashes, names, origins, MAX_DISTANCE)
        if options.imagehash:
            listed = Path(folder) / "list.json"
            listed.write_text(json.dumps([str(path) for path in paths]))
            command = [options.imagehash, "-c", PEER, str(listed)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=600)
            by_name, seconds = json.loads(done.stdout)
            for name, texts in by_name.items():
                peer: list[Hashes | None] = [
                    np.frombuffer(bytes.fromhex(text), np.uint8) for text in texts
                ]
                title = f"imagehash {name}, {seconds[name] / len(paths) * 1e3:.2f} ms a picture"
                for limit in (4, 8):
                    report(title, peer, names, origins, limit)


if __name__ == "__main__":
    main()
