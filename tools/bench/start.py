"""Start on object storage with many shards: ``python -m tools.bench.start``.

An S3 server (SeaweedFS) and a proxy that counts requests run on this machine. There are two
corpora:

- plain tars without a manifest, each one an object of five samples of 1 kB. `mmstream index`
  indexes them; then the corpus is opened, and a loader makes its first batch;
- a manifest of many more shards, which hold more samples of other sizes. The proxy has all their
  names lead to one tar. This corpus is opened the same way.

Every measurement is a new process with a cache of its own. Seconds of `index` and `open` leave out
Python's start and the imports. Memory is that of the process and of all its descendants.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from tests.helpers.http_fault_proxy import FaultProxy, Faults, fault_proxy
from tools.bench.process_tree import PeakMemory
from tools.bench.storage.corpus import Bucket
from tools.s3_server import Server, s3_server, without_aws

NUM_WRITERS = 32


def main() -> None:
    """Make both corpora, and print a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tars", type=int, default=10_000, help="plain tars; 0: none")
    parser.add_argument(
        "--named", type=int, default=100_000, help="shards of the manifest; 0: none"
    )
    parser.add_argument("--samples", type=int, default=100, help="of each named shard")
    parser.add_argument("--sample-bytes", type=int, default=100_000, help="of an image there")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds to the first byte")
    parser.add_argument("--workers", type=int, default=2, help="of the loader")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        _run(*options.run)
        return
    with s3_server() as server, fault_proxy(server.endpoint) as proxy:
        own = without_aws(os.environ) | server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        os.environ.clear()
        os.environ.update(own)
        bucket = Bucket(server)
        slow = Faults(latency_s=options.latency)
        if options.tars:
            url = f"s3://{bucket.name}/plain"
            seconds = write_plain(server, "plain", options.tars, tar_of(5, 1000))
            print(f"{options.tars:,} tars were written in {seconds:.1f} s", flush=True)
            proxy.set(slow)
            measure(proxy, "index", url, 0)
            measure(proxy, "open", url, options.workers)
        if options.named:
            proxy.set(Faults())
            url = f"s3://{bucket.name}/named"
            size = write_named(url, options.named, options.samples, options.sample_bytes)
            bucket.add_names("named", ((_name(n), "named/one.tar") for n in range(options.named)))
            proxy.alias(bucket.aliases)
            print(f"a manifest of {options.named:,} shards, {size / 1e6:.1f} MB")
            proxy.set(slow)
            measure(proxy, "open", url, options.workers)


def tar_of(num_samples: int, num_bytes: int) -> bytes:
    """Return a tar of samples with an image's bytes and a caption."""
    from mmstream.tar.writer import TarWriter

    rng, file = random.Random(0), io.BytesIO()
    writer = TarWriter(file)
    for number in range(num_samples):
        image = rng.randbytes(num_bytes)
        writer.add(f"{number:06d}", {"jpg": image, "txt": b"a caption"})
    writer.close()
    return file.getvalue()


def write_plain(server: Server, prefix: str, num_tars: int, tar: bytes) -> float:
    """Write tars without a manifest; return the seconds. The URLs are signed, so that is quick."""
    from botocore.config import Config
    from botocore.session import Session

    started = time.perf_counter()
    client = Session().create_client(
        "s3",
        endpoint_url=server.endpoint,
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
    )

    def write(numbers: range) -> None:
        with closing(
            http.client.HTTPConnection(server.endpoint.removeprefix("http://"))
        ) as connection:
            for number in numbers:
                params = {"Bucket": server.bucket, "Key": f"{prefix}/{_name(number)}"}
                url = client.generate_presigned_url("put_object", Params=params)
                connection.request("PUT", url.removeprefix(server.endpoint), tar)
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    sys.exit(f"a tar was answered by {answer.status}")

    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        list(pool.map(write, (range(n, num_tars, NUM_WRITERS) for n in range(NUM_WRITERS))))
    return time.perf_counter() - started


def write_named(url: str, num_shards: int, num_samples: int, sample_bytes: int) -> int:
    """Write one tar, and a manifest and an index in which it has many names.

    Returns:
        The bytes of the manifest.
    """
    from mmstream.dataset.index import build_index
    from mmstream.dataset.index_part import PartWriter, columns_of
    from mmstream.dataset.manifest import MANIFEST_NAME, Manifest, ShardInfo
    from mmstream.storage import open_store

    store, tar = open_store(url), tar_of(num_samples, sample_bytes)
    store.write("one.tar", tar)
    columns = columns_of(build_index(store, "one.tar"), None)
    with tempfile.TemporaryFile() as file:
        writer = PartWriter(file)
        for _ in range(num_shards):
            writer.add(len(tar), columns)
        part = writer.write(store)
    assert part is not None
    shards = [ShardInfo(_name(number), num_samples, len(tar)) for number in range(num_shards)]
    data = Manifest(tuple(shards), index_parts=(part,)).to_bytes()
    store.write(MANIFEST_NAME, data)
    return len(data)


def _name(number: int) -> str:
    return f"shard-{number:06d}.tar"


def measure(proxy: FaultProxy, kind: str, url: str, num_workers: int) -> None:
    """Run one process, and print what it says, its requests and its memory."""
    proxy.reset_counts()
    command = [sys.executable, "-m", "tools.bench.start", "--run", kind, url, str(num_workers)]
    with tempfile.TemporaryDirectory() as cache:
        variables = {**os.environ, "XDG_CACHE_HOME": cache}
        process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        with process, PeakMemory(process.pid) as memory:
            said, _ = process.communicate()
    if process.returncode:
        sys.exit(f"{kind} ended with {process.returncode}")
    counts = proxy.counts()
    num_data = counts.gets_by_suffix.get("tar", 0)
    values = json.loads(said.splitlines()[-1])
    values |= {
        "requests": counts.num_requests,
        "tars": num_data,
        "others": counts.num_requests - num_data,
        "MB": round(counts.num_bytes / 1e6, 1),
        "peak_MB": round(memory.num_bytes / 1e6),
    }
    print(f"{kind} {url}: {json.dumps(values)}", flush=True)


def _run(kind: str, url: str, num_workers: str) -> None:
    """Do what is measured, in a process of its own."""
    values = _index(url) if kind == "index" else _open(url, int(num_workers))
    print(json.dumps(values))


def _index(url: str) -> dict[str, Any]:
    from mmstream.dataset.index_tars import index_tars

    started = time.perf_counter()
    report = index_tars(url)
    return {"seconds": _seconds(started), "shards": report.num_shards}


def _open(url: str, num_workers: int) -> dict[str, Any]:
    import mmstream as mm

    started = time.perf_counter()
    dataset = mm.open_dataset(url)
    opened_s = _seconds(started)
    settings: dict[str, Any] = {"global_batch_size": 64, "seed": 0, "decode": None}
    loader = mm.Loader(mm.Pipeline(dataset, **settings), num_workers=num_workers)
    next(iter(loader))
    values = {
        "open_s": opened_s,
        "first_batch_s": _seconds(started),
        "shards": len(dataset.manifest.shards),
    }
    loader.close()
    return values


def _seconds(started: float) -> float:
    return round(time.perf_counter() - started, 2)


if __name__ == "__main__":
    main()
