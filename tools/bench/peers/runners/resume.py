"""What all runners of `tools.bench.resume` share: the commands, the clock and the work on a sample.

A runner is a script that runs in its loader's own environment. It imports what it needs, then calls
`serve`: so the interpreter's start and all imports lie before the clock starts.

    prepare CORPUS FOLDER          make from the tars what this loader reads
    walk FOLDER STATES STEP ...    one epoch; save a state after so many steps; digests of batches
    resume FOLDER STATE            a fresh loader, at a state ("-": at the start): time to a batch
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

import mmstream as mm

BATCH, SHUFFLE_BUFFER = 64, 1000
NUM_WORKERS = int(os.environ.get("BENCH_NUM_WORKERS", "2"))

decoder = mm.ImageDecoder(size=224, resize_size=256)
"""The work on each sample, the same for all."""


def picture(data: bytes) -> torch.Tensor:
    """Return a decoded JPEG, uint8 [3, 224, 224]."""
    return torch.from_numpy(decoder(data)).permute(2, 0, 1)


def samples_of(corpus: str) -> Iterator[dict[str, Any]]:
    """Yield key and JPEG of each sample, for loaders with a format of their own."""
    for sample in mm.open_dataset(corpus):
        yield {"key": sample["__key__"], "jpg": sample["jpg"]}


def serve(
    prepare: Callable[[str, str], object],
    make: Callable[[str], Any],
    save: Callable[[Any], Any],
    load: Callable[[Any, Any], object],
    parts: Callable[[Any], tuple[Any, ...]] = itemgetter("image", "key"),
) -> None:
    """Do what the command line asks, and print the findings as one line of JSON.

    Args:
        prepare: (corpus, folder) -> files of this loader's own.
        make: folder -> a fresh loader of batches.
        save: loader -> its state.
        load: (loader, state): continue there.
        parts: batch -> (its pictures, its keys).
    """
    command, folder, *rest = sys.argv[1:]

    def keys_of(batch: Any) -> list[str]:
        pictures, keys = parts(batch)
        if tuple(pictures.shape) != (BATCH, 3, 224, 224) or len(keys) != BATCH:
            sys.exit(f"not the same work: {tuple(pictures.shape)} with {len(keys)} keys")
        return [str(name).rpartition("/")[2] for name in keys]

    if command == "prepare":
        prepare(folder, *rest)
        found: dict[str, Any] = {}
    elif command == "walk":
        found = _walk(make(folder), keys_of, save, rest[0], [int(step) for step in rest[1:]])
    else:
        imported = time.time() - float(os.environ["BENCH_STARTED"])
        found = {"imports_s": imported, **_resume(lambda: make(folder), load, keys_of, *rest)}
    print(json.dumps(found))


def _walk(
    loader: Any,
    keys_of: Callable[[Any], list[str]],
    save: Callable[[Any], Any],
    states: str,
    steps: list[int],
) -> dict[str, Any]:
    batches = []
    for number, batch in enumerate(islice(loader, steps[-1]), start=1):
        batches.append(keys_of(batch))
        if number in steps[:-1]:
            torch.save(save(loader), Path(states, f"{number}.pt"))
    return {"batches": batches}


def _resume(
    make: Callable[[], Any],
    load: Callable[[Any, Any], object],
    keys_of: Callable[[Any], list[str]],
    state: str,
    num_batches: str = "1",
) -> dict[str, Any]:
    started = time.perf_counter()
    loader = make()
    if state != "-":
        load(loader, torch.load(state, weights_only=False))  # written by this benchmark itself
    batches = iter(loader)
    first = next(batches)
    seconds = time.perf_counter() - started
    following = [keys_of(batch) for batch in islice(batches, int(num_batches) - 1)]
    return {"seconds": seconds, "batches": [keys_of(first), *following]}
