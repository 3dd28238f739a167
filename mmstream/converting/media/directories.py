"""Directories of the archives that rows name: which members each tar or zip has.

    archive -> DIRECTORIES -> its members by their names

A directory is read once, and kept for the rows that follow. Rows usually name the members of few
archives at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from mmstream.converting.draft import RowError

__all__ = ["Directories", "ReadRange", "plain_name"]

MAX_KEPT_MEMBERS = 500_000
"""Most members that are remembered, of all archives together: about 200 MB. The archive that was
named last is always kept, even if it alone has more."""

Member = TypeVar("Member")
ReadRange = Callable[[int, int], bytes]
"""(start, stop) -> these bytes of an archive."""


class _Directory(NamedTuple, Generic[Member]):
    members: dict[str, Member]
    fault: str | None
    """Why the archive cannot be read."""

    @property
    def num_kept(self) -> int:
        return max(1, len(self.members))  # what has no members takes memory, too


class Directories(Generic[Member]):
    """The directories of the archives that were named last. Safe to use from several threads.

    Args:
        read_directory: (reads a range, size in bytes) -> the members by their plain names. It
            raises a `RowError` where the archive cannot be read.
    """

    def __init__(self, read_directory: Callable[[ReadRange, int], dict[str, Member]]) -> None:
        self._read_directory = read_directory
        self._directories: OrderedDict[Hashable, _Directory[Member]] = OrderedDict()
        self._num_kept = 0
        self._lock = threading.Lock()

    def members(self, archive: Hashable, read: ReadRange, num_bytes: int) -> dict[str, Member]:
        """Return the members of an archive by their plain names.

        Args:
            archive: What identifies it: two archives have the same only if they are the same.
            read: Returns bytes [start, stop) of the archive.
            num_bytes: Size of the archive.

        Raises:
            RowError: The archive cannot be read. That is remembered, too.
        """
        with self._lock:
            if archive not in self._directories:
                self._keep(archive, self._directory(read, num_bytes))
            self._directories.move_to_end(archive)
            members, fault = self._directories[archive]
        if fault is not None:
            raise RowError(fault)
        return members

    def _directory(self, read: ReadRange, num_bytes: int) -> _Directory[Member]:
        try:
            return _Directory(self._read_directory(read, num_bytes), None)
        except RowError as error:
            return _Directory({}, str(error))

    def _keep(self, archive: Hashable, directory: _Directory[Member]) -> None:
        """Keep a directory, and forget those that were named least recently."""
        self._directories[archive] = directory
        self._num_kept += directory.num_kept
        while len(self._directories) > 1 and self._num_kept > MAX_KEPT_MEMBERS:
            _, oldest = self._directories.popitem(last=False)
            self._num_kept -= oldest.num_kept


def plain_name(name: str) -> str:
    """Return the name of a member without ``./`` before it."""
    return name.removeprefix("./")
