"""The progress bar of a conversion: rows a second, megabytes a second, time left, rejects.

    shard (any process) -> a small file of counts -> PROGRESS (a thread) -> the terminal

A shard may take an hour where its media are downloaded, so the bar counts rows and not shards. Each
process that writes shards has a mapped file of three numbers, and adds to them row by row. The main
process reads them a few times a second. Processes on other machines have no such file; their rows
are counted when their shard is done.
"""

from __future__ import annotations

import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
from tqdm import tqdm

from mmstream.converting.shard import ShardReport

INTERVAL_S = 0.25


class Progress:
    """A progress bar on the terminal. A context manager.

    Args:
        num_rows: Rows of all shards.
        is_shown: Whether there is a bar. It is shown on a terminal only.
    """

    def __init__(self, num_rows: int, is_shown: bool) -> None:
        self._bar = tqdm(
            total=num_rows, unit="row", desc="convert", disable=None if is_shown else True
        )
        self._stack = ExitStack()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._written = np.zeros(3, np.int64)  # rows, rejects, bytes of finished shards
        self._num_kept = 0
        self.folder: str | None = None
        """Where processes put their counts. None: nothing is shown, so nothing is counted."""

    def __enter__(self) -> Progress:
        self._stack.enter_context(self._bar)
        if not self._bar.disable:
            folder = tempfile.TemporaryDirectory(prefix="mmstream-progress-")
            self.folder = self._stack.enter_context(folder)
            thread = threading.Thread(target=self._watch, name="mmstream-progress", daemon=True)
            thread.start()
            self._stack.callback(thread.join)
            self._stack.callback(self._ended.set)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def finish_shard(self, report: ShardReport) -> None:
        """Count a shard that is done. The rows of one that an earlier call wrote took no time."""
        with self._lock:
            if report.reused:
                self._num_kept += report.num_rows
            else:
                self._written += (report.num_rows, report.num_rejects, report.num_bytes)
        self._show()

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._show()

    def _show(self) -> None:
        """Draw the bar. Rows of shards in work are counted by their processes."""
        if self.folder is None:
            return
        with self._lock:
            counted = sum((_counts(path) for path in Path(self.folder).iterdir()), np.zeros(3))
            rows, rejects, num_bytes = np.maximum(self._written, counted).astype(int).tolist()
            bar = self._bar
            bar.initial = self._num_kept  # the rate is that of the rows that this call wrote
            bar.n = max(bar.n, min(self._num_kept + rows, bar.total))
            elapsed = bar.format_dict["elapsed"] or 0
            rate = num_bytes / 1e6 / elapsed if elapsed else 0.0
            bar.set_postfix_str(f"{rate:.1f} MB/s, {rejects:,} rejected")


def _counts(path: Path) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    data = path.read_bytes()
    return np.frombuffer(data, np.int64) if len(data) == 24 else np.zeros(3, np.int64)
