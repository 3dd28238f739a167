"""How full planned packs are, how far their samples lie apart, and how long planning takes.

    python -m tools.bench.packing --data ../shared/data [--peers-python PYTHON]

Lengths are drawn from real rows: captions of COCO, questions and answers of LLaVA. A word counts as
1.3 tokens. Pictures take 576 tokens (LLaVA), or one for 28 x 28 pixels (Qwen2-VL). With
`--peers-python`, the packers of TRL and axolotl, installed there, pack the same lengths in the same
run: in one process, all samples at once (TRL) or in groups of 100,000 (axolotl's default).
TRL's packer also moves the tokens; the others answer in numbers of samples. Times are of the CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from mmstream.dataset.manifest import ShardInfo
from mmstream.packing.measure_file import Measure
from mmstream.packing.plan_report import plan_report
from mmstream.packing.planner import make_plan
from mmstream.packing.settings import PackLimits
from mmstream.types import IntArray

TOKENS_A_WORD = 1.3

SIZES = ((640, 480), (480, 640), (640, 427), (427, 640), (500, 375), (640, 640), (333, 500))
"""Sizes of pictures in COCO."""

PEERS = """
import ast, sys, time
import numpy as np
lengths, T = np.load(sys.argv[1]), int(sys.argv[2])
import importlib.util, numba
from pathlib import Path
source = Path(importlib.util.find_spec("axolotl").origin).parent / "utils/samplers/multipack.py"
tree = ast.parse(source.read_text())
code = [node for node in tree.body if getattr(node, "name", "") == "pack_group"]
names = {"np": np, "numba": numba}
exec(compile(ast.Module(code, []), str(source), "exec"), names)
pack = names["pack_group"]
pack(lengths[:10], 0, T, 10, 10**9, True)  # compiled
start, bins = time.process_time(), 0
for first in range(0, len(lengths), 100_000):
    group = lengths[first:first + 100_000]
    bins += len(pack(group, first, T, len(group), 10**9, True))
print("axolotl", time.process_time() - start, bins)
import pyarrow as pa
from trl.data_utils import _pack_bfd
ends = np.concatenate([[0], np.cumsum(lengths)])
tokens = pa.array(np.zeros(ends[-1], np.int32))
table = pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(ends), tokens)})
start = time.process_time()
bins = len(_pack_bfd(table, T))
print("TRL bfd", time.process_time() - start, bins)
"""


def corpora(data: Path, num_samples: int) -> dict[str, IntArray]:
    """Return the lengths of samples of four kinds, drawn from real rows."""
    rng = np.random.default_rng(0)
    rows = (data / "coco" / "captions_val2017.jsonl").read_text().splitlines()
    captions = [len(text.split()) for row in rows for text in json.loads(row)["captions"]]
    answers = [
        len((json.loads(row)["instruction"] + " " + json.loads(row)["output"]).split())
        for row in (data / "llava_text" / "coco2014_val_gpt4_qa_30x3.jsonl").open()
    ]

    def text(words: list[int], number: int = num_samples) -> IntArray:
        return (rng.choice(words, number) * TOKENS_A_WORD).astype(np.int64) + 4

    turns = rng.integers(1, 6, num_samples)
    ends = np.cumsum(turns)
    turn_tokens = np.concatenate([[0], np.cumsum(text(answers, int(ends[-1])))])
    chats = np.diff(turn_tokens[np.concatenate([[0], ends])])
    pictures = np.array([(width // 28) * (height // 28) + 2 for width, height in SIZES])
    num_pictures = rng.integers(1, 7, num_samples)
    return {
        "COCO captions": text(captions),
        "LLaVA-like, 576 a picture": chats + 576 + 15,
        "Qwen-like, own sizes": chats + rng.choice(pictures, num_samples) + 15,
        "1-6 pictures of 576": chats // 3 + num_pictures * 578,
    }


def main() -> None:
    """Print a line for each kind of samples, size of shards and length of packs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--num-samples", type=int, default=200_000)
    parser.add_argument("--peers-python")
    options = parser.parse_args()
    for name, lengths in corpora(options.data, options.num_samples).items():
        cells = [(max_tokens, 1000) for max_tokens in (4096, 8192, 32768, 131072)]
        for max_tokens, per_shard in [*cells, (8192, 30), (8192, 10_000)]:
            print(f"{name}; {line(lengths, per_shard, max_tokens)}", flush=True)
        if options.peers_python:
            run_peers(options.peers_python, lengths, 8192)


def line(lengths: IntArray, per_shard: int, max_tokens: int) -> str:
    """Plan packs, and return the figures."""
    shards = tuple(
        ShardInfo(f"{number}.tar", min(per_shard, lengths.size - start), 0)
        for number, start in enumerate(range(0, lengths.size, per_shard))
    )
    measure = Measure(shards, {"num_tokens": lengths})
    start = time.process_time()
    plan = make_plan(measure, PackLimits(max_tokens))
    seconds = time.process_time() - start
    report = plan_report(plan, measure)
    return (
        f"T {max_tokens:,}, {per_shard:,} samples a shard: fill {report.fill:.2%}, at best "
        f"{report.bound:.2%}, {report.num_ranges:.1f} ranges a pack over {report.spread} packs, "
        f"{seconds / lengths.size * 1e6:.2f} us of CPU a sample"
    )


def run_peers(python: str, lengths: IntArray, max_tokens: int) -> None:
    """Print what the packers of others take for the same lengths."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lengths.npy")
        np.save(path, np.minimum(lengths, max_tokens))
        command = [python, "-c", PEERS, str(path), str(max_tokens)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if result.returncode:
        print(f"  peers failed: {result.stderr[-500:]}")
    for words in result.stdout.splitlines():
        peer, seconds, num_packs = words.rsplit(" ", 2)
        fill = np.minimum(lengths, max_tokens).sum() / (int(num_packs) * max_tokens)
        print(
            f"  {peer}: T {max_tokens:,}: fill {fill:.2%}, "
            f"{float(seconds) / lengths.size * 1e6:.2f} us of CPU a sample"
        )


if __name__ == "__main__":
    main()
