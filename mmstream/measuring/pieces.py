"""The lengths of single shards, as files: what a measure has so far.

`measure.measure_into` -> a PIECE for each shard -> `Measure`
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from crc32c import crc32c

from mmstream.dataset.manifest import ShardInfo
from mmstream.errors import ManifestError, MMStreamError
from mmstream.measuring.lengths import SampleLengths
from mmstream.measuring.probes import MAX_KINDS
from mmstream.packing.measure_file import COLUMNS, UNUSABLE_NAME, Measure, open_measure
from mmstream.storage import Store, open_store
from mmstream.types import IntArray

__all__ = ["Joined", "Piece", "Pieces"]

UNFINISHED = "unfinished"
"""The folder of the shards that are done, within that of the measure."""


@dataclass(frozen=True)
class Piece:
    """The lengths of one shard, as a file."""

    values: IntArray
    """int64 [num_samples, len(COLUMNS)]."""
    reasons: list[tuple[int, str]]
    kinds: dict[str, int]
    """The first sample of each kind."""

    @classmethod
    def of(cls, lengths: Iterator[tuple[SampleLengths, str]]) -> Piece:
        """Collect the lengths of a shard."""
        rows, reasons = [], []
        kinds: dict[str, int] = {}
        for number, (entry, kind) in enumerate(lengths):
            rows.append(entry.values)
            if entry.reason:
                reasons.append((number, entry.reason))
            elif len(kinds) < MAX_KINDS:
                kinds.setdefault(kind, number)
        values = np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS))
        return cls(values, reasons, kinds)

    def encode(self) -> bytes:
        """Return the bytes of the file: JSON of the reasons in one line, then the numbers."""
        numbers = np.ascontiguousarray(self.values, "<i8").tobytes()
        head = _Head(int(crc32c(numbers)), self.reasons, self.kinds)
        return msgspec.json.encode(head) + b"\n" + numbers

    @classmethod
    def decode(cls, data: bytes, num_samples: int) -> Piece | None:
        """Return the lengths in a file. None: it is damaged."""
        head, _, numbers = data.partition(b"\n")
        try:
            content = msgspec.json.decode(head, type=_Head)
        except msgspec.MsgspecError:
            return None
        if crc32c(numbers) != content.crc32c or len(numbers) != num_samples * len(COLUMNS) * 8:
            return None
        values = np.frombuffer(numbers, "<i8").reshape(num_samples, len(COLUMNS))
        return cls(values.astype(np.int64), content.reasons, content.kinds)


class _Head(msgspec.Struct):
    crc32c: int
    reasons: list[tuple[int, str]]
    kinds: dict[str, int]


class Joined(NamedTuple):
    """The lengths of all shards."""

    values: IntArray
    """int64 [num_samples, len(COLUMNS)]."""
    unusable: list[bytes]
    """A line of JSON for each sample that cannot be used."""
    kinds: list[int]
    """Positions of samples, the first of each kind."""


class Pieces:
    """What is measured so far: a file for each shard, in a folder within that of the measure.

    The name of a file says what the settings and the shard were, so that no file is taken for
    another.
    """

    def __init__(
        self, folder: str, settings: dict[str, Any], shards: tuple[ShardInfo, ...]
    ) -> None:
        self._folder, self._shards, self._settings = folder, shards, settings
        self._store: Store = open_store(f"{folder.rstrip('/')}/{UNFINISHED}")
        words = msgspec.json.encode(settings, order="sorted")
        self._names = [
            hashlib.sha256(words + msgspec.json.encode(shard)).hexdigest()[:32] for shard in shards
        ]
        self._old, self._old_unusable = self._old_measure()

    def missing(self) -> list[int]:
        """Return the shards that are not measured yet."""
        done = self._store.list()
        num_old = 0 if self._old is None else len(self._old.shards)
        return [
            number
            for number, name in enumerate(self._names)
            if number >= num_old and name not in done
        ]

    def write(self, shard: int, piece: Piece) -> None:
        """Write what a shard gave."""
        if len(piece.values) != self._shards[shard].num_samples:
            raise ManifestError(
                f"{self._shards[shard].name}: {len(piece.values)} samples, the manifest says "
                f"{self._shards[shard].num_samples}; run `mmstream index --overwrite`"
            )
        self._store.write(self._names[shard], piece.encode())

    def join(self) -> Joined:
        """Return what all shards gave.

        Raises:
            MMStreamError: A file is damaged. It is removed, so that the next call measures again.
        """
        num_old = 0 if self._old is None else len(self._old.shards)
        pieces, lines = [], list(self._old_unusable)
        kinds: dict[str, int] = {}
        first = 0 if self._old is None else self._old.num_samples
        if self._old is not None:
            pieces = [np.column_stack([self._old.column(name) for name in COLUMNS])]
        for number in range(num_old, len(self._shards)):
            shard, name = self._shards[number], self._names[number]
            piece = Piece.decode(self._store.read(name), shard.num_samples)
            if piece is None:
                self._store.remove(name)
                raise MMStreamError(
                    f"{self._store.url_of(name)}: was damaged on the way; run the same command "
                    "again"
                )
            pieces.append(piece.values)
            for index, reason in piece.reasons:
                line = {"shard": shard.name, "index": index, "reason": reason}
                lines.append(msgspec.json.encode(line))
            for kind, index in piece.kinds.items():
                kinds.setdefault(kind, first + index)
            first += shard.num_samples
        values = np.concatenate([np.zeros((0, len(COLUMNS)), np.int64), *pieces])
        return Joined(values, lines, list(kinds.values()))

    def remove(self) -> None:
        """Remove the files. Those of other settings are of no use either."""
        for name in self._store.list():
            self._store.remove(name)
        path = self._store.local_path("")
        if path is not None and Path(path).is_dir():
            for file in Path(path).iterdir():  # a call that was killed may leave half a file
                file.unlink(missing_ok=True)
            Path(path).rmdir()

    def _old_measure(self) -> tuple[Measure | None, list[bytes]]:
        """Return an earlier measure of the first shards by the same settings, and its lines."""
        try:
            old = open_measure(self._folder)
        except (FileNotFoundError, ManifestError):
            return None, []
        if dict(old.settings) != self._settings or old.shards != self._shards[: len(old.shards)]:
            return None, []
        if self._settings["room"]:  # the tokens of a measure hold the room already
            return None, []
        try:
            lines = open_store(self._folder).read(UNUSABLE_NAME).splitlines()
        except FileNotFoundError:
            lines = []
        return old, lines
