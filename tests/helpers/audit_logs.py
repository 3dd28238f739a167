"""Logs as ``mmstream train --log-keys`` writes them, of loaders without any training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmstream as mm
from mmstream.audit import SampleLog


def write_logs(
    loaders: Sequence[mm.Loader],
    folder: Path,
    num_steps: int,
    every: int = 1,
    has_order: bool = True,
) -> dict[str, Any]:
    """Log some steps of all ranks, and return the state after them.

    Args:
        loaders: one for each rank.
        folder: of the logs. What is there stays.
        num_steps: batches of each rank.
        every: a line for so many batches.
        has_order: False: the order is not logged, as by early versions.
    """
    folder.mkdir(exist_ok=True)
    for rank, loader in enumerate(loaders):
        samples, done = SampleLog(enabled=True), 0
        with (folder / f"metrics-rank{rank}.jsonl").open("a") as file:
            while done < num_steps:
                state = loader.state_dict()
                for batch in loader:
                    samples.add([batch], state["order"] if has_order else None)
                    state, done = loader.state_dict(), done + 1
                    if done % every == 0 or done == num_steps:
                        line = {"num_steps": done, "rank": rank, "world_size": len(loaders)}
                        file.write(json.dumps({**line, **samples.take()}) + "\n")
                    if done == num_steps:
                        break
    return dict(json.loads(json.dumps(loaders[0].state_dict())))
