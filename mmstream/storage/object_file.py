"""An object of a store as a file that other libraries read, such as Arrow."""

from __future__ import annotations

import io

from mmstream.storage.store import ObjectStat, Store


class ObjectFile(io.RawIOBase):
    """An object of a store, read by ranges. Another version of it is a ReplacedError."""

    def __init__(self, store: Store, name: str, stat: ObjectStat) -> None:
        self._store, self._name, self._size = store, name, stat.size
        self._known = {name: stat}
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes, at most `size`. Negative or None: all of the rest."""
        stop = self._size if size is None or size < 0 else min(self._size, self._position + size)
        if stop <= self._position:
            return b""
        answer = self._store.read_ranges([(self._name, self._position, stop)], self._known)[0]
        if isinstance(answer, OSError):
            raise answer
        self._position = stop
        return answer
