"""Raw samples from S3, behind slow and faulty links: ``python -m tools.bench storage``.

A real S3 server (SeaweedFS) runs on this machine. A proxy before it delays the first byte, limits
the rate of each connection, and breaks answers. Every measurement is a new process, rounds are
interleaved, and the tables have medians. ``--checkout DIR`` measures another version beside this.

Eight tars stand for 1,000 by name: the proxy gives each of them many names. Orders, windows and
ranges are those of the large corpus, because only names and the manifest decide them. The server
and the proxy use the same cores as the loader. Columns:

    late            samples a second after 40 % of the run, when windows are full
    @1, @100        seconds until that batch came
    p99             of the wait for a batch, late in the run
    CPU s/GB        of all processes of the loader, per 10^9 bytes of late samples
    GET/GB          requests per 10^9 bytes that were sent
    faults          answers that the proxy broke or slowed down
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from tests.helpers.http_fault_proxy import FaultProxy, Faults, fault_proxy
from tools.bench.corpus import write_corpus
from tools.s3_server import Server, s3_server, without_aws

ROOT = Path(__file__).resolve().parents[2]
NUM_TARS, NUM_SHARDS, SHARD_SAMPLES, BATCH_SIZE = 8, 1000, 500, 64
LATE = 0.4
NEAR = Faults(latency_s=0.05, bytes_per_s=40e6)

SCENARIOS = {
    "direct": Faults(),
    "50/40": NEAR,
    "200/10": Faults(latency_s=0.2, bytes_per_s=10e6),
    "tail": replace(NEAR, tail=0.02),
    "faults": replace(NEAR, reset=0.02, truncate=0.015, busy=0.015, retry_after_s=1),
    "mute": replace(NEAR, mute=0.005),
    "stall": replace(NEAR, stall=0.005, dribble=0.005),
}
"""Milliseconds to the first byte, and MB/s of a connection. The last four are 50/40 with faults:
2 % of the answers 20 times slower; 5 % fail; 0.5 % never come; 1 % stop in the middle."""


def compare(
    scenarios: list[str] | None, num_rounds: int, seconds: float, checkouts: list[Path]
) -> None:
    """Print a table of the scenarios.

    Args:
        scenarios: Names. None: all.
        num_rounds: Runs of each version in each scenario.
        seconds: Of each run.
        checkouts: Other versions of mmstream.
    """
    print("\n| | late samples/s (min-max) | @1 | @100 | p99, ms | CPU s/GB | GET/GB | faults |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    with behind_proxy() as (server, proxy), tempfile.TemporaryDirectory() as folder:
        url = fill_bucket(server, proxy, Path(folder), NUM_SHARDS, SHARD_SAMPLES)
        for name in scenarios or SCENARIOS:
            runs: dict[Path, list[dict[str, float]]] = {root: [] for root in [ROOT, *checkouts]}
            for _ in range(num_rounds):
                for root, own in runs.items():
                    proxy.set(SCENARIOS[name])
                    proxy.reset_counts()
                    own.append(called(root, url, seconds))
                    counts = proxy.counts()
                    own[-1]["GET/GB"] = counts.num_gets / counts.num_bytes * 1e9
                    own[-1]["faults"] = sum(counts.faults.values())
            for root, own in runs.items():
                print(f"| {name}{'' if root == ROOT else f', {root.name}'} | {cells_of(own)} |")


@contextmanager
def behind_proxy() -> Iterator[tuple[Server, FaultProxy]]:
    """Start a server and a proxy before it, for this process and those that it starts."""
    with s3_server() as server, fault_proxy(server.endpoint) as proxy:
        own = without_aws(os.environ) | server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        with patch.dict(os.environ, own, clear=True):
            yield server, proxy


def fill_bucket(
    server: Server, proxy: FaultProxy, folder: Path, num_shards: int, shard_samples: int
) -> str:
    """Upload the index of a corpus that has each of eight tars many times.

    Returns:
        The URL of the corpus. The proxy sends the tars from the folder.
    """
    from mmstream.dataset.index_tars import index_tars
    from mmstream.storage import open_store

    write_corpus(folder, NUM_TARS * shard_samples, shard_samples)
    tars = sorted(folder.glob("*.tar"))
    corpus = folder / "corpus"
    corpus.mkdir()
    names = {f"shard-{number:06d}.tar": tars[number % NUM_TARS] for number in range(num_shards)}
    for name, tar in names.items():
        os.link(tar, corpus / name)
    index_tars(corpus, progress=False)
    for name in names:
        (corpus / name).unlink()
    url = f"s3://{server.bucket}/corpus"
    store = open_store(url)
    for path in corpus.iterdir():
        store.write(path.name, path.read_bytes())
    proxy.serve_files({f"{server.bucket}/corpus/{name}": tar for name, tar in names.items()})
    return url


def called(root: Path, url: str, seconds: float) -> dict[str, float]:
    """Run `take` in a new process, with the package of a checkout and the tools of this one."""
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "mmstream").symlink_to(root.resolve() / "mmstream")
        done = subprocess.run(
            [sys.executable, "-m", "tools.bench.storage", url, str(seconds)],
            env=os.environ | {"PYTHONPATH": f"{scratch}{os.pathsep}{ROOT}"},
            cwd=scratch,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{root}: {url} failed:\n{done.stderr[-3000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def take(url: str, seconds: float) -> dict[str, float]:
    """Take batches for some seconds, epoch after epoch, and return the figures of the run."""
    import mmstream as mm

    pipeline = mm.Pipeline(mm.open_dataset(url), global_batch_size=BATCH_SIZE)
    arrivals: list[float] = []
    late_waits: list[float] = []
    late_bytes, late_cpu_s = 0, 0.0
    with closing(mm.Loader(pipeline)) as loader:
        begin = time.monotonic()
        asked = 0.0
        while asked < seconds:
            for batch in loader:
                now = time.monotonic() - begin
                arrivals.append(now)
                if now > LATE * seconds:
                    late_cpu_s = late_cpu_s or -sum(loader.cpu_seconds().values())
                    late_waits.append(now - asked)
                    late_bytes += sum(map(len, batch["jpg"]))
                asked = time.monotonic() - begin
                if asked >= seconds:
                    break
        late_cpu_s += sum(loader.cpu_seconds().values())
    late = [moment for moment in arrivals if moment > LATE * seconds]
    return {
        "late": (len(late) - 1) * BATCH_SIZE / (late[-1] - late[0]),
        "@1": arrivals[0],
        "@100": arrivals[99] if len(arrivals) > 99 else math.inf,
        "p99": 1000 * sorted(late_waits)[int(0.99 * len(late_waits))],
        "CPU s/GB": late_cpu_s / late_bytes * 1e9,
    }


def cells_of(runs: list[dict[str, float]]) -> str:
    """Return the cells of a version in a scenario."""
    late = [run["late"] for run in runs]
    median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return (
        f"{median['late']:,.0f} ({min(late):,.0f}-{max(late):,.0f}) | {median['@1']:.1f} "
        f"| {median['@100']:.1f} | {median['p99']:.0f} | {median['CPU s/GB']:.2f} "
        f"| {median['GET/GB']:,.0f} | {median['faults']:.0f}"
    )


if __name__ == "__main__":
    print(json.dumps(take(sys.argv[1], float(sys.argv[2]))))
