"""Kill conversions at random moments, and prove that the same command gives the same bytes.

    python -m tools.prove.convert_kills --kills 100
    python -m tools.prove.convert_kills --kills 20 --s3
    python -m tools.prove.convert_kills --kills 10 --ray --longest-s 20    # Ray starts slowly
    python -m tools.prove.convert_kills --kills 20 --bake

Each round converts the same rows into a new destination. It kills the whole process group with
SIGKILL at a random moment and starts the same command again, up to three times, until it is left to
end. A round runs one of these, drawn at random:

- a conversion with one or two worker processes, or with ``--ray`` on a Ray of this machine;
- three ranges of shards, one of which is killed, and then ``mmstream finalize``, which is killed;
- a retry of rejected rows, whose images have come since;
- with ``--bake`` only that: a bake of the converted dataset, with one or two worker processes.

All files of the destination, hidden ones too, must have the bytes of an undisturbed run. The exit
code is 1 if a round fails. A round takes about ten seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

import mmstream as mm
from mmstream.storage import open_store
from tests.helpers.corpora import jpeg
from tools import s3_server

NUM_ROWS = 400
ROWS_PER_SHARD = 20
NUM_SHARDS = NUM_ROWS // ROWS_PER_SHARD
LATE = range(7, NUM_ROWS, 40)
"""Rows from 0 whose images come between the conversion and its retry."""
MAX_KILLS = 3
MAX_SECONDS = 240


class Corpus:
    """Rows with small images, some of which are late.

    Args:
        folder: Where the files are written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = folder / "rows.jsonl"
        for number in range(16):
            (folder / f"{number}.jpg").write_bytes(jpeg(number, (120, 90)))
        lines = [
            {
                "id": number,
                "image": f"late-{number}.jpg" if number in LATE else f"{number % 16}.jpg",
                "text": "" if number == 333 else f"row {number}",
            }
            for number in range(NUM_ROWS)
        ]
        self.rows.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def set_late(self, present: bool) -> None:
        """Put the late images there, or take them away."""
        for number in LATE:
            path = self.folder / f"late-{number}.jpg"
            if present:
                path.write_bytes(jpeg(number, (120, 90)))
            else:
                path.unlink(missing_ok=True)


def pixels(dataset: mm.Dataset) -> mm.Pipeline:
    """Return the pipeline that is baked."""
    decode = mm.Decode(image=mm.ImageDecoder(size=64))
    return mm.Pipeline(dataset, global_batch_size=8, decode=decode)


def bake(corpus: Corpus, dest: str, *options: str) -> list[str]:
    """Return the command that bakes the converted corpus."""
    command = ["bake", str(corpus.folder / "alone"), dest]
    return [*command, "--pipeline", "tools.prove.convert_kills:pixels", *options]


def convert(corpus: Corpus, dest: str, *options: str) -> list[str]:
    """Return the command of a conversion."""
    command = ["convert", str(corpus.rows), dest, "--samples-per-shard", str(ROWS_PER_SHARD)]
    # Images are made smaller, so idle CPUs help the last shard.
    return [*command, "--max-rejects", "100%", "--max-image-side", "64", *options]


def run(command: Sequence[str], kill_after_s: float | None = None) -> tuple[bool, str]:
    """Run a command of mmstream, and perhaps kill it. Return whether it ended well, and why not."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from mmstream.cli import main; main()", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with suppress(subprocess.TimeoutExpired):
        _, errors = process.communicate(timeout=kill_after_s or MAX_SECONDS)
        return process.returncode == 0, errors.strip()
    os.killpg(process.pid, signal.SIGKILL)
    _, errors = process.communicate()
    return False, "killed" if kill_after_s else f"ran longer than {MAX_SECONDS} s: {errors}"


def insist(command: Sequence[str], draw: random.Random, longest_s: float) -> tuple[int, str]:
    """Kill a command up to three times, then let it end. Return the kills, and what was wrong."""
    num_kills = 0
    for _ in range(MAX_KILLS):
        is_done, message = run(command, draw.uniform(0.3, longest_s))
        if is_done:
            return num_kills, ""
        if message != "killed":
            return num_kills, message
        num_kills += 1
        time.sleep(1.5)  # workers end soon after their main process
    is_done, message = run(command)
    return num_kills, "" if is_done else message


def files_of(dest: str) -> dict[str, bytes]:
    """Return {name: bytes} of a destination. In a folder, hidden files too."""
    store = open_store(dest)
    folder = store.local_path("")
    if folder is not None:
        paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    reports = [f"reports/{name}" for name in open_store(f"{dest}/reports").list()]
    return {name: store.read(name) for name in [*store.list(), *reports]}


def fault_of_round(
    kind: str, corpus: Corpus, dest: str, draw: random.Random, longest_s: float
) -> tuple[int, str]:
    """Run one round. Return the number of kills, and what was wrong, or nothing."""
    engine = ["--engine", "ray"] if kind == "ray" else ["--num-workers"]
    if kind == "bake":  # torch takes a while to import
        return insist(bake(corpus, dest, *engine, draw.choice("12")), draw, 3 * longest_s)
    corpus.set_late(False)
    if kind in ("processes", "ray"):
        options = engine if kind == "ray" else [*engine, draw.choice("12")]
        return insist(convert(corpus, dest, *options), draw, longest_s)
    if kind == "ranges":
        num_kills = 0
        ends = sorted(draw.sample(range(1, NUM_SHARDS), 2))
        for start, stop in zip([0, *ends], [*ends, NUM_SHARDS + 5], strict=True):
            command = convert(corpus, dest, "--shard-range", f"{start}:{stop}", *engine, "1")
            kills, fault = insist(command, draw, longest_s)
            num_kills += kills
            if fault:
                return num_kills, fault
        kills, fault = insist(["finalize", dest, "--max-rejects", "100%"], draw, longest_s / 2)
        return num_kills + kills, fault
    is_done, fault = run(convert(corpus, dest, *engine, "1"))
    if not is_done:
        return 0, fault
    corpus.set_late(True)
    return insist(convert(corpus, dest, "--retry-rejects", *engine, "1"), draw, longest_s)


def prove(arguments: argparse.Namespace, folder: Path, root: str) -> int:
    """Run rounds until there were enough kills. Return the number of rounds that failed."""
    draw = random.Random(arguments.seed)
    corpus = Corpus(folder)
    expected: dict[str, dict[str, bytes]] = {}
    corpus.set_late(False)
    assert run(convert(corpus, str(folder / "alone")))[0]
    for kind in ("processes", "ranges", "ray"):
        expected[kind] = files_of(str(folder / "alone"))
    corpus.set_late(True)
    assert run(convert(corpus, str(folder / "alone"), "--retry-rejects"))[0]
    expected["retry"] = files_of(str(folder / "alone"))
    kinds = ["ray"] if arguments.ray else ["processes", "ranges", "retry"]
    if arguments.bake:
        kinds = ["bake"]
        assert run(bake(corpus, str(folder / "baked")))[0]
        expected["bake"] = files_of(str(folder / "baked"))
    counts: Counter[str] = Counter()
    num_faults = number = 0
    # Ctrl-C ends the proof early, and says how far it came.
    with suppress(KeyboardInterrupt), tqdm(total=arguments.kills, unit="kill", disable=None) as bar:
        while counts.total() < arguments.kills:
            kind, dest = kinds[number % len(kinds)], f"{root}/round-{number}"
            kills, fault = fault_of_round(kind, corpus, dest, draw, arguments.longest_s)
            files = files_of(dest)
            differing = {
                name for name in files | expected[kind]
                if files.get(name) != expected[kind].get(name)
            }  # fmt: skip
            if differing and not fault:
                fault = f"other bytes: {', '.join(sorted(differing))}"
            if fault:
                num_faults += 1
                tqdm.write(f"round {number}, {kind}: {fault}")
            elif not arguments.s3:
                shutil.rmtree(dest)
            counts[kind] += kills
            number += 1
            bar.update(kills)
    print(f"{counts.total()} kills ({dict(counts)}) in {number} rounds, {num_faults} failed")
    return num_faults


def main() -> int:
    """Run the rounds, print what failed, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest-s", type=float, default=2.5, help="latest moment of a kill")
    parser.add_argument("--s3", action="store_true", help="write to a real S3 server")
    parser.add_argument("--ray", action="store_true", help="convert with Ray only")
    parser.add_argument("--bake", action="store_true", help="bake the corpus only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="convert-kills-") as folder:
        if not arguments.s3:
            return bool(prove(arguments, Path(folder), folder))
        with s3_server.s3_server() as server:
            os.environ.update(server.env)
            return bool(prove(arguments, Path(folder), f"s3://{server.bucket}/kills"))


if __name__ == "__main__":
    sys.exit(main())
