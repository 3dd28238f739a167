"""Storage: objects in the memory of this process, under ``memory://`` URLs.

Made for tests and for small corpora that are generated on the fly. The objects lie in fsspec's own
memory file system, so other libraries that use fsspec see the same ones.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO, ClassVar

from mmstream.errors import StorageError
from mmstream.storage.store import (
    Access,
    CommonCalls,
    ObjectStat,
    Range,
    require_known,
    require_size,
)

_write_if = threading.Lock()
"""Held between the look at an object and its replacement."""


@dataclass(frozen=True)
class MemoryStore(CommonCalls):
    r"""A folder of objects in memory. `open_store` returns one for ``memory://folder``.

    All stores of a process share one space of names, and it lives as long as the process.

    A pickled store carries the objects under its root. So loader workers can read them, whatever
    the start method. Objects that already exist in the process that unpickles are kept as they are.
    Every worker holds a copy: use it for megabytes, not gigabytes. What a worker process writes is
    not seen by the others.

    Examples:
        >>> from mmstream.storage import open_store
        >>> store = open_store("memory://example/corpus")
        >>> store.write("captions.txt", b"a cat\na dog\n")
        >>> store.read_range("captions.txt", 2, 5)
        b'cat'
        >>> store.list()
        {'captions.txt': ObjectStat(size=12, version='...')}
    """

    url: str

    access: ClassVar[Access] = Access(
        max_gap_bytes=4 * 1024,
        max_range_bytes=2 * 1024 * 1024,
        min_header_read_bytes=16 * 1024,
        max_header_read_bytes=256 * 1024,
        concurrent=False,
    )

    def __reduce__(self) -> tuple[Any, ...]:
        root = self._path("") + "/"
        objects = {
            path: (bytes(file.getbuffer()), file.modified)
            for path, file in dict(_file_system().store).items()
            if path.startswith(root)
        }
        return _restore, (type(self), self.url, objects)

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Return a whole object.

        Raises:
            FileNotFoundError: No such object.
            StorageError: The object has more than `max_bytes`.
        """
        file = self._file(name)
        require_size(self.url_of(name), file.size, max_bytes)
        return bytes(file.getbuffer())

    def read_ranges(
        self, ranges: Sequence[Range], expected: MutableMapping[str, ObjectStat] | None = None
    ) -> list[bytes | OSError]:
        """Return the bytes of every range, or the error in its place."""
        outcomes: list[bytes | OSError] = []
        for name, start, stop in ranges:
            try:
                file, url = self._file(name), self.url_of(name)
                require_known(url, name, _object_stat(file), expected)
                if start < stop and file.size < stop:
                    raise StorageError(f"{url}: ends {stop - file.size} bytes before {stop}")
                outcomes.append(bytes(file.getbuffer()[start:stop]))
            except OSError as error:
                outcomes.append(error)
        return outcomes

    def stat(self, name: str) -> ObjectStat:
        """Return the size and the version of an object; errors as `read`."""
        return _object_stat(self._file(name))

    def list(self) -> dict[str, ObjectStat]:
        """Return the objects directly under the root by their names, sorted by name.

        Names that start with a dot are left out.
        """
        stats: dict[str, ObjectStat] = {}
        for name in self._names("file"):
            with suppress(FileNotFoundError):  # removed by another thread since
                stats[name] = self.stat(name)
        return stats

    def folders(self) -> Sequence[str]:
        """Return the names of the folders directly under the root, sorted."""
        return self._names("directory")

    def _names(self, kind: str) -> Sequence[str]:
        root = f"{self._path('')}/"
        try:
            entries = _file_system().ls(root.rstrip("/"), detail=True)
        except FileNotFoundError:
            return []
        paths = [entry["name"].rstrip("/") for entry in entries if entry["type"] == kind]
        names = [path.removeprefix(root) for path in paths if path.startswith(root)]
        return sorted(name for name in names if not name.startswith("."))

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a new object for writing; it appears whole when the block ends, or not at all."""
        buffer = io.BytesIO()
        yield buffer
        self.write(name, buffer.getvalue())

    def write(self, name: str, data: bytes) -> None:
        """Write one object, whole or not at all."""
        _file_system().pipe_file(self._path(name), bytes(data))

    def write_if(self, name: str, data: bytes, version: str | None) -> bool:
        """Write one object if nobody else wrote it meanwhile. Return whether it was written.

        Args:
            name: Of the object.
            data: Its content.
            version: What `stat` said of the object that is replaced. None: there must be none.
        """
        with _write_if:
            current = self.stat(name).version if self.exists(name) else None
            if current != version:
                return False
            self.write(name, data)
            return True

    def remove(self, name: str) -> None:
        """Remove an object. It is not an error when there is none."""
        with suppress(FileNotFoundError):
            _file_system().rm_file(self._path(name))

    def _path(self, name: str) -> str:
        """Return the name of an object in the file system, where all names are absolute."""
        return "/" + self.url_of(name).removeprefix("memory://").strip("/")

    def _file(self, name: str) -> Any:
        """Return the file of an object. Every write puts a new one in its place."""
        file = _file_system().store.get(self._path(name))
        if file is None:
            raise FileNotFoundError(f"{self.url_of(name)}: no such object")
        return file


def _restore(
    kind: type[MemoryStore], url: str, objects: Mapping[str, tuple[bytes, datetime]]
) -> MemoryStore:
    """Make a store from its pickle, and the objects that this process does not have yet."""
    file_system = _file_system()
    for path, (data, modified) in objects.items():
        if not file_system.isfile(path):
            file_system.pipe_file(path, data)
            file_system.store[path].modified = modified  # the same version in every process
    return kind(url)


def _object_stat(file: Any) -> ObjectStat:
    return ObjectStat(file.size, file.modified.isoformat())


def _file_system() -> Any:
    """Return fsspec's memory file system; all of its instances share their objects."""
    import fsspec

    return fsspec.filesystem("memory")
