"""Tars of samples that cannot be read at any place -> plain tars in the temporary folder.

    compressed tars, remote tars without indexes, standard input -> TARS -> samples

A sample is read at its place in a tar, and a compressed file or a stream has no such places. So the
tar is read once, from front to back. Other tars of the same list are linked beside the copies, or
copied too if they are remote.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from mmstream.converting.rows.compressed import compression_of, plain_file, plain_head
from mmstream.converting.rows.detect import HEAD_BYTES, is_tar
from mmstream.converting.rows.fetch import InputFile, read_head
from mmstream.dataset.index import index_name
from mmstream.dataset.open import open_dataset
from mmstream.errors import ConfigError, StorageError
from mmstream.storage import is_remote, open_store, split_url
from mmstream.tar.header import BLOCK

__all__ = ["are_readable", "copy_tars", "holds_tar"]

logger = logging.getLogger(__name__)

_COMPRESSED_HEAD_BYTES = 1 << 20
"""A block of bzip2 has up to 900 kB, and gives nothing before its end."""


def holds_tar(path: str) -> bool:
    """Tell whether a file is a tar, compressed or not. Its beginning is read.

    Args:
        path: Of a local file, or a URL.

    Raises:
        FileNotFoundError: There is no such file.
        StorageError: It could not be read.
    """
    head = read_head(path, HEAD_BYTES)
    if compression_of(head) is not None and len(head) == HEAD_BYTES:
        head = read_head(path, _COMPRESSED_HEAD_BYTES)
    return is_tar(plain_head(head, 2 * BLOCK))


def are_readable(files: Sequence[InputFile]) -> bool:
    """Tell whether all tars can be read where they lie: plain ones, and remote ones with an index.

    The folders of remote tars are listed, and the beginnings of local ones are read.
    """
    names: dict[str, set[str]] = {}
    for file in files:
        if file.copy is not None:
            return False
        if not is_remote(file.url):
            if not _is_plain(read_head(file.url, 2 * BLOCK)):
                return False
            continue
        folder, name = split_url(file.url)
        if folder not in names:
            names[folder] = _names_in(folder)
        if index_name(name) not in names[folder]:
            return False
    return True


def copy_tars(files: Sequence[InputFile], folder: Path, limit: int | None) -> list[str]:
    """Return plain local tars with the content of compressed or remote ones, in their order.

    Args:
        files: The tars.
        folder: Temporary folder. The copies are written to its folder ``tars``. Messages and plans
            name them by their place in that.
        limit: No more tars are read than have so many samples together.

    Raises:
        ConfigError: A file is no tar, or damaged.
        StorageError: A remote tar could not be read.
    """
    copies: list[str] = []
    num_samples = 0
    for file, place in zip(files, _places(files), strict=True):
        path = folder / "tars" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        plain = plain_file(file, path, folder / "download")
        if plain != path:
            path.symlink_to(plain.resolve())
        if not _is_plain(read_head(str(path), 2 * BLOCK)):
            raise ConfigError(f"{file.url}: is no tar, and the first file is one; name tars alone")
        copies.append(str(path))
        if limit is not None:
            num_samples += len(open_dataset([path]))
            if num_samples >= limit:
                break
    return copies


def _names_in(folder: str) -> set[str]:
    """Return the names in a folder of remote tars. Without the right to list it, there are none."""
    try:
        return set(open_store(folder).list())
    except (StorageError, PermissionError) as error:
        logger.warning("%s: cannot be listed, so its tars are copied: %s", folder, error)
        return set()


def _places(files: Sequence[InputFile]) -> Iterator[PurePosixPath]:
    """Yield a relative path for each tar. They are different, and none is a folder of another.

    They are the names of the tars where these are so. Otherwise each has a folder of its own. Names
    that differ by their case alone are one file on some disks.
    """
    names = [PurePosixPath(file.name) for file in files]
    num_different = len({str(name).casefold() for name in names})
    differ = len({len(name.parts) for name in names}) == 1 and num_different == len(names)
    if differ and not any({"/", "//", ".."} & set(name.parts) for name in names):
        yield from names
        return
    for number, name in enumerate(names):
        yield PurePosixPath(str(number), name.name)


def _is_plain(head: bytes) -> bool:
    """Tell whether a file begins as a plain tar. One without members begins with zeros."""
    return is_tar(head) or (bool(head) and not any(head))
