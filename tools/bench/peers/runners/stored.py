"""Shared by the runners of `tools.bench.storage`: samples from an S3 server, batch after batch.

A runner is a program that runs in its loader's environment. It imports its modules and calls
`serve`. So the start of the interpreter and all imports come before the measured time.

    prepare CORPUS FOLDER NUM_NAMES     write what this loader needs into FOLDER, to be uploaded
    run SETTINGS                        take batches for some seconds, and print when each came

`prepare` prints which objects are another object under a further name, so that few bytes stand for
a large corpus: {name of a shard: name of the file in FOLDER or of the tar in CORPUS}.

The clock begins when all workers are up: each writes down the moment, by a `Stamp`. A run ends in
its time also while a batch is awaited.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
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
    start_timeout_s: float = 60.0
    """The run ends if no worker is up after this time."""
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
    """Of the runner alone; for mmstream, of the pipeline."""

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

    def stamp(self, name: str = "") -> None:
        """Write a file with the time, one for each name; by default for each process."""
        Path(self._folder, f"up-{name or os.getpid()}").write_text(str(time.monotonic()))


def as_list(samples: list[Any]) -> list[Any]:
    """Collate nothing: a batch is the list of its samples."""
    return samples


def close_connections() -> None:
    """Close the idle connections of botocore in this process, before workers are forked.

    Workers would share them, and mix their answers: tars and shards came with bytes of others.
    With TLS the records would not fit, and the requests would be sent again.
    """
    import urllib3

    for value in gc.get_objects():
        if isinstance(value, urllib3.PoolManager):
            value.clear()


def dataloader_batches(
    loader_class: Callable[..., Iterable[Any]],
    dataset: Any,
    settings: Settings,
    collate: Callable[[list[Any]], Any] = as_list,
) -> Iterator[Any]:
    """Yield lists of samples from torch's DataLoader, or one like it, epoch after epoch."""
    loader = loader_class(
        dataset,
        batch_size=settings.batch_size,
        num_workers=settings.num_workers,
        collate_fn=collate,
        worker_init_fn=Stamp(settings.scratch),
    )
    while True:
        yield from loader


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
    if command == "prepare":
        corpus, folder, num_names = arguments
        _print_and_exit({"names": prepare(corpus, folder, int(num_names))})
    words = json.loads(arguments[0])
    words["arguments"] = tuple((name, value) for name, value in words.get("arguments", ()))
    run = _Run(Settings(**words))
    threading.Thread(target=run.end_in_time, args=(more,), daemon=True).start()
    run.take(make, num_samples)
    run.end(more)


class _Run:
    """The batches of a run: when each came, and what it cost."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.started = time.monotonic()
        self.asked: float | None = self.started
        self.lock = threading.Lock()
        self.moments: list[float] = []
        self.waits: list[float] = []
        self.counts: list[int] = []
        self.cpu: list[tuple[float, float, int]] = []

    @property
    def up(self) -> float | None:
        """The moment when all workers were up."""
        if self.settings.num_workers == 0:
            return self.started
        paths = Path(self.settings.scratch).glob("up-*")
        stamps = sorted(float(text) for path in paths if (text := path.read_text()))
        stamps = stamps[: self.settings.num_workers]
        return stamps[-1] if len(stamps) == self.settings.num_workers else None

    def take(
        self, make: Callable[[Settings], Iterable[Any]], num_samples: Callable[[Any], int]
    ) -> None:
        """Take batches until the time of the settings is over."""
        settings = self.settings
        stream = iter(make(settings))
        up, taken, next_cpu = None, 0, 0.0
        while True:
            self.asked = asked = time.monotonic()
            batch = next(stream, None)
            now = time.monotonic()
            if batch is None:
                return
            up = up or self.up or self.started
            count = num_samples(batch)
            del batch
            taken += count
            with self.lock:
                self.moments.append(now)
                self.waits.append(now - asked)
                self.counts.append(count)
                self.asked = None
            if now > next_cpu:
                self.cpu.append((now, cpu_seconds(os.getpid()), taken))
                next_cpu = now + 0.25
            if now - up > settings.seconds or len(self.moments) == settings.max_batches:
                return
            if settings.paced:
                due = self.moments[0] + taken / settings.paced
                time.sleep(max(0.0, due - time.monotonic()))

    def end_in_time(self, more: Callable[[], dict[str, Any]]) -> None:
        """End the process when its time is over, whatever it waits for."""
        settings = self.settings
        while True:
            time.sleep(0.1)
            if self.moments or self.up is not None:
                is_over = time.monotonic() > (self.up or self.started) + settings.seconds + 0.5
            else:
                is_over = time.monotonic() > self.started + settings.start_timeout_s
            if is_over:
                self.end(more)

    def end(self, more: Callable[[], dict[str, Any]]) -> None:
        """Print the figures and end the process, without waiting for workers that read ahead."""
        ended = time.monotonic()
        cpu_s = cpu_seconds(os.getpid())
        self.lock.acquire()
        up = self.up
        begin = self.started if up is None else up
        cpu = [*self.cpu, (ended, cpu_s, sum(self.counts))]
        _print_and_exit(
            {
                "began": begin,
                "start_s": None if up is None else up - self.started,
                "ended": ended - begin,
                "arrivals": [moment - begin for moment in self.moments],
                "waits": self.waits,
                "pending_s": None if self.asked is None else ended - self.asked,
                "counts": self.counts,
                "cpu": [(moment - begin, *numbers) for moment, *numbers in cpu],
                **more(),
            }
        )


def _print_and_exit(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)
    os._exit(0)
