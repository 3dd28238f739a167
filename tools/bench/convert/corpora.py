"""The rows and media that every system converts: photos, files of 1 MB, texts.

Media are copies of given JPEGs. A comment of 16 random bytes in each copy makes its bytes
unique, so that no file system and no archive can store two of them as one.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Corpus", "write_corpus"]

WORDS = ("a", "the", "brown", "bear", "sits", "on", "green", "grass", "near", "water", "with")


class Corpus(NamedTuple):
    """A corpus on disk."""

    rows: Path
    media: Path
    num_rows: int
    num_bytes: int
    """Bytes of the media and of the file of rows."""


def write_corpus(folder: Path, kind: str, num_rows: int, pictures: Sequence[Path]) -> Corpus:
    """Write a corpus, unless an earlier call did.

    Args:
        folder: Where the corpora lie.
        kind: "photos" (the pictures as they are), "megabytes" (each filled up to 1 MB) or "texts".
        num_rows: Rows of the corpus.
        pictures: JPEGs to copy.
    """
    target = folder / f"{kind}-{num_rows}"
    rows, media = target / "rows.jsonl", target / "media"
    if not rows.exists():
        shutil.rmtree(target, ignore_errors=True)
        media.mkdir(parents=True)
        rng = random.Random(0)
        contents = [path.read_bytes() for path in pictures]
        lines = []
        for number in range(num_rows):
            text = " ".join(rng.choices(WORDS, k=rng.randrange(8, 40)))
            row = {"text": text}
            if kind != "texts":
                row["image"] = f"{number % 100:02d}/{number:07d}.jpg"
                row["id"] = f"photo-{number}"
                path = media / row["image"]
                path.parent.mkdir(exist_ok=True)
                fill = max(0, 1_000_000 - len(contents[number % len(contents)]))
                comment = rng.randbytes(16 if kind == "photos" else 16 + fill)
                path.write_bytes(with_comment(contents[number % len(contents)], comment))
            lines.append(json.dumps(row) + "\n")
        rows.write_text("".join(lines))
    files = [rows, *(path for path in media.rglob("*") if path.is_file())]
    return Corpus(rows, media, num_rows, sum(path.stat().st_size for path in files))


def with_comment(jpeg: bytes, comment: bytes) -> bytes:
    """Return a JPEG with comment segments behind its first marker."""
    segments = b"".join(
        b"\xff\xfe" + (len(piece) + 2).to_bytes(2, "big") + piece
        for piece in (comment[i : i + 60_000] for i in range(0, len(comment), 60_000))
    )
    return jpeg[:2] + segments + jpeg[2:]
