"""A store that notes what is asked of it, and that can fail or answer wrongly on purpose."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import mmstream as mm
from mmstream.storage.store import Access, Store

Range: TypeAlias = tuple[str, int, int]
Answer: TypeAlias = bytes | OSError
Change: TypeAlias = Callable[[str, tuple[int, int] | None, Answer], Answer]
"""Takes an object's name, the range (None: the whole object) and the answer; returns another."""


class WatchedStore:
    """Asks a real store and notes each request. What is not here is asked of the real store.

    Args:
        store: the real one.
        change: alters answers; an OSError is raised, or stands in the place of a range.
        maps_files: False: as if no object were a file of this machine.
        access: settings of `Access` that differ from the real store's.
    """

    def __init__(
        self,
        store: Store,
        change: Change | None = None,
        *,
        maps_files: bool = True,
        **access: Any,
    ) -> None:
        self.store = store
        self.access: Access = replace(store.access, **access)
        self.whole_reads: list[str] = []
        self.range_reads: list[list[Range]] = []
        """Of each request, its ranges."""
        self.size_reads: list[str] = []
        self.num_lists = 0
        self.change = change
        self._maps_files = maps_files

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by pickle, of a store that is still empty
            raise AttributeError(name)
        return getattr(self.__dict__["store"], name)

    @property
    def ranges(self) -> list[Range]:
        """The ranges of all requests."""
        return [one for request in self.range_reads for one in request]

    @property
    def num_range_bytes(self) -> int:
        """Bytes of all ranges."""
        return sum(stop - start for _, start, stop in self.ranges)

    def local_path(self, name: str) -> str | None:
        return self.store.local_path(name) if self._maps_files else None

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        self.whole_reads.append(name)
        return self._raised(self._changed(name, None, self.store.read(name, max_bytes)))

    def list(self) -> dict[str, Any]:
        self.num_lists += 1
        return self.store.list()

    def size(self, name: str) -> int:
        self.size_reads.append(name)
        return self.store.size(name)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        return self._raised(self.read_ranges([(name, start, stop)])[0])

    def read_ranges(self, ranges: Sequence[Range], known: Any = None) -> list[Answer]:
        self.range_reads.append(list(ranges))
        answers = self.store.read_ranges(ranges, known)
        return [
            self._changed(name, (start, stop), answer)
            for (name, start, stop), answer in zip(ranges, answers, strict=True)
        ]

    def _changed(self, name: str, bounds: tuple[int, int] | None, answer: Answer) -> Answer:
        return answer if self.change is None else self.change(name, bounds, answer)

    @staticmethod
    def _raised(answer: Answer) -> bytes:
        if isinstance(answer, OSError):
            raise answer
        return answer


def watched(dataset: mm.Dataset, change: Change | None = None, **options: Any) -> mm.Dataset:
    """Return the dataset on a `WatchedStore`. It has read no index yet."""
    store = WatchedStore(dataset.store, change, **options)
    checksums = dataset.has_checksums
    return mm.Dataset(dataset.manifest, store, store, bad=dataset.bad, checksums=checksums)


def watched_pipeline(
    pipeline: mm.Pipeline, change: Change | None = None, **options: Any
) -> tuple[mm.Pipeline, WatchedStore]:
    """Return the pipeline on a `WatchedStore`, and the store."""
    dataset = watched(pipeline.dataset, change, **options)
    return replace(pipeline, dataset=dataset), dataset.store


class BitFlips:
    """Flips one bit in a part of all answers of a store. Works in worker processes too.

    The chance and the bit depend on the bytes that are read and on how often this process has read
    them before. The order of threads plays no part.

    Args:
        log: a file that gets a line for each flip, from all processes.
        rate: the part of answers that is changed, 0 to 1.
    """

    def __init__(self, log: Path, rate: float = 0.2) -> None:
        self.log, self.rate = log, rate
        self.num_reads = Counter[tuple[Any, ...]]()
        log.touch()

    def __call__(self, name: str, bounds: tuple[int, int] | None, answer: Answer) -> Answer:
        key = (name, bounds)
        self.num_reads[key] += 1
        chance = random.Random(f"{key} {self.num_reads[key]}")
        if chance.random() >= self.rate or isinstance(answer, OSError) or not answer:
            return answer
        bit = chance.randrange(8 * len(answer))
        with self.log.open("a") as file:
            file.write(json.dumps([name, bounds, bit]) + "\n")
        flipped = bytearray(answer)
        flipped[bit // 8] ^= 1 << bit % 8
        return bytes(flipped)

    @property
    def flips(self) -> list[tuple[str, tuple[int, int], int]]:
        """Of each flip: the object, the range that was read, and the bit of the answer."""
        return [tuple(json.loads(line)) for line in self.log.read_text().splitlines()]


class FarStore(WatchedStore):
    """A folder that looks like storage behind a network, so that a reader process reads it.

    Args:
        slow_name: of an object whose ranges come when `gate` is there.
        gate: a file.
    """

    def __init__(self, store: Store, slow_name: str = "", gate: str = "") -> None:
        super().__init__(store, maps_files=False, concurrent=True)
        self.slow_name, self.gate = slow_name, gate

    @property
    def url(self) -> str:
        return f"far://host{self.store.url}"

    def read_ranges(self, ranges: Sequence[Range], known: Any = None) -> list[Answer]:
        if any(name == self.slow_name for name, _, _ in ranges):
            while not Path(self.gate).exists():
                time.sleep(0.01)
        return super().read_ranges(ranges, known)


def far(dataset: mm.Dataset, **settings: Any) -> mm.Dataset:
    """Return the dataset on a `FarStore`."""
    store = FarStore(dataset.store, **settings)
    return mm.Dataset(dataset.manifest, store, store, bad=dataset.bad, stats=dataset.shards.known)
