"""Speed and memory of two checkouts, side by side: ``python -m tools.bench.compare CHECKOUT``.

    git worktree add --detach ../before HEAD~10
    python -m tools.bench.compare ../before --rounds 5
    python -m tools.bench.compare ../before --rows decoded S3 --seconds 8

Both read the same corpora, by the rows of this checkout (`tools.bench.compare_rows`). Every
measurement is a new process. The two checkouts take turns, and every second round the other one
begins. The table has medians. "Gain" is above 1 where this checkout is faster; the range is that of
the rounds. Memory is the peak of the proportional set size of all processes, with imports.

The S3 server (SeaweedFS) and the proxy that adds latency run on the same cores. Measure with
nothing else on the machine. A checkout beside a copy of itself tells how large the noise is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import psutil

from mmstream.processes.machine import pss_bytes
from tests.helpers.corpora import write_corpus
from tests.helpers.http_fault_proxy import Faults, fault_proxy
from tests.helpers.media_files import audio_file, video_file
from tools.bench.compare_rows import ROWS
from tools.bench.corpus import mosaics, photographs, write_tokenizer
from tools.s3_server import s3_server, without_aws

ROOT = Path(__file__).resolve().parents[2]
FAR = Faults(latency_s=0.05, bytes_per_s=40e6)
NUM_PHOTOS = 2000
POLL_INTERVAL_S = 0.3
"""Between two looks at the memory of a run."""

Fields = dict[str, bytes]


class Run(NamedTuple):
    """One measurement of a row."""

    value: float
    cpu_ms: float
    peak_bytes: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the corpora, measure both checkouts in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="root of the other checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rows", nargs="+", metavar="WORD", help="only rows with such a word")
    options = parser.parse_args(arguments)
    checkouts = {"this": ROOT, "other": options.checkout.resolve()}
    if not (checkouts["other"] / "mmstream").is_dir():
        parser.error(f"{options.checkout}: no folder mmstream/ in it; give the root of a checkout")
    rows = [row for row in ROWS if any(word in row for word in options.rows or [""])]
    if not rows:
        parser.error(f"no row has {' or '.join(options.rows)}; the rows are {'; '.join(ROWS)}")
    runs: dict[tuple[str, str], list[Run]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory() as folder,
        s3_server() as server,
        fault_proxy(server.endpoint, FAR) as proxy,
        patch.dict(os.environ, without_aws(os.environ) | server.env, clear=True),
    ):
        os.environ["BENCH_URL"] = f"s3://{server.bucket}"
        write_corpora(Path(folder), os.environ["BENCH_URL"])
        for which, root in checkouts.items():
            Path(folder, which).mkdir()
            Path(folder, which, "mmstream").symlink_to(root / "mmstream")
        for number in range(options.rounds):
            for row in rows:
                endpoint = proxy.endpoint if "50/40" in row else server.endpoint
                os.environ["AWS_ENDPOINT_URL"] = endpoint
                for which in list(checkouts)[:: -1 if number % 2 else 1]:
                    run = measure(row, Path(folder), which, options.seconds)
                    runs[row, which].append(run)
                    print(
                        f"round {number + 1}: {row}, {which}: {_rounded(run.value)}",
                        file=sys.stderr,
                    )
    print_table(rows, runs)


# -- the corpora ----------------------------------------------------------------------------------


def write_corpora(folder: Path, url: str) -> None:
    """Write what all rows read, into a folder and into a bucket."""
    small = [photo.jpeg for photo in photographs()]
    large = {name: [each.jpeg for each in mosaics(size, 4)] for name, size in SIZES.items()}
    video = with_room(video_file(num_frames=240, width=320, height=240, gop=12, moov_first=True))
    sounds = [audio_file("flac", seconds=12 + number) for number in range(4)]
    write(folder / "photos", NUM_PHOTOS, lambda number: {"jpg": small[number % len(small)]})
    write(folder / "4mp", 128, lambda number: {"jpg": large["4mp"][number % 4]})
    write(folder / "12mp", 64, lambda number: {"jpg": large["12mp"][number % 4]})
    write(folder / "audio", 256, lambda number: {"flac": sounds[number % 4]})
    write(f"{url}/photos", NUM_PHOTOS, lambda number: {"jpg": small[number % len(small)]})
    write(f"{url}/videos", 32, lambda _: {"mp4": video})
    write_tokenizer(folder)
    (folder / "media").mkdir()
    lines = []
    for number in range(NUM_PHOTOS):
        name = f"{number:06d}.jpg"
        (folder / "media" / name).write_bytes(small[number % len(small)])
        lines.append(json.dumps({"image": name, "text": f"photograph {number}"}))
    (folder / "rows.jsonl").write_text("\n".join(lines))


SIZES = {"4mp": (2304, 1728), "12mp": (4000, 3000)}


def write(target: str | Path, count: int, fields_of: Callable[[int], Fields]) -> None:
    """Write a dataset of eight shards, whose samples have a caption too."""
    counts = [count // 8] * 8
    write_corpus(str(target), counts, lambda n: fields_of(n) | {"txt": b"photograph %d" % n})


def with_room(video: bytes, num_bytes: int = 9 << 20) -> bytes:
    """Return an mp4 with free room behind its frames, so that it is read by ranges."""
    size = num_bytes - len(video)
    return video + struct.pack(">I4s", size, b"free") + bytes(size - 8)


# -- measuring ------------------------------------------------------------------------------------


def measure(row: str, folder: Path, which: str, seconds: float) -> Run:
    """Run a row in a new process that imports mmstream of one of the checkouts."""
    own = folder / which
    variables = {"PYTHONPATH": f"{own}{os.pathsep}{ROOT}", "XDG_CACHE_HOME": str(own / "cache")}
    command = [sys.executable, "-m", "tools.bench.compare_rows", row, str(folder), str(own)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, str(seconds)],
            env=os.environ | variables | {"TOKENIZERS_PARALLELISM": "false"},
            cwd=own,  # Python looks there for mmstream before it looks at PYTHONPATH
            stdout=out,
            stderr=errors,
        )
        peak_bytes = 0.0
        while process.poll() is None:
            with suppress(psutil.Error):  # it has just ended
                children = psutil.Process(process.pid).children(recursive=True)
                pids = [process.pid, *(child.pid for child in children)]
                peak_bytes = max(peak_bytes, pss_bytes(pids))
            time.sleep(POLL_INTERVAL_S)
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            sys.exit(f"{row}, {which}: exit {process.returncode}\n{errors.read()[-3000:]}")
        return Run(**json.loads(out.read().splitlines()[-1]), peak_bytes=peak_bytes)


def _rounded(value: float) -> str:
    """Return a number with four digits, or whole: 17,110, not 1.711e+04."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def print_table(rows: Sequence[str], runs: dict[tuple[str, str], list[Run]]) -> None:
    """Print the medians of both checkouts, and how they compare."""
    print("| row | unit | this | other | gain (range) | CPU ms | other | MB | other |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        this, other = runs[row, "this"], runs[row, "other"]
        unit = ROWS[row][0]
        gains = [gain(unit, one, another) for one, another in zip(this, other, strict=True)]
        new, old = median(this), median(other)
        print(
            f"| {row} | {unit} | {_rounded(new.value)} | {_rounded(old.value)} "
            f"| {gain(unit, new, old):.3f} ({min(gains):.2f}-{max(gains):.2f}) "
            f"| {new.cpu_ms:.3f} | {old.cpu_ms:.3f} "
            f"| {new.peak_bytes / 1e6:,.0f} | {old.peak_bytes / 1e6:,.0f} |"
        )


def median(runs: Sequence[Run]) -> Run:
    """Return the median of each figure."""
    return Run(*(statistics.median(column) for column in zip(*runs, strict=True)))


def gain(unit: str, this: Run, other: Run) -> float:
    """Return how many times as fast this checkout is."""
    return other.value / this.value if unit == "s" else this.value / other.value


if __name__ == "__main__":
    main()
