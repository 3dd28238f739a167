"""Tars of samples that cannot be read at any place -> plain tars in the temporary folder.

    compressed tars, remote tars without indexes, standard input -> TARS -> samples

A sample is read at its place in a tar, and a compressed file or a stream has no such places. So the
tar is read once, from front to back. Other tars of the same list are linked beside the copies, or
copied too if they are remote.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from mmstream.converting.rows.compressed import compression_of, decompress, plain_head
from mmstream.converting.rows.detect import HEAD_BYTES, is_tar
from mmstream.converting.rows.fetch import InputFile, download, local_path, read_head
from mmstream.dataset.index import index_name
from mmstream.dataset.open import open_dataset
from mmstream.errors import ConfigError
from mmstream.storage import is_remote, open_store, split_url
from mmstream.tar.header import BLOCK

__all__ = ["are_readable", "copy_tars", "holds_tar", "is_tar_name"]

_TAR_ENDINGS = (".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz")


def is_tar_name(name: str) -> bool:
    """Tell whether a file of a folder is called like a tar, compressed or not."""
    return name.lower().endswith(_TAR_ENDINGS)


def holds_tar(head: bytes) -> bool:
    """Tell by the first bytes of a file whether it is a tar, compressed or not."""
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
            names[folder] = set(open_store(folder).list())
        if index_name(name) not in names[folder]:
            return False
    return True


def copy_tars(files: Sequence[InputFile], folder: Path, limit: int | None) -> list[str]:
    """Return plain local tars with the content of compressed or remote ones, in their order.

    Args:
        files: The tars.
        folder: Where the copies are written. Messages and plans name them by their place in it.
        limit: No more tars are read than have so many samples together.

    Raises:
        ConfigError: A file is no tar, or damaged.
        StorageError: A remote tar could not be read.
    """
    copies: list[str] = []
    num_samples = 0
    for number, file in enumerate(files):
        words = PurePosixPath(file.name).parts
        is_safe = words and not {"/", "..", ""} & set(words)
        path = folder / (file.name if is_safe else f"{number}/{PurePosixPath(file.name).name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        _copy(file, path)
        copies.append(str(path))
        if limit is not None:
            num_samples += len(open_dataset([path]))
            if num_samples >= limit:
                break
    return copies


def _copy(file: InputFile, target: Path) -> None:
    """Write the plain content of one tar to `target`, or link to it if it is plain and local."""
    if file.copy is not None or not is_remote(file.url):
        path = file.copy or Path(local_path(file.url))
    else:
        path = download(file.url, target.with_name(target.name + ".download"))
    compression = compression_of(read_head(str(path), HEAD_BYTES))
    if compression is not None:
        decompress(path, target, compression, file.url)
        if path != Path(local_path(file.url)):
            path.unlink()
    elif path.parent == target.parent:
        path.rename(target)
    else:
        target.symlink_to(path.resolve())
    if not _is_plain(read_head(str(target), 2 * BLOCK)):
        raise ConfigError(f"{file.url}: is no tar, and the first file is one; name tars alone")


def _is_plain(head: bytes) -> bool:
    """Tell whether a file begins as a plain tar. One without members begins with zeros."""
    return is_tar(head) or (bool(head) and not any(head))
