"""The same run on 1, 8 and 64 ranks from S3: ``python -m tools.bench.ranks``.

Eight ranks begin an epoch and save their state in it. Then the same state is resumed on 1, 8 and 64
ranks, each of which is a process with a reader process of its own. All read the same tars from one
S3 server behind a proxy. The table says whether the global batches were equal, sample by sample,
and what the ranks asked the store for and held.

The scale is small: samples of 20 kB, windows of 256 MiB over all ranks, and 128 MiB over all ranks
that are read ahead at most. Otherwise most of a short run would be windows that fill. More than 8
ranks run 8 at a time, one group after the other, because their processes need memory too.

Columns:

    equal           steps whose rows are those of the first run, on all ranks together
    first           seconds to the first batch of the slowest rank, with the start of its reader
    GET/GB          requests for shards per 10^9 bytes that were sent, while all ranks read
    samples/GET     samples of such a request
    read/used       bytes that were sent to those of delivered samples, in the same time
    bound           MB of samples that the fullest rank may hold, by its plan: the ranges between
                    their first use and two steps after their last one, and what is read ahead
    held            MB of samples that the fullest rank held, each page once: the pages of its
                    `SampleMemory` that were ever used. Gaps between ranges are among them
    rank            MB of the largest rank, both processes with all that they share
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tests.helpers.held_bytes import most_held_bytes
from tests.helpers.http_fault_proxy import Counts, FaultProxy, Faults, fault_proxy
from tools.bench.loader_report import print_machine
from tools.bench.peers.environments import ROOT, process_variables
from tools.bench.process_tree import own_pss_bytes, tree
from tools.bench.storage.corpus import NUM_TARS, Bucket
from tools.bench.storage.runs import copy_with_defaults
from tools.s3_server import s3_server

COLUMNS = (
    "ranks",
    "equal",
    "first",
    "GET/GB",
    "samples/GET",
    "read/used",
    "bound",
    "held",
    "rank",
)

GROUP = 8
"""Ranks that run at the same time."""

SAMPLE_MEMORY = "memfd:mmstream-samples"

STEADY = 0.4
"""Requests are counted after this share of the steps: then windows are full."""


@dataclass(frozen=True)
class Settings:
    """Settings of the tool."""

    url: str = ""
    num_shards: int = 200
    samples_per_shard: int = 2000
    sample_bytes: int = 20_000
    global_batch_size: int = 256
    window_bytes: int = 256 << 20
    ahead_bytes: int = 128 << 20
    first_steps: int = 40
    """Before the state."""
    steps: int = 300
    """After it."""

    def ahead_of(self, world_size: int) -> int:
        """Return the bytes that each of so many ranks reads ahead at most."""
        return self.ahead_bytes // world_size


def main() -> None:
    """Run all numbers of ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=Settings.steps, help="after the state")
    parser.add_argument("--latency-ms", type=float, default=50)
    parser.add_argument("--mb-per-s", type=float, default=40, help="of a connection")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.group:
        _run_group(json.loads(options.group))
        return
    print_machine()
    faults = Faults(latency_s=options.latency_ms / 1000, bytes_per_s=options.mb_per_s * 1e6)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        s3_server() as server,
        fault_proxy(server.endpoint) as proxy,
    ):
        bucket = Bucket(server)
        settings = Settings(f"s3://{bucket.name}/corpus", steps=options.steps)
        _upload(Path(folder), bucket, proxy, settings)
        proxy.set(faults)
        variables = {**process_variables(), **server.env, "AWS_ENDPOINT_URL": proxy.endpoint}
        bench = _Bench(Path(folder), proxy, settings, variables)
        order = bench.order()
        print(
            f"{settings.num_shards} shards of {settings.samples_per_shard} samples of "
            f"{settings.sample_bytes:,} bytes, batches of {settings.global_batch_size} rows, "
            f"{options.latency_ms:g} ms, {options.mb_per_s:g} MB/s a connection; {order}\n"
        )
        print(f"| {' | '.join(COLUMNS)} |\n|{'---:|' * len(COLUMNS)}")
        whole = bench.run(GROUP, None, settings.first_steps + settings.steps)
        state = whole.state
        expected = whole.steps[settings.first_steps :]
        for world_size in options.ranks:
            run = bench.run(world_size, state, settings.steps)
            num_equal = sum(a == b for a, b in zip(run.steps, expected, strict=True))
            print(f"| {world_size} | {num_equal} of {settings.steps} | {run.line} |", flush=True)


def _upload(folder: Path, bucket: Bucket, proxy: FaultProxy, settings: Settings) -> None:
    """Write eight tars, and index as many names as the corpus has shards."""
    from mmstream.dataset.index_tars import index_tars
    from mmstream.tar.writer import TarWriter

    tars, corpus = folder / "tars", folder / "corpus"
    tars.mkdir()
    corpus.mkdir()
    for number in range(NUM_TARS):
        draw = random.Random(number)
        with (tars / f"tar-{number}.tar").open("wb") as file:
            writer = TarWriter(file)
            for sample in range(settings.samples_per_shard):
                data = draw.randbytes(settings.sample_bytes - 1024)
                writer.add(f"{number}-{sample:06d}", {"bin": data})
            writer.close()
    names = {f"shard-{n:06d}.tar": f"tar-{n % NUM_TARS}.tar" for n in range(settings.num_shards)}
    for name, tar in names.items():
        os.link(tars / tar, corpus / name)
    index_tars(corpus, progress=False)
    for name in names:
        (corpus / name).unlink()
    bucket.upload(tars, "tars")
    bucket.upload(corpus, "corpus")
    bucket.add_names("corpus", ((name, f"tars/{tar}") for name, tar in names.items()))
    proxy.alias(bucket.aliases)
    proxy.hold()


@dataclass
class _Run:
    """What a number of ranks did."""

    steps: list[list[int]]
    """For each step a number of each row: of its shard, its index and its bytes."""
    line: str
    state: dict[str, Any]


class _Bench:
    def __init__(
        self, folder: Path, proxy: FaultProxy, settings: Settings, variables: dict[str, str]
    ) -> None:
        self._folder, self._proxy = folder, proxy
        self._settings, self._variables = settings, variables
        self._identity = self._call(1, [], None, 0)[0]["identity"]

    def order(self) -> str:
        """Return the identity of the order, in words."""
        names = ("grid", "window", "interleave", "chunk")
        return ", ".join(f"{name} {self._identity[name]}" for name in names)

    def run(self, world_size: int, state: dict[str, Any] | None, num_steps: int) -> _Run:
        """Run all ranks, group after group."""
        settings = self._settings
        ranks: list[dict[str, Any]] = []
        num_gets = num_bytes = used = 0
        for first in range(0, world_size, GROUP):
            group = list(range(first, min(first + GROUP, world_size)))
            results, moments = self._watched(world_size, group, state, num_steps)
            ranks += results
            begin = max(result["moments"][int(STEADY * num_steps)] for result in results)
            end = min(result["moments"][-1] for result in results)
            spans = [entry for entry in moments if begin <= entry[0] <= end]
            if len(spans) < 2:
                continue
            (start, before), (stop, after) = spans[0], spans[-1]
            num_gets += after.gets_by_suffix["tar"] - before.gets_by_suffix["tar"]
            num_bytes += after.bytes_by_suffix["tar"] - before.bytes_by_suffix["tar"]
            for result in results:
                taken = sum(start < moment <= stop for moment in result["moments"])
                used += taken * len(result["rows"][0]) * settings.sample_bytes
        steps = [list(chain(*(rank["rows"][n] for rank in ranks))) for n in range(num_steps)]
        cells = [
            f"{max(rank['first_s'] for rank in ranks):.2f}",
            f"{num_gets / (num_bytes / 1e9):,.0f}" if num_bytes else "",
            f"{num_bytes / settings.sample_bytes / num_gets:.1f}" if num_gets else "",
            f"{num_bytes / used:.2f}" if used else "",
            f"{max(rank['bound_bytes'] for rank in ranks) / 1e6:,.0f}",
            f"{max(rank['held_bytes'] for rank in ranks) / 1e6:,.0f}",
            f"{max(rank['rank_bytes'] for rank in ranks) / 1e6:,.0f}",
        ]
        return _Run(steps, " | ".join(cells), ranks[0]["state"])

    def _watched(
        self, world_size: int, group: list[int], state: dict[str, Any] | None, num_steps: int
    ) -> tuple[list[dict[str, Any]], list[tuple[float, Counts]]]:
        self._proxy.reset_counts()
        moments: list[tuple[float, Counts]] = []
        results = self._call(world_size, group, state, num_steps, moments)
        return results, moments

    def _call(
        self,
        world_size: int,
        group: list[int],
        state: dict[str, Any] | None,
        num_steps: int,
        moments: list[tuple[float, Counts]] | None = None,
    ) -> list[dict[str, Any]]:
        """Run some of the ranks in a process that starts them."""
        settings = self._settings
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            ahead: float = settings.ahead_of(world_size)
            limits = {"HORIZON_BYTES": ahead, "LEAST_HORIZON_BYTES": ahead}
            copy_with_defaults(
                ROOT / "mmstream", Path(scratch, "mmstream"), {"reading/rank_reader.py": limits}
            )
            words = {
                "settings": asdict(settings),
                "world_size": world_size,
                "group": group,
                "state": state,
                "num_steps": num_steps,
                "folder": scratch,
            }
            paths = os.pathsep.join([scratch, self._variables["PYTHONPATH"]])
            process = subprocess.Popen(
                [sys.executable, "-m", "tools.bench.ranks", "--group", json.dumps(words)],
                env={**self._variables, "PYTHONPATH": paths, "TMPDIR": scratch},
                cwd=scratch,
            )
            while process.poll() is None:
                time.sleep(0.1)
                if moments is not None:
                    moments.append((time.monotonic(), self._proxy.counts()))
            if process.returncode:
                raise SystemExit(f"the ranks {group} of {world_size} ended with an error")
            paths_of_results = [Path(scratch, f"rank-{rank}.json") for rank in group or [0]]
            return [json.loads(path.read_text()) for path in paths_of_results]


def _run_group(words: dict[str, Any]) -> None:
    """Fork the ranks of a group, and wait for them."""
    import mmstream as mm

    settings = Settings(**words["settings"])
    os.environ["LOCAL_WORLD_SIZE"] = str(words["world_size"])
    if not words["group"]:
        result = {"identity": _pipeline(settings).order.identity()}
        Path(words["folder"], "rank-0.json").write_text(json.dumps(result))
        return
    assert mm.Loader is not None  # imported once, before the ranks are forked
    context = multiprocessing.get_context("fork")
    together = context.Barrier(len(words["group"]))
    ranks = [
        context.Process(target=_run_rank, args=(settings, words, rank, together))
        for rank in words["group"]
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        sys.exit(1)


def _pipeline(settings: Settings) -> Any:
    import mmstream as mm

    return mm.Pipeline(
        mm.open_dataset(settings.url),
        global_batch_size=settings.global_batch_size,
        window_bytes=settings.window_bytes,
    )


def _run_rank(settings: Settings, words: dict[str, Any], rank: int, together: Any) -> None:
    """Take the steps of one rank, as fast as the others of its group, and write what came."""
    import mmstream as mm

    loader = mm.Loader(_pipeline(settings), world=mm.World(rank, words["world_size"]))
    if words["state"] is not None:
        loader.load_state_dict(words["state"])
    started = time.monotonic()
    rows, moments = [], []
    state: dict[str, Any] = {}
    for batch in islice(loader, words["num_steps"]):
        moments.append(time.monotonic())
        pairs = zip(batch["__lineage__"].planned, batch["bin"], strict=True)
        rows.append([zlib.crc32(data, zlib.crc32(str(tuple(ref)).encode())) for ref, data in pairs])
        if len(rows) == settings.first_steps:
            state = loader.state_dict()
        together.wait()
    own, *others = tree(os.getpid())
    result = {
        "first_s": moments[0] - started,
        "moments": moments,
        "rows": rows,
        "state": state,
        "held_bytes": sum(map(_sample_memory_bytes, others)),
        "rank_bytes": sum(map(own_pss_bytes, [own, *others])),
        "bound_bytes": _bound_bytes(settings, words, rank),
    }
    Path(words["folder"], f"rank-{rank}.json").write_text(json.dumps(result))
    os._exit(0)


def _bound_bytes(settings: Settings, words: dict[str, Any], rank: int) -> int:
    """Return the bytes of samples that a rank may hold, by its plan."""
    from mmstream.reading.plan import RankPlan

    pipeline = _pipeline(settings)
    dataset, order, world_size = pipeline.dataset, pipeline.order, words["world_size"]
    num_rows = settings.global_batch_size // world_size
    state = words["state"] or {"epoch": 0, "step": 0}
    plan = RankPlan(
        order,
        (rank * num_rows, (rank + 1) * num_rows),
        state["epoch"] * order.steps_per_epoch + state["step"],
        bounds=dataset.bounds,
        access=lambda _: dataset.store.access,
    )
    return most_held_bytes(plan, words["num_steps"], settings.ahead_of(world_size))


def _sample_memory_bytes(pid: int) -> int:
    """Return the bytes of all pages of the `SampleMemory` of a reader process."""
    links = [link for link in Path(f"/proc/{pid}/fd").iterdir() if SAMPLE_MEMORY in _target(link)]
    files = {status.st_ino: status.st_blocks * 512 for status in map(Path.stat, links)}
    return sum(files.values())  # a map has a descriptor of its own, of the same file


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:  # closed since
        return ""


if __name__ == "__main__":
    main()
