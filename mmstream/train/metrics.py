"""What a run says: one line a step in the log, and the same as JSON lines, one file a rank.

The files tell the history of the weights. Each line is with the system before the next step
begins, so a kill -9 keeps it; what a crash undid (steps after the checkpoint that is gone on from)
is cut off when the run resumes.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

__all__ = ["StepLog", "cut_history"]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"metrics-rank(\d+)\.jsonl")


class StepLog:
    """Writes one rank's steps; a context manager.

    Args:
        folder: local folder of ``metrics-rank{r}.jsonl``; None: only the log.
        rank: this process's; rank 0 alone writes to the log.
        world_size: number of ranks.
        num_steps: steps in the checkpoint that the run goes on from; later lines are cut off.
    """

    def __init__(self, folder: str | None, *, rank: int, world_size: int, num_steps: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._file: TextIO | None = None
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            num_cut = cut_history(Path(folder), rank, world_size, num_steps)
            if num_cut:
                logger.info("rank %d: %d lines of undone steps cut off", rank, num_cut)
            path = Path(folder, f"metrics-rank{rank}.jsonl")
            self._file = path.open("a", encoding="utf-8", buffering=1)  # 1: a line at a time

    def __enter__(self) -> StepLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, line: dict[str, Any]) -> None:
        """Write one step.

        Args:
            line: epoch, step (in the epoch, from 0), num_steps (ever, with this one), loss,
                samples_per_s (all ranks), wait_fraction (of the step's time, waiting for data),
                and when they are wanted keys (this rank's samples), with planned and shown
                [shard, index] of each row where substitutes stand for bad samples.
        """
        if self._rank == 0:
            logger.info(
                "epoch %d step %d loss %.4f, %.0f samples/s, %.0f %% waiting for data",
                line["epoch"], line["step"], line["loss"], line["samples_per_s"],
                100 * line["wait_fraction"],
            )  # fmt: skip
        if self._file is not None:
            where = {"rank": self._rank, "world_size": self._world_size}
            self._file.write(json.dumps({**line, **where}, ensure_ascii=False) + "\n")


def cut_history(folder: Path, rank: int, world_size: int, num_steps: int) -> int:
    """Remove the lines after `num_steps`, and a torn last one; return how many.

    Each rank cuts its own file. Rank 0 also cuts those of ranks that no longer exist, which an
    earlier run on more ranks has left.
    """
    num_cut = 0
    for path in sorted(folder.glob("metrics-rank*.jsonl")):
        found = _NAME.fullmatch(path.name)
        if found is None or not (
            int(found[1]) == rank or (rank == 0 and int(found[1]) >= world_size)
        ):
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if _steps_of(line) <= num_steps]
        if len(kept) < len(lines):
            num_cut += len(lines) - len(kept)
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text("".join(kept), encoding="utf-8")
            temporary.replace(path)
    return num_cut


def _steps_of(line: str) -> float:
    """Return a line's num_steps; infinity for one that a crash has torn."""
    try:
        return int(json.loads(line)["num_steps"]) if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")
