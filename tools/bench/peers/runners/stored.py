"""Shared by the runners of `tools.bench.storage`: samples from an S3 server, batch after batch.

A runner is a program that runs in its loader's environment. It imports its modules and calls
`serve`. So the start of the interpreter and all imports come before the measured time.

    prepare CORPUS FOLDER NUM_NAMES     write what this loader needs into FOLDER, to be uploaded
    run SETTINGS                        take batches for some seconds, and print when each came

`prepare` prints which objects are another object under a further name, so that few bytes stand for
a large corpus: {name of a shard: name of the file in FOLDER or of the tar in CORPUS}.

The clock begins when all workers are up: each writes down the moment, by a `Stamp`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.process_tree import cpu_seconds

LATE = 0.4
"""The late part of a run begins after this share of its time."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run."""

    bucket: str
    prefix: str
    """Of the objects of this loader."""
    num_names: int
    seconds: float
    """From the moment when all workers are up."""
    scratch: str
    """An empty folder."""
    batch_size: int = 64
    num_workers: int = 2
    local: str = ""
    """A local folder to read instead of the bucket."""
    decoded: bool = False
    """mmstream only: images are decoded and scaled to 224."""
    paced: float = 0.0
    """Samples a second that the consumer takes at most. 0: as fast as they come."""
    num_connections: int = 64
    """Raw clients only."""
    range_bytes: int = 4 << 20
    """Raw clients only."""
    max_batches: int = 0
    """The run ends with this batch. 0: with its time."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """mmstream only: further arguments of the pipeline."""

    @property
    def names(self) -> list[str]:
        """The tars of the corpus, relative to the prefix of the tars."""
        return [tar_name(number) for number in range(self.num_names)]


def tar_name(number: int) -> str:
    """Return the name of a shard."""
    return f"shard-{number:06d}.tar"


class Stamp:
    """Writes down when a process begins its work: where it is unpickled, or called in a worker.

    As a transform it returns its sample.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        self.stamp()

    def __call__(self, argument: Any) -> Any:
        """Take the number of a worker, or a sample."""
        if isinstance(argument, int):
            self.stamp()
        return argument

    def stamp(self) -> None:
        """Write a file with the time."""
        Path(self._folder, f"up-{os.getpid()}").write_text(str(time.monotonic()))


def as_list(samples: list[Any]) -> list[Any]:
    """Collate nothing: a batch is the list of its samples."""
    return samples


def serve(
    prepare: Callable[[str, str, int], dict[str, str]],
    make: Callable[[Settings], Iterable[Any]],
    num_samples: Callable[[Any], int] = len,
    more: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Run the command of the command line and print the figures as one line of JSON.

    Args:
        prepare: (corpus, folder, number of names) -> further names of files and tars.
        make: settings -> a new iterable of batches, without an end if possible.
        num_samples: batch -> samples in it.
        more: further figures, asked for at the end of a run.
    """
    command, *arguments = sys.argv[1:]
    figures: dict[str, Any]
    if command == "prepare":
        corpus, folder, num_names = arguments
        figures = {"names": prepare(corpus, folder, int(num_names))}
    else:
        words = json.loads(arguments[0])
        words["arguments"] = tuple((name, value) for name, value in words.get("arguments", ()))
        settings = Settings(**words)
        figures = _run(make(settings), settings, num_samples)
        figures.update(more())
    print(json.dumps(figures), flush=True)
    sys.stdout.flush()
    os._exit(0)  # do not wait for workers that still read ahead


def _run(
    batches: Iterable[Any], settings: Settings, num_samples: Callable[[Any], int]
) -> dict[str, Any]:
    """Take batches for the time of the settings; return when each came and what it cost."""
    started = time.monotonic()
    stream = iter(batches)
    arrivals: list[float] = []
    waits: list[float] = []
    counts: list[int] = []
    cpu: list[tuple[float, float, int]] = []
    next_cpu = 0.0
    up = None
    taken = 0
    while True:
        asked = time.monotonic()
        batch = next(stream, None)
        now = time.monotonic()
        if up is None:
            up = max(_stamps(settings), default=started)
        if batch is None:
            break
        count = num_samples(batch)
        del batch
        taken += count
        arrivals.append(now - up)
        waits.append(now - asked)
        counts.append(count)
        if now > next_cpu:
            cpu.append((now - up, cpu_seconds(os.getpid()), taken))
            next_cpu = now + 0.25
        if now - up > settings.seconds or len(arrivals) == settings.max_batches:
            break
        if settings.paced:
            time.sleep(max(0.0, up + arrivals[0] + taken / settings.paced - time.monotonic()))
    return {
        "start_s": up - started,
        "arrivals": arrivals,
        "waits": waits,
        "counts": counts,
        "cpu": [*cpu, (arrivals[-1], cpu_seconds(os.getpid()), taken)] if arrivals else [],
    }


def _stamps(settings: Settings) -> Sequence[float]:
    paths = Path(settings.scratch).glob("up-*")
    return sorted(float(path.read_text()) for path in paths)[: settings.num_workers]
