"""Writes the metrics of each step: JSON lines per rank, the log, a progress bar and TensorBoard.

    loop.fit -> Meter.read -> `StepLog.write`

The JSON lines are the history of the weights. Each line is handed to the system before the next
step begins, so it survives a ``kill -9``. When a run resumes, the lines of undone steps are
removed: those after the checkpoint from which it resumes. Rank 0 also shows a progress bar in a
terminal, and writes TensorBoard files if that is installed.
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

from mmstream.storage.new_file import create_file

__all__ = ["StepLog", "cut_history"]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(?:metrics|validation)-rank(\d+)\.jsonl")


class StepLog:
    """Writes the metrics of one rank; a context manager.

    Args:
        folder: local folder of ``metrics-rank{r}.jsonl``, ``validation-rank0.jsonl`` and
            ``tensorboard/``. None: the metrics go only to the log.
        rank: number of this rank. Only rank 0 writes to the log.
        world_size: number of ranks.
        num_steps: optimizer steps of the checkpoint from which the run resumes. Later lines are
            removed.
        last_step: optimizer step at which the progress bar ends; None: no bar.
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
                logger.info("rank %d: removed %d lines of undone steps", rank, num_cut)
            path = self._folder / f"metrics-rank{rank}.jsonl"
            self._file = self._open.enter_context(_open_lines(path))
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
        for output in (self._board, self._bar):
            if output is not None:
                output.close()

    def write(self, line: dict[str, Any]) -> None:
        """Write the metrics of one step.

        Args:
            line: a dict with these fields:

                - epoch, step: position of the last loader step; `step` counts from 0 per epoch
                - num_steps: optimizer steps since the first start, this one included
                - loss, lr, grad_norm: of this step; the norm is before clipping, and null in the
                  file where it overflowed fp16
                - samples_per_s, tokens_per_s: over all ranks, since the line before
                - padding_fraction: share of padding among token positions; None without text
                - fill: with packs, share of the room of rows that has tokens, since the line before
                - modelled_imbalance: with packs on several ranks, the modelled cost of the packs of
                  the rank with most to do, over the mean of a step; 1 is best
                - wait_fraction: share of the time spent waiting for data
                - idle_fraction: on CUDA, share of the time in which the device was idle
                - memory_bytes: on CUDA, peak of the allocated memory
                - num_bad, num_skipped: bad samples, and samples that a filter left out, of all
                  ranks since the run started; bad has both by kind
                - num_wrong_reads: reads that came with bytes unlike their checksums, of all ranks
                  since the run started
                - cache_hit_fraction: with a node cache, share of the bytes that came from it, over
                  all ranks since the run started
                - num_cut_texts, cut_text_fraction: samples whose text `max_length` cut, of all
                  ranks since the run started, and their share
                - num_dropped_parts: parts of conversations that nothing decodes, with
                  ``undecoded_parts="drop"``
                - sources: in a mixture, valid rows per source, over all ranks, since the line
                  before
                - keys, lineage: with `log_keys`, this rank's samples since the line before (see
                  `mmstream.audit.training_log`)
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
            ranks = {"rank": self._rank, "world_size": self._world_size}
            self._file.write(_json({**line, **ranks}))
        self._chart("train", line)

    def write_validation(self, line: dict[str, Any]) -> None:
        """Write a validation pass, on rank 0: num_steps, loss, weight (rows or tokens), seconds."""
        if self._rank != 0:
            return
        logger.info("validation after %d steps: loss %.4f", line["num_steps"], line["loss"])
        if self._folder is not None:
            with _open_lines(self._folder / "validation-rank0.jsonl") as file:
                file.write(_json(line))
        self._chart("validation", line)

    def _chart(self, group: str, line: dict[str, Any]) -> None:
        """Write the numbers of a line to TensorBoard."""
        if self._board is None:
            return
        for name, value in line.items():
            if isinstance(value, int | float) and name not in ("num_steps", "epoch", "step"):
                self._board.add_scalar(f"{group}/{name}", value, line["num_steps"])


def _open_lines(path: Path) -> TextIO:
    """Open a file to append lines. Each line goes to the system at once."""
    return path.open("a", encoding="utf-8", buffering=1)


def _json(line: dict[str, Any]) -> str:
    """Return a line of JSON. Infinity and NaN, which JSON lacks, become null.

    It is ASCII: keys of foreign tars may hold bytes that are no text and have no UTF-8 form.
    """
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in line.items()
    }
    return json.dumps(finite) + "\n"


def _open_board(folder: Path | None, num_steps: int) -> Any:
    """Return TensorBoard's writer; None if it is not installed or there is no folder."""
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=num_steps + 1)


def _open_bar(num_steps: int, last_step: int | None) -> Any:
    """Return a progress bar; None outside a terminal."""
    if last_step is None or not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    return tqdm(total=last_step, initial=num_steps, unit="step", dynamic_ncols=True)


def cut_history(folder: Path, rank: int, world_size: int, num_steps: int) -> int:
    """Remove the lines of steps after `num_steps`, and an incomplete last line.

    Each rank cuts its own files. Rank 0 also cuts the files of ranks that this run does not have,
    which an earlier run on more ranks wrote.

    Returns:
        The number of removed lines.
    """
    num_cut = 0
    for path in sorted(folder.glob("*-rank*.jsonl")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        rank_of_file = int(match[1])
        is_orphan = rank_of_file >= world_size
        if rank_of_file != rank and not (rank == 0 and is_orphan):
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if _steps_of(line) <= num_steps]
        if len(kept) < len(lines):
            num_cut += len(lines) - len(kept)
            with create_file(path) as file:
                file.write("".join(kept).encode())
    return num_cut


def _steps_of(line: str) -> float:
    """Return num_steps of a line; infinity for a line that a crash left incomplete."""
    try:
        return int(json.loads(line)["num_steps"]) if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")
