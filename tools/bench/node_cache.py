"""Epochs from object storage, from the node cache and from the local disk.

    python -m tools.bench.node_cache [--gb 1.5] [--latency-ms 50 --mb-per-s 40] [--decode]
    python -m tools.bench.node_cache --rows first second --gb 3 --room 0.5  # hits of a small cache
    python -m tools.bench.node_cache --rows both --gb 3  # is each byte fetched once?

The same shards lie on a SeaweedFS server behind a proxy, and on the local disk. Each run is a
loader with two workers; raw samples of object storage start none. "first" fills an empty cache,
"second" is the next epoch, and "local" reads the local disk. "s3" is an epoch without a cache.
"both" reads two epochs in one process, with an empty cache. Runs are interleaved, and the table has
medians. Files of the cache and of the local corpus are in the page cache, or not, alike.

Columns: samples/s after the first fifth of the last epoch; CPU seconds of all processes per 10^9
bytes of samples in that time; share of the bytes that came from the cache; bytes that arrived
faster than the disk takes them, to those of the corpus; requests that were sent again, as retries
or hedges; bytes that the server sent, to those of the samples of one epoch.

A corpus should have 3 GB at least. In a smaller one, three things count that are the same in any
corpus: samples of the first steps, about 40 MB, are read alone and once more with the ranges around
them; up to 512 MB of the next epoch are read ahead, part of which was not written yet; up to a step
of samples is dropped at the end of an epoch, others in each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.helpers.http_fault_proxy import FaultProxy, Faults, fault_proxy
from tools.bench.loader_report import print_machine
from tools.bench.peers.environments import process_variables
from tools.bench.process_tree import cpu_seconds
from tools.s3_server import s3_server

SAMPLES_PER_SHARD = 250
WARM_SHARE = 0.2
ROWS = ("local", "s3", "first", "second", "both")


def main() -> None:
    """Measure all rows, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=0)
    parser.add_argument("--mb-per-s", type=float, default=0, help="of a connection; 0: no limit")
    parser.add_argument("--decode", action="store_true", help="images to 224 pixels")
    parser.add_argument("--room", type=float, default=2, help="of the cache, to the corpus")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS[:4]))
    parser.add_argument("--steps", type=int, help="of an epoch, at most")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(_run(**json.loads(options.run))))
        return
    print_machine()
    faults = Faults(latency_s=options.latency_ms / 1000, bytes_per_s=options.mb_per_s * 1e6)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        s3_server() as server,
        fault_proxy(server.endpoint) as proxy,
    ):
        os.environ.update(server.env)
        url = f"s3://{server.bucket}/corpus"
        num_samples = _write(Path(folder), url, options.gb)
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        proxy.set(faults)
        print(f"{num_samples:,} samples, {vars(options)}\n")
        _measure(Path(folder), url, proxy, options)


def _measure(folder: Path, url: str, proxy: FaultProxy, options: argparse.Namespace) -> None:
    figures: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(options.rounds):
        cache_dir = str(folder / f"cache-{number}")
        settings: dict[str, dict[str, Any]] = {
            "local": {"url": str(folder / "local")},
            "s3": {"url": url},
            "first": {"url": url, "cache_dir": cache_dir},
            "second": {"url": url, "cache_dir": cache_dir, "first_epoch": 1},
            "both": {"url": url, "cache_dir": f"{cache_dir}/both", "num_epochs": 2},
        }
        for row in options.rows:
            proxy.reset_counts()
            words = {
                **settings[row],
                "room": options.room,
                "decode": options.decode,
                "max_steps": options.steps,
            }
            line = subprocess.run(
                [sys.executable, "-m", "tools.bench.node_cache", "--run", json.dumps(words)],
                env={**os.environ, **process_variables(), "AWS_ENDPOINT_URL": proxy.endpoint},
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            ).stdout.splitlines()[-1]
            run = json.loads(line)
            run["sent/used"] = proxy.counts().num_bytes / run.pop("bytes")
            figures[row].append(run)
            print(f"{number} {row} {run}", file=sys.stderr, flush=True)
        shutil.rmtree(cache_dir, ignore_errors=True)
    columns = list(figures[options.rows[0]][0])
    print(f"| | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for row in options.rows:
        medians = [statistics.median(run[column] for run in figures[row]) for column in columns]
        print(f"| {row} | {' | '.join(f'{median:,.2f}' for median in medians)} |")


def _write(folder: Path, url: str, gigabytes: float) -> int:
    """Write the corpus to the disk and to the server; return its number of samples."""
    from mmstream.storage import open_store
    from tests.helpers.corpora import write_corpus
    from tools.bench.corpus import photographs

    photos = [photo.jpeg for photo in photographs()]
    mean_bytes = sum(map(len, photos)) / len(photos)
    num_shards = max(1, int(gigabytes * 1e9 / mean_bytes / SAMPLES_PER_SHARD))

    def sample(number: int) -> dict[str, bytes]:
        return {"jpg": photos[number % len(photos)], "txt": b"a caption"}

    counts = [SAMPLES_PER_SHARD] * num_shards
    local, store = write_corpus(folder / "local", counts, sample, checksums=True), open_store(url)
    for path in sorted(Path(local).iterdir()):
        store.write(path.name, path.read_bytes())
    return sum(counts)


def _run(
    url: str,
    room: float,
    decode: bool,
    max_steps: int | None,
    cache_dir: str | None = None,
    first_epoch: int = 0,
    num_epochs: int = 1,
) -> dict[str, float]:
    """Read epochs with two workers; return the figures of the last one."""
    import mmstream as mm
    from mmstream.state import make_state

    dataset = mm.open_dataset(url)
    pipeline = mm.Pipeline(
        dataset,
        global_batch_size=64,
        window_bytes=256 << 20,
        cache_dir=cache_dir,
        max_cache_bytes=None if cache_dir is None else int(room * dataset.manifest.num_bytes),
        reshuffle="lanes",
        decode=mm.Decode(image=mm.ImageDecoder(size=224)) if decode else None,
    )
    num_steps = min(pipeline.order.steps_per_epoch, max_steps or 1 << 60)
    first = int(WARM_SHARE * num_steps)
    with closing(mm.Loader(pipeline, num_workers=2)) as loader:
        loader.load_state_dict(make_state(pipeline.order, first_epoch, 0))
        for _ in range(num_epochs):
            for number, _ in enumerate(loader, start=1):
                if number == first:
                    began, cpu_s = time.perf_counter(), cpu_seconds(os.getpid())
                if number == num_steps:
                    break
        seconds = time.perf_counter() - began
        cpu_s = cpu_seconds(os.getpid()) - cpu_s
        transfers = loader.stats.transfers
        num_samples = (num_steps - first) * 64
        sample_bytes = dataset.manifest.num_bytes / len(dataset)
        return {
            "samples/s": num_samples / seconds,
            "CPU s/GB": cpu_s / (num_samples * sample_bytes / 1e9),
            "hits": loader.stats.cache_hit_fraction,
            "dropped": transfers.num_cache_dropped_bytes / dataset.manifest.num_bytes,
            "sent again": transfers.num_retries + transfers.num_hedges,
            "bytes": num_steps * 64 * sample_bytes,
        }


if __name__ == "__main__":
    main()
