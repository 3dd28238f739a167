"""What a file of rows is, by its content. Its name does not count.

    a file -> DETECT -> the module that reads its kind

Where the content says that the file is no rows at all, the error names what it is.

How rows are read: the options that the files of this package need.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from mmstream.converting.rows.encodings import advice
from mmstream.converting.rows.json_values import NotJSONError, iter_values
from mmstream.converting.rows.records import BOM, MAX_ROW_BYTES
from mmstream.converting.rows.tables import DELIMITERS, delimiters_of
from mmstream.converting.rows.transcripts import is_transcripts
from mmstream.decoding.fields import is_json
from mmstream.errors import ConfigError
from mmstream.media_types import sniff
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
_WRONG_MAGIC = (
    (b"%PDF", "a PDF"),
    (b"\xd0\xcf\x11\xe0", "an old Excel or Word file; save it as csv"),
    (b"\x89HDF", "HDF5"),
    (b"SQLite format 3", "a SQLite database"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"7z\xbc\xaf", "a 7z archive; unpack it"),
    (b"Rar!", "a RAR archive; unpack it"),
    (b"ORC", "ORC; save it as Parquet"),
    (b"Obj\x01", "Avro; save it as Parquet"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file; run `git lfs pull`"),
    (b"\x80\x04", "a pickle; save its rows as JSONL"),
    (b"\x80\x05", "a pickle; save its rows as JSONL"),
    (b"OBJ\x01", "Avro; save it as Parquet"),
)


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
        ConfigError: A picture, a web page, an archive, a database, or text that is no UTF-8.
    """
    kind = next((name for magic, name in _WRONG_MAGIC if head.startswith(magic)), None)
    text = head[:1024].removeprefix(BOM).lstrip().lower()
    if head.startswith(b"PK\x03\x04"):
        is_excel = b"xl/" in head or b"[Content_Types]" in head
        kind = "Excel; save it as csv" if is_excel else "a zip archive; unpack it"
        if b"/data.pkl" in head[:256]:
            kind = "a file of torch.save; save its rows as JSONL"
    elif text.startswith((b"<!doctype html", b"<html")):
        kind = "an HTML page, not a file of rows; the address may need a login or another path"
    elif text.startswith((b"<?xml", b"<")) and not text.startswith(b"<image"):
        kind = "XML"
    elif head.startswith(_UTF16):
        raise ConfigError(f"{rows}: is not UTF-8; {advice(head)}")
    elif kind is None and (media_type := sniff(head[:64])) is not None:
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


def text_kind(path: Path, rows: str) -> tuple[RowKind, str]:
    """Return the kind of a plain text file, and the delimiter of a table.

    Raises:
        ConfigError: Its text is of no kind, or of several.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
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


def require_text_kind(rows_as: RowKind, path: Path, rows: str) -> None:
    """Refuse a kind of rows that a plain text file clearly is not.

    Raises:
        ConfigError: The file is a table and not JSON, the other way round, or no such transcripts;
            or the kind is none of text.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
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
    """Return the first line that is not blank. None: no other follows it.

    A file of one line may be an array of any length, so such a line is not held.
    """
    with path.open("rb") as file:
        if file.read(len(BOM)) != BOM:
            file.seek(0)
        start, text = file.tell(), file.readline(HEAD_BYTES)
        while text and not text.strip():
            start, text = file.tell(), file.readline(HEAD_BYTES)
        while text and not text.endswith(b"\n"):
            text = file.readline(1 << 20)
        stop = file.tell()
        if not any(rest.strip() for rest in iter(lambda: file.readline(1 << 20), b"")):
            return None
        file.seek(start)
        return file.read(min(stop - start, MAX_ROW_BYTES)).strip()


def _object_kind(path: Path, head: bytes) -> RowKind:
    """Return the kind of a file that begins with an object."""
    line = _first_line(path)
    is_jsonl = line is not None and is_json(line)
    if _COCO.match(head.removeprefix(BOM)) and not is_jsonl:
        from mmstream.converting.rows.coco import parse_coco

        if parse_coco(path) is not None:
            return "coco"
    if is_jsonl or line is None:
        return "jsonl"
    try:
        first = next(iter_values(path), b"")
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


@dataclass(frozen=True)
class RowOptions:
    """How rows are read. `RowReading` has checked what the caller says."""

    rows_as: RowKind | None = None
    """What the rows lie in. None: their content says it."""
    encoding: str | None = None
    """Encoding of texts, by Python's name. None: UTF-8."""
    limit: int | None = None
    """Only the first so many rows."""
    group_spans: bool = False
    """Consecutive rows about the same medium are one row, with the key "segments"."""
    run_length: int = 5000
    """Rows that are read together: those of a shard, or 1 where they are shuffled."""
    media_keys: tuple[str, ...] = field(default=(), compare=False)
    """Keys that name the medium of a row, for `group_spans`, before the usual ones."""

    def require_kind(self, kind: RowKind, url: str) -> None:
        """Refuse `rows_as` and `encoding` where the content is clearly something else.

        Raises:
            ConfigError: It is.
        """
        name = NAMES_OF_KINDS[kind]
        if self.rows_as not in (None, kind):
            raise ConfigError(f"{url}: is {name}, not rows_as={self.rows_as!r}")
        if self.encoding is not None:
            raise ConfigError(
                f"{url}: is {name}, where encoding={self.encoding!r} has no effect; leave it out"
            )
