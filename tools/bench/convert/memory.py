"""Peak memory of a conversion of N rows and of 20 N: ``python -m tools.bench.convert.memory``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.bench.convert.corpora import write_corpus
from tools.bench.convert.speed import SCRIPT


def main() -> None:
    """Convert a small and a large corpus of each kind, and print the peaks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=Path, required=True, help="a folder of JPEGs")
    options = parser.parse_args()
    pictures = sorted(options.pictures.glob("*.jpg"))
    with tempfile.TemporaryDirectory() as name:
        for kind, num_rows in (("texts", 5000), ("photos", 150)):
            few, many = (
                peak_bytes(Path(name), kind, n, pictures) for n in (num_rows, 20 * num_rows)
            )
            print(
                f"{kind}: {num_rows:,} rows {few / 1e6:.0f} MB, {20 * num_rows:,} rows "
                f"{many / 1e6:.0f} MB, {many / few - 1:+.0%}"
            )


def peak_bytes(folder: Path, kind: str, num_rows: int, pictures: list[Path]) -> int:
    """Return the largest resident memory of a conversion without worker processes."""
    corpus = write_corpus(folder, kind, num_rows, pictures)
    words = [sys.executable, SCRIPT, "mmstream", corpus.rows, corpus.media, folder / "out", 1]
    process = subprocess.Popen(list(map(str, words)))
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the conversion of {kind} failed")
    return usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
