"""One rank of the training that `tools.prove.resume` kills: a linear model under DDP.

A rank logs a step before it exchanges the gradients. So if a checkpoint has a step, the logs of all
ranks have it too. Numbers are float64, so that a single lost or repeated sample changes the weights
by more than rounding does.
"""

from __future__ import annotations

import json
import random
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.nn.parallel import DistributedDataParallel

import mmstream as mm
from mmstream.loader.device import DeviceLoader
from mmstream.storage import open_store
from mmstream.train.checkpoint import Checkpoint, Trained, resume_training, save_checkpoint
from mmstream.train.distributed import TrainProcess, process_group
from mmstream.types import Batch
from tools.prove.corpus import NUM_FEATURES, open_pipeline

BALLAST_BYTES = 8 << 20
"""Written with each checkpoint. It takes so long that some kills come while it is written."""


@dataclass(frozen=True)
class Settings:
    """Settings of one start of the run."""

    corpus: str
    checkpoints: str
    logs: str
    """Folder of this start alone."""
    seed: int
    save_seed: int
    """Seed of the random numbers of steps between checkpoints."""
    num_epochs: int
    global_batch_size: int
    num_workers: int = 0
    max_interval: int = 9
    """Steps between two checkpoints, at most."""
    pace_s: float = 0.0
    """Sleep in each step, so that workers can read ahead."""

    def command(self) -> list[str]:
        """Return the command line of a rank."""
        return [sys.executable, "-m", "tools.prove.trainer", json.dumps(asdict(self))]


def main() -> None:
    """Train until the last epoch ends."""
    settings = Settings(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    pipeline = open_pipeline(settings.corpus, settings.global_batch_size, settings.seed)
    with (
        process_group("cpu") as process,
        Path(settings.logs, f"rank{process.rank}.jsonl").open("ab", buffering=0) as log,
        closing(
            mm.Loader(pipeline, num_workers=settings.num_workers, rows_per_rank="balanced")
        ) as loader,
    ):
        train(settings, process, mm.to_device(loader, process.device), log)


def train(settings: Settings, process: TrainProcess, batches: DeviceLoader, log: BinaryIO) -> None:
    """Resume from the newest checkpoint and train to the end."""
    store = open_store(settings.checkpoints)
    draw = random.Random(settings.save_seed)
    trained = make_trained(process)
    num_steps = resume_training(store, trained, batches, process)
    write(log, {"resumed": num_steps})
    due = num_steps + draw.randint(1, settings.max_interval)
    while batches.state_dict()["epoch"] < settings.num_epochs:
        for batch in batches:
            errors = trained.parallel(batch["features"]).squeeze(1) - batch["target"]
            loss = (errors.square() * batch["__valid__"]).sum() / settings.global_batch_size
            write(log, describe(batch) | {"number": num_steps, "loss": loss.item()})
            trained.optimizer.zero_grad()
            (loss * process.world_size).backward()  # DDP takes the mean over ranks, not the sum
            trained.optimizer.step()
            time.sleep(settings.pace_s)
            num_steps += 1
            state = batches.state_dict()
            if num_steps >= due or state["epoch"] == settings.num_epochs:
                due = num_steps + draw.randint(1, settings.max_interval)
                if process.rank == 0:
                    content = trained.state_dict() | {
                        "loader": json.dumps(state),
                        "ballast": torch.zeros(BALLAST_BYTES, dtype=torch.uint8),
                    }
                    save_checkpoint(store, Checkpoint(num_steps, content), keep=2)


def make_trained(process: TrainProcess) -> Trained:
    """Return a new model and optimizer, equal in every process."""
    model = torch.nn.Linear(NUM_FEATURES, 1, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return Trained(
        model,
        DistributedDataParallel(model) if process.world_size > 1 else model,
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        "fp32",
    )


def describe(batch: Batch) -> dict[str, Any]:
    """Return the fields of a batch that the proof needs."""
    lineage = batch["__lineage__"]
    return {
        "epoch": lineage.epoch,
        "step": lineage.step,
        "start": lineage.start,
        "keys": batch["__key__"],
        "planned": lineage.planned,
        "shown": lineage.shown,
        "valid": batch["__valid__"].tolist(),
    }


def write(log: BinaryIO, line: dict[str, Any]) -> None:
    """Append a line in one system call, so that a kill comes before or after it."""
    log.write(json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    main()
