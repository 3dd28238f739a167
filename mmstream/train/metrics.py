"""What a run says: one line a step in the log, and the same as JSON lines, one file a rank.

The files tell the history of the weights. Each line is with the system before the next step
begins, so a kill -9 keeps it; what a crash undid (steps after the checkpoint that is gone on from)
is cut off when the run resumes. Rank 0 also moves a progress bar, where it runs in a terminal, and
writes for TensorBoard, where that is installed.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

__all__ = ["StepLog", "cut_history"]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(?:metrics|validation)-rank(\d+)\.jsonl")


class StepLog:
    """Writes one rank's steps; a context manager.

    Args:
        folder: local folder of ``metrics-rank{r}.jsonl``, of rank 0's ``validation-rank0.jsonl``
            and of ``tensorboard/``; None: only the log.
        rank: this process's; rank 0 alone writes to the log.
        world_size: number of ranks.
        num_steps: steps in the checkpoint that the run goes on from; later lines are cut off.
        last_step: where the progress bar ends; None: no bar.
    """

    def __init__(
        self,
        folder: str | None,
        *,
        rank: int,
        world_size: int,
        num_steps: int,
        last_step: int | None = None,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._folder = None if folder is None else Path(folder)
        self._open = ExitStack()
        self._file: TextIO | None = None
        self._board = self._bar = None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            num_cut = cut_history(self._folder, rank, world_size, num_steps)
            if num_cut:
                logger.info("rank %d: %d lines of undone steps cut off", rank, num_cut)
            path = self._folder / f"metrics-rank{rank}.jsonl"
            self._file = self._open.enter_context(_lines(path))
        if rank == 0:
            self._board = _open_board(self._folder, num_steps)
            self._bar = _open_bar(num_steps, last_step)

    def __enter__(self) -> StepLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()
        for shown in (self._board, self._bar):
            if shown is not None:
                shown.close()

    def write(self, line: dict[str, Any]) -> None:
        """Write one step.

        Args:
            line: epoch, step (in the epoch, from 0, of the last batch), num_steps (ever, with this
                one), loss, lr, grad_norm (before clipping; None where it overflowed fp16),
                samples_per_s and tokens_per_s (all ranks, since the line before), padding_fraction
                (of all tokens; None without text), wait_fraction (of the time, waiting for data),
                idle_fraction (CUDA: the device between steps), memory_bytes (CUDA: the most that
                was allocated), num_bad and num_skipped (bad samples and what a filter left out, of
                all ranks since the run started), bad (both by kind), of a mixture sources (valid
                rows of each, all ranks, since the line before), and when they are wanted keys and
                lineage of this rank's samples since the line before, see `audit.training_log`.
        """
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"loss {line['loss']:.4f}, {line['samples_per_s']:.0f} samples/s, "
                f"{line['wait_fraction']:.0%} waiting for data",
                refresh=False,
            )
            self._bar.update(line["num_steps"] - self._bar.n)
        elif self._rank == 0:
            logger.info(
                "epoch %d step %d loss %.4f, %.0f samples/s, %.0f %% waiting for data",
                line["epoch"],
                line["step"],
                line["loss"],
                line["samples_per_s"],
                100 * line["wait_fraction"],
            )
        if self._file is not None:
            where = {"rank": self._rank, "world_size": self._world_size}
            self._file.write(_json({**line, **where}))
        self._chart("train", line)

    def write_validation(self, line: dict[str, Any]) -> None:
        """Write one validation pass, on rank 0: num_steps, loss, weight (rows, tokens), seconds."""
        if self._rank != 0:
            return
        logger.info("validation after %d steps: loss %.4f", line["num_steps"], line["loss"])
        if self._folder is not None:
            with _lines(self._folder / "validation-rank0.jsonl") as file:
                file.write(_json(line))
        self._chart("validation", line)

    def _chart(self, group: str, line: dict[str, Any]) -> None:
        if self._board is None:
            return
        for name, value in line.items():
            if isinstance(value, int | float) and name not in ("num_steps", "epoch", "step"):
                self._board.add_scalar(f"{group}/{name}", value, line["num_steps"])


def _lines(path: Path) -> TextIO:
    return path.open("a", encoding="utf-8", buffering=1)  # 1: a line at a time


def _json(line: dict[str, Any]) -> str:
    """Return a line of JSON, which has no word for infinity."""
    sane = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in line.items()
    }
    return json.dumps(sane, ensure_ascii=False) + "\n"


def _open_board(folder: Path | None, num_steps: int) -> Any:
    """Return TensorBoard's writer, or None where it is not installed."""
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=num_steps + 1)


def _open_bar(num_steps: int, last_step: int | None) -> Any:
    """Return a progress bar, or None off a terminal."""
    if last_step is None or not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    return tqdm(total=last_step, initial=num_steps, unit="step", dynamic_ncols=True)


def cut_history(folder: Path, rank: int, world_size: int, num_steps: int) -> int:
    """Remove the lines after `num_steps`, and a torn last one; return how many.

    Each rank cuts its own file. Rank 0 also cuts those of ranks that no longer exist, which an
    earlier run on more ranks has left.
    """
    num_cut = 0
    for path in sorted(folder.glob("*-rank*.jsonl")):
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
