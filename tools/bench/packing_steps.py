"""What a planned order costs while it trains: ``python -m tools.bench.packing_steps reads``.

``reads``      a plan of many synthetic units is mapped by 64 processes, 8 ranks of 8 workers, which
               ask for the samples of their steps as readers do, with rows dealt to the ranks. It
               prints the time a step takes, the memory of all processes, and what was read from
               the plan's files.
``intervals``  two loaders over the same texts, one with packs and one with single samples without
               padding, are read in turn by a consumer that rests after each batch, as a training
               step on a GPU does. It prints the quantiles of the time between batches.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import tarfile
import time
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

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

RANKS, WORKERS, PACKS_A_RANK = 8, 8, 8
SAMPLES_A_UNIT, UNITS_A_GROUP = 10, 1000
MAX_TOKENS = 8192
COST = mm.Cost(tokens=1, squared_tokens=2e-5)


# -- reads ----------------------------------------------------------------------------------------


def synthetic_plan(num_units: int) -> PackPlan:
    """Return a plan of units of ten samples each, in groups of one shard."""
    num_groups = num_units // UNITS_A_GROUP
    num_units = num_groups * UNITS_A_GROUP
    of_shard = UNITS_A_GROUP * SAMPLES_A_UNIT
    shards = tuple(
        ShardInfo(f"{number:07d}.tar", of_shard, of_shard * 20_000) for number in range(num_groups)
    )
    members = np.arange(num_units * SAMPLES_A_UNIT, dtype=np.int64)
    random = np.random.Generator(np.random.Philox(1))
    tokens = random.integers(64, MAX_TOKENS // SAMPLES_A_UNIT, members.size, dtype=np.int32)
    rows = np.zeros((num_units, 8), dtype=np.int64)
    rows[:, 0] = members[::SAMPLES_A_UNIT]
    of_units = tokens.reshape(num_units, SAMPLES_A_UNIT)
    rows[:, 1] = of_units.sum(axis=1)
    rows[:, 2] = np.einsum("ij,ij->i", of_units, of_units, dtype=np.int64)
    rows[:, 3], rows[:, 7] = rows[:, 1] - SAMPLES_A_UNIT, SAMPLES_A_UNIT
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


def file_reads() -> int:
    """Return the bytes that this process had the disk read, by page faults too."""
    lines = Path("/proc/self/io").read_text("ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def run_worker(opened: PackPlan, rank: int, worker: int, num_steps: int, results: int) -> None:
    """Ask for the samples of the steps of a worker, and write down how long they took.

    As a worker of a loader does, it opens the plan that the main process has opened and checked.
    """
    started = time.perf_counter()
    plan = pickle.loads(pickle.dumps(opened))
    counts = [shard.num_samples for shard in plan.shards]
    corpus = Corpus(np.array(counts), [shard.name for shard in plan.shards])
    rows = RANKS * PACKS_A_RANK
    order = PackOrder.from_plan(plan, corpus, global_batch_size=rows)
    dealt = order.with_ranks(RANKS, partial(deal, among=None), COST.modelled)
    opened_s = time.perf_counter() - started
    cpu_s = []
    for step in range(worker, num_steps, WORKERS):
        begun = time.process_time()
        dealt.refs(0, step, (rank * PACKS_A_RANK, (rank + 1) * PACKS_A_RANK))
        cpu_s.append(time.process_time() - begun)
    line = json.dumps({"opened_s": opened_s, "cpu_s": cpu_s, "read": file_reads()})
    os.write(results, line.encode() + b"\n")


def reads(num_units: int, num_steps: int) -> None:
    """Print what 64 processes take of a plan."""
    with TemporaryDirectory() as folder:
        size = 0
        path = Path(folder, "plan")
        write_plan(synthetic_plan(num_units), str(path))
        for file in path.rglob("*"):
            size += file.stat().st_size
        print(f"{num_units:,} units, {num_units * SAMPLES_A_UNIT:,} samples: {size / 1e9:.2f} GB")
        started = time.perf_counter()
        plan = open_plan(str(path))
        print(f"opened and checked in {time.perf_counter() - started:.1f} s, once a rank")
        reading, writing = os.pipe()
        hold, release = os.pipe()
        children = []
        for number in range(RANKS * WORKERS):
            child = os.fork()
            if not child:
                os.close(release)
                run_worker(plan, number // WORKERS, number % WORKERS, num_steps, writing)
                os.read(hold, 1)  # until all have been weighed
                os._exit(0)
            children.append(child)
        os.close(writing)
        lines: list[str] = []
        data = b""
        while len(lines) < len(children):
            data += os.read(reading, 1 << 20)
            lines = data.decode().splitlines() if data.endswith(b"\n") else lines
        memory = pss_bytes(children)
        own = pss_bytes([os.getpid()])
        os.close(release)
        for child in children:
            os.waitpid(child, 0)
        values = [json.loads(line) for line in lines]
        cpu = np.concatenate([value["cpu_s"] for value in values])
        print(
            f"{len(children)} processes, {num_steps} steps of {RANKS * PACKS_A_RANK} packs: "
            f"opened in {np.median([value['opened_s'] for value in values]):.2f} s, a step takes "
            f"{1000 * np.median(cpu):.2f} ms of CPU (99 %: {1000 * np.quantile(cpu, 0.99):.2f}), "
            f"{memory / 1e6 / len(children):.0f} MB a process (PSS; {own / 1e6:.0f} before), "
            f"{sum(value['read'] for value in values) / 1e6:.0f} MB from disk"
        )


# -- intervals ------------------------------------------------------------------------------------


def write_texts(folder: Path, lengths: Sequence[int], of_shard: int = 500) -> mm.Dataset:
    """Write texts of so many bytes, in tars."""
    for first in range(0, len(lengths), of_shard):
        with tarfile.open(folder / f"{first:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(first, min(first + of_shard, len(lengths))):
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
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--samples", type=int, default=30_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=100)
    args = parser.parse_args()
    if args.what == "reads":
        reads(args.units, args.steps)
    else:
        intervals(args.samples, args.workers, args.rounds, args.step_ms / 1000)


if __name__ == "__main__":
    main()
