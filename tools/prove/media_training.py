"""Kill -9 the training of a tiny Qwen2.5-VL on real clips and of a tiny Whisper on real speech.

    python -m tools.prove.media_training --data ../shared/data

Models and tokenizers are made from configs and saved to folders, and `mmstream train --model` opens
them. The clips and chats are the demos of Qwen3-VL and LLaMA-Factory, and the speech is the Free
Spoken Digit Dataset: `--data` is a folder with `qwen3vl_demo`, `llamafactory_mllm_demo` and `fsdd`.

For each model: one run on one rank is not disturbed. Another has two ranks; one of them is killed.
It resumes with one rank and a worker process, which is killed too. It ends with three ranks. Then
the logs of both are compared with the plan and with each other.

The last line of output is JSON. The exit code is 1 if the proof fails. It takes some minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mmstream as mm
from mmstream.audit.compare_runs import prove, read_history
from tests.helpers.tiny_media_models import save_tiny_qwen, save_tiny_whisper
from tools.prove.launch import launch_ranks

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NUM_EPOCHS = 3
NUM_COPIES = 12
"""How often the few chats are repeated, each time with another answer, so that an epoch has steps
enough."""
TOLERANCE = 1e-4
"""Of losses, relative, in float32: sums over ranks are rounded differently."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the data that it is trained on."""

    name: str
    save_model: Callable[[Path], Path]
    rows: Callable[[Path], Iterator[dict[str, Any]]]
    global_batch_size: int


def main() -> None:
    """Run the proof for each model and exit with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", choices=["qwen", "whisper"])
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mmstream-prove-"))
    cases = [case for case in CASES if options.only in (None, case.name)]
    results = {case.name: prove_case(case, options.data, folder / case.name) for case in cases}
    holds = all(result["holds"] for result in results.values())
    if holds:
        shutil.rmtree(folder)
    else:
        print(f"logs and checkpoints: {folder}")
    print(json.dumps(results))
    sys.exit(0 if holds else 1)


def chats(data: Path) -> Iterator[dict[str, Any]]:
    """Yield the video chats of both demos, again and again."""
    qwen = data / "qwen3vl_demo/qwen-vl-finetune/demo"
    llama = data / "llamafactory_mllm_demo/data"
    rows = []
    for row in json.loads((qwen / "video.json").read_text()):
        path = qwen / "videos" / row["video"]
        if path.exists():  # one of three is not in the demo
            rows.append({**row, "video": str(path.relative_to(data))})
    for name in ("mllm_video_demo.json", "mllm_demo.json"):
        for row in json.loads((llama / name).read_text()):
            paths = {
                kind: [str((llama / path).relative_to(data)) for path in row[kind]]
                for kind in ("images", "videos")
                if kind in row
            }
            rows.append({**row, **paths})
    for number in range(NUM_COPIES):
        for row in rows:
            yield {"id": f"{number}", **row}


def speech(data: Path) -> Iterator[dict[str, Any]]:
    """Yield recordings of digits with their words."""
    for path in sorted((data / "fsdd/recordings").glob("*.wav"))[::4]:
        digit = DIGITS[int(path.name[0])]
        yield {"audio_filepath": str(path.relative_to(data)), "text": digit}


CASES = [
    Case("qwen", save_tiny_qwen, chats, 8),
    Case("whisper", save_tiny_whisper, speech, 12),
]


def prove_case(case: Case, data: Path, folder: Path) -> dict[str, Any]:
    """Run the proof of one model and return its results."""
    started = time.monotonic()
    folder.mkdir(parents=True)
    model = case.save_model(folder / "model")
    shards = folder / "shards"
    report = mm.convert(
        list(case.rows(data)), str(shards), media_root=str(data), num_workers=0, progress=False
    )
    dataset = mm.open_dataset(str(shards))
    order = dataset.plan_order(global_batch_size=case.global_batch_size)
    last = NUM_EPOCHS * order.steps_per_epoch
    print(f"{case.name}: {report.num_samples} samples, {last} steps in {NUM_EPOCHS} epochs")

    def run(name: str, world_size: int, num_workers: int = 0, kill: int | None = None) -> None:
        _train(case, model, shards, folder / name, world_size, num_workers, kill)

    run("undisturbed", 1)
    run("disturbed", 2, kill=last // 3)
    run("disturbed", 1, num_workers=1, kill=2 * last // 3)
    run("disturbed", 3)
    disturbed, undisturbed = (read_history(folder / n) for n in ("disturbed", "undisturbed"))
    proof = prove(order, disturbed, undisturbed, NUM_EPOCHS)
    ends = [undisturbed.lines[key] for key in (min(undisturbed.lines), max(undisturbed.lines))]
    return {
        **dataclasses.asdict(proof),
        "num_bad": ends[1]["num_bad"],
        "num_cut_texts": ends[1]["num_cut_texts"],
        "world_sizes": sorted({line["world_size"] for line in disturbed.lines.values()}),
        "losses": [round(end["loss"], 3) for end in ends],
        "seconds": round(time.monotonic() - started),
        "holds": proof.num_steps == last
        and not (proof.lost or proof.repeated or proof.unplanned or proof.different)
        and not ends[1]["num_bad"]
        and proof.loss_difference <= TOLERANCE,
    }


def _train(
    case: Case,
    model: Path,
    shards: Path,
    out: Path,
    world_size: int,
    num_workers: int,
    kill: int | None,
) -> None:
    """Run ``mmstream train`` as torchrun would. Kill -9 the last rank after the step `kill`."""
    command = [str(shards), "--out", str(out), "--model", str(model), "--log-keys"]
    command += ["--device", "cpu", "--lr", "3e-3", "--checkpoint-every", "3"]
    command += ["--global-batch-size", str(case.global_batch_size)]
    command += ["--num-workers", str(num_workers), "--epochs", str(NUM_EPOCHS)]
    launch_ranks(command, out, world_size, kill)


if __name__ == "__main__":
    main()
