"""Compare what `mmstream bench` predicts with the runs that follow.

    python -m tools.prove.speed_forecast

A corpus of photographs of 110 kB, decoded to 224x224, on local disk (in the page cache), on a real
S3 server, and on the same server behind a proxy with 50 ms to the first byte and 40 MB/s a
connection. Eight tars stand for all shards by name, so windows are those of a corpus that is larger
than they are.

Each round is `mmstream bench` in a new process, then two runs of several hundred steps with the
recommended setting, each in a new process and with the windows of the order:

    free    takes batches as fast as they come. Its speed counts after 40 % of the steps, when
            windows are full. It is compared with the prediction.
    paced   a step takes 1.25 times as long as the forecast says that one must take to not wait. Its
            waits are compared with the time.

The CPU time of a sample is compared, too: other programs change it little. It fails where the
median of a comparison of speeds is off by more than 15 %, or a paced run waits for more than 15 %
of its time. The server and the proxy use the same cores as the loader. Other programs on the
machine do, too: run it on a quiet one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mmstream as mm
from tests.helpers.http_fault_proxy import FaultProxy, Faults, fault_proxy
from tools.bench.loader_report import print_machine
from tools.bench.peers.runners.stored_mmstream import prepare
from tools.bench.storage.corpus import Bucket, write_tars
from tools.s3_server import Server, s3_server

BATCH_SIZE, IMAGE_SIZE = 64, 224

LATE = 0.4
"""Share of the steps of a run before the part that counts."""

MOST_OFF = 0.15
"""Of the prediction, and of the time that a paced run waits."""

PACE = 1.25
"""Length of a step of a paced run, in steps that do not wait."""

LINKS = {
    "local": None,
    "S3": Faults(),
    "S3 at 50 ms": Faults(latency_s=0.05, bytes_per_s=40e6),
}


@dataclass(frozen=True)
class Comparison:
    """A prediction, and the two runs after it."""

    num_workers: int
    num_threads: int
    limit: str
    predicted: float
    """Samples a second."""
    free: float
    """Samples a second of the free run."""
    predicted_cpu_s: float
    """CPU seconds of a sample, all processes of the loader, as `mmstream bench` had it."""
    free_cpu_s: float
    """The same of the free run."""
    waiting: float
    """Share of its time that the paced run has waited."""

    @property
    def ratio(self) -> float:
        """Of the run to the prediction."""
        return self.free / self.predicted

    @property
    def cpu_ratio(self) -> float:
        """Of the CPU time of a sample. Other programs of the machine change it little."""
        return self.free_cpu_s / self.predicted_cpu_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare on each link, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", action="append", choices=LINKS, help="repeat; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each `mmstream bench`")
    parser.add_argument("--steps", type=int, default=400, help="of each run")
    parser.add_argument("--shards", type=int, default=200, help="names of the corpus")
    parser.add_argument("--samples", type=int, default=250, help="of each shard")
    parser.add_argument("--images", type=Path, help="a folder of JPEGs; default: the demo's")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        print(json.dumps(run(**json.loads(options.run))))
        return 0
    print_machine()
    links = options.link or list(LINKS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Path(folder, "tars").mkdir()
        sample_bytes = write_tars(folder / "tars", options.samples, options.images)
        Path(folder, "corpus").mkdir()
        aliases = prepare(str(folder / "tars"), str(folder / "corpus"), options.shards)
        print(f"{options.shards} shards of {options.samples} samples of {sample_bytes:,} bytes")
        with s3_server() as server, fault_proxy(server.endpoint) as proxy:
            if set(links) - {"local"}:
                upload(server, proxy, folder, aliases)
            compared: dict[str, list[Comparison]] = {link: [] for link in links}
            for number in range(options.rounds):
                for link in links:
                    url, variables = target(link, server, proxy, folder, aliases)
                    one = compare(url, variables, options.seconds, options.steps)
                    compared[link].append(one)
                    print(f"round {number + 1}, {link}: {asdict(one)}", file=sys.stderr)
    print_table(compared)
    return 0 if all(map(holds, compared.values())) else 1


def upload(server: Server, proxy: FaultProxy, folder: Path, aliases: dict[str, str]) -> None:
    """Put the corpus on the server: the tars once, and their names at the proxy."""
    bucket = Bucket(server)
    bucket.upload(folder / "tars", "tars")
    bucket.upload(folder / "corpus", "corpus")
    bucket.add_names("corpus", ((name, f"tars/{tar}") for name, tar in aliases.items()))
    proxy.hold()
    proxy.alias(bucket.aliases)


def target(
    link: str, server: Server, proxy: FaultProxy, folder: Path, aliases: dict[str, str]
) -> tuple[str, dict[str, str]]:
    """Return the URL of the corpus on a link, and the variables that lead there."""
    faults = LINKS[link]
    if faults is not None:
        proxy.set(faults)
        return f"s3://{server.bucket}/corpus", {**server.env, "AWS_ENDPOINT_URL": proxy.endpoint}
    local = folder / "local"
    if not local.exists():
        local.mkdir()
        for path in (folder / "corpus").iterdir():
            os.link(path, local / path.name)
        for name, tar in aliases.items():
            os.link(folder / "tars" / tar, local / name)
    return str(local), {}


def compare(url: str, variables: dict[str, str], seconds: float, num_steps: int) -> Comparison:
    """Predict, run twice, and return what came."""
    words = ["bench", url, "--image-size", IMAGE_SIZE, "--global-batch-size", BATCH_SIZE]
    forecast = called(["mmstream", *words, "--seconds", seconds, "--json"], variables)
    chosen = forecast["chosen"]
    settings = {
        "url": url,
        "num_workers": chosen["num_workers"],
        "num_threads": chosen["num_threads"],
        "num_steps": num_steps,
    }
    predicted = forecast["samples_per_s"]
    module = "tools.prove.speed_forecast"
    free = called([module, "--run", json.dumps(settings)], variables)
    settings["step_s"] = PACE * BATCH_SIZE / predicted
    paced = called([module, "--run", json.dumps(settings)], variables)
    return Comparison(
        chosen["num_workers"],
        chosen["num_threads"],
        chosen["limit"],
        predicted,
        free["samples_per_s"],
        sum(chosen[name] for name in ("main_cores", "worker_cores", "reader_cores")) / predicted,
        free["cpu_s"],
        paced["waiting"],
    )


def called(words: Sequence[object], variables: dict[str, str]) -> Any:
    """Run a module in a new process; return the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{words[0]}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(
    url: str, num_workers: int, num_threads: int, num_steps: int, step_s: float = 0.0
) -> dict[str, float]:
    """Take the batches of some steps; return speed, CPU time and share of waiting, late in the run.

    Args:
        url: the corpus.
        num_workers: of the loader.
        num_threads: of each worker.
        num_steps: how many steps.
        step_s: seconds that a step takes after its batch has come.
    """
    pipeline = mm.Pipeline(
        mm.open_dataset(url),
        global_batch_size=BATCH_SIZE,
        decode=mm.Decode(image=mm.ImageDecoder(size=IMAGE_SIZE)),
    )
    loader = mm.Loader(pipeline, num_workers=num_workers, num_threads=num_threads)
    begin = int(LATE * num_steps)
    num_done = 0
    began, waited_s, num_samples, cpu_s = time.perf_counter(), 0.0, 0, 0.0
    try:
        while num_done < num_steps:
            for _ in loader:
                num_done += 1
                time.sleep(step_s)
                if num_done == begin:
                    began, waited_s = time.perf_counter(), loader.stats.wait_s
                    num_samples = loader.stats.num_samples
                    cpu_s = sum(loader.cpu_seconds().values())
                if num_done == num_steps:
                    break
        seconds = time.perf_counter() - began
        num_samples = loader.stats.num_samples - num_samples
        return {
            "samples_per_s": num_samples / seconds,
            "cpu_s": (sum(loader.cpu_seconds().values()) - cpu_s) / num_samples,
            "waiting": (loader.stats.wait_s - waited_s) / seconds,
        }
    finally:
        loader.close()


def holds(compared: Sequence[Comparison]) -> bool:
    """Tell whether the medians of the comparisons of a link are near enough."""
    off = abs(statistics.median(one.ratio for one in compared) - 1)
    return off <= MOST_OFF and statistics.median(one.waiting for one in compared) <= MOST_OFF


def print_table(compared: dict[str, list[Comparison]]) -> None:
    """Print a line for each link: medians, and the range of ratios."""
    heads = "predicted, samples/s", "run, samples/s", "run to prediction", "CPU time of a sample"
    print(f"\n| | {' | '.join(heads)} | paced run waits | |")
    print("|---|---|---|---|---|---|---|")
    for link, each in compared.items():
        ratios = sorted(one.ratio for one in each)
        predicted, free, cpu_ratio, waiting = (
            statistics.median(getattr(one, name) for one in each)
            for name in ("predicted", "free", "cpu_ratio", "waiting")
        )
        print(
            f"| {link}, limit: {each[-1].limit} | {predicted:,.0f} | {free:,.0f} | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) | "
            f"{cpu_ratio:.2f} | {waiting:.1%} | {'holds' if holds(each) else 'FAILS'} |"
        )


if __name__ == "__main__":
    sys.exit(main())
