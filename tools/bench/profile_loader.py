"""CPU time of a decoded sample, stage by stage: ``python -m tools.bench.profile_loader``.

The work is JPEG of 500x375 to 224 (shorter side to 256, central crop), text to 128 tokens, and
batches of 64. The functions of each stage are wrapped to measure the CPU time of their thread. When
one stage calls another, the time counts for the inner stage. Time outside all stages is "Python
between the stages". Time in which a core did not compute is "waiting, or other programs". So a
column sums to cores x time.

Workers are forked here, because wrapped functions cannot be pickled. ``floor`` is decoding and
resizing alone, from memory, in two threads.
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
    "read: ranges to samples (tar)": (
        "mmstream.reading.fetcher:Fetcher.fetch",
        "mmstream.reading.held:HeldSamples.take",
        "mmstream.reading.held:HeldSamples.take_all",
    ),
    "read: hand over a step": ("mmstream.reading.reader:Reader.step",),
    "text: json and tokens of a step": ("mmstream.decoding.substitute:RowDecoder.prepare",),
    "image: entropy decode": (
        "simplejpeg:decode_jpeg",
        "mmstream.decoding.image.jpeg:decode_reduced",
    ),
    "image: headers, orientation, checks": (
        "mmstream.decoding.stage:plan_pictures",
        "mmstream.decoding.image.decoder:ImageDecoder._plan",
        "mmstream.decoding.image.decoder:ImageDecoder._decode",
    ),
    "image: resize": ("torch.nn.functional:interpolate",),
    "image: crop, copy to the batch": ("numpy:copyto",),
    "sample: dicts, lineage, transforms": (
        "mmstream.decoding.stage:decode_picture",
        "mmstream.decoding.substitute:RowDecoder.__call__",
    ),
    "batch: memory": ("mmstream.decoding.stage:DecodeStage._memory_of_rows",),
    "batch: collate": ("mmstream.pipeline:make_batch",),
    "IPC: pack": ("mmstream.loader.batch_transport:SentBatch.__init__",),
    "IPC: pickle": ("multiprocessing.queues:_ForkingPickler.dumps",),
    "IPC: unpickle, attach": ("multiprocessing.queues:_ForkingPickler.loads",),
    "count, state": ("mmstream.loader.loader:Loader.mark_delivered",),
}
"""Row of the table -> the functions that are measured, as ``module:name``."""


class StageTimes:
    """CPU seconds by stage in one process. When stages are nested, the inner stage counts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._threads = threading.local()

    def wrap(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that also adds its CPU time to a stage."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            inner_seconds = self._threads.__dict__.setdefault("inner_seconds", [0.0])
            inner_seconds.append(0.0)
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.thread_time() - started
                self.seconds[stage] += seconds - inner_seconds.pop()
                inner_seconds[-1] += seconds

        return timed

    def snapshot(self) -> dict[str, float]:
        """Return the CPU seconds of this process so far, by stage and as "all"."""
        return {**self.seconds, "all": time.process_time()}


def main() -> None:
    """Measure each configuration in a new process and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument(
        "--configs",
        nargs="+",
        default=["floor", "0x1", "0x2", "1x1", "1x2", "2x1"],
        help="workers x threads",
    )
    parser.add_argument("--corpus", help="folder of such shards; default: written for the run")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.corpus)))
        return
    with tempfile.TemporaryDirectory() as folder:
        corpus = options.corpus
        if corpus is None:
            from tools.bench.corpus import write_corpus

            corpus = folder
            write_corpus(Path(folder), options.samples)
        columns = {name: run_process(name, corpus) for name in options.configs}
    print_table(columns)


def run_process(name: str, corpus: str) -> dict[str, float]:
    """Measure one configuration in a new process and return microseconds per sample."""
    command = [sys.executable, "-m", "tools.bench.profile_loader"]
    command += ["--measure", name, "--corpus", corpus]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    column: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return column


def measure(name: str, corpus: str) -> dict[str, float]:
    """Return microseconds per sample by stage, over all processes, and the sums."""
    import mmstream as mm
    from mmstream.train.tokenizer import byte_tokenizer

    times = StageTimes()
    install(times)
    dataset = mm.open_dataset(corpus)
    decoder = mm.ImageDecoder(size=224, resize_size=256)
    if name == "floor":
        return measure_floor(times, decoder, [sample["jpg"] for sample in dataset])
    pipeline = mm.Pipeline(
        dataset,
        global_batch_size=BATCH,
        decode=mm.Decode(image=decoder, text=mm.TextDecoder(byte_tokenizer(), max_length=128)),
    )
    num_workers, num_threads = map(int, name.split("x"))
    loader = mm.Loader(
        pipeline, num_workers=num_workers, num_threads=num_threads, multiprocessing_context="fork"
    )
    before = times.snapshot()
    started = time.perf_counter()
    last_snapshots: dict[int, dict[str, float]] = {}
    num_samples = 0
    for batch in loader:
        pid, snapshot = batch["__profile__"]
        last_snapshots[pid] = snapshot
        num_samples += len(batch["__key__"])
    wall = time.perf_counter() - started
    loader.close()
    last_snapshots[os.getpid()] = times.snapshot()
    seconds: dict[str, float] = defaultdict(float)
    for pid, snapshot in last_snapshots.items():
        for stage, value in snapshot.items():
            # A forked process inherits the times of the stages, but its CPU time starts at zero.
            starts_at_zero = stage == "all" and pid != os.getpid()
            seconds[stage] += value - (0.0 if starts_at_zero else before.get(stage, 0.0))
    return per_sample(seconds, wall, num_samples, max(1, num_workers) * num_threads)


def install(times: StageTimes) -> None:
    """Wrap the functions of all stages, and add a snapshot of its process to each batch."""
    from mmstream.pipeline import PipelineRunner

    for stage, names in STAGES.items():
        for name in names:
            module, _, path = name.partition(":")
            owner: Any = importlib.import_module(module)
            *parents, last = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            wrapped = times.wrap(stage, getattr(owner, last))
            is_static = isinstance(vars(owner).get(last), classmethod | staticmethod)
            setattr(owner, last, staticmethod(wrapped) if is_static else wrapped)
    make_batch = PipelineRunner.batch

    def profiled_batch(runner: PipelineRunner, job: Any) -> Any:
        batch = make_batch(runner, job)
        batch["__profile__"] = os.getpid(), times.snapshot()
        return batch

    PipelineRunner.batch = profiled_batch  # type: ignore[method-assign, assignment]


def measure_floor(times: StageTimes, decoder: Any, images: list[bytes]) -> dict[str, float]:
    """Decode and resize from memory, in two threads if there are two cores."""
    num_threads = min(2, os.cpu_count() or 1)
    before = times.snapshot()
    started = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as pool:
        for start in range(0, len(images), BATCH):
            list(pool.map(decoder, images[start : start + BATCH]))
    wall = time.perf_counter() - started
    after = times.snapshot()
    seconds = {stage: after[stage] - before.get(stage, 0.0) for stage in after}
    return per_sample(seconds, wall, len(images), num_threads)


def per_sample(
    seconds: dict[str, float], wall: float, num_samples: int, num_threads: int
) -> dict[str, float]:
    """Return microseconds per sample: stages, the rest of the CPU time, waiting, and the sums."""
    cores = min(num_threads, os.cpu_count() or 1)
    cpu = seconds.pop("all")
    column = {stage: value / num_samples * 1e6 for stage, value in seconds.items()}
    column["Python between the stages"] = (cpu - sum(seconds.values())) / num_samples * 1e6
    column["cpu"] = cpu / num_samples * 1e6
    column["waiting, or other programs"] = (cores * wall - cpu) / num_samples * 1e6
    column["whole"] = cores * wall / num_samples * 1e6
    column["samples_per_s"] = num_samples / wall
    return column


def print_table(columns: dict[str, dict[str, float]]) -> None:
    """Print a row per stage and a column per configuration."""
    import torch

    cores = os.cpu_count()
    load = os.getloadavg()[0]
    print(f"{cores} cores, load {load:.1f}, torch {torch.__version__}; microseconds per sample\n")
    print("| | " + " | ".join(columns) + " |")
    print("|---|" + "---|" * len(columns))

    def print_row(label: str, key: str) -> None:
        cells = (f"{column.get(key, 0.0):,.0f}" for column in columns.values())
        print(f"| {label} | " + " | ".join(cells) + " |")

    for stage in STAGES:
        print_row(stage, stage)
    print_row("Python between the stages", "Python between the stages")
    print_row("**CPU, all processes**", "cpu")
    print_row("waiting, or other programs", "waiting, or other programs")
    print_row("**cores x time**", "whole")
    print_row("samples/s", "samples_per_s")


if __name__ == "__main__":
    main()
