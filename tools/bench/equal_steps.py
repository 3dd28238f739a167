"""Steps and samples of every rank on a grid of topologies: ``python -m tools.bench equal-steps``.

The grid has 1 to 64 shards, 1 to 8 ranks, 0 to 4 workers per rank, and 0 to 20 % bad images. In
each cell, mmstream, webdataset and Hugging Face datasets deliver one epoch of the whole corpus.
A cell is judged by the batches of the ranks:

    equal steps     all ranks got the same number of batches; otherwise DDP waits for ever
    complete        every readable sample came exactly once, and mmstream also logged every bad
                    sample; substitutes of bad samples do not count
    same batches    the global batches equal those of one rank without workers, row by row
    errors          an exception ended the epoch

Workers are real processes. Ranks run one after another, so a hang shows as unequal steps.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

SHARDS, RANKS, WORKERS, BAD = (1, 2, 5, 16, 64), (1, 2, 3, 8), (0, 1, 4), (0, 5, 20)
GLOBAL_BATCH, NUM_SAMPLES = 24, 500
"""The last step is partial."""
TIMEOUT_S = 60


class Cell(NamedTuple):
    """One point of the grid."""

    num_shards: int
    world_size: int
    num_workers: int
    bad_percent: int


class Delivered(NamedTuple):
    """A batch of one rank."""

    keys: list[str]
    """Without padding and without substitutes of bad samples."""
    logged: Sequence[str] = ()
    """Bad samples that the loader logged, ``SHARD[INDEX]``."""


@dataclass(frozen=True)
class Corpus:
    """Tars with tiny images, and the names of their samples."""

    folder: str
    readable: frozenset[str]
    """Keys of the good samples."""
    bad: frozenset[str]
    """``SHARD[INDEX]`` of the bad samples."""

    @property
    def tars(self) -> list[str]:
        """The paths of the tars."""
        return sorted(str(path) for path in Path(self.folder).glob("*.tar"))


@dataclass
class Tally:
    """The results of one loader."""

    logs_bad: bool = False
    """Whether this loader must log which samples were bad."""
    equal: int = 0
    complete: int = 0
    both: int = 0
    same: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    one_rank: dict[tuple[int, int], list[list[str]]] = field(default_factory=dict)
    """(num_shards, bad_percent) -> the global batches of the first cell: one rank, no workers."""

    def add(self, cell: Cell, corpus: Corpus, delivered: Sequence[Sequence[Delivered]]) -> None:
        """Judge the batches of all ranks in one cell."""
        ranks = [[batch.keys for batch in rank] for rank in delivered]
        shown = Counter(key for rank in ranks for keys in rank for key in keys)
        logged = [name for rank in delivered for batch in rank for name in batch.logged]
        equal = len({len(rank) for rank in ranks}) == 1
        expected_log = sorted(corpus.bad) if self.logs_bad else []
        complete = shown == Counter(corpus.readable) and sorted(logged) == expected_log
        self.equal += equal
        self.complete += complete
        self.both += equal and complete
        batches = [list(chain(*rows)) for rows in zip(*ranks, strict=False)] if equal else []
        key = cell.num_shards, cell.bad_percent
        self.same += bool(batches) and self.one_rank.setdefault(key, batches) == batches


def compare(only: Sequence[str] | None = None) -> None:
    """Run the grid, which takes half an hour, and print the table."""
    cells = [Cell(*values) for values in product(SHARDS, RANKS, WORKERS, BAD)]
    print(f"\n| {len(cells)} cells | equal steps | complete | both | same batches | errors |")
    print("|---|---:|---:|---:|---:|---|")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": folder}
        corpora = write_corpora(Path(folder), cells)
        for name in only or SYSTEMS:
            tally = judge(name, cells, corpora)
            counts = f"{tally.equal} | {tally.complete} | {tally.both} | {tally.same}"
            errors = ", ".join(f"{count} {kind}" for kind, count in tally.errors.most_common())
            print(f"| {name} | {counts} | {errors or 0} |", flush=True)


def judge(name: str, cells: Iterable[Cell], corpora: dict[tuple[int, int], Corpus]) -> Tally:
    """Run all cells of one loader, with its ranks one after another."""
    tally = Tally(logs_bad=name == "mmstream")
    signal.signal(signal.SIGALRM, _give_up)
    for cell in cells:
        corpus = corpora[cell.num_shards, cell.bad_percent]
        ranks = []
        try:
            for rank in range(cell.world_size):
                os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{cell.world_size}"}
                signal.alarm(TIMEOUT_S)
                ranks.append(list(SYSTEMS[name](corpus, cell)))
        except Exception as error:
            tally.errors[type(error).__name__] += 1
        else:
            tally.add(cell, corpus, ranks)
        finally:
            signal.alarm(0)
            del os.environ["RANK"], os.environ["WORLD_SIZE"]
    return tally


def _give_up(*_: object) -> None:
    raise TimeoutError(f"no batch in {TIMEOUT_S} s")


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
                writer.add(f"{number:06d}", {"jpg": good[:300] if number in bad else good})
            writer.close()
    index_tars(folder, progress=False)
    readable = {f"{number:06d}" for number in range(NUM_SAMPLES) if number not in bad}
    return Corpus(str(folder), frozenset(readable), frozenset(names))


def mmstream(corpus: Corpus, cell: Cell) -> Iterator[Delivered]:
    """Yield the batches of this rank in one epoch of mmstream."""
    import mmstream as mm

    policy = mm.BadSamplePolicy(max_fraction=1.0, max_consecutive=0, quarantine=None)
    pipeline = mm.Pipeline(
        mm.open_dataset(corpus.folder),
        global_batch_size=GLOBAL_BATCH,
        decode=mm.Decode(image=mm.ImageDecoder(size=8)),
        drop_last=False,
        bad_samples=policy,
    )
    # fork, as in the other loaders, because a grid starts thousands of workers.
    settings: dict[str, Any] = {"multiprocessing_context": "fork", "rows_per_rank": "balanced"}
    with closing(mm.Loader(pipeline, num_workers=cell.num_workers, **settings)) as loader:
        for batch in loader:
            lineage = batch["__lineage__"]
            replaced = {record.row - lineage.start for record in lineage.bad}
            rows = enumerate(zip(batch["__key__"], batch["__valid__"].tolist(), strict=True))
            yield Delivered(
                [key for row, (key, valid) in rows if valid and row not in replaced],
                [f"{record.shard}[{record.index}]" for record in lineage.bad],
            )


def webdataset(corpus: Corpus, cell: Cell, *, check: bool = True) -> Iterator[Delivered]:
    """The same of webdataset: shards split by node and worker, bad samples dropped.

    Without the check, workers that have no shard raise no error.
    """
    import webdataset as wds

    handler = wds.ignore_and_continue  # warn_and_continue sleeps half a second for each of them
    dataset = wds.WebDataset(
        corpus.tars,
        shardshuffle=100,
        nodesplitter=wds.split_by_node,
        workersplitter=wds.split_by_worker,
        detshuffle=True,
        seed=0,
        empty_check=check,
        handler=handler,
    )
    dataset = dataset.compose(wds.detshuffle(100, seed=0)).decode("pil", handler=handler)
    dataset = dataset.map(lambda sample: sample["__key__"], handler=handler)
    dataset = dataset.batched(GLOBAL_BATCH // cell.world_size, collation_fn=list)
    for keys in wds.WebLoader(dataset, batch_size=None, num_workers=cell.num_workers):
        yield Delivered(list(keys))


def webdataset_unchecked(corpus: Corpus, cell: Cell) -> Iterator[Delivered]:
    """The same with ``empty_check=False``."""
    return webdataset(corpus, cell, check=False)


def datasets(corpus: Corpus, cell: Cell, *, is_filtered: bool = False) -> Iterator[Delivered]:
    """The same of Hugging Face datasets: streaming, with split_dataset_by_node.

    Where it is filtered, a function decodes the images and drops bad samples, as users write it.
    """
    from datasets import Image, load_dataset
    from datasets.distributed import split_dataset_by_node
    from torch.utils.data import DataLoader

    files = {"train": corpus.tars}
    dataset = load_dataset("webdataset", data_files=files, split="train", streaming=True)
    if is_filtered:
        dataset = dataset.cast_column("jpg", Image(decode=False)).filter(is_readable)
    dataset = dataset.shuffle(seed=0, buffer_size=100)
    rank, size = int(os.environ["RANK"]), cell.world_size
    dataset = split_dataset_by_node(dataset, rank=rank, world_size=size)
    loader = DataLoader(
        dataset, GLOBAL_BATCH // size, num_workers=cell.num_workers, collate_fn=keys_of
    )
    for keys in loader:
        yield Delivered(keys)


def datasets_filtered(corpus: Corpus, cell: Cell) -> Iterator[Delivered]:
    """The same with a filter."""
    return datasets(corpus, cell, is_filtered=True)


def is_readable(sample: dict[str, Any]) -> bool:
    """Return whether an image can be decoded."""
    from PIL import Image

    try:
        Image.open(BytesIO(sample["jpg"]["bytes"])).load()
    except Exception:
        return False
    return True


def keys_of(samples: list[dict[str, Any]]) -> list[str]:
    """Collate samples to their keys."""
    return [sample["__key__"] for sample in samples]


SYSTEMS: dict[str, Callable[[Corpus, Cell], Iterator[Delivered]]] = {
    "mmstream": mmstream,
    "webdataset": webdataset,
    "webdataset, empty_check=False": webdataset_unchecked,
    "datasets": datasets,
    "datasets, bad samples filtered by hand": datasets_filtered,
}
