"""Prove that a loader's processes hold no more after an hour than after a minute.

    python -m tools.prove.soak --minutes 60

It goes through all that a long run can do to a loader, again and again: whole epochs, jumps, loops
left early, loaders closed and opened again or dropped, workers that are killed or that a transform
fails in, bad samples, and no workers at all. After each round it looks at the open files, threads,
processes, shared memory and memory of the whole tree of processes. It ends with exit code 1 and
names what has grown.
"""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import current_process
from pathlib import Path

import click
import numpy as np
import psutil
from PIL import Image

import mmstream as mm
from mmstream.processes.machine import pss_bytes
from mmstream.state import state_at
from mmstream.types import Sample
from tests.helpers.soak import SETTLE_S, growth, num_entries, num_shared_maps

MEMORY_SLACK = 40_000_000
"""Bytes by which the memory of all processes may grow: allocators keep what they once had."""

WARM_UP_ROUNDS = 1
"""Rounds before the first look: they start what stays, such as the fork server."""

MIN_LOOKS = 4

SEMAPHORES = f"soak-{os.getpid()}"
"""In the names of this process' semaphores, so that those of other programs are not counted."""


@dataclass(frozen=True)
class Look:
    """What this process and all its descendants hold at one moment."""

    open_files: int
    threads: int
    child_processes: int
    shared_maps: int
    """Maps of files in /dev/shm and of memory files."""
    shm_entries: int
    """Files in /dev/shm that this process has made."""
    pss_bytes: int
    """Memory; pages that several processes share count once."""


def soak(minutes: float, *, seed: int = 0, report: Callable[[str], None] = print) -> list[str]:
    """Stress loaders for so long. Return what has grown, a line each; [] is good.

    Args:
        minutes: how long; at least five rounds are made.
        seed: of the order of events.
        report: is called with a line after each round.
    """
    # Python offers no public way to name semaphores.
    current_process()._config["semprefix"] = f"/mp-{SEMAPHORES}"  # type: ignore[attr-defined]
    rng = random.Random(seed)
    deadline = time.monotonic() + 60 * minutes
    looks: list[Look] = []
    number = 0
    with tempfile.TemporaryDirectory() as folder:
        corpus = _write_corpus(Path(folder))
        while time.monotonic() < deadline or len(looks) < MIN_LOOKS:
            for event in rng.sample(EVENTS, len(EVENTS)):
                event(corpus, rng)
            number += 1
            if number > WARM_UP_ROUNDS:
                looks.append(_look())
                report(f"round {number}: {json.dumps(asdict(looks[-1]))}")
        half = len(looks) // 2
        settled = time.monotonic() + SETTLE_S
        while (
            grown := growth(looks[:half], looks[half:], pss_bytes=MEMORY_SLACK)
        ) and time.monotonic() < settled:
            time.sleep(0.2)
            looks.append(_look())
    return grown


# -- what happens to a loader -------------------------------------------------------------------


class FailsOnRequest:
    """A transform that does something to its process at one sample of step 2."""

    def __init__(self, action: str) -> None:
        self.action = action

    def __call__(self, sample: Sample) -> Sample:
        """Fail in step 2, in the way that `action` says."""
        if sample["__lineage__"].step == 2:
            if self.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise NameError("a transform with a bug")
        return sample


def _pipeline(corpus: str, *transforms: FailsOnRequest) -> mm.Pipeline:
    return mm.Pipeline(
        mm.open_dataset(corpus),
        global_batch_size=8,
        decode=mm.Decode(image=mm.ImageDecoder(size=96)),
        transforms=transforms,
        bad_samples=mm.BadSamplePolicy(quarantine=None, max_fraction=1.0, max_consecutive=0),
    )


def _epochs_and_jumps(corpus: str, rng: random.Random) -> None:
    """Several epochs of one loader, with jumps between them and loops that are left early."""
    with closing(mm.Loader(_pipeline(corpus), num_workers=2)) as loader:
        for _ in range(6):
            for _batch in islice(loader, rng.randrange(1, len(loader))):
                pass
            state = loader.state_dict()
            loader.load_state_dict(state_at(state, state["epoch"], rng.randrange(len(loader))))
            for _batch in mm.to_device(loader, "cpu"):
                pass


def _dropped(corpus: str, rng: random.Random) -> None:
    """A loader that nobody closes."""
    loader = mm.Loader(_pipeline(corpus), num_workers=1, num_threads=2)
    for _batch in islice(loader, rng.randrange(1, 4)):
        pass


def _reopened(corpus: str, rng: random.Random) -> None:
    """A loader that is closed and used again."""
    loader = mm.Loader(_pipeline(corpus), num_workers=1)
    for _ in range(2):
        for _batch in islice(loader, rng.randrange(1, 4)):
            pass
        loader.close()


def _dying_worker(corpus: str, _: random.Random) -> None:
    with closing(mm.Loader(_pipeline(corpus, FailsOnRequest("kill")), num_workers=2)) as loader:
        _expect(mm.MMStreamError, loader)


def _failing_transform(corpus: str, _: random.Random) -> None:
    with closing(mm.Loader(_pipeline(corpus, FailsOnRequest("raise")), num_workers=1)) as loader:
        _expect(NameError, loader)


def _stopped_worker(corpus: str, _: random.Random) -> None:
    """A worker that hangs, until the loader ends it."""
    loader = mm.Loader(_pipeline(corpus), num_workers=1, stall_timeout_s=1)
    with closing(loader):
        batches = iter(loader)
        with suppress(mm.MMStreamError):  # a busy machine may not start a worker in a second
            next(batches)
            for pid in loader._makers.workers.pids if loader._makers.workers else ():
                os.kill(pid, signal.SIGSTOP)
            for _batch in batches:
                pass


def _no_workers(corpus: str, rng: random.Random) -> None:
    loader = mm.Loader(_pipeline(corpus), num_threads=2)
    for _batch in loader:
        pass
    for _batch in islice(loader, rng.randrange(1, 4)):
        pass


EVENTS = [
    _epochs_and_jumps,
    _dropped,
    _reopened,
    _dying_worker,
    _failing_transform,
    _stopped_worker,
    _no_workers,
]


def _expect(kind: type[Exception], loader: mm.Loader) -> None:
    try:
        for _batch in loader:
            pass
    except kind:
        return
    raise AssertionError(f"no {kind.__name__} came")


# -- what it works on and what it looks at ------------------------------------------------------


def _write_corpus(folder: Path) -> str:
    """Write 64 JPEGs, two of them cut off. Return the dataset."""
    rng = np.random.default_rng(0)
    lines = []
    for number in range(64):
        buffer = io.BytesIO()
        pixels = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((320, 240)).save(buffer, "JPEG")
        Path(folder, f"{number}.jpg").write_bytes(buffer.getvalue())
        lines.append(json.dumps({"id": str(number), "image": f"{number}.jpg", "text": "a photo"}))
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(lines))
    mm.convert(rows, folder / "shards", samples_per_shard=16, progress=False)
    shard = bytearray((folder / "shards" / "shard-000000.tar").read_bytes())
    shard[2000:2400] = bytes(400)  # inside the first image: bad on every read
    (folder / "shards" / "shard-000000.tar").write_bytes(shard)
    return str(folder / "shards")


def _look() -> Look:
    gc.collect()
    children = psutil.Process().children(recursive=True)
    pids = [os.getpid(), *(child.pid for child in children)]
    return Look(
        open_files=sum(num_entries(pid, "fd") for pid in pids),
        threads=sum(num_entries(pid, "task") for pid in pids),
        child_processes=len(pids) - 1,
        shared_maps=sum(num_shared_maps(pid) for pid in pids),
        shm_entries=_num_shm_entries(),
        pss_bytes=pss_bytes(pids),
    )


def _num_shm_entries() -> int:
    """Return the number of semaphores, and of files that torch makes (``torch_PID_...``)."""
    names = [path.name for path in Path("/dev/shm").glob("*")]
    return sum(SEMAPHORES in name or f"torch_{os.getpid()}_" in name for name in names)


@click.command()
@click.option("--minutes", default=60.0, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(minutes: float, seed: int) -> None:
    """Stress loaders for so long; exit code 1 where something has grown."""
    logging.basicConfig(level=logging.ERROR)  # hundreds of warnings are meant here
    grown = soak(minutes, seed=seed, report=click.echo)
    click.echo("; ".join(grown) or "flat: nothing has grown")
    sys.exit(1 if grown else 0)


if __name__ == "__main__":
    main()
