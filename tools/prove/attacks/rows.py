"""Attacks by the rows of a conversion, and by the media that they name."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mmstream as mm
from tests.helpers.corpora import jpeg
from tools.prove.attacks.attack import Attack

NUM_GOOD = 5


def _convert(rows: bytes, **settings: Any) -> Callable[[Path], None]:
    """Convert good rows and hostile ones; the good ones must become samples."""

    def run(folder: Path) -> None:
        media = folder / "media"
        media.mkdir()
        (media / "good.jpg").write_bytes(jpeg(1))
        os.mkfifo(media / "pipe.jpg")
        (media / "link.jpg").symlink_to("/etc/passwd")
        (media / "zero.jpg").symlink_to("/dev/zero")
        (media / "folder.jpg").mkdir()
        good = b'{"image": "good.jpg", "caption": "good"}\n' * NUM_GOOD
        (folder / "rows.jsonl").write_bytes(good + rows)
        settings_here = {"media_root": str(media), **settings}
        report = mm.convert(
            folder / "rows.jsonl", folder / "shards", progress=False, **settings_here
        )
        assert report.num_samples >= NUM_GOOD, f"{report}"
        for line in (folder / "shards" / "rejects.jsonl").read_bytes().splitlines():
            assert not any(byte < 32 for byte in line), f"{line!r}"
            json.loads(line)

    return run


def _media(path: str) -> Callable[[Path], None]:
    return _convert(json.dumps({"image": path, "caption": "x"}).encode() + b"\n")


def _system_file(path: str) -> Callable[[Path], None]:
    """Any file of the machine may be named, and this one cannot be read as an image."""

    def run(folder: Path) -> None:
        rows = [{"text": "good"}] * NUM_GOOD + [{"image": path, "caption": "x"}]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        report = mm.convert(
            folder / "rows.jsonl", folder / "shards", media_root="/", progress=False
        )
        assert (report.num_samples, report.num_rejects) == (NUM_GOOD, 1), f"{report}"

    return run


def _gzip_bomb(folder: Path) -> None:
    """1 KB of gzip that unpack to a million empty rows."""
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(b"\n" * 1_000_000))
    mm.convert(folder / "rows.jsonl.gz", folder / "shards", progress=False)


def _rows_inside(name: str, *, overwrite: bool) -> Callable[[Path], None]:
    """The rows lie in the destination, under a name that a conversion writes itself."""

    def run(folder: Path) -> None:
        dest = folder / "shards"
        dest.mkdir()
        rows = dest / name
        rows.write_bytes(b'{"text": "a"}\n' * 3)
        before = rows.read_bytes()
        try:
            mm.convert(rows, dest, progress=False, rerun=mm.Rerun(overwrite=overwrite))
        finally:
            assert rows.read_bytes() == before, "the input is lost"

    return run


def _planted_link(folder: Path) -> None:
    """A link lies where the converter would write a temporary file."""
    victim = folder / "precious.txt"
    victim.write_text("precious")
    dest = folder / "shards"
    dest.mkdir()
    for name in ("shard-000000.tar", "mmstream.json", "rejects.jsonl"):
        (dest / f".{name}.tmp").symlink_to(victim)
    _convert(b"")(folder)
    assert victim.read_text() == "precious", "a file outside was overwritten"
    assert not (dest / "shard-000000.tar").is_symlink(), "the shard is a link"


PATHS = (
    "/etc/passwd",
    "../rows.jsonl",
    "pipe.jpg",
    "link.jpg",
    "zero.jpg",
    "folder.jpg",
    "",
    "a\0b.jpg",
    "x" * 5000,
    "http://127.0.0.1:9/a.jpg",
    "file:///etc/passwd",
    "%2e%2e/a",
    "\x1b[2J.jpg",
    "\ud800.jpg",
)
SYSTEM_FILES = ("/proc/self/mem", "/proc/kmsg", "/proc/self/environ", "/dev/zero", "/dev/stdin")
ROWS = {
    "no JSON": b"{{{{\n",
    "no UTF-8": b'{"caption": "\xff\xfe"}\n',
    "a BOM and NULs": b"\xef\xbb\xbf\x00\x00\n",
    "nested a million times": b'{"caption":' + b"[" * 1_000_000 + b"\n",
    "an array": b"[1, 2, 3]\n",
    "a number of a million digits": b'{"id": ' + b"9" * 1_000_000 + b"}\n",
    "a row of 65 MiB": b'{"caption": "' + b"x" * (65 << 20) + b'"}\n',
    "a reserved field": b'{"text": "a", "__source__": "b", "__key__": "c"}\n',
    "an id with a path": b'{"id": "../../x", "text": "a"}\n',
    "100,000 empty rows": b"\n" * 100_000,
    "a million images": b'{"image": ['
    + b'"good.jpg",' * 999_999
    + b'"good.jpg"], "caption": "x"}\n',
}

ATTACKS = (
    *(Attack(f"row: {name}", _convert(row)) for name, row in ROWS.items()),
    *(Attack(f"row: the image {path[:40]!r}", _media(path)) for path in PATHS),
    *(Attack(f"row: the image {path} under /", _system_file(path)) for path in SYSTEM_FILES),
    Attack("rows: a gzip bomb", _gzip_bomb, "."),
    *(
        Attack(
            f"rows: inside the destination as {name}{' (overwrite)' * overwrite}",
            _rows_inside(name, overwrite=overwrite),
            "rows",
        )
        for name in ("rejects.jsonl", "shard-000000.tar.idx", "mmstream.json")
        for overwrite in (False, True)
    ),
    Attack("rows: links where temporary files would lie", _planted_link),
)
