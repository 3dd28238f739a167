"""Step 1 of a conversion: whatever holds the rows -> a `RowSource`.

ROWS -> plan -> formats -> media -> shard
"""

from __future__ import annotations

import errno
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mmstream.converting.rows.detect import require_kind
from mmstream.converting.rows.fetch import (
    STDIN,
    InputFile,
    download,
    expand,
    local_path,
    short_names,
)
from mmstream.converting.rows.folders import FolderContent, look_into
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
from mmstream.errors import ConfigError, StorageError, escaped
from mmstream.storage import is_remote, open_store, split_url

__all__ = ["open_rows"]

logger = logging.getLogger(__name__)


@contextmanager
def open_rows(
    rows: Rows, options: RowOptions | None = None, root: str | None = None
) -> Iterator[RowSource]:
    """Open the rows. Temporary copies, if some are needed, are removed after the block.

    Args:
        rows: What the caller named.
        options: How they are read.
        root: Their `media_folder`, where it is known already. None: it is looked for.

    Raises:
        FileNotFoundError: There is no such file, or no file fits a pattern.
        ConfigError: There are no rows, or their content is damaged, of an unknown kind, or of
            several.
        StorageError: A remote file could not be read, it is a FIFO or a device, or the temporary
            folder is full.
    """
    with tempfile.TemporaryDirectory(prefix="mmstream-rows-") as folder:
        try:
            source = _open(rows, Path(folder), options or RowOptions(), root)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise StorageError(
                f"{folder}: no space left for the copy of the rows; set TMPDIR to a folder with "
                "more space"
            ) from None
        require_rows(source.name, source.num_rows)
        yield source


def _open(rows: Rows, folder: Path, options: RowOptions, root: str | None) -> RowSource:
    names = file_names(rows)
    if names is None:
        if options.rows_as is not None:
            raise ConfigError(
                f"rows_as={options.rows_as!r}: has no effect on rows from Python; leave it out"
            )
        return PlainFiles(folder, "rows", options).open_python(rows)
    urls = expand(names)
    name = _name_of(names[0])
    root = root or media_folder(rows)
    plain_files = PlainFiles(folder, name, options, root)
    is_remote_folder = is_remote(urls[0]) and root is not None
    if len(urls) == 1 and (is_remote_folder or is_local_folder(urls[0])):
        return _open_folder(urls[0], name, folder, plain_files, options)
    if any(is_local_folder(url) for url in urls):
        inputs = inputs_of(urls, options.rows_as, root)
        return plain_files.open_inputs(
            [_held(each, folder) if isinstance(each, InputFile) else each for each in inputs]
        )
    names_of_files = zip(urls, short_names(urls), strict=True)
    files = [_held(InputFile(url, short_name), folder) for url, short_name in names_of_files]
    if holds_tar(str(files[0].copy or urls[0])):
        require_kind(options.rows_as, "tars", urls[0])
        return _open_tars(files, name, folder, options)
    if options.rows_as == "tars":
        raise ConfigError(f"{urls[0]}: is no tar; leave out rows_as='tars'")
    return plain_files.open(files)


def _held(file: InputFile, folder: Path) -> InputFile:
    """Return a file, standard input with a copy: it can be read once only."""
    if file.url != STDIN:
        return file
    return replace(file, name="stdin", copy=download(STDIN, folder / "stdin"))


def _open_tars(
    files: Sequence[InputFile], name: str, folder: Path, options: RowOptions
) -> SampleSource:
    """Return the source of tars of samples. Those that cannot be read at any place are copied."""
    if are_readable(files):
        return SampleSource.open([file.url for file in files], name, options.limit)
    copies = copy_tars(files, folder, options.limit)
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
        require_kind(options.rows_as, "tars", url)  # too large to be listed, perhaps
        return SampleSource.open(url, name, options.limit)
    if options.rows_as is None and is_lerobot(url):
        return plain_files.open_lerobot(url)
    content = look_into(url, temporary / "listing" if is_remote(url) else None)
    kind = folder_kind(url, content, options.rows_as)
    if kind == "tars":
        if content.has_manifest:
            return SampleSource.open(url, name, options.limit)
        return _open_tars(_tars_in(url, content), name, temporary, options)
    if kind == "media":
        return plain_files.open_media(url, content)
    return plain_files.open(files_in(url, content, kind, ""))


def _tars_in(url: str, content: FolderContent) -> list[InputFile]:
    """Return the tars of a folder. A warning counts those that are left out."""
    tars = content.tars_to_read()
    doubled = sorted({*content.tars, *content.packed_tars}.difference(tars))
    if doubled:
        logger.warning(
            "%s: tars of the same name but another compression are left out (%d, such as %s)",
            url,
            len(doubled),
            escaped(doubled[0]),
        )
    return [InputFile(f"{url.rstrip('/')}/{tar}", tar) for tar in tars]
