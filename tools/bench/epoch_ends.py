"""The wait where one epoch follows another: ``python -m tools.bench.epoch_ends``.

A real S3 server (SeaweedFS) runs on this machine. A proxy before it delays answers and limits each
connection. A loop takes raw samples of a small corpus for several epochs, in batches of 64. One
loop takes batches as fast as they come, and others at a pace. For each epoch it prints the wait for
its first ten batches beside the wait for all others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

from tests.helpers.http_fault_proxy import Faults, fault_proxy
from tools.bench.storage.corpus import write_tars
from tools.s3_server import s3_server, without_aws

NUM_FIRST = 10
"""Batches that begin an epoch."""


def main() -> None:
    """Write the corpus, and print a line for each pace and epoch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, help="folder of JPEGs; default: those of the demo")
    parser.add_argument("--samples", type=int, default=1000, help="of each of the 8 shards")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds to the first byte")
    parser.add_argument("--rate", type=float, default=40e6, help="bytes/s of a connection; 0: any")
    parser.add_argument(
        "--pace", type=float, nargs="+", default=[2000], help="samples/s of the paced loops"
    )
    options = parser.parse_args()
    with s3_server() as server, fault_proxy(server.endpoint) as proxy:
        own = without_aws(os.environ) | server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        os.environ.clear()
        os.environ.update(own)
        url = f"s3://{server.bucket}/corpus"
        _upload(url, options.samples, options.images)
        proxy.set(Faults(latency_s=options.latency, bytes_per_s=options.rate))
        for pace in (0.0, *options.pace):
            _take(url, options.epochs, pace)


def _upload(url: str, num_samples: int, images: Path | None) -> None:
    """Write the tars of the corpus, and index them."""
    from mmstream.dataset.index_tars import index_tars
    from mmstream.storage import open_store

    store = open_store(url)
    with tempfile.TemporaryDirectory() as folder:
        write_tars(Path(folder), num_samples, images)
        for path in sorted(Path(folder).iterdir()):
            store.write(path.name, path.read_bytes())
    index_tars(url, progress=False)


def _take(url: str, num_epochs: int, pace: float) -> None:
    """Take some epochs, and print what their batches were waited for."""
    import mmstream as mm

    pipeline = mm.Pipeline(mm.open_dataset(url), global_batch_size=64)
    name = f"at {pace:,.0f} samples/s" if pace else "as fast as they come"
    with closing(mm.Loader(pipeline)) as loader:
        for epoch in range(num_epochs):
            waits, asked = [], time.perf_counter()
            for _ in loader:
                waits.append(1000 * (time.perf_counter() - asked))
                if pace:
                    time.sleep(64 / pace)
                asked = time.perf_counter()
            first, others = waits[:NUM_FIRST], waits[NUM_FIRST:]
            print(
                f"{name}, epoch {epoch}: waited {sum(waits) / 1000:.1f} s; batch 1 {waits[0]:.0f} "
                f"ms, the first {NUM_FIRST} at most {max(first):.0f} ms; others p50 "
                f"{statistics.median(others):.0f} ms, p99 "
                f"{statistics.quantiles(others, n=100)[98]:.0f} ms, most {max(others):.0f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
