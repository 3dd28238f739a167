"""Decoded samples a second, beside webdataset: ``python tools/bench_loader.py --rounds 5``.

The same tars and the same work: JPEG of 500x375 to 224 (shortest side to 256, centre crop), text to
128 tokens, batches of 64. Each measurement is a process of its own; rounds are interleaved, medians
are printed, with ratios. `floor` is a bare loop that only decodes and resizes, from memory, with as
many threads as there are workers.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BATCH = 64


def main() -> None:
    """Measure all systems, or with --system one of them, in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--corpus", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.system:
        print(json.dumps(measure(options.system, options.corpus, options.num_workers)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder), options.samples)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in SYSTEMS}
        for _ in range(options.rounds):
            for name in SYSTEMS:
                found[name].append(in_a_process(name, folder, options.num_workers))
    report(found, options)


def write_corpus(folder: Path, num_samples: int, samples_per_shard: int = 500) -> None:
    """Write tars of real photographs at 500x375, about 60 kB each."""
    from PIL import Image

    from mmstream.demo import corpus_rows
    from mmstream.index import encode_index
    from mmstream.tar import TarWriter

    rows = [json.loads(line) for line in Path(corpus_rows()).read_text().splitlines()]
    pictures = []
    for row in rows:
        image = Image.open(Path(corpus_rows()).parent / row["image"])
        buffer = io.BytesIO()
        image.convert("RGB").resize((500, 375), Image.Resampling.LANCZOS).save(
            buffer, "JPEG", quality=92
        )
        pictures.append((buffer.getvalue(), row["captions"]))
    for shard, start in enumerate(range(0, num_samples, samples_per_shard)):
        path = folder / f"shard-{shard:06d}.tar"
        with path.open("wb") as file:
            writer = TarWriter(file)
            for number in range(start, min(num_samples, start + samples_per_shard)):
                data, captions = pictures[number % len(pictures)]
                text = captions[number % len(captions)].encode()
                writer.add(f"{number:06d}", {"jpg": data, "txt": text})
            writer.close()
        path.with_suffix(".tar.idx").write_bytes(encode_index(writer.offsets))


def in_a_process(system: str, corpus: str, num_workers: int) -> dict[str, float]:
    """Run one measurement in a process of its own and return its figures."""
    command = [sys.executable, __file__, "--system", system, "--corpus", corpus]
    command += ["--num-workers", str(num_workers)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(system: str, corpus: str, num_workers: int) -> dict[str, float]:
    """Time the stream of one system; the first batch is timed apart."""
    batches = SYSTEMS[system](corpus, num_workers)
    started = time.perf_counter()
    next(batches)
    first_s = time.perf_counter() - started
    started = time.perf_counter()
    count = sum(batches)
    seconds = time.perf_counter() - started
    del batches
    return {"samples_per_s": count / seconds, "first_batch_s": first_s}


def mmstream_batches(corpus: str, num_workers: int, num_threads: int = 1) -> Iterator[int]:
    """Yield the sizes of mmstream's batches."""
    import mmstream as mm
    from mmstream.train.tokenizer import byte_tokenizer

    pipeline = mm.Pipeline(
        mm.open_dataset(corpus),
        global_batch_size=BATCH,
        decode=mm.Decode(
            image=mm.ImageDecoder(size=224, resize_size=256),
            text=mm.TextDecoder(byte_tokenizer(), max_length=128),
        ),
    )
    loader = mm.Loader(pipeline, num_workers=num_workers, num_threads=num_threads)
    yield from (len(batch["__key__"]) for batch in loader)
    loader.close()


def threaded_batches(corpus: str, num_workers: int) -> Iterator[int]:
    """Yield the sizes of mmstream's batches, decoded in threads of one process."""
    return mmstream_batches(corpus, 0, num_workers)


def webdataset_batches(corpus: str, num_workers: int) -> Iterator[int]:
    """Yield the sizes of webdataset's batches, with the stages its users write."""
    import webdataset as wds

    from mmstream._torchvision import import_torchvision
    from mmstream.train.tokenizer import byte_tokenizer

    import_torchvision()
    from torchvision import transforms

    tokenizer = byte_tokenizer()
    transform = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )

    def tokenize(text: str) -> Any:
        coded = tokenizer(
            text, max_length=128, padding="max_length", truncation=True, return_tensors="pt"
        )
        return coded["input_ids"][0]

    shards = sorted(str(path) for path in Path(corpus).glob("*.tar"))
    dataset = (
        wds.WebDataset(shards, shardshuffle=False, nodesplitter=wds.split_by_node)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "txt")
        .map_tuple(transform, tokenize)
        .batched(BATCH)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=num_workers)
    yield from (len(images) for images, _ in loader)


def floor_batches(corpus: str, num_workers: int) -> Iterator[int]:
    """Yield batch sizes of a loop that only decodes and resizes, in threads, from memory."""
    import mmstream as mm

    decoder = mm.ImageDecoder(size=224, resize_size=256)
    pictures = [sample["jpg"] for sample in mm.open_dataset(corpus)]
    with ThreadPoolExecutor(num_workers) as pool:
        for start in range(0, len(pictures), BATCH):
            yield len(list(pool.map(decoder, pictures[start : start + BATCH])))


SYSTEMS: dict[str, Callable[[str, int], Iterator[int]]] = {
    "mmstream, processes": mmstream_batches,
    "mmstream, threads": threaded_batches,
    "webdataset": webdataset_batches,
    "floor": floor_batches,
}


def report(found: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> None:
    """Print medians, spreads and ratios as a table."""
    import torch
    import webdataset

    print(
        f"{options.samples} samples, {options.rounds} rounds, {options.num_workers} workers, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"webdataset {webdataset.__version__}\n"
    )
    base = statistics.median(run["samples_per_s"] for run in found["webdataset"])
    print("| | samples/s, median (min-max) | to webdataset | first batch, s |")
    print("|---|---|---|---|")
    for name, runs in found.items():
        speeds = sorted(run["samples_per_s"] for run in runs)
        middle = statistics.median(speeds)
        first = statistics.median(run["first_batch_s"] for run in runs)
        spread = f"{speeds[0]:,.0f}-{speeds[-1]:,.0f}"
        print(f"| {name} | {middle:,.0f} ({spread}) | {middle / base:.2f}x | {first:.2f} |")


if __name__ == "__main__":
    main()
