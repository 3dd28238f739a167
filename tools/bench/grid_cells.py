"""The corpora of `tools.bench.compare_grid`, which have bad samples, and the verdict on a cell."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from tools.bench.peers.runners.grid import Cell

__all__ = ["NUM_SAMPLES", "Cell", "Corpus", "Tally", "write_corpora"]

NUM_SAMPLES = 500
"""Not a multiple of the 24 samples of a global batch, so the last step is partial."""


@dataclass(frozen=True)
class Corpus:
    """Tars with tiny images, and the names of their samples."""

    folder: str
    readable: frozenset[str]
    """Keys of the good samples."""
    bad: frozenset[str]
    """``SHARD[INDEX]`` of the bad samples."""


@dataclass
class Tally:
    """The results of one system."""

    logs_bad: bool = False
    """Whether this system must log which samples were bad."""
    num_cells: int = 0
    equal: int = 0
    complete: int = 0
    same: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    one_rank: dict[tuple[int, int], list[list[str]]] = field(default_factory=dict)
    """(num_shards, bad_percent) -> the global batches of the first cell: one rank, no workers."""
    failed: list[Cell] = field(default_factory=list)
    """Cells with unequal steps, incomplete data or an error."""

    def add(self, cell: Cell, corpus: Corpus, answer: dict[str, Any]) -> None:
        """Judge a runner's answer for one cell."""
        self.num_cells += 1
        if "error" in answer:
            self.errors[answer["error"].partition(":")[0]] += 1
            self.failed.append(cell)
            return
        ranks = [[keys for keys, _ in rank] for rank in answer["ranks"]]
        shown = Counter(key for rank in ranks for keys in rank for key in keys)
        logged = [name for rank in answer["ranks"] for _, names in rank for name in names]
        equal = len({len(rank) for rank in ranks}) == 1
        expected_log = sorted(corpus.bad) if self.logs_bad else []
        complete = shown == Counter(corpus.readable) and sorted(logged) == expected_log
        self.equal += equal
        self.complete += complete
        if not (equal and complete):
            self.failed.append(cell)
        batches = [list(chain(*rows)) for rows in zip(*ranks, strict=False)] if equal else []
        key = cell.num_shards, cell.bad_percent
        self.same += bool(batches) and self.one_rank.setdefault(key, batches) == batches


def write_corpora(folder: Path, cells: Iterable[Cell]) -> dict[tuple[int, int], Corpus]:
    """Write the corpus of each (num_shards, bad_percent) of the cells."""
    corpora = {}
    for num_shards, bad_percent in sorted({(cell.num_shards, cell.bad_percent) for cell in cells}):
        path = folder / f"{num_shards}-{bad_percent}"
        path.mkdir()
        corpora[num_shards, bad_percent] = write_corpus(path, num_shards, bad_percent)
    return corpora


def write_corpus(folder: Path, num_shards: int, bad_percent: int) -> Corpus:
    """Write shards of nearly equal sizes and truncate a share of their images."""
    from PIL import Image

    from mmstream.dataset.index_tars import index_tars
    from mmstream.tar.writer import TarWriter

    image = BytesIO()
    Image.new("RGB", (16, 16), "teal").save(image, "JPEG")
    good = image.getvalue()
    truncated = good[:300]
    draw = random.Random(num_shards)
    bounds = [NUM_SAMPLES * shard // num_shards for shard in range(num_shards + 1)]
    bad = set(draw.sample(range(NUM_SAMPLES), NUM_SAMPLES * bad_percent // 100))
    names = set()
    for shard, (start, stop) in enumerate(pairwise(bounds)):
        name = f"shard-{shard:06d}.tar"
        names |= {f"{name}[{number - start}]" for number in bad if start <= number < stop}
        with (folder / name).open("wb") as file:
            writer = TarWriter(file)
            for number in range(start, stop):
                writer.add(f"{number:06d}", {"jpg": truncated if number in bad else good})
            writer.close()
    index_tars(folder, progress=False)
    readable = {f"{number:06d}" for number in range(NUM_SAMPLES) if number not in bad}
    return Corpus(str(folder), frozenset(readable), frozenset(names))
