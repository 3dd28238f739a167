"""Rows in tables of text: csv, tsv, and others with ``;`` or ``|`` between the cells.

    a table -> TABLES -> spool

The first line names the columns. Cells are quoted as RFC 4180 says, so a cell may hold line ends.
Cells are text: ``007`` and ``42`` stay as they are. Empty cells are absent keys. A cell that begins
with ``[`` or ``{`` is parsed as JSON, or as Python writes lists, where it is that.

Two published kinds of tables have no line of names. They are recognised by their cells: a caption
and a URL (CC3M, CC12M), and a picture with the number of its caption, ``a.jpg#0`` (Flickr).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TextIO

from mmstream.converting.draft import RowError
from mmstream.converting.formats.fields import value_of_text
from mmstream.converting.rows.records import MAX_ROW_BYTES, NumberedRow
from mmstream.errors import ConfigError, escaped
from mmstream.media_types import BY_EXTENSION

DELIMITERS = {",": "csv", "\t": "tsv", ";": "csv with ;", "|": "csv with |"}

_HEAD_RECORDS = 20
_URL = re.compile(r"https?://\S+", re.IGNORECASE)
_NUMBERED_FILE = re.compile(r"(\S+\.(?:jpe?g|png|webp|gif))#\d+", re.IGNORECASE)
_MEDIA_FILE = re.compile(rf"\S+\.({'|'.join(BY_EXTENSION)})\b", re.IGNORECASE)


def delimiters_of(head: str, *, is_cut: bool) -> list[str]:
    """Return the delimiters with which the beginning of a text is a table.

    Every record must then have as many cells as the first one, and at least two. Where several do,
    those that come inside longer cells of another are left out.

    Args:
        head: The text.
        is_cut: More of it follows, so the last record counts for nothing.
    """
    with _long_cells():
        return [
            delimiter
            for delimiter in DELIMITERS
            if _is_table(head, delimiter, csv.QUOTE_MINIMAL, is_cut)
            or (delimiter == "\t" and _is_table(head, delimiter, csv.QUOTE_NONE, is_cut))
        ]


def _is_table(head: str, delimiter: str, quoting: Literal[0, 3], is_cut: bool) -> bool:
    lines = head.splitlines(keepends=True)
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting)
    try:
        records = list(islice(reader, _HEAD_RECORDS + 1))
    except csv.Error:
        return False
    records = [record for record in records if record]
    if is_cut or len(records) > 2:  # the last one may be cut off
        records = records[:-1]
    counts = {len(record) for record in records}
    return len(records) >= 2 and len(counts) == 1 and counts.pop() >= 2


def iter_table(path: Path, delimiter: str, rows: str) -> Iterator[NumberedRow]:
    """Yield (number, row) of each record. Numbers count from 1, without the line of names.

    A record with too many or too few cells, or with damaged quotes, has a `RowError`.

    Raises:
        ConfigError: A column that is named twice, no line of names, or a quote that is never
            closed.
    """
    with _long_cells(), _open_text(path) as file:
        is_quoted = delimiter != "\t" or _has_whole_quotes(path)  # else quotes are part of texts
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
        reader = csv.reader(file, delimiter=delimiter, quoting=quoting, strict=True)
        records = _records(reader, rows)
        first = next(records, None)
        names = _names(first, rows)
        number = 0
        if names is None:
            assert isinstance(first, list)
            names = _published_names(first, rows)
            number = 1
            yield number, _row(first, names)
        for record in records:
            number += 1
            yield number, _row(record, names)


@contextmanager
def _long_cells() -> Iterator[None]:
    """Let the csv module read cells of any length. It allows 131,072 characters otherwise."""
    before = csv.field_size_limit(MAX_ROW_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _open_text(path: Path) -> TextIO:
    """Open a table. Bytes that are not UTF-8 make rejects of their rows, in the spool."""
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline="")


def _has_whole_quotes(path: Path) -> bool:
    """Tell whether the quotes of a file are those of RFC 4180, and no text of their own."""
    with _open_text(path) as file:
        try:
            for _ in csv.reader(file, delimiter="\t", strict=True):
                pass
        except csv.Error:
            return False
    return True


def _records(reader: Any, rows: str) -> Iterator[list[str] | RowError]:
    """Yield the cells of each record. Blank lines are none."""
    while True:
        line = reader.line_num + 1
        try:
            record = next(reader, None)
        except csv.Error as error:
            if "expected after" in str(error):
                yield RowError(f"damaged quotes: {error} (line {line})")
                continue
            raise ConfigError(
                f"{rows}: a quote is opened in line {line} and never closed ({error}); mend it"
            ) from None
        if record is None:
            return
        if record:
            yield record


def _names(record: list[str] | RowError | None, rows: str) -> list[str] | None:
    """Return the names of the columns. None: the first record is a row already."""
    if record is None or isinstance(record, RowError):
        raise ConfigError(f"{rows}: holds no rows; the first line must name the columns")
    names = [name.strip() for name in record]
    if any(map(_is_data, names)):
        return None
    require_different(list(filter(None, names)), rows)
    if not any(names):
        raise ConfigError(f"{rows}: the first line names no columns")
    return names


def require_different(names: Sequence[Any], rows: str) -> None:
    """Raise a ConfigError if two columns have one name: a row would keep one of them."""
    doubled = [name for i, name in enumerate(names) if name in names[:i]]
    if doubled:
        raise ConfigError(f"{rows}: two columns are named {escaped(doubled[0])!r}; rename one")


def _is_data(cell: str) -> bool:
    return bool(_URL.fullmatch(cell) or _NUMBERED_FILE.fullmatch(cell) or _MEDIA_FILE.match(cell))


def _published_names(record: Sequence[str], rows: str) -> list[str]:
    """Return the names of columns of a table that has none."""
    is_data = [_is_data(cell.strip()) for cell in record]
    if len(record) != 2 or all(is_data):
        raise ConfigError(
            f"{rows}: the first line is data, not names of columns; put a line in front, such as "
            "image,caption"
        )
    media_name = "url" if any(_URL.fullmatch(cell.strip()) for cell in record) else "image"
    return [media_name if data else "caption" for data in is_data]


def _row(record: list[str] | RowError, names: Sequence[str]) -> dict[str, Any] | RowError:
    if isinstance(record, RowError):
        return record
    if len(record) != len(names):
        return RowError(f"{len(record)} cells, but {len(names)} columns")
    row = {
        name: value_of_text(cell) for name, cell in zip(names, record, strict=True) if name and cell
    }
    image = row.get("image")
    numbered = _NUMBERED_FILE.fullmatch(image) if isinstance(image, str) else None
    return {**row, "image": numbered[1]} if numbered else row
