"""Flip one bit in a fifth of all reads, and prove that no batch changes and that all are counted.

    python -m tools.prove.wrong_reads --rate 0.2

A corpus of images and captions is converted, so its samples have checksums. An epoch is read from a
local disk and from a real S3 server, each undisturbed first. Then a store or a proxy flips a bit in
some of the answers, wherever it falls: in pixels, texts, tar headers, indexes, checksums or the
manifest. The exit code is 1 if a batch differs, or if nothing was counted. It takes about a minute.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mmstream as mm
from mmstream.dataset.dataset import Dataset
from mmstream.storage import LocalStore, open_store
from mmstream.types import Batch
from tests.helpers.http_fault_proxy import Faults, fault_proxy
from tools.prove.two_writers import write_rows
from tools.s3_server import s3_server

NUM_SAMPLES = 240
GLOBAL_BATCH_SIZE = 8


@dataclass(frozen=True)
class FlippingStore(LocalStore):
    """A local folder where one bit is flipped in some of the answers."""

    rate: float = 0.2

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Return a whole object, or one with a flipped bit."""
        return self._flip(super().read(name, max_bytes))

    def read_ranges(self, ranges: Sequence[Any], *args: Any) -> list[bytes | OSError]:
        """Return the bytes of every range, some of them with a flipped bit."""
        return [
            data if isinstance(data, OSError) else self._flip(data)
            for data in super().read_ranges(ranges, *args)
        ]

    def _flip(self, data: bytes) -> bytes:
        if not data or random.random() >= self.rate:
            return data
        changed = bytearray(data)
        changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
        return bytes(changed)


@dataclass(frozen=True)
class Epoch:
    """What one epoch delivered."""

    digests: list[str]
    """Of each step: everything in the batch but its lineage."""
    num_wrong_reads: int
    num_bad: int


def write_corpus(folder: Path) -> Path:
    """Convert images with captions. Return the folder of the shards."""
    rows = write_rows(folder, NUM_SAMPLES, 32, (160, 120))
    mm.convert(rows, folder / "shards", samples_per_shard=60, num_workers=0, progress=False)
    return folder / "shards"


def read_epoch(dataset: Dataset, num_workers: int) -> Epoch:
    """Go through one epoch, with a window small enough for many reads."""
    pipeline = mm.Pipeline(
        dataset,
        global_batch_size=GLOBAL_BATCH_SIZE,
        grid=(1, 2),
        window=12,
        decode=mm.Decode(image=mm.ImageDecoder(size=64)),
        bad_samples=mm.BadSamplePolicy(quarantine=None),
    )
    loader = mm.Loader(pipeline, num_workers=num_workers)
    digests = [_digest(batch) for batch in loader]
    loader.close()
    return Epoch(digests, loader.stats.num_wrong_reads, loader.stats.num_bad)


def _digest(batch: Batch) -> str:
    digest = hashlib.sha256()
    for name in sorted(set(batch) - {"__lineage__", "__url__"}):
        value = batch[name]
        is_tensor = isinstance(value, torch.Tensor)
        digest.update(
            name.encode() + (value.numpy().tobytes() if is_tensor else repr(value).encode())
        )
    return digest.hexdigest()


def fault_of(disturbed: Epoch, expected: Epoch) -> str:
    """Return what is wrong with a disturbed epoch, or nothing."""
    pairs = zip(disturbed.digests, expected.digests, strict=True)
    num_different = sum(one != other for one, other in pairs)
    if num_different:
        return f"{num_different} of {len(expected.digests)} batches differ"
    if disturbed.num_bad:
        return f"{disturbed.num_bad} samples were called bad"
    return "" if disturbed.num_wrong_reads else "no wrong read was counted"


def main() -> int:
    """Run all epochs, print what came of them, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=0.2, help="share of reads with a flipped bit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2])
    arguments = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="wrong-reads-") as name:
        folder = write_corpus(Path(name))
        expected = read_epoch(mm.open_dataset(folder), 0)

        def judge(place: str, disturbed: Epoch, num_flips: str = "") -> None:
            fault = fault_of(disturbed, expected)
            print(
                f"{place}: {len(disturbed.digests)} steps, {disturbed.num_wrong_reads} wrong reads "
                f"counted{num_flips}: {fault or 'all batches are the same'}"
            )
            outcomes.append(fault)

        for num_workers in arguments.workers:
            dataset = mm.open_dataset(folder)
            dataset.shards.store = dataset.index_store = FlippingStore(str(folder), arguments.rate)
            judge(f"local disk, {num_workers} workers", read_epoch(dataset, num_workers))
        faults = Faults(flip=arguments.rate, seed=arguments.seed)
        with (
            s3_server() as server,
            fault_proxy(server.endpoint, faults) as proxy,
        ):
            os.environ.update(server.env)
            url = f"s3://{server.bucket}/shards"
            store = open_store(url)
            for path in folder.iterdir():
                if path.is_file():
                    store.write(path.name, path.read_bytes())
            os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
            for num_workers in arguments.workers:
                proxy.reset_counts()
                disturbed = read_epoch(mm.open_dataset(url), num_workers)
                counts = proxy.counts()
                flips = f", {counts.faults['flip']} flips in {counts.num_gets} answers"
                judge(f"S3, {num_workers} workers", disturbed, flips)
    return 1 if any(outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
