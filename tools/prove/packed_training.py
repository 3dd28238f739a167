"""Train tiny Qwen2-VL and Qwen3-VL on packs, kill -9 their ranks, and compare with unpacked steps.

    python -m tools.prove.packed_training

The conversations have 0 to 8 pictures each, photographs of the demo. They are measured, and planned
into packs of 4,096 tokens. `mmstream train --pack` runs on 4 ranks, and one of them is killed. It
goes on with 3 ranks, and one is killed again. It ends with 1 rank and 2 worker processes.

Then one process trains the same steps unpacked: it reads the samples of each step anew, one a row,
with padding. What must hold:

- Each step has the samples of the plan, in the same packs, on every number of ranks.
- Losses and norms of gradients are those of the unpacked steps.
- On several ranks, the log says how unequal their packs are.
- With equal weights, the packed gradient of each parameter points where the unpacked one does,
  those of the vision tower too.

The last line of output is JSON. The exit code is 1 if the proof fails. It takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mmstream as mm
from mmstream.demo.demo import corpus_rows
from mmstream.train import TrainConfig
from mmstream.train.models import decode_for, open_model_tokenizer
from tests.helpers.tiny_media_models import save_tiny_qwen
from tests.helpers.unpacked import are_packs_of, train_unpacked
from tools.prove.launch import launch_ranks

FAMILIES = ("Qwen2VL", "Qwen3VL")
GLOBAL_BATCH_SIZE = 12
"""Packs of a step: 4, 3 and 1 ranks divide them."""
LOSS_TOLERANCE = 1e-5
"""Relative, in float32: sums over ranks are rounded differently, and steps add up."""
NORM_TOLERANCE = 1e-4
LEAST_COSINE = 0.9999


def main() -> None:
    """Run the proof for each model and exit with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=FAMILIES)
    parser.add_argument("--pack", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mmstream-prove-"))
    results = {
        family: prove_family(family, options, folder / family)
        for family in FAMILIES
        if options.only in (None, family)
    }
    holds = all(result["holds"] for result in results.values())
    if holds:
        shutil.rmtree(folder)
    else:
        print(f"logs and checkpoints: {folder}")
    print(json.dumps(results))
    sys.exit(0 if holds else 1)


def albums(number: int) -> Iterator[dict[str, Any]]:
    """Yield conversations about 0 to 8 photographs, of very different lengths."""
    path = Path(corpus_rows())
    photographs = [json.loads(line) for line in path.read_text().splitlines()]
    for i in range(number):
        shown = [photographs[(7 * i + k) % len(photographs)] for k in range(i * 5 % 9)]
        captions = photographs[i % len(photographs)]["captions"]
        turns = [
            {"role": "user", "content": "<image>" * len(shown) + "What is this? " * (1 + i % 7)},
            {"role": "assistant", "content": " ".join(captions[: 1 + i % 5])},
        ]
        yield {"id": str(i), "messages": turns, "images": [row["image"] for row in shown]}


def prove_family(family: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the proof of one model and return its results."""
    pack, num_steps = options.pack, options.steps
    started = time.monotonic()
    folder.mkdir(parents=True)
    shards, out = folder / "shards", folder / "run"
    rows = list(albums(options.samples))
    media_root = str(Path(corpus_rows()).parent)
    mm.convert(rows, str(shards), media_root=media_root, num_workers=0, progress=False)
    config = TrainConfig(
        url=str(shards),
        out="",
        model=str(save_tiny_qwen(folder / "model", family=family)),
        pack=pack,
        plan=f"default-{pack}",
        global_batch_size=GLOBAL_BATCH_SIZE,
        max_steps=num_steps,
        lr=3e-3,
        precision="fp32",
        device="cpu",
    )
    decode = decode_for(config, open_model_tokenizer(config), None)
    mm.measure(str(shards), decode=decode, progress=False)
    plan = mm.plan_packs(str(shards), pack)
    print(f"{family}: {plan}", flush=True)

    command = [config.url, "--out", str(out), "--model", config.model, "--log-keys"]
    command += ["--pack", str(pack), "--plan", f"default-{pack}", "--precision", "fp32"]
    command += ["--device", "cpu", "--lr", "3e-3", "--checkpoint-every", "1"]
    command += ["--global-batch-size", str(GLOBAL_BATCH_SIZE), "--max-steps", str(num_steps)]
    launch_ranks([*command, "--num-workers", "0"], out, 4, kill=num_steps // 3)
    launch_ranks([*command, "--num-workers", "0"], out, 3, kill=2 * num_steps // 3)
    launch_ranks([*command, "--num-workers", "2"], out, 1)
    steps = list(train_unpacked(config))
    logs = [read_log(path) for path in sorted(out.glob("metrics-rank*.jsonl"))]
    lines = list(logs[0].values())
    losses = [abs(a["loss"] / b.loss - 1) for a, b in zip(lines, steps, strict=True)]
    norms = [abs(a["grad_norm"] / b.grad_norm - 1) for a, b in zip(lines, steps, strict=True)]
    same_packs = all(
        are_packs_of(step.packs, [log[number]["keys"] for log in logs if number in log])
        for number, step in enumerate(steps, start=1)
    )
    imbalances = [line.get("modelled_imbalance", 0) for line in lines if line["world_size"] > 1]
    cosine = min(step.least_cosine for step in steps)
    return {
        "num_steps": len(lines),
        "world_sizes": [line["world_size"] for line in lines],
        "same_packs": same_packs,
        "num_packs": sum(len(step.packs) for step in steps),
        "num_samples": sum(len(pack) for step in steps for pack in step.packs),
        "num_images": sum(step.num_images for step in steps),
        "fill": round(sum(step.fill for step in steps) / len(steps), 4),
        "modelled_imbalances": imbalances,
        "loss_difference": max(losses),
        "norm_difference": max(norms),
        "packed_loss_difference": max(abs(step.packed_loss / step.loss - 1) for step in steps),
        "least_cosine": cosine,
        "seconds": round(time.monotonic() - started),
        "holds": same_packs
        and len(lines) == num_steps
        and all(value >= 1 for value in imbalances)
        and max(losses) <= LOSS_TOLERANCE
        and max(norms) <= NORM_TOLERANCE
        and cosine >= LEAST_COSINE,
    }


def read_log(path: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of a rank's metrics by their optimizer steps."""
    lines = map(json.loads, path.read_text().splitlines())
    return {line["num_steps"]: line for line in lines}


if __name__ == "__main__":
    main()
