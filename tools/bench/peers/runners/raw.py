"""The runner of `tools.bench.raw`: samples per second without decoding, for one system.

    prepare NAME CORPUS FOLDER              convert the tars to the files that the system reads
    run NAME FOLDER WORKERS SECONDS CRC     print samples/s and CPU microseconds per sample as JSON

Samples come in lists of 64, shuffled by the system, for as many epochs as the time allows. Imports
and the opening of the dataset come before the measured time, and the first read is in it.
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


def as_list(samples: list[Any]) -> list[Any]:
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
                samples = [
                    {
                        name: value if name.startswith("__") else bytes(value)
                        for name, value in sample.items()
                    }
                    for sample in samples
                ]
            yield samples

    return batches()


def mmstream_loader(folder: str, _workers: int) -> Batches:
    """Yield the batches of a Loader in this process, with a dict per row."""
    import mmstream as mm

    pipeline = mm.Pipeline(mm.open_dataset(folder), global_batch_size=BATCH, zero_copy=True)
    loader = mm.Loader(pipeline)

    def batches() -> Batches:
        while True:
            for batch in loader:
                rows = zip(batch["jpg"], batch["txt"], strict=True)
                yield [{"jpg": image, "txt": text} for image, text in rows]

    return batches()


def webdataset(folder: str, workers: int) -> Batches:
    """Yield lists of samples, batched in the workers."""
    import webdataset as wds
    from torch.utils.data import DataLoader

    urls = sorted(str(path) for path in Path(folder).glob("*.tar"))
    dataset = wds.WebDataset(urls, shardshuffle=100, seed=0).shuffle(SHUFFLE_BUFFER)
    dataset = dataset.batched(BATCH, collation_fn=as_list)

    def batches() -> Batches:
        while True:
            yield from DataLoader(dataset, None, num_workers=workers) if workers else dataset

    return batches()


def mosaicml(folder: str, workers: int) -> Batches:
    """Yield lists of samples from MDS shards."""
    from mmstream._torchvision import import_torchvision

    import_torchvision()
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    dataset = StreamingDataset(local=folder, shuffle=True, shuffle_seed=0, batch_size=BATCH)

    def batches() -> Batches:
        loader = StreamingDataLoader(
            dataset, batch_size=BATCH, num_workers=workers, collate_fn=as_list
        )
        while True:
            yield from loader

    return batches()


def write_mosaicml(corpus: str, folder: str) -> None:
    """Write MDS shards of the default size."""
    import mmstream as mm
    from mmstream._torchvision import import_torchvision

    import_torchvision()
    from streaming import MDSWriter

    with MDSWriter(out=folder, columns={"key": "str", "jpg": "bytes", "txt": "bytes"}) as out:
        for sample in mm.open_dataset(corpus):
            out.write({"key": sample["__key__"], "jpg": sample["jpg"], "txt": sample["txt"]})


def link_tars(corpus: str, folder: str) -> None:
    """Link the tars and their indexes."""
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
    """Measure one system and return its figures."""
    if name.startswith("mmstream"):
        import mmstream as mm

        mm.Pipeline  # noqa: B018 - imports its modules before the measured time
    batches = SYSTEMS[name](folder, int(workers))
    pool = ThreadPoolExecutor(2) if crc == "crc" else None
    num_samples = 0
    started_cpu = _cpu_s()
    started = time.perf_counter()
    for samples in batches:
        num_samples += len(samples)
        if pool is not None:  # zlib releases the GIL
            list(pool.map(_checksum, (samples[:32], samples[32:])))
        if time.perf_counter() - started > float(seconds):
            break
    figures = {"samples_per_s": num_samples / (time.perf_counter() - started)}
    if int(workers) == 0:
        figures["cpu_us"] = (_cpu_s() - started_cpu) / num_samples * 1e6
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
        os._exit(0)  # do not wait for workers that still read ahead
