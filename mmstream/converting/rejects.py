"""Rejected rows: a file for each shard while it is written, then one file for the dataset.

    shard -> REJECTS -> destination

Both are written line by line, and no process holds them: a few kilobytes of gzip may be a million
empty rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO

import msgspec

from mmstream.errors import ManifestError
from mmstream.storage import Store

__all__ = [
    "REJECTS_NAME",
    "REPORTS",
    "Reject",
    "RejectGroup",
    "ShardRejects",
    "first_rejects",
    "group_rejects",
    "rejects_name",
    "rejects_of",
    "report_name",
    "write_rejects",
]

REJECTS_NAME = "rejects.jsonl"
REPORTS = "reports"
"""Folder of the shards' reports and rejects, at the destination."""

_BLOCK = 4 << 20
_HEAD_BYTES = 64 << 10
_MAX_GROUPS = 1000
"""Most reasons that are counted apart, so that a strange corpus cannot fill the memory."""

_NAME = re.compile(r"^(?!no |not |[\w.<>]+\(\): ).*?: ")
"""The path, URL or name of a field with which a reason begins. The caller's function is kept."""
_VALUE = re.compile(r"b?'[^']*'|b?\"[^\"]*\"|(?<=the keys ).*|\d+")
"""What a reason quotes from its row: strings, names of keys, numbers."""


class Reject(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row that became no sample: one line of ``rejects.jsonl``."""

    file: str
    """Name of the file of rows."""
    row: int
    """Counts from 1: the line of the file, or the item of the JSON array."""
    reason: str
    key: str = ""
    """Key that its sample would have. It names the row among those of all files."""
    left_out: bool = False
    """It is no fault: a blank line, or a row that the caller's function left out."""


@dataclass(frozen=True)
class RejectGroup:
    """Rejected rows that have one reason, whatever names and numbers it quotes."""

    kind: str
    """The reason with ``*`` in place of names, quoted values and numbers."""
    num_rows: int
    example: Reject
    """The first of them."""


class ShardRejects:
    """The rejects of one shard, as they come. Without any, there is no file.

    A context manager: the file appears when the block ends without an error.

    Args:
        store: The destination.
        shard: Name of the shard.
    """

    def __init__(self, store: Store, shard: str) -> None:
        self.num_rejects = 0
        self.num_bytes = 0
        self._store, self._shard = store, shard
        self._stack = ExitStack()
        self._file: BinaryIO | None = None

    def __enter__(self) -> ShardRejects:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def add(self, reject: Reject) -> None:
        """Write one reject."""
        if self._file is None:
            self._file = self._stack.enter_context(self._store.create(rejects_name(self._shard)))
        line = msgspec.json.encode(reject) + b"\n"
        self._file.write(line)
        self.num_rejects += 1
        self.num_bytes += len(line)


def report_name(shard: str) -> str:
    """Return the name of a shard's report: ``shard-000000.tar`` -> ``reports/...json``."""
    return f"{REPORTS}/{shard.removesuffix('.tar')}.json"


def rejects_name(shard: str) -> str:
    """Return the name of a shard's rejects: ``shard-000000.tar`` -> ``reports/...``."""
    return f"{REPORTS}/{shard.removesuffix('.tar')}.rejects.jsonl"


def rejects_of(store: Store, shard: str) -> list[Reject]:
    """Return the rejects of one shard, as its file has them. Without a file there are none."""
    try:
        data = store.read(rejects_name(shard))
    except FileNotFoundError:
        return []
    try:
        return msgspec.json.Decoder(Reject).decode_lines(data)
    except msgspec.MsgspecError as error:
        raise ManifestError(f"{store.url_of(rejects_name(shard))}: {error}") from None


def write_rejects(store: Store, shards: Iterable[tuple[str, int]]) -> None:
    """Write ``rejects.jsonl`` from the files of the shards, a block at a time.

    Args:
        store: The destination.
        shards: (name of a shard, bytes of its rejects), in the order of the shards.
    """
    with store.create(REJECTS_NAME) as file:
        for shard, num_bytes in shards:
            for start in range(0, num_bytes, _BLOCK):
                stop = min(num_bytes, start + _BLOCK)
                file.write(store.read_range(rejects_name(shard), start, stop))


def first_rejects(store: Store, limit: int) -> list[Reject]:
    """Return the first rejects of a finished conversion, up to `limit`."""
    num_bytes = min(store.size(REJECTS_NAME), _HEAD_BYTES)
    lines = store.read_range(REJECTS_NAME, 0, num_bytes).splitlines(keepends=True)
    whole = [line for line in lines[:limit] if line.endswith(b"\n")]
    return [msgspec.json.decode(line, type=Reject) for line in whole]


def group_rejects(store: Store) -> list[RejectGroup]:
    """Return the reasons of a finished conversion's rejects, the most frequent first.

    Reasons that differ in names, quoted values or numbers only are one group:
    ``a.jpg: no such file`` and ``b.jpg: no such file``, for example. From the 1,000th reason on,
    new ones count as the last group.
    """
    counts: dict[str, int] = {}
    examples: dict[str, Reject] = {}
    for reject in _all_rejects(store):
        kind = _VALUE.sub("*", _NAME.sub("*: ", reject.reason))
        is_new = kind not in counts and not reject.left_out
        if is_new and len(counts) >= _MAX_GROUPS:
            kind = next(reversed(counts))
        counts[kind] = counts.get(kind, 0) + 1
        examples.setdefault(kind, reject)
    groups = [RejectGroup(kind, num_rows, examples[kind]) for kind, num_rows in counts.items()]
    return sorted(groups, key=lambda group: -group.num_rows)


def _all_rejects(store: Store) -> Iterator[Reject]:
    """Yield the rejects of a finished conversion. A block of the file is in memory."""
    num_bytes = store.size(REJECTS_NAME)
    rest = b""
    for start in range(0, num_bytes, _BLOCK):
        block = rest + store.read_range(REJECTS_NAME, start, min(num_bytes, start + _BLOCK))
        *lines, rest = block.split(b"\n")
        for line in lines:
            yield msgspec.json.decode(line, type=Reject)
