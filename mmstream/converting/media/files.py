"""Media files on local disk. Nothing outside the media root is read.

    references -> FILES

A disk that fails is no fault of a row: it ends the conversion. So does a media root that was there
at the beginning and is gone, such as a network mount that was lost.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from mmstream.converting.draft import RowError
from mmstream.converting.media.references import folder_stamp
from mmstream.errors import StorageError, escaped
from mmstream.storage import NotAFileError, open_file
from mmstream.storage.urls import file_path

_KERNEL_FOLDERS = ("/proc/", "/sys/", "/dev/")
"""Their files are no data. Some of them fail when they are read, or never end."""

_BAD_PATH = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
_MAX_FOLDERS = 1000
_DRIVE = re.compile(r"/?[A-Za-z]:[/\\]+")


class LocalFolder:
    """A folder of media files on this machine.

    Args:
        root: Its real path. No path may lead out of it, by ``..`` or by a link.
        stamp: What `folder_stamp` gave for it when the conversion began. None: not compared.
    """

    def __init__(self, root: str, stamp: tuple[int, int] | None = None) -> None:
        self._root, self._stamp = root, stamp
        self._real_folders: dict[str, str] = {}

    def read(self, path: str, max_bytes: int) -> bytes:
        r"""Return a whole file.

        Args:
            path: Relative to the root, absolute and inside it, a ``file://`` URL, or a path of
                Windows. The drive of such a path is left out: ``C:\a\b.jpg`` is ``a/b.jpg``.
            max_bytes: The largest file that is read.

        Raises:
            RowError: It is missing, outside the root, empty, too large, or no plain file. The
                message does not name the path.
            StorageError: The disk failed, or the root is gone.
        """
        with self._open(path) as (descriptor, size):
            if size > max_bytes:
                raise RowError(f"{size:,} bytes, {max_bytes:,} are left of the limit of a row")
            return _read(descriptor, 0, size, size)

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file; errors as `read`."""
        with self._open(path) as (descriptor, size):
            if stop > size:
                raise RowError(f"bytes {start} to {stop} of a file of {size}")
            return _read(descriptor, start, stop, size)

    def stamp(self, path: str) -> tuple[str, int, int]:
        """Return (real path, bytes, time of the last change in ns) of a file; errors as `read`."""
        with self._open(path) as (descriptor, size):
            return self._resolve(path), size, os.fstat(descriptor).st_mtime_ns

    @contextmanager
    def _open(self, path: str) -> Iterator[tuple[int, int]]:
        """Open a file. Yield its descriptor and its size in bytes."""
        try:
            descriptor = self._open_any(path)
            try:
                size = os.fstat(descriptor).st_size
                if not size:  # the files of /proc have no size either, wherever it is mounted
                    raise RowError("empty file")
                yield descriptor, size
            finally:
                os.close(descriptor)
        except NotAFileError:
            raise RowError("not a file") from None
        except PermissionError:
            self._require_root()
            raise RowError("no permission to read it") from None
        except OSError as error:
            if error.errno in _BAD_PATH:
                self._require_root()
                raise RowError(f"no such file{_tried(path)}") from None
            raise StorageError(
                f"{escaped(self._root)}/{escaped(path)}: {error.strerror}; this is no fault of a "
                "row, so the conversion stops. Mend the disk, then run the same command again"
            ) from error

    def _open_any(self, path: str) -> int:
        """Open a file by its path as it is, or else as a path of Windows."""
        try:
            return open_file(self._resolve(path))
        except FileNotFoundError:
            if "\\" not in path and not _DRIVE.match(path):
                raise
            return open_file(self._resolve(plain_path(path)))

    def _resolve(self, path: str) -> str:
        """Return the real path of a media file. It lies under the root."""
        if path.startswith("file://"):
            path = plain_path(path)
        if "\0" in path:
            raise RowError("not a path")
        # os.path is twice as fast as pathlib.
        folder, name = os.path.split(os.path.join(self._root, path))  # noqa: PTH118
        real = os.path.join(self._real_folder(folder), name)  # noqa: PTH118
        if name in ("", ".", "..") or os.path.islink(real):  # noqa: PTH114
            real = os.path.realpath(real)
        if not real.startswith(self._root.rstrip("/") + "/"):
            spelled = os.path.normpath(os.path.join(self._root, path))  # noqa: PTH118
            is_link = spelled.startswith(self._root.rstrip("/") + "/")
            raise RowError(
                f"lies outside the media root{', behind a link' * is_link}; name a higher folder "
                "as the media root if you trust the rows"
            )
        if real.startswith(_KERNEL_FOLDERS) and not real.startswith("/dev/shm/"):
            raise RowError("not a file")
        return real

    def _real_folder(self, folder: str) -> str:
        """Return the real path of a folder. Each level costs a system call, so it is kept."""
        real = self._real_folders.get(folder)
        if real is None:
            if len(self._real_folders) >= _MAX_FOLDERS:
                self._real_folders.clear()
            real = self._real_folders[folder] = os.path.realpath(folder)
        return real

    def _require_root(self) -> None:
        """Raise a StorageError where the root is another folder than at the beginning."""
        if self._stamp is not None and folder_stamp(self._root) != self._stamp:
            raise StorageError(
                f"{escaped(self._root)}: the media root is gone or was replaced while rows were "
                "converted. Mount it again, then run the same command again"
            )


def plain_path(path: str) -> str:
    r"""Return a path as it is looked for last: no ``file://``, no drive of Windows, no ``\``."""
    if path.startswith("file://"):
        return _without_drive(file_path(path))
    return _without_drive(path).replace("\\", "/")


def _without_drive(path: str) -> str:
    match = _DRIVE.match(path)
    return path[match.end() :] if match else path


def _tried(path: str) -> str:
    """Say which path in the root was looked for last, where the row spells it otherwise."""
    last = plain_path(path)
    return f"; tried {escaped(repr(last), 200)} in the media root" if last != path else ""


def _read(descriptor: int, start: int, stop: int, size: int) -> bytes:
    """Return bytes [start, stop) of an open file of `size` bytes. It must not change meanwhile."""
    pieces: list[bytes] = []
    position = start
    while position < stop:  # the kernel gives at most 2 GiB at once
        piece = os.pread(descriptor, stop - position, position)
        if not piece:
            break
        pieces.append(piece)
        position += len(piece)
    if position != stop or os.fstat(descriptor).st_size != size:
        raise RowError("changed its size while it was read")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
