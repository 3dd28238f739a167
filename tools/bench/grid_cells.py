"""The ground of `tools.bench.compare_grid`: corpora with bad samples, and the verdict on a cell."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

from tools.bench.peers.runners.grid import Cell

__all__ = ["NUM_SAMPLES", "Cell", "Corpus", "Tally", "write_corpora"]

NUM_SAMPLES = 500
"""No multiple of the 24 samples of a global batch: the last step is a part of one."""


@dataclass(frozen=True)
class Corpus:
    """Tars with tiny pictures, and what is in them."""

    folder: str
    readable: frozenset[str]
    """Keys of the good samples."""
    bad: frozenset[str]
    """``SHARD[INDEX]`` of the bad ones."""


@dataclass
class Tally:
    """What was found of one system."""

    names_bad: bool = False
    """Whether this system must say which samples were bad."""
    num_cells: int = 0
    equal: int = 0
    complete: int = 0
    same: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first: dict[tuple[int, int], list[list[str]]] = field(default_factory=dict)
    """Corpus -> the global batches on one rank without workers."""
    failed: list[Cell] = field(default_factory=list)
    """Cells without equal steps, or not complete, or ended by an error."""

    def add(self, cell: Cell, corpus: Corpus, found: dict[str, Any]) -> None:
        """Judge one cell."""
        self.num_cells += 1
        if "error" in found:
            self.errors[found["error"].partition(":")[0]] += 1
            self.failed.append(cell)
            return
        ranks = [[keys for keys, _ in rank] for rank in found["ranks"]]
        shown = Counter(key for rank in ranks for keys in rank for key in keys)
        logged = [name for rank in found["ranks"] for _, names in rank for name in names]
        equal = len({len(rank) for rank in ranks}) == 1
        due = sorted(corpus.bad) if self.names_bad else []
        complete = shown == Counter(corpus.readable) and sorted(logged) == due
        self.equal += equal
        self.complete += complete
        if not (equal and complete):
            self.failed.append(cell)
        batches = [list(chain(*parts)) for parts in zip(*ranks, strict=False)] if equal else []
        at = cell.num_shards, cell.bad_percent
        self.same += bool(batches) and self.first.setdefault(at, batches) == batches


def write_corpora(folder: Path, cells: Iterable[Cell]) -> dict[tuple[int, int], Corpus]:
    """Write the corpus of each (number of shards, percent of bad samples) among the cells."""
    corpora = {}
    for num_shards, bad_percent in sorted({(cell.num_shards, cell.bad_percent) for cell in cells}):
        path = folder / f"{num_shards}-{bad_percent}"
        path.mkdir()
        corpora[num_shards, bad_percent] = write_corpus(path, num_shards, bad_percent)
    return corpora


def write_corpus(folder: Path, num_shards: int, bad_percent: int) -> Corpus:
    """Write shards of equal sizes (as near as can be), a share of their pictures cut short."""
    from PIL import Image

    from mmstream.dataset.index_tars import index_tars
    from mmstream.tar.writer import TarWriter

    picture = BytesIO()
    Image.new("RGB", (16, 16), "teal").save(picture, "JPEG")
    good, cut = picture.getvalue(), picture.getvalue()[:300]
    draw = random.Random(num_shards)
    cuts = [NUM_SAMPLES * shard // num_shards for shard in range(1, num_shards)]
    bad = set(draw.sample(range(NUM_SAMPLES), NUM_SAMPLES * bad_percent // 100))
    names = set()
    for shard, (start, stop) in enumerate(zip([0, *cuts], [*cuts, NUM_SAMPLES], strict=True)):
        name = f"shard-{shard:06d}.tar"
        names |= {f"{name}[{number - start}]" for number in bad if start <= number < stop}
        with (folder / name).open("wb") as file:
            writer = TarWriter(file)
            for number in range(start, stop):
                writer.add(f"{number:06d}", {"jpg": cut if number in bad else good})
            writer.close()
    index_tars(folder, progress=False)
    readable = {f"{number:06d}" for number in range(NUM_SAMPLES) if number not in bad}
    return Corpus(str(folder), frozenset(readable), frozenset(names))
