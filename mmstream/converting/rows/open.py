"""Step 1 of a conversion: whatever holds the rows -> a `RowSource`.

ROWS -> plan -> formats -> media -> shard
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mmstream.converting.formats.tarred import names_tars
from mmstream.converting.rows.detect import is_tar, require_kind
from mmstream.converting.rows.fetch import (
    STDIN,
    InputFile,
    expand,
    local_path,
    read_head,
    short_names,
    with_splits,
)
from mmstream.converting.rows.folders import look_into
from mmstream.converting.rows.inputs import (
    Rows,
    file_names,
    files_in,
    folder_kind,
    inputs_of,
    is_local_folder,
    media_folder,
)
from mmstream.converting.rows.lerobot import is_lerobot
from mmstream.converting.rows.options import RowOptions
from mmstream.converting.rows.plain_files import PlainFiles
from mmstream.converting.rows.records import require_rows
from mmstream.converting.rows.samples import SampleSource
from mmstream.converting.rows.source import RowSource
from mmstream.dataset.manifest import MANIFEST_NAME
from mmstream.errors import ConfigError, StorageError
from mmstream.storage import is_remote, open_store, split_url
from mmstream.tar.header import BLOCK

__all__ = ["open_rows"]


@contextmanager
def open_rows(rows: Rows, options: RowOptions | None = None) -> Iterator[RowSource]:
    """Open the rows. Temporary copies, if some are needed, are removed after the block.

    Raises:
        FileNotFoundError: There is no such file, or no file fits a pattern.
        ConfigError: There are no rows, or their content is damaged, of an unknown kind, or of
            several.
        StorageError: A remote file could not be read, it is a FIFO or a device, or the temporary
            folder is full.
    """
    with tempfile.TemporaryDirectory(prefix="mmstream-rows-") as folder:
        try:
            source = _open(rows, Path(folder), options or RowOptions())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise StorageError(
                f"{folder}: no space left for the copy of the rows; set TMPDIR to a folder with "
                "more space"
            ) from None
        require_rows(source.name, source.num_rows)
        yield source


def _open(rows: Rows, folder: Path, options: RowOptions) -> RowSource:
    names = file_names(rows)
    if names is None:
        if options.rows_as is not None:
            raise ConfigError(
                f"rows_as={options.rows_as!r}: has no effect on rows from Python; leave it out"
            )
        return PlainFiles(folder, "rows", options).open_python(rows)
    urls = expand(names)
    name = _name_of(names[0])
    plain_files = PlainFiles(folder, name, options, media_folder(rows))
    if len(urls) == 1 and urls[0] != STDIN and _is_folder(urls[0]):
        return _open_folder(urls[0].rstrip("/") or "/", name, plain_files, options)
    if any(is_local_folder(url) for url in urls):
        return plain_files.open_inputs(inputs_of(urls, options.rows_as, media_folder(rows)))
    if _are_tars(urls):
        require_kind(options.rows_as, "tars", urls[0])
        return SampleSource.open(urls, name, options.limit)
    if options.rows_as == "tars":
        raise ConfigError(f"{urls[0]}: is no tar; leave out rows_as='tars'")
    return plain_files.open(
        [InputFile(url, name) for url, name in zip(urls, short_names(urls), strict=True)]
    )


def _name_of(path: str) -> str:
    """Return how messages and the plan name the rows: the base name of the first file."""
    return "stdin" if path == STDIN else split_url(path.rstrip("/"))[1]


def _open_folder(url: str, name: str, plain_files: PlainFiles, options: RowOptions) -> RowSource:
    """Return the source of a folder's rows."""
    if is_remote(url):
        names = sorted(open_store(url).list())
        has_tars = any(each.endswith(".tar") for each in names)
        if has_tars and (tarred := [each for each in names if names_tars(each)]):
            names = tarred
        elif MANIFEST_NAME in names or has_tars:
            return SampleSource.open(url, name, options.limit)
        files = [InputFile(f"{url}/{each}", each) for each in names]
        return plain_files.open(with_splits(files, names))
    folder = Path(local_path(url))
    if options.rows_as is None and is_lerobot(folder):
        return plain_files.open_lerobot(folder)
    content = look_into(folder)
    kind = folder_kind(url, content, options.rows_as)
    if kind == "tars":
        return SampleSource.open(str(folder), name, options.limit)
    if kind == "media":
        return plain_files.open_media(folder, content)
    return plain_files.open(files_in(folder, content, kind, ""))


def _is_folder(url: str) -> bool:
    if not is_remote(url):
        return Path(local_path(url)).is_dir()
    folder, name = split_url(url)
    return not name or (not open_store(folder).exists(name) and bool(open_store(url).list()))


def _are_tars(urls: Sequence[str]) -> bool:
    """Tell whether the first file is a tar. Then all must be."""
    return urls[0] != STDIN and is_tar(read_head(urls[0], 2 * BLOCK))
