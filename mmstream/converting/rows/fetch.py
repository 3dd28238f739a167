"""Names of rows -> plain files: patterns, folders of URLs, standard input, downloads.

    what the caller named -> FETCH -> detect

Files that are compressed by gzip, zstd, bzip2 or xz become plain temporary files. Those of several
frames or members are read to their end. The compression is recognised by the first bytes, whatever
the file is called.

A sample is read at its place in a tar. A compressed file and a stream have no such places, and
those in a remote tar without an index are not known. So such a tar is read once, from front to
back, into a plain tar in the temporary folder. Other tars of the same list are linked beside the
copies, or copied too if they are remote.
"""

from __future__ import annotations

import bz2
import fnmatch
import glob
import gzip
import io
import logging
import lzma
import os
import re
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from mmstream.converting.rows.detect import HEAD_BYTES, is_tar
from mmstream.converting.rows.records import encodable
from mmstream.dataset.index import index_name
from mmstream.dataset.open import expand_braces, open_dataset
from mmstream.errors import ConfigError, MMStreamError, StorageError, escaped
from mmstream.storage import is_remote, open_file, open_store, split_url
from mmstream.storage.store import ObjectFile, local_path, require_no_secret
from mmstream.tar.header import BLOCK

logger = logging.getLogger(__name__)

STDIN = "-"
"""The name of standard input."""

_BLOCK = 16 << 20
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
}
"""Words in names of files and folders that name a split, as Hugging Face's datasets read them."""

SPLIT_ORDER = ("train", "validation", "test")


@dataclass(frozen=True)
class InputFile:
    """A file that the caller named."""

    url: str
    """Local path, URL, or ``-``."""
    name: str
    """How rejects name it: the shortest end of its path that no other file has."""
    split: str | None = None
    folder: str = ""
    """For metadata of a folder: where the file lies in it, empty or with a slash at the end."""
    copy: Path | None = None
    """A local copy of standard input, which can be read once only."""
    rows: Iterable[tuple[int, Any]] | None = None
    """(number, row) of rows that no file holds: from Python, or one for each file of a folder."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", encodable(self.name))


def expand(names: Sequence[str]) -> list[str]:
    """Return the files of names, patterns and braces, in the order of the caller.

    The files of one pattern are sorted by code points. A name that exists stands for itself,
    whatever characters it has.

    Raises:
        FileNotFoundError: A pattern fits no file.
        ConfigError: A name comes twice, or a URL's pattern is not in its last part.
    """
    urls: list[str] = []
    for name in names:
        require_no_secret(name)
        if name == STDIN or (not is_remote(name) and Path(local_path(name)).exists()):
            urls.append(name)
            continue
        for pattern in expand_braces(name):
            urls += _matches(pattern)
    doubled = next((url for url, count in Counter(urls).items() if count > 1), None)
    if doubled is not None:
        raise ConfigError(f"{escaped(doubled)}: is named twice, so its rows would come twice")
    return urls


def _matches(pattern: str) -> list[str]:
    if not re.search(r"[*?\[]", pattern):
        return [pattern]
    if is_remote(pattern):
        folder, last = split_url(pattern)
        if re.search(r"[*?\[]", folder):
            raise ConfigError(f"{pattern}: in a URL, only the last part may be a pattern")
        store = open_store(folder)
        urls = [store.url_of(name) for name in store.list() if fnmatch.fnmatchcase(name, last)]
    else:
        paths = glob.glob(local_path(pattern), recursive=True)  # noqa: PTH207 - takes any path
        urls = [path for path in paths if Path(path).is_file()]
    if not urls:
        raise FileNotFoundError(f"{pattern}: no file fits this pattern")
    return sorted(urls)


def short_names(urls: Sequence[str]) -> list[str]:
    """Return the shortest ends of paths that are different for all of them.

    Examples:
        >>> short_names(["data/a.jsonl", "data/b.jsonl"]), short_names(["x/a.csv", "y/a.csv"])
        (['a.jsonl', 'b.jsonl'], ['x/a.csv', 'y/a.csv'])
    """
    paths = [url.rstrip("/").split("/") for url in urls]
    for length in range(1, max(map(len, paths), default=0) + 1):
        names = ["/".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return list(urls)


def split_of(path: str) -> str | None:
    """Return the split that a path names, by its last word that is one: ``data/train-0.csv``."""
    words = re.split(r"[^A-Za-z]+", path.lower())
    return next((SPLIT_WORDS[word] for word in reversed(words) if word in SPLIT_WORDS), None)


def with_splits(files: Sequence[InputFile], paths: Sequence[str]) -> list[InputFile]:
    """Return files of a folder with their splits, sorted by them; as they are if they have none.

    Args:
        files: In the order of the folder.
        paths: Of each file in the folder.

    Raises:
        ConfigError: Some files are of a split and others are not.
    """
    splits = [split_of(path) for path in paths]
    if len(set(splits)) < 2:
        return list(files)
    if None in splits:
        strange = next(f.url for f, split in zip(files, splits, strict=True) if split is None)
        named = next(f.url for f, split in zip(files, splits, strict=True) if split)
        raise ConfigError(
            f"{escaped(named)} is of a split, and {escaped(strange)} is of none; name the files "
            "that belong together"
        )
    listed = [replace(file, split=split) for file, split in zip(files, splits, strict=True)]
    return sorted(listed, key=lambda file: SPLIT_ORDER.index(str(file.split)))


def read_head(url: str, num_bytes: int) -> bytes:
    """Return the first bytes of a file.

    Raises:
        FileNotFoundError: There is no such file.
        StorageError: It could not be read, or it is a folder, a FIFO or a device.
    """
    if is_remote(url):
        folder, name = split_url(url)
        store = open_store(folder)
        size = store.size(name)
        try:
            return store.read_range(name, 0, min(num_bytes, size))
        except StorageError:
            if size > _BLOCK:
                raise
        # Some servers know no ranges. They send whole files, as `download` asks for them.
        return store.read_range(name, 0, size)[:num_bytes]
    try:
        with os.fdopen(open_file(local_path(url)), "rb") as file:
            return file.read(num_bytes)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{url}: no such file of rows; pass JSONL, JSON, csv, tsv, Parquet, tars or a folder"
        ) from None
    except OSError as error:
        if isinstance(error, MMStreamError) or error.filename is not None:
            raise
        raise StorageError(  # a failed read does not say of which file
            f"{url}: cannot be read ({error.strerror}); check the disk or the mount, or copy it"
        ) from None


def download(url: str, target: Path) -> Path:
    """Write a remote file, or standard input, to `target`. Return it.

    Raises:
        StorageError: It could not be read, or it was replaced meanwhile.
    """
    with target.open("wb") as file, ExitStack() as stack:
        source: Any = sys.stdin.buffer
        if url != STDIN:
            folder, name = split_url(url)
            store = open_store(folder)
            source = stack.enter_context(ObjectFile(store, name, store.stat(name)))
        shutil.copyfileobj(source, file, _BLOCK)
    return target


_PACKED_BLOCK = 4 << 20
_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, ValueError)
_MAGIC = {
    "gzip": re.compile(rb"\x1f\x8b"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    "bzip2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
}
"""How compressed files begin. A file of zstd may begin with a frame that is skipped, and a file of
bzip2 without content with its end."""


def compression_of(head: bytes) -> str | None:
    """Return the name of a file's compression by its first bytes. None: it has none."""
    if is_tar(head):  # it begins with the name of a member, which may be any bytes
        return None
    return next((name for name, magic in _MAGIC.items() if magic.match(head)), None)


def plain_head(head: bytes, num_bytes: int) -> bytes:
    """Return the first bytes of a file's content, by the first bytes of the file.

    Fewer come back where the file is damaged, or where so few bytes hold no more.
    """
    compression = compression_of(head)
    if compression is None:
        return head[:num_bytes]
    content = b""
    blocks = _plain_blocks(io.BytesIO(head), compression, num_bytes, "")
    with suppress(ConfigError):
        while len(content) < num_bytes and (block := next(blocks, None)) is not None:
            content += block
    return content[:num_bytes]


def plain_file(file: InputFile, target: Path, downloaded: Path) -> Path:
    """Return a plain local file with the content of a file.

    It is the file itself where that is plain and local. Otherwise it is `target`.

    Args:
        file: Any file. A copy of standard input is moved or removed.
        target: Where the content is written. No such file exists.
        downloaded: Where a remote file lies meanwhile.

    Raises:
        ConfigError: The file is damaged or cut off.
        StorageError: It could not be read.
    """
    is_remote_file = file.copy is None and is_remote(file.url)
    copy = download(file.url, downloaded) if is_remote_file else file.copy
    path = copy or Path(local_path(file.url))
    compression = compression_of(read_head(str(path), HEAD_BYTES))
    if compression is not None:
        with path.open("rb") as source, target.open("xb") as plain:
            for block in _plain_blocks(source, compression, _PACKED_BLOCK, file.url):
                plain.write(block)
        if copy is not None:
            copy.unlink()
        return target
    return path if copy is None else copy.rename(target)


def _plain_blocks(file: BinaryIO, compression: str, num_bytes: int, rows: str) -> Iterator[bytes]:
    """Yield the content of a compressed file, at most `num_bytes` at a time.

    Raises:
        ConfigError: The file is damaged or cut off.
    """
    try:
        if compression in _STREAMS:
            yield from _joined_streams(file, _STREAMS[compression], num_bytes)
            return
        if compression == "gzip":
            source: Any = gzip.GzipFile(fileobj=file)
        else:
            import pyarrow as pa

            source = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
        yield from iter(lambda: source.read(num_bytes), b"")
    except _DAMAGE as error:
        raise ConfigError(
            f"{rows}: damaged {compression} ({error}); fetch or write it again"
        ) from None


def _joined_streams(file: BinaryIO, new: Callable[[], Any], num_bytes: int) -> Iterator[bytes]:
    """Yield the content of streams that follow each other, with zeros between them or not.

    ``bz2.open`` and ``lzma.open`` end in silence where a later stream is damaged or has zeros in
    front of it.
    """
    stream, data = new(), b""
    while True:
        if stream.eof:
            data = stream.unused_data.lstrip(b"\0")
            while not data and (data := file.read(_PACKED_BLOCK)):
                data = data.lstrip(b"\0")
            if not data:
                return
            stream = new()
        elif stream.needs_input and not (data := file.read(_PACKED_BLOCK)):
            raise EOFError("it is cut off")
        yield stream.decompress(data, num_bytes)
        data = b""


_STREAMS: dict[str, Callable[[], Any]] = {
    "bzip2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
}


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
    names_in = cache(_names_in)
    return all(_is_readable(file, names_in) for file in files)


def _is_readable(file: InputFile, names_in: Callable[[str], set[str]]) -> bool:
    if file.copy is not None:
        return False
    if not is_remote(file.url):
        return _is_plain(read_head(file.url, 2 * BLOCK))
    folder, name = split_url(file.url)
    return index_name(name) in names_in(folder)


def copy_tars(files: Sequence[InputFile], folder: Path, limit: int | None) -> list[str]:
    """Return plain local tars with the content of compressed or remote ones, in their order.

    Args:
        files: The tars.
        folder: Temporary folder. The copies are written to its folder ``tars``. Messages and plans
            name them by their place in that.
        limit: No more tars are read than have so many samples together.

    Raises:
        ConfigError: A file is not a tar, or damaged.
        StorageError: A remote tar could not be read.
    """
    copies: list[str] = []
    num_samples = 0
    for file, relative_path in zip(files, _places(files), strict=True):
        path = folder / "tars" / relative_path
        path.parent.mkdir(parents=True, exist_ok=True)
        plain = plain_file(file, path, folder / "download")
        if plain != path:
            path.symlink_to(plain.resolve())
        if not _is_plain(read_head(str(path), 2 * BLOCK)):
            raise ConfigError(f"{file.url}: is not a tar, and the first file is; name tars alone")
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
