"""Raw samples a second of one system, in one of its configurations: a runner of `tools.bench.raw`.

``raw.py prepare NAME CORPUS FOLDER`` makes what the system reads from the tars; ``raw.py run NAME
FOLDER WORKERS SECONDS CRC`` prints samples a second and CPU microseconds a sample, as JSON. Samples
come in lists of 64, shuffled as the system does it, epoch after epoch; imports and the opening lie
before the clock, the first read does not.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

BATCH, SHUFFLE_BUFFER = 64, 1000

Batches = Iterator[list[dict[str, Any]]]


def as_they_are(samples: list[Any]) -> list[Any]:
    """Collate nothing: a batch is the list of its samples."""
    return samples


def mmstream(folder: str, _workers: int, zero_copy: bool = False, copy: bool = False) -> Batches:
    """Yield the raw samples of each step."""
    import mmstream as mm
    from mmstream.reading.reader import Reader
    from mmstream.reading.step import Job

    dataset = mm.open_dataset(folder)
    order = mm.Pipeline(dataset, global_batch_size=BATCH).order
    reader = Reader(dataset, order, zero_copy=zero_copy)

    def batches() -> Batches:
        steps = range(order.steps_per_epoch)
        jobs = (Job(epoch, step, 0, BATCH) for epoch in count() for step in steps)
        for step in map(reader.step, jobs):
            samples: list[Any] = step.outcomes
            if copy:
                samples = [{k: v if k[:2] == "__" else bytes(v) for k, v in sample.items()}
                           for sample in samples]  # fmt: skip
            yield samples

    return batches()


def mmstream_loader(folder: str, _workers: int) -> Batches:
    """Yield the batches of a Loader in this process, a dict a row."""
    import mmstream as mm

    pipeline = mm.Pipeline(mm.open_dataset(folder), global_batch_size=BATCH, zero_copy=True)
    loader = mm.Loader(pipeline)

    def batches() -> Batches:
        while True:
            for batch in loader:
                rows = zip(batch["jpg"], batch["txt"], strict=True)
                yield [{"jpg": picture, "txt": text} for picture, text in rows]

    return batches()


def webdataset(folder: str, workers: int) -> Batches:
    """Yield lists of samples, batched where they are read."""
    import webdataset as wds
    from torch.utils.data import DataLoader

    urls = sorted(str(path) for path in Path(folder).glob("*.tar"))
    dataset = wds.WebDataset(urls, shardshuffle=100, seed=0).shuffle(SHUFFLE_BUFFER)
    dataset = dataset.batched(BATCH, collation_fn=as_they_are)

    def batches() -> Batches:
        while True:
            yield from DataLoader(dataset, None, num_workers=workers) if workers else dataset

    return batches()


def mosaicml(folder: str, workers: int) -> Batches:
    """Yield lists of samples of its own shards."""
    from mmstream._torchvision import import_torchvision

    import_torchvision()
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    dataset = StreamingDataset(local=folder, shuffle=True, shuffle_seed=0, batch_size=BATCH)

    def batches() -> Batches:
        loader = StreamingDataLoader(
            dataset, batch_size=BATCH, num_workers=workers, collate_fn=as_they_are
        )
        while True:
            yield from loader

    return batches()


def write_mosaicml(corpus: str, folder: str) -> None:
    """Write MDS shards of its default size."""
    import mmstream as mm
    from mmstream._torchvision import import_torchvision

    import_torchvision()
    from streaming import MDSWriter

    with MDSWriter(out=folder, columns={"key": "str", "jpg": "bytes", "txt": "bytes"}) as out:
        for sample in mm.open_dataset(corpus):
            out.write({"key": sample["__key__"], "jpg": sample["jpg"], "txt": sample["txt"]})


def link_tars(corpus: str, folder: str) -> None:
    """Give a system that reads tars the same tars, with their indexes."""
    for path in Path(corpus).iterdir():
        os.link(path, Path(folder, path.name))


SYSTEMS: dict[str, Callable[[str, int], Batches]] = {
    "mmstream zero_copy": lambda folder, workers: mmstream(folder, workers, zero_copy=True),
    "mmstream bytes": mmstream,
    "mmstream bytes(zero_copy)": lambda folder, workers: mmstream(folder, workers, True, True),
    "mmstream Loader, zero_copy": mmstream_loader,
    "webdataset": webdataset,
    "mosaicml": mosaicml,
}


def run(name: str, folder: str, workers: str, seconds: str, crc: str) -> dict[str, float]:
    """Measure one system."""
    if name.startswith("mmstream"):
        import mmstream as mm

        mm.Pipeline  # noqa: B018 - what it needs is imported before the clock
    batches = SYSTEMS[name](folder, int(workers))
    pool = ThreadPoolExecutor(2) if crc == "crc" else None
    num_samples, before, started = 0, _cpu_s(), time.perf_counter()
    for samples in batches:
        num_samples += len(samples)
        if pool is not None:  # zlib leaves the interpreter to others
            list(pool.map(_checksum, (samples[:32], samples[32:])))
        if time.perf_counter() - started > float(seconds):
            break
    passed = time.perf_counter() - started
    figures = {"samples_per_s": num_samples / passed}
    if int(workers) == 0:
        figures["cpu_us"] = (_cpu_s() - before) / num_samples * 1e6
    return figures


def _checksum(samples: list[dict[str, Any]]) -> int:
    total = 0
    for sample in samples:
        for value in sample.values():
            if isinstance(value, bytes | memoryview):
                total ^= zlib.crc32(value)
    return total


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    command, name, *rest = sys.argv[1:]
    if command == "prepare":
        (write_mosaicml if name == "mosaicml" else link_tars)(*rest)
    else:
        print(json.dumps(run(name, *rest)), flush=True)
        os._exit(0)  # workers that still read ahead are not waited for
