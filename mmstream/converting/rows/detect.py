"""What a file of rows is, by its content. Its name does not count.

    a file -> DETECT -> the function that reads its kind

Where the content says that the file is not rows at all, the error names what it is.

Texts that are not UTF-8 are written in UTF-8, where the caller names their encoding.
"""

from __future__ import annotations

import codecs
import logging
import re
import shutil
from pathlib import Path
from typing import Literal, TypeAlias

from mmstream.converting.rows.records import BOM, MAX_ROW_BYTES
from mmstream.converting.rows.tables import (
    DELIMITERS,
    NotJSONError,
    delimiters_of,
    first_value,
    is_transcripts,
    parse_coco,
)
from mmstream.errors import ConfigError, escaped
from mmstream.media.fields import is_json
from mmstream.media.types import sniff
from mmstream.settings import shown
from mmstream.tar.header import BLOCK

RowKind: TypeAlias = Literal[
    "jsonl",
    "json",
    "csv",
    "tsv",
    "lines",
    "coco",
    "parquet",
    "arrow",
    "tars",
    "media",
    "transcripts",
]
"""What rows may lie in; the values of ``rows_as``."""


NAMES_OF_KINDS: dict[RowKind, str] = {
    "jsonl": "JSONL",
    "json": "JSON",
    "csv": "csv",
    "tsv": "tsv",
    "lines": "lines of text",
    "coco": "COCO's annotations",
    "parquet": "Parquet",
    "arrow": "Arrow",
    "tars": "tars of samples",
    "media": "media files",
    "transcripts": "transcripts of LibriSpeech or LJSpeech",
}

HEAD_BYTES = 64 << 10
"""Bytes at the beginning of a file that are looked at."""

_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_CONTROL = bytes((*range(9), *range(14, 32)))
"""Control characters. A text has few of them; of other bytes they are a tenth."""
_COCO = re.compile(rb'\s*\{\s*"(info|licenses|images|annotations|categories|type)"\s*:')
_TEXT = rb"(?:\xef\xbb\xbf)?\s*"
_WRONG_KINDS = (
    (rb"%PDF", "a PDF"),
    (rb"\xd0\xcf\x11\xe0", "an old Excel or Word file; save it as csv"),
    (rb"\x89HDF", "HDF5"),
    (rb"SQLite format 3", "a SQLite database"),
    (rb"\x93NUMPY", "a NumPy array"),
    (rb"7z\xbc\xaf", "a 7z archive; unpack it"),
    (rb"Rar!", "a RAR archive; unpack it"),
    (rb"ORC", "ORC; save it as Parquet"),
    (rb"(Obj|OBJ)\x01", "Avro; save it as Parquet"),
    (rb"version https://git-lfs", "a Git LFS pointer, not the file; run `git lfs pull`"),
    (rb"\x80[\x04\x05]", "a pickle; save its rows as JSONL"),
    (rb"PK\x03\x04.{,242}/data\.pkl", "a file of torch.save; save its rows as JSONL"),
    (rb"PK\x03\x04.*(xl/|\[Content_Types\])", "Excel; save it as csv"),
    (rb"PK\x03\x04", "a zip archive; unpack it"),
    (
        _TEXT + rb"(?i:<!doctype html|<html)",
        "an HTML page, not a file of rows; the address may need a login or another path",
    ),
    (_TEXT + rb"<(?!(?i:image))", "XML"),
)
"""(pattern of the beginning of a file that holds no rows, what it is)."""


def is_tar(head: bytes) -> bool:
    """Tell whether a file is a tar, by its first header."""
    return head[257:262] == b"ustar" or (
        len(head) >= BLOCK and bytes(512) != head[:512] and _is_old_tar(head)
    )


def _is_old_tar(head: bytes) -> bool:
    digits = head[148:156].rstrip(b"\0 ").strip()
    if not digits or digits.strip(b"01234567"):
        return False
    return int(digits, 8) == sum(head[:148]) + 8 * ord(" ") + sum(head[156:512])


def refuse_wrong_kind(head: bytes, rows: str) -> None:
    """Raise a ConfigError that names the kind of a file that holds no rows.

    Raises:
        ConfigError: A picture, a web page, an archive, a database, or text that is not UTF-8.
    """
    if head.startswith(_UTF16):
        raise ConfigError(f"{rows}: is not UTF-8; say encoding='utf-16'")
    kinds = (kind for pattern, kind in _WRONG_KINDS if re.match(pattern, head, re.DOTALL))
    kind = next(kinds, None)
    if kind is None and (media_type := sniff(head[:64])) is not None:
        article = "a" if media_type.kind == "video" else "an"
        kind = f"{article} {media_type.kind} ({media_type.extension}), not rows; name its folder"
    if kind is not None:
        raise ConfigError(f"{rows}: this is {kind}")
    num_control = len(head) - len(head.translate(None, _CONTROL))
    is_text = num_control * 20 < len(head) or _has_json_line(head)
    if b"\0" in head and not is_text:  # else NULs are a bad row among others
        raise ConfigError(
            f"{rows}: a binary file of an unknown kind; rows are JSONL, JSON, csv, tsv, Parquet, "
            "Arrow, or tars of samples"
        )


def text_kind(path: Path, head: bytes, rows: str) -> tuple[RowKind, str]:
    """Return the kind of a plain text file, and the delimiter of a table.

    Args:
        path: Of the file.
        head: Its first `HEAD_BYTES`.
        rows: How messages name it.

    Raises:
        ConfigError: Its text is of no kind, or of several.
    """
    text = head.removeprefix(BOM).lstrip()
    if text.startswith(b"["):
        line = _first_line(path)  # a list of its own, where others follow; a dense array has one
        return ("jsonl" if line is not None and is_json(line) else "json"), ""
    if text.startswith(b"{"):
        return _object_kind(path, head), ""
    if not text or _has_json_line(text):
        return "jsonl", ""
    if is_transcripts(head):
        return "transcripts", ""
    return _table_kind(path, rows)


def require_text_kind(rows_as: RowKind, head: bytes, rows: str) -> None:
    """Refuse a kind of rows that a text clearly is not, by its beginning.

    Raises:
        ConfigError: The file is a table and not JSON, the other way round, or no such transcripts;
            or the kind is none of text.
    """
    text = head.removeprefix(BOM).lstrip()
    if not text:
        return
    has_json = text.startswith((b"{", b"[")) or _has_json_line(text)
    fits = {
        "jsonl": has_json,
        "json": has_json,
        "coco": has_json,
        "lines": True,
        "csv": not text.startswith(b"{"),
        "tsv": not text.startswith(b"{"),
        "transcripts": is_transcripts(head),
    }
    if not fits.get(rows_as, False):
        raise ConfigError(
            f"{rows}: is {'JSON' if has_json else 'text'}, not {NAMES_OF_KINDS[rows_as]}; leave "
            f"out rows_as={rows_as!r}, and the content says what it is"
        )


def _first_line(path: Path) -> bytes | None:
    """Return the first line that is not blank. None: no other follows it, or it is too long."""
    with path.open("rb") as file:
        pieces = iter(lambda: file.readline(MAX_ROW_BYTES), b"")
        lines = filter(None, (piece.removeprefix(BOM).strip() for piece in pieces))
        first, second = next(lines, b""), next(lines, b"")
    return first if second and len(first) < MAX_ROW_BYTES else None


def _object_kind(path: Path, head: bytes) -> RowKind:
    """Return the kind of a file that begins with an object."""
    line = _first_line(path)
    is_jsonl = line is not None and is_json(line)
    if _COCO.match(head.removeprefix(BOM)) and not is_jsonl and parse_coco(path) is not None:
        return "coco"
    if is_jsonl or line is None:
        return "jsonl"
    try:
        first = first_value(path)
    except NotJSONError:
        return "jsonl"
    return "json" if b"\n" in first else "jsonl"


def _has_json_line(text: bytes) -> bool:
    """Tell whether one of the first lines is an object, a list or a text of JSON."""
    lines = [line.strip() for line in text.splitlines()[:100]]
    return any(line[:1] in (b"{", b"[", b'"') and is_json(line) for line in lines if line)


def _table_kind(path: Path, rows: str) -> tuple[RowKind, str]:
    with path.open("rb") as file:
        for size in (HEAD_BYTES, 16 * HEAD_BYTES, MAX_ROW_BYTES):  # cells may be whole pictures
            file.seek(0)
            head = file.read(size)
            text = head.removeprefix(BOM).decode(errors="replace")
            delimiters = delimiters_of(text, is_cut=len(head) == size)
            if delimiters or len(head) < size:
                break
    if "\t" in delimiters and "," not in delimiters:
        delimiters = ["\t"]
    if len(delimiters) == 1:
        return ("tsv" if delimiters[0] == "\t" else "csv"), delimiters[0]
    if not delimiters:
        raise ConfigError(
            f"{rows}: plain text, not JSON, and no table. Rows are JSON objects, one per line, or "
            "a table whose first line names its columns. For a table of one column, say "
            "rows_as='csv'; for a row of each line, as its text, rows_as='lines'"
        )
    names = " and ".join(DELIMITERS[delimiter] for delimiter in delimiters)
    raise ConfigError(f"{rows}: may be {names}; choose one with rows_as='csv' or rows_as='tsv'")


logger = logging.getLogger(__name__)

_BLOCK = 1 << 20


def encoding_name(name: str) -> str:
    """Return Python's name of an encoding of texts.

    Raises:
        ConfigError: There is none of this name.
    """
    try:
        "a".encode(name)  # encodings of bytes, such as base64, refuse it
        return codecs.lookup(name).name
    except (LookupError, ValueError, TypeError):
        raise ConfigError(
            f"encoding={shown(name)}: is not an encoding of texts that Python knows, such as "
            "'gb18030', 'big5', 'shift_jis', 'utf-16' or 'cp1252'"
        ) from None


def write_utf8(path: Path, target: Path, encoding: str, rows: str) -> Path:
    """Write a text to a new file in UTF-8. Return the file.

    Bytes that the encoding does not have become bytes that are not UTF-8: their row is a reject.

    Raises:
        ConfigError: The text is of another encoding altogether.
    """
    errors = "surrogatepass" if encoding.startswith(("utf-16", "utf-32")) else "surrogateescape"
    try:
        with (
            path.open(encoding=encoding, errors=errors, newline="") as source,
            target.open("x", encoding="utf-8", errors="surrogatepass", newline="") as file,
        ):
            shutil.copyfileobj(source, file, _BLOCK)
    except UnicodeError as error:
        raise ConfigError(f"{rows}: is not {encoding} ({escaped(error)})") from None
    return target


def warn_of_encoding(head: bytes, rows: str, encoding: str | None) -> None:
    """Log it if the beginning of a text is not UTF-8.

    Args:
        head: The beginning.
        rows: How messages name the file.
        encoding: What the text was before it was written in UTF-8. None: the caller named none.
    """
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        logger.warning(
            "%s: not %s; rows with such bytes are rejected; name the encoding with encoding=NAME",
            rows,
            encoding or "UTF-8",
        )
