"""A server that is away in mid-run changes no batch: ``python -m tools.prove.server_away``.

A real S3 server (SeaweedFS) runs on this machine, behind a proxy. A loop takes all batches of some
epochs. Then another loop does so, and for a minute of it no server answers. Both must get the same
batches. It prints the longest wait, and ends with 1 where a batch differs.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import threading
import time
from contextlib import closing
from itertools import zip_longest
from pathlib import Path

from tests.helpers.http_fault_proxy import FaultProxy, Faults
from tools.bench.corpus import write_corpus
from tools.bench.storage import behind_proxy


def main() -> None:
    """Write the corpus, and compare the two runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--away", type=float, default=60.0, help="seconds without a server")
    parser.add_argument("--samples", type=int, default=2000, help="of each of the 8 shards")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    with behind_proxy() as (server, proxy):
        url = f"s3://{server.bucket}/corpus"
        _upload(url, options.samples)
        proxy.set(Faults(latency_s=0.05, bytes_per_s=40e6))
        expected, usual_s = _take(url, options.epochs)
        batches, longest_s = _take(url, options.epochs, proxy, options.away)
    num_equal = sum(one == other for one, other in zip_longest(batches, expected))
    print(
        f"{num_equal} of {len(expected)} batches are equal; the longest wait was {usual_s:.1f} s "
        f"with the server there, and {longest_s:.1f} s where it was away for {options.away:.0f} s"
    )
    sys.exit(num_equal < len(expected) or len(batches) != len(expected))


def _upload(url: str, num_samples: int) -> None:
    """Write the tars of the corpus, and index them with checksums."""
    from mmstream.dataset.index_tars import index_tars
    from mmstream.storage import open_store

    store = open_store(url)
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder), 8 * num_samples, num_samples)
        for path in sorted(Path(folder).glob("*.tar")):
            store.write(path.name, path.read_bytes())
    index_tars(url, checksums=True, progress=False)


def _take(
    url: str, num_epochs: int, proxy: FaultProxy | None = None, away_s: float = 0.0
) -> tuple[list[str], float]:
    """Return the hash of each batch, and the longest wait for one, in seconds.

    Args:
        url: the dataset.
        num_epochs: how many are taken.
        proxy: goes away after 40 batches. None: it stays.
        away_s: comes back after this time.
    """
    import mmstream as mm

    pipeline = mm.Pipeline(mm.open_dataset(url), global_batch_size=64, seed=3)
    hashes, longest_s, back = list[str](), 0.0, None
    with closing(mm.Loader(pipeline)) as loader:
        for _ in range(num_epochs):
            asked = time.monotonic()
            for batch in loader:
                longest_s = max(longest_s, time.monotonic() - asked)
                content = b"".join([*map(str.encode, batch["__key__"]), *batch["jpg"]])
                hashes.append(hashlib.sha256(content).hexdigest())
                if proxy is not None and len(hashes) == 40:
                    proxy.go_away()
                    back = threading.Timer(away_s, proxy.come_back)
                    back.start()
                asked = time.monotonic()
    if back is not None:
        back.join()
    return hashes, longest_s


if __name__ == "__main__":
    main()
