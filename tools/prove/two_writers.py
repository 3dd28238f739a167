"""Start several converters in one folder at nearly the same moment, and prove that no byte suffers.

    python -m tools.prove.two_writers --rounds 20

In each round, two or three processes convert the same rows into the same folder. They start up to
half a second apart; in every third round one of them is killed. Those that are refused must name
the one that writes. Afterwards the same command runs once more, and must leave the bytes of an
undisturbed conversion. The exit code is 1 if a round fails. A round takes a few seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from tests.helpers.corpora import jpeg

NUM_ROWS = 1500
ROWS_PER_SHARD = 100
MAX_SECONDS = 120
"""Longest time of a conversion; it takes about a second."""


def write_rows(folder: Path, num_rows: int, num_images: int, size: tuple[int, int]) -> Path:
    """Write rows with captions and small images of some width and height."""
    for number in range(num_images):
        (folder / f"{number}.jpg").write_bytes(jpeg(number, size))
    rows = folder / "rows.jsonl"
    lines = (
        json.dumps({"image": f"{number % num_images}.jpg", "caption": f"caption {number}"})
        for number in range(num_rows)
    )
    rows.write_text("\n".join(lines))
    return rows


def undisturbed(rows: Path, dest: Path) -> dict[str, str]:
    """Convert alone. Return {name: sha256} of all files."""
    process = _start(rows, dest)
    assert _end(process)[0] == 0
    return _hashes(dest)


def fault_of_round(rows: Path, dest: Path, expected: dict[str, str], draw: random.Random) -> str:
    """Run one round. Return what was wrong, or nothing."""
    processes: list[subprocess.Popen[str]] = []
    for _ in range(draw.choice((2, 2, 3))):
        processes.append(_start(rows, dest))
        time.sleep(draw.choice((0, 0, 0.1, 0.5)) * draw.random())
    if draw.random() < 1 / 3:
        time.sleep(draw.uniform(0.5, 2.0))
        draw.choice(processes).kill()
    for process in processes:
        code, message = _end(process)
        is_refused = "another convert (pid " in message and len(message.splitlines()) == 1
        if code not in (0, -9) and not is_refused:
            return f"a converter ended with {code}: {message}"
    code, message = _end(_start(rows, dest))
    if code:
        return f"the last conversion failed: {message}"
    hashes = _hashes(dest)
    differing = {name for name in hashes | expected if hashes.get(name) != expected.get(name)}
    return f"other bytes: {', '.join(sorted(differing))}" if differing else ""


def _start(rows: Path, dest: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-c",
        "from mmstream.cli import main; main()",
        "convert",
        str(rows),
        str(dest),
    ]
    options = ["--samples-per-shard", str(ROWS_PER_SHARD), "--num-workers", "0"]
    return subprocess.Popen(
        [*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def _end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=MAX_SECONDS)
    return process.returncode, errors.strip()


def _hashes(dest: Path) -> dict[str, str]:
    return {
        str(path.relative_to(dest)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(dest.rglob("*"))
        if path.is_file()
    }


def main() -> int:
    """Run the rounds, print what failed, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="where to write; a RAM disk gave the most collisions")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    num_faults = 0
    with tempfile.TemporaryDirectory(prefix="two-writers-", dir=arguments.folder) as name:
        folder = Path(name)
        rows = write_rows(folder, NUM_ROWS, 16, (120, 90))
        expected = undisturbed(rows, folder / "alone")
        for number in tqdm(range(arguments.rounds), disable=None):
            fault = fault_of_round(rows, folder / f"round-{number}", expected, draw)
            num_faults += bool(fault)
            if fault:
                tqdm.write(f"round {number}: {fault}")
    print(f"{arguments.rounds} rounds, {num_faults} failed")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
