"""Step 1 of a conversion: whatever holds the rows -> a `RowSource`.

ROWS -> plan -> formats -> media -> shard
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mmstream.converting.rows.detect import HEAD_BYTES, require_kind
from mmstream.converting.rows.fetch import (
    STDIN,
    InputFile,
    download,
    expand,
    local_path,
    read_head,
    short_names,
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
from mmstream.converting.rows.tars import are_readable, copy_tars, holds_tar
from mmstream.dataset.manifest import MANIFEST_NAME
from mmstream.errors import ConfigError, StorageError
from mmstream.storage import is_remote, open_store, split_url

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
    root = media_folder(rows)
    plain_files = PlainFiles(folder, name, options, root)
    is_remote_folder = is_remote(urls[0]) and root is not None
    if len(urls) == 1 and (is_remote_folder or is_local_folder(urls[0])):
        return _open_folder(urls[0], name, folder, plain_files, options)
    if any(is_local_folder(url) for url in urls):
        return plain_files.open_inputs(inputs_of(urls, options.rows_as, root))
    files = [
        InputFile(url, short_name) if url != STDIN else _standard_input(folder)
        for url, short_name in zip(urls, short_names(urls), strict=True)
    ]
    if holds_tar(read_head(str(files[0].copy or urls[0]), HEAD_BYTES)):
        require_kind(options.rows_as, "tars", urls[0])
        return _open_tars(files, name, folder, options)
    if options.rows_as == "tars":
        raise ConfigError(f"{urls[0]}: is no tar; leave out rows_as='tars'")
    return plain_files.open(files)


def _standard_input(folder: Path) -> InputFile:
    """Return standard input as a file: it can be read once only."""
    return InputFile(STDIN, "stdin", copy=download(STDIN, folder / "stdin"))


def _open_tars(
    files: Sequence[InputFile], name: str, folder: Path, options: RowOptions
) -> SampleSource:
    """Return the source of tars of samples. Those that cannot be read at any place are copied."""
    if are_readable(files):
        return SampleSource.open([file.url for file in files], name, options.limit)
    copies = copy_tars(files, folder / "tars", options.limit)
    return SampleSource.open(copies, name, options.limit, is_temporary=True)


def _name_of(path: str) -> str:
    """Return how messages and the plan name the rows: the base name of the first file."""
    return "stdin" if path == STDIN else split_url(path.rstrip("/"))[1]


def _open_folder(
    url: str, name: str, temporary: Path, plain_files: PlainFiles, options: RowOptions
) -> RowSource:
    """Return the source of a folder's rows.

    Args:
        url: Of the folder.
        name: How the plan names the rows.
        temporary: Folder for copies.
        plain_files: Reads everything but tars of samples.
        options: How rows are read.
    """
    url = local_path(url).rstrip("/") or "/"
    if is_remote(url) and open_store(url).exists(MANIFEST_NAME):
        require_kind(options.rows_as, "tars", url)  # a data set of any size: it is not listed
        return SampleSource.open(url, name, options.limit)
    if options.rows_as is None and is_lerobot(url):
        return plain_files.open_lerobot(url)
    content = look_into(url)
    kind = folder_kind(url, content, options.rows_as)
    if kind == "tars":
        tars = [InputFile(f"{url}/{tar}", tar) for tar in content.tars]
        if content.has_manifest or are_readable(tars):
            return SampleSource.open(url, name, options.limit)
        return _open_tars(tars, name, temporary, options)
    if kind == "media":
        return plain_files.open_media(url, content)
    return plain_files.open(files_in(url, content, kind, ""))
