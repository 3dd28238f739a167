"""A file that is written and hashed by a thread of its own, a block at a time.

    tar writer -> HASHED FILE -> storage

To hash a tar takes about as long as to read its media. Both release Python's lock, so the thread
does it while the next media are read. At most `MAX_WAITING` blocks are in memory.
"""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import BinaryIO

__all__ = ["HashedFile"]

BLOCK_BYTES = 1 << 20
"""Small pieces, such as headers, are joined to blocks of this size. Larger ones stay whole."""
MAX_WAITING = 4


class HashedFile:
    """Passes bytes on to a file, and computes their SHA-256.

    A context manager. All bytes are written when `close` returns; an error in the file is raised by
    `close` or by a later `write`.

    Args:
        file: Where the bytes go. It stays open.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._thread = ThreadPoolExecutor(1, "mmstream-write")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def write(self, data: bytes) -> int:
        """Take bytes, and wait while too many others are not written yet."""
        self._pieces.append(data)
        self._num_bytes += len(data)
        if self._num_bytes >= BLOCK_BYTES:
            self._pass_on()
        return len(data)

    def close(self) -> str:
        """Wait until all bytes are written, and return their SHA-256 as 64 hexadecimal digits."""
        self._pass_on()
        while self._waiting:
            self._waiting.popleft().result()
        return self._digest.hexdigest()

    def _pass_on(self) -> None:
        while len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._write, self._pieces))
        self._pieces, self._num_bytes = [], 0

    def _write(self, pieces: list[bytes]) -> None:
        block = b"".join(pieces)
        self._file.write(block)
        self._digest.update(block)
