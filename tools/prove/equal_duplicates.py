"""Prove that every planted duplicate is found and nothing else, and measure the memory it takes.

    python -m tools.prove.equal_duplicates                            # 100,000 rows
    python -m tools.prove.equal_duplicates --rows 2000 --hashes 0     # a short one

A third of the rows has the file, the text, or both of an earlier row. The corpus is converted, and
the pairs that `find_duplicates` names are compared with those that were planted. Then the peak of
memory of comparing random hashes is measured, in a process of its own for each number of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mmstream as mm
from mmstream.converting.quality.duplicates import KINDS

JPEG_HEAD = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"
"""Enough for a file that nothing decodes."""

PEAK = """
import resource, sys, time
import numpy as np
from mmstream.converting.quality.equal import equal_to_first
num_hashes = int(sys.argv[1])
generator = np.random.default_rng(0)
chunk = 1_000_000
chunks = [generator.integers(0, 1 << 64, (chunk, 2), np.uint64) for _ in range(num_hashes // chunk)]
chunks[-1][: chunk // 2] = chunks[0][: chunk // 2]
start = time.process_time()
first, again = equal_to_first(chunks)
assert (again - first == num_hashes - chunk).all(), "another hash"
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
print(len(again) / (chunk // 2), peak, time.process_time() - start)
"""

Pairs = dict[str, set[tuple[str, str]]]


def write_corpus(folder: Path, num_rows: int, seed: int) -> Pairs:
    """Write rows and their files. Return the pairs (first id, later id) of each kind."""
    generator = random.Random(seed)
    files: list[int] = []
    texts: list[int] = []
    with (folder / "rows.jsonl").open("w") as rows:
        for number in range(num_rows):
            file, text = number, number
            if number and generator.random() < 1 / 3:
                earlier = generator.randrange(number)
                kind = generator.choice(KINDS)
                file = files[earlier] if kind != "text" else number
                text = texts[earlier] if kind != "media" else number
            files.append(file)
            texts.append(text)
            path = folder / f"{file // 1000}" / f"{file}.jpg"
            path.parent.mkdir(exist_ok=True)
            if file == number:
                path.write_bytes(JPEG_HEAD + generator.randbytes(64))
            row = {"id": number, "image": str(path.relative_to(folder)), "text": f"text {text}"}
            rows.write(json.dumps(row) + "\n")
    contents: dict[str, list[Any]] = {
        "media": files,
        "text": texts,
        "pair": list(zip(files, texts, strict=True)),
    }
    return {kind: set(_pairs(contents[kind])) for kind in KINDS}


def _pairs(contents: list[Any]) -> Iterator[tuple[str, str]]:
    """Yield (key of the first, key of a later sample) with the same content."""
    first: dict[Any, int] = {}
    for number, content in enumerate(contents):
        if first.setdefault(content, number) != number:
            yield f"{first[content] + 1:09d}", f"{number + 1:09d}"


def main() -> None:
    """Plant, convert, compare; then measure. The exit code is 1 if a pair was missed or invented.

    Raises:
        SystemExit: With the exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--hashes", type=int, default=40, metavar="MILLIONS", help="0: none")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    is_right = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        planted = write_corpus(folder, options.rows, options.seed)
        unchecked = mm.MediaOptions(check="none")
        rows, corpus = folder / "rows.jsonl", folder / "corpus"
        mm.convert(rows, corpus, media=unchecked, num_workers=2, progress=False)
        start = time.process_time()
        duplicates = mm.find_duplicates(mm.open_dataset(corpus), progress=False)
        print(f"{options.rows:,} samples, compared in {time.process_time() - start:.1f} s of CPU")
        for kind, pairs in planted.items():
            found = {(pair.first.key, pair.again.key) for pair in duplicates.pairs([kind])}
            recall = len(found & pairs) / max(1, len(pairs))
            others = len(found - pairs)
            print(f"  {kind:5} {len(pairs):,} planted, {recall:.2%} found, {others} others")
            is_right = is_right and found == pairs
    for millions in (max(1, options.hashes // 4), options.hashes) if options.hashes else ():
        command = [sys.executable, "-c", PEAK, str(millions * 1_000_000)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
        recall, peak, cpu_s = map(float, done.stdout.split())
        print(f"{millions} million hashes: {recall:.2%} found, peak {peak:,.0f} MB, {cpu_s:.1f} s")
        is_right = is_right and recall == 1
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
