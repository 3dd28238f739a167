"""Where the time of a decoded sample goes: ``python -m tools.bench.profile_loader --samples 4000``.

JPEG of 500x375 to 224 (shortest side to 256, centre crop), text to 128 tokens, batches of 64. The
functions of each stage are wrapped with a clock of their thread's CPU time, and each microsecond
counts for the innermost; what no clock saw is Python between the stages, and what a core did not
compute at all it waited for, or gave to others. So a column sums to cores x seconds. Workers are
forked here, since wrapped functions cannot be sent; `floor` is decode and resize alone, in the same
number of threads.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BATCH = 64

STAGES: dict[str, tuple[str, ...]] = {
    "order: refs, windows": (
        "mmstream.order.order:Order.refs",
        "mmstream.order.order:Order.windows",
        "mmstream.order.order:Order.window",
        "mmstream.order.order:Order.stream",
    ),
    "read: bytes from the page cache": ("mmstream.storage.local:LocalStore.read_ranges",),
    "read: ranges to samples (tar)": ("mmstream.reading.reader:Reader._piece",),
    "read: hand over a step": ("mmstream.reading.reader:Reader.step",),
    "text: json and tokens of a step": ("mmstream.decoding.stage:decode_texts",),
    "image: entropy decode": ("simplejpeg:decode_jpeg",),
    "image: headers, orientation, checks": ("mmstream.decoding.image:ImageDecoder.__call__",),
    "image: resize": ("torch.nn.functional:interpolate",),
    "image: crop, copy to the batch": ("numpy:copyto",),
    "sample: dicts, lineage, transforms": ("mmstream.decoding.substitute:Filler.__call__",),
    "batch: memory": ("mmstream.decoding.stage:_picture_buffer",),
    "batch: collate": (),
    "IPC: pack": ("mmstream.loader.batch_transport:Parcel.__init__",),
    "IPC: pickle": ("multiprocessing.queues:_ForkingPickler.dumps",),
    "IPC: unpickle, attach": ("multiprocessing.queues:_ForkingPickler.loads",),
    "count, state": ("mmstream.loader:Loader.count",),
}


class Clocks:
    """CPU seconds by stage; nested calls count for the innermost. One per process."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._threads = threading.local()

    def wrap(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that adds its own CPU time to a stage."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            inner = self._threads.__dict__.setdefault("inner", [0.0])
            inner.append(0.0)
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.thread_time() - started
                self.spent[stage] += whole - inner.pop()
                inner[-1] += whole

        return timed


def main() -> None:
    """Measure each configuration in a process of its own and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument(
        "--configs",
        nargs="+",
        default=["floor", "0x1", "0x2", "1x1", "1x2", "2x1"],
        help="workers x threads",
    )
    parser.add_argument("--corpus", help="a folder of such shards; made where it is missing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.corpus)))
        return
    with tempfile.TemporaryDirectory() as folder:
        corpus = options.corpus
        if corpus is None:
            from tools.bench.corpus import write_corpus

            corpus = folder
            write_corpus(Path(folder), options.samples)
        columns = {name: in_a_process(name, corpus) for name in options.configs}
    print_table(columns)


def in_a_process(name: str, corpus: str) -> dict[str, float]:
    """Run one configuration in a process of its own and return microseconds a sample."""
    command = [
        sys.executable,
        "-m",
        "tools.bench.profile_loader",
        "--one",
        name,
        "--corpus",
        corpus,
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(name: str, corpus: str) -> dict[str, float]:
    """Return microseconds a sample by stage, of all processes, and what sums them up."""
    import mmstream as mm
    from mmstream.train.tokenizer import byte_tokenizer

    clocks = Clocks()
    install(clocks)
    dataset = mm.open_dataset(corpus)
    decoder = mm.ImageDecoder(size=224, resize_size=256)
    if name == "floor":
        return floor(clocks, decoder, [sample["jpg"] for sample in dataset])
    pipeline = mm.Pipeline(
        dataset,
        global_batch_size=BATCH,
        decode=mm.Decode(image=decoder, text=mm.TextDecoder(byte_tokenizer(), max_length=128)),
    )
    num_workers, num_threads = map(int, name.split("x"))
    loader = mm.Loader(
        pipeline, num_workers=num_workers, num_threads=num_threads, multiprocessing_context="fork"
    )
    before, started = snapshot(clocks), time.perf_counter()
    last: dict[int, dict[str, float]] = {}
    num_samples = 0
    for batch in loader:
        last.update([batch["__profile__"]])
        num_samples += len(batch["__key__"])
    wall = time.perf_counter() - started
    loader.close()
    last[os.getpid()] = snapshot(clocks)
    spent: dict[str, float] = defaultdict(float)
    for pid, seen in last.items():  # a forked process starts with our clocks, and no CPU time
        for stage, seconds in seen.items():
            is_new = stage == "all" and pid != os.getpid()
            spent[stage] += seconds - (0.0 if is_new else before.get(stage, 0.0))
    return summed(spent, wall, num_samples, max(1, num_workers) * num_threads)


def install(clocks: Clocks) -> None:
    """Wrap the functions of all stages, and let each batch say what its process has spent."""
    import mmstream.loader.loader
    import mmstream.pipeline

    for stage, names in STAGES.items():
        for name in names:
            module, _, path = name.partition(":")
            owner: Any = importlib.import_module(module)
            *parents, last = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            wrapped = clocks.wrap(stage, getattr(owner, last))
            static = isinstance(vars(owner).get(last), classmethod | staticmethod)
            setattr(owner, last, staticmethod(wrapped) if static else wrapped)
    batches = vars(mmstream.pipeline)["batch"]

    def batch(steps: Any, collate: Any) -> Any:
        for made in batches(steps, clocks.wrap("batch: collate", collate)):
            made["__profile__"] = os.getpid(), snapshot(clocks)
            yield made

    vars(mmstream.pipeline)["batch"] = batch


def snapshot(clocks: Clocks) -> dict[str, float]:
    """Return what this process has spent, by stage, and in all."""
    return {**clocks.spent, "all": time.process_time()}


def floor(clocks: Clocks, decoder: Any, pictures: list[bytes]) -> dict[str, float]:
    """Decode and resize from memory, in as many threads as there are cores, up to two."""
    num_threads = min(2, os.cpu_count() or 1)
    before, started = snapshot(clocks), time.perf_counter()
    with ThreadPoolExecutor(num_threads) as pool:
        for start in range(0, len(pictures), BATCH):
            list(pool.map(decoder, pictures[start : start + BATCH]))
    wall = time.perf_counter() - started
    after = snapshot(clocks)
    spent = {stage: after[stage] - before.get(stage, 0.0) for stage in after}
    return summed(spent, wall, len(pictures), num_threads)


def summed(
    spent: dict[str, float], wall: float, num_samples: int, num_cores: int
) -> dict[str, float]:
    """Return microseconds a sample: stages, the rest of the CPU time, waiting, and the whole."""
    cores = min(num_cores, os.cpu_count() or 1)
    whole_cpu = spent.pop("all")
    found = {stage: seconds / num_samples * 1e6 for stage, seconds in spent.items()}
    found["Python between the stages"] = (whole_cpu - sum(spent.values())) / num_samples * 1e6
    found["cpu"] = whole_cpu / num_samples * 1e6
    found["waiting, or other programs"] = (cores * wall - whole_cpu) / num_samples * 1e6
    found["whole"] = cores * wall / num_samples * 1e6
    found["samples_per_s"] = num_samples / wall
    return found


def print_table(columns: dict[str, dict[str, float]]) -> None:
    """Print a row a stage, a column a configuration."""
    import torch

    cores, load = os.cpu_count(), os.getloadavg()[0]
    print(f"{cores} cores, load {load:.1f}, torch {torch.__version__}; microseconds a sample\n")
    print("| | " + " | ".join(columns) + " |")
    print("|---|" + "---|" * len(columns))

    def row(label: str, key: str) -> None:
        cells = (f"{column.get(key, 0.0):,.0f}" for column in columns.values())
        print(f"| {label} | " + " | ".join(cells) + " |")

    for stage in STAGES:
        row(stage, stage)
    row("Python between the stages", "Python between the stages")
    row("**CPU, all processes**", "cpu")
    row("waiting, or other programs", "waiting, or other programs")
    row("**cores x time**", "whole")
    row("samples/s", "samples_per_s")


if __name__ == "__main__":
    main()
