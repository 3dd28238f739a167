"""Transcripts of LibriSpeech and LJSpeech -> one row per line.

    84-121123-0000 GO DO YOU HEAR                               84/121123/84-121123.trans.txt
    -> {"id": "84-121123-0000", "audio": "84/121123/84-121123-0000.flac", "text": "GO DO YOU HEAR"}

    LJ001-0001|Printing, in 1440|Printing, in fourteen forty    LJSpeech-1.1/metadata.csv
    -> {"id": "LJ001-0001", "audio": "LJSpeech-1.1/wavs/LJ001-0001.wav",
        "text": "Printing, in fourteen forty", "raw_text": "Printing, in 1440"}

The sound lies beside the transcript, or in ``wavs`` beside it. Its path is relative to the folder
of the media. Quotes of LJSpeech are part of the text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mmstream.converting.draft import RowError
from mmstream.converting.rows.records import NumberedRow
from mmstream.storage import is_remote
from mmstream.storage.urls import local_path

_LIBRISPEECH = re.compile(r"(\d+-\d+-\d+) (\S.*)")
_LJSPEECH_ID = re.compile(r"\w+[_-]\d+")


def is_transcripts(head: bytes) -> bool:
    """Tell by its beginning whether a text holds transcripts. Its last line may be cut off."""
    lines = head.decode(errors="replace").splitlines()
    whole = lines[:-1] if len(lines) > 1 else lines
    return bool(whole) and any(
        all(fields_of(line) is not None for line in whole)
        for fields_of in (_LIBRISPEECH.fullmatch, _ljspeech)
    )


def iter_transcripts(path: Path, url: str, root: str | None) -> Iterator[NumberedRow]:
    """Yield (number, row) of each line.

    Args:
        path: A plain text file.
        url: Where it came from. The sound lies beside it.
        root: Folder or prefix that the rows' media are relative to. None: that of `url`.
    """
    folder = "." if root is None else _folder_in(root, url)
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            yield number, _row(line.rstrip("\r\n"), folder)


def _row(line: str, folder: str) -> dict[str, str] | RowError:
    if match := _LIBRISPEECH.fullmatch(line):
        sound = os.path.normpath(f"{folder}/{match[1]}.flac")
        return {"id": match[1], "audio": sound, "text": match[2]}
    if fields := _ljspeech(line):
        name, raw_text, text = fields
        sound = os.path.normpath(f"{folder}/wavs/{name}.wav")
        return {"id": name, "audio": sound, "text": text, "raw_text": raw_text}
    return RowError(
        "expected an id such as 84-121123-0000, a blank, and a text; or LJ001-0001|text|text"
    )


def _ljspeech(line: str) -> tuple[str, str, str] | None:
    """Return (id, text as printed, normalized text). None: this is no line of LJSpeech."""
    fields = line.split("|")
    if len(fields) != 3 or not _LJSPEECH_ID.fullmatch(fields[0]) or not fields[2].strip():
        return None
    return fields[0], fields[1], fields[2]


def _folder_in(root: str, url: str) -> str:
    """Return the folder of a file, relative to the root of the media."""
    if is_remote(root):
        return url.rpartition("/")[0].removeprefix(root).strip("/") or "."
    return os.path.relpath(os.path.realpath(Path(local_path(url)).parent), root)
