"""Shared by the runners of `tools.bench.resume`: commands, time measurement, work on a sample.

A runner is a program that runs in its loader's environment. It imports its modules and calls
`serve`. So the start of the interpreter and all imports come before the measured time.

    prepare CORPUS FOLDER          convert the tars to the files that this loader reads
    walk FOLDER STATES STEP ...    deliver an epoch and save a state after each of these steps; the
                                   last number is the steps of the epoch
    resume FOLDER STATE [N]        make a new loader, load a state ("-": none), and measure the time
                                   to the first of N batches

The answers have the keys of each batch.
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
"""The work on each sample, the same for all loaders."""


def decode_jpeg(data: bytes) -> torch.Tensor:
    """Return a decoded JPEG, uint8 [3, 224, 224]."""
    return torch.from_numpy(decoder(data)).permute(2, 0, 1)


def samples_of(corpus: str) -> Iterator[dict[str, Any]]:
    """Yield key and JPEG of each sample, for loaders with their own file format."""
    for sample in mm.open_dataset(corpus):
        yield {"key": sample["__key__"], "jpg": sample["jpg"]}


def serve(
    prepare: Callable[[str, str], object],
    make: Callable[[str], Any],
    save: Callable[[Any], Any],
    load: Callable[[Any, Any], object],
    fields: Callable[[Any], tuple[Any, ...]] = itemgetter("image", "key"),
) -> None:
    """Run the command of the command line and print the answer as one line of JSON.

    Args:
        prepare: (corpus, folder): write the files that this loader reads.
        make: folder -> a new loader of batches.
        save: loader -> its state.
        load: (loader, state): continue from the state.
        fields: batch -> (images, keys).
    """
    command, folder, *rest = sys.argv[1:]

    def keys_of(batch: Any) -> list[str]:
        images, keys = fields(batch)
        if tuple(images.shape) != (BATCH, 3, 224, 224) or len(keys) != BATCH:
            sys.exit(f"a batch has images {tuple(images.shape)} and {len(keys)} keys")
        return [str(key).rpartition("/")[2] for key in keys]

    answer: dict[str, Any] = {}
    if command == "prepare":
        prepare(folder, *rest)
    elif command == "walk":
        answer = _walk(make(folder), keys_of, save, rest[0], [int(step) for step in rest[1:]])
    else:
        imports_s = time.time() - float(os.environ["BENCH_STARTED"])
        answer = {"imports_s": imports_s, **_resume(lambda: make(folder), load, keys_of, *rest)}
    print(json.dumps(answer))


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
        load(loader, torch.load(state, weights_only=False))  # a file of this benchmark
    batches = iter(loader)
    first = next(batches)
    seconds = time.perf_counter() - started
    following = [keys_of(batch) for batch in islice(batches, int(num_batches) - 1)]
    return {"seconds": seconds, "batches": [keys_of(first), *following]}
