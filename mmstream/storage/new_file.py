"""A new file of a local folder: written under a temporary name, then renamed.

`LocalStore` writes all objects this way, and so does whoever rewrites a file of its own. The
temporary name of ``a.tar`` is ``.a.tar.PID-RANDOM.tmp``: two processes never share one, and nobody
can put a link in its place beforehand. A killed process leaves it behind;
`remove_temporaries` is for whoever knows that no other process writes there.
"""

from __future__ import annotations

import io
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mmstream.errors import StorageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

EARLY_BYTES = 1 << 20
"""Pieces of this size go to the disk before the file is complete."""

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def create_file(
    path: Path, commit: Callable[[Path, Path], object] = Path.replace
) -> Iterator[BinaryIO]:
    """Open a new file for writing, front to back. It has its name when the block ends.

    After an error there is no new file; an old one stays as it was. If `path` is a link, the new
    file replaces the link and not the file that it leads to.

    Args:
        path: Its name.
        commit: (the complete file, its name) -> gives it the name. By default an old file of this
            name is replaced.

    Raises:
        StorageError: The file does not have all bytes that were written to it.
        OSError: The disk failed, or is full.
    """
    name = f".{path.name}.{os.getpid()}-{secrets.token_hex(6)}.tmp"
    temporary = path.with_name(name)
    descriptor = os.open(temporary, _FLAGS, 0o666)  # the umask takes its bits away
    try:
        with io.BufferedWriter(_EarlyWriter(descriptor, "wb")) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            num_written, size = file.tell(), os.fstat(file.fileno()).st_size
        if size != num_written:
            raise StorageError(
                f"{path}: {num_written} bytes were written, but the file has {size}; "
                "see which other program changes files there"
            )
        commit(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class _EarlyWriter(io.FileIO):
    """Lets the disk begin with large pieces at once.

    Else the `fsync` at the end waits for nearly all bytes. That was a seventh of the time in which
    pictures of 1 MB are converted.
    """

    def write(self, data: ReadableBuffer, /) -> int:
        num_bytes = super().write(data)
        if num_bytes >= EARLY_BYTES and hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # a hint; not all file systems take it
                start = self.tell() - num_bytes
                # Linux begins to write what it cannot drop yet. Other pages stay as they are.
                os.posix_fadvise(self.fileno(), start, num_bytes, os.POSIX_FADV_DONTNEED)
        return num_bytes


def remove_temporaries(folder: Path, name: str) -> None:
    """Remove what killed processes left of files that they were writing.

    Args:
        folder: It need not exist.
        name: Regular expression of the files' final names.
    """
    pattern = re.compile(rf"\.(?:{name})\.\d+-[0-9a-f]+\.tmp")
    for path in folder.glob(".*.tmp"):
        if pattern.fullmatch(path.name):
            path.unlink(missing_ok=True)
