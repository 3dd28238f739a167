"""What a planned order costs while it trains: ``python -m tools.bench.packing_steps reads``.

``reads``      a plan of many synthetic units is opened by 8 ranks of 8 workers, which ask for the
               samples of their steps as readers do, with rows dealt to the ranks. It prints the
               time to the first step, the time a step takes, and the memory of all processes. With
               ``--s3`` the plan lies on a real S3 server, and its requests are counted.
``intervals``  two loaders over the same texts, one with packs and one with single samples without
               padding, are read in turn by a consumer that rests after each batch, as a training
               step on a GPU does. It prints the quantiles of the time between batches.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import tarfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import mmstream as mm
from mmstream.dataset.manifest import ShardInfo
from mmstream.order.corpus import Corpus
from mmstream.packing.deal import deal
from mmstream.packing.measure_file import Measure
from mmstream.packing.order import PackOrder
from mmstream.packing.plan import PackPlan
from mmstream.packing.plan_file import open_plan, write_plan
from mmstream.packing.planner import make_plan
from mmstream.packing.settings import PackLimits
from mmstream.processes import pss_bytes
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.http_fault_proxy import fault_proxy
from tools.s3_server import s3_server

RANKS, WORKERS, PACKS_A_RANK = 8, 8, 8
UNITS_A_GROUP = 1000
MAX_TOKENS = 8192
COST = mm.Cost(tokens=1, squared_tokens=2e-5)


# -- reads ----------------------------------------------------------------------------------------


def synthetic_plan(num_units: int, samples_a_unit: int) -> PackPlan:
    """Return a plan of units of so many samples each, in groups of one shard."""
    num_groups = num_units // UNITS_A_GROUP
    num_units = num_groups * UNITS_A_GROUP
    of_shard = UNITS_A_GROUP * samples_a_unit
    shards = tuple(
        ShardInfo(f"{number:07d}.tar", of_shard, of_shard * 20_000) for number in range(num_groups)
    )
    members = np.arange(num_units * samples_a_unit, dtype=np.int64)
    random = np.random.Generator(np.random.Philox(1))
    tokens = random.integers(64, MAX_TOKENS // samples_a_unit, members.size, dtype=np.int32)
    rows = np.zeros((num_units, 8), dtype=np.int64)
    rows[:, 0] = members[::samples_a_unit]
    of_units = tokens.reshape(num_units, samples_a_unit)
    rows[:, 1] = of_units.sum(axis=1)
    rows[:, 2] = np.einsum("ij,ij->i", of_units, of_units, dtype=np.int64)
    rows[:, 3], rows[:, 7] = rows[:, 1] - samples_a_unit, samples_a_unit
    return PackPlan(
        settings=PackLimits(MAX_TOKENS),
        digest="synthetic",
        spread=1,
        shards=shards,
        group_stops=np.arange(1, num_groups + 1, dtype=np.int64),
        counts=np.full(num_groups, UNITS_A_GROUP, dtype=np.int64),
        group_digests=tuple(f"{number:032x}" for number in range(num_groups)),
        unit_rows=rows,
        members=members,
        member_tokens=tokens,
        left_out=np.zeros((0, 3), dtype=np.int64),
    )


class _Children:
    """Processes that each answer with one line of JSON, and then wait until they are weighed."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self._reading, self._writing = os.pipe()
        self._hold, self._release = os.pipe()

    def start(self, work: Callable[[], dict[str, Any]]) -> None:
        """Start a process that does the work."""
        child = os.fork()
        if child:
            self.pids.append(child)
            return
        status = 1
        try:
            os.close(self._release)
            os.write(self._writing, json.dumps(work()).encode() + b"\n")
            os.read(self._hold, 1)  # it ends when the parent closes its end
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)

    def answers(self) -> list[dict[str, Any]]:
        """Return the answers of all processes."""
        os.close(self._writing)
        with os.fdopen(self._reading) as file:
            lines = [file.readline() for _ in self.pids]
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """Let all processes end."""
        os.close(self._release)
        for pid in self.pids:
            os.waitpid(pid, 0)


def run_rank(url: str, rank: int, num_steps: int, started: float) -> dict[str, Any]:
    """Open and check a plan, as the main process of a rank does, and let workers use it."""
    plan = open_plan(url)
    opened_s = time.perf_counter() - started
    workers = _Children()
    for worker in range(WORKERS):
        workers.start(partial(run_worker, plan, rank, worker, num_steps, started))
    return {"opened_s": opened_s, "workers": workers.answers(), "pids": workers.pids}


def run_worker(
    opened: PackPlan, rank: int, worker: int, num_steps: int, started: float
) -> dict[str, Any]:
    """Ask for the samples of the steps of a worker, and answer how long they took.

    As a worker of a loader does, it opens the plan that the main process has opened and checked.
    """
    begun = time.perf_counter()
    plan = pickle.loads(pickle.dumps(opened))
    counts = [shard.num_samples for shard in plan.shards]
    corpus = Corpus(np.array(counts), [shard.name for shard in plan.shards])
    rows = RANKS * PACKS_A_RANK
    order = PackOrder.from_plan(plan, corpus, global_batch_size=rows)
    dealt = order.with_ranks(RANKS, partial(deal, among=None), COST.modelled)
    opened_s = time.perf_counter() - begun
    cpu_s, first_s = [], 0.0
    for step in range(worker, num_steps, WORKERS):
        before = time.process_time()
        dealt.refs(0, step, (rank * PACKS_A_RANK, (rank + 1) * PACKS_A_RANK))
        cpu_s.append(time.process_time() - before)
        first_s = first_s or time.perf_counter() - started
    return {"opened_s": opened_s, "cpu_s": cpu_s, "first_s": first_s}


def reads(num_units: int, samples_a_unit: int, num_steps: int, on_s3: bool) -> None:
    """Print what 64 processes take of a plan."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        os.environ["XDG_CACHE_HOME"] = folder
        url, proxy = str(Path(folder, "plan")), None
        if on_s3:
            server = stack.enter_context(s3_server())
            proxy = stack.enter_context(fault_proxy(server.endpoint))
            os.environ |= server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
            url = f"s3://{server.bucket}/plan"
        writer = _Children()  # a process of its own, whose memory is free afterwards

        def write() -> dict[str, Any]:
            plan = write_plan(synthetic_plan(num_units, samples_a_unit), url)
            names = ("unit_rows", "members", "member_tokens")
            return {"bytes": sum(getattr(plan, name).nbytes for name in names)}

        writer.start(write)
        (written,) = writer.answers()
        writer.end()
        print(
            f"{num_units:,} units, {num_units * samples_a_unit:,} samples, "
            f"{num_units // UNITS_A_GROUP:,} groups: {written['bytes'] / 1e9:.2f} GB",
            flush=True,
        )
        if proxy is not None:
            shutil.rmtree(Path(folder, "mmstream"))  # what the writer has opened
            proxy.reset_counts()
        started = time.perf_counter()
        ranks = _Children()
        for rank in range(RANKS):
            ranks.start(partial(run_rank, url, rank, num_steps, started))
        answers = ranks.answers()
        memory = pss_bytes([pid for answer in answers for pid in answer["pids"]])
        own = pss_bytes(ranks.pids)
        counts = None if proxy is None else proxy.counts()
        ranks.end()  # and their workers with them
    workers = [worker for answer in answers for worker in answer["workers"]]
    cpu = np.concatenate([worker["cpu_s"] for worker in workers])
    print(
        f"{RANKS} ranks opened and checked it in {max(a['opened_s'] for a in answers):.1f} s, "
        f"each of {len(workers)} workers opened it again in "
        f"{np.median([worker['opened_s'] for worker in workers]):.2f} s; the last worker knew its "
        f"first step after {max(worker['first_s'] for worker in workers):.1f} s\n"
        f"{num_steps} steps of {RANKS * PACKS_A_RANK} packs: a step takes "
        f"{1000 * np.median(cpu):.2f} ms of CPU (99 %: {1000 * np.quantile(cpu, 0.99):.2f})\n"
        f"PSS: {memory / 1e6 / len(workers):.0f} MB a worker, {own / 1e6 / RANKS:.0f} MB a rank"
    )
    if counts is not None:
        gets = " and ".join(f"{num:,} of {name}" for name, num in counts.gets_by_suffix.items())
        num_groups = num_units // UNITS_A_GROUP
        print(
            f"GETs of the node: {gets}, {counts.num_bytes / 1e9:.2f} GB; "
            f"{counts.num_gets / num_groups:.3f} a group"
        )


# -- intervals ------------------------------------------------------------------------------------


def write_texts(folder: Path, lengths: Sequence[int]) -> mm.Dataset:
    """Write texts of so many bytes, in tars of 500."""
    for first in range(0, len(lengths), 500):
        with tarfile.open(folder / f"{first:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(first, min(first + 500, len(lengths))):
                text = ("lorem ipsum dolor sit amet " * (lengths[number] // 27 + 1)).encode()
                member = tarfile.TarInfo(f"{number:08d}.txt")
                member.size = lengths[number]
                tar.addfile(member, BytesIO(text[: lengths[number]]))
    return mm.open_dataset(str(folder))


def intervals(num_samples: int, num_workers: int, rounds: int, step_s: float) -> None:
    """Print the time between batches of a packed and of an unpacked loader."""
    random = np.random.Generator(np.random.Philox(2))
    lengths = np.clip(random.lognormal(6.5, 1.0, num_samples), 32, MAX_TOKENS - 2).astype(np.int64)
    with TemporaryDirectory() as folder:
        dataset = write_texts(Path(folder), lengths.tolist())
        tokens = lengths + 2
        columns = {"num_tokens": tokens, "num_label_tokens": tokens - 1}
        plan = make_plan(Measure(tuple(dataset.manifest.shards), columns), PackLimits(MAX_TOKENS))
        decode = mm.Decode(text=mm.TextDecoder(byte_tokenizer(), max_length=MAX_TOKENS))
        samples_a_pack = round(num_samples / plan.num_units)
        settings = {
            "packed": (4, mm.Pack(MAX_TOKENS, plan=plan)),
            "unpacked": (4 * samples_a_pack, mm.Flat()),
        }
        ratios: dict[str, list[float]] = {name: [] for name in settings}
        for _ in range(rounds):
            for name, (rows, batching) in settings.items():
                pipeline = mm.Pipeline(
                    dataset, global_batch_size=rows, decode=decode, batching=batching
                )
                loader = mm.Loader(pipeline, num_workers=num_workers, world=mm.World())
                times, num_tokens = [], 0
                for batch in loader:
                    time.sleep(step_s)
                    times.append(time.perf_counter())
                    num_tokens += batch["num_tokens"]
                loader.close()
                between = np.diff(times[4:])
                p50, p99 = np.quantile(between, [0.5, 0.99])
                ratios[name].append(p99 / p50)
                print(
                    f"{name:8} {len(times):5} batches of {rows:3} rows, "
                    f"{num_tokens / (times[-1] - times[0]) / 1e6:5.2f} M tokens/s; between batches "
                    f"p50 {1000 * p50:5.1f} ms, p99 {1000 * p99:5.1f} ms, p99/p50 {p99 / p50:.2f}"
                )
        for name, of_runs in ratios.items():
            print(f"{name}: median p99/p50 {np.median(of_runs):.2f}")


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["reads", "intervals"])
    parser.add_argument("--units", type=int, default=10_000_000)
    parser.add_argument("--samples-a-unit", type=int, default=10)
    parser.add_argument("--s3", action="store_true", help="the plan lies on an S3 server")
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--samples", type=int, default=30_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=100)
    args = parser.parse_args()
    if args.what == "reads":
        reads(args.units, args.samples_a_unit, args.steps, args.s3)
    else:
        intervals(args.samples, args.workers, args.rounds, args.step_ms / 1000)


if __name__ == "__main__":
    main()
