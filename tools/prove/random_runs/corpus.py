"""Random datasets that remember what was written into them, so that no judge needs to ask mmstream.

Samples have a text, a number, and sometimes a recording. Some are bad, each in a way of its own.
"""

from __future__ import annotations

import io
import json
import random
import struct
import uuid
import wave
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

import mmstream as mm
from mmstream.dataset.bad_list import write_bad
from mmstream.dataset.index import checksums_name, encode_checksums, encode_index, index_name
from mmstream.dataset.manifest import MANIFEST_NAME, Manifest, ShardInfo
from mmstream.storage import open_store
from mmstream.tar.writer import TarWriter

Ref: TypeAlias = tuple[int, int]
"""(shard, index) of a sample."""

FAULTS = {
    "json": {"DecodeError"},
    "utf8": {"DecodeError"},
    "wav": {"DecodeError"},
    "twice": {"SampleError"},
    "reserved": {"SampleError"},
    "header": {"SampleError", "ChecksumError"},
    "flipped": {"ChecksumError"},
    "no shard": {"ShardError"},
    "refused": {"DecodeError", "SampleError"},
    "filtered": {"SkipSample"},
    "taken down": {"TakenDownError"},
}
"""Ways to be bad, and the kinds under which mmstream may record each."""

_LIES = {
    "8 GB": (b"77777777777\0", b"0"),
    "2^63": (b"\x80\0\0\0\x80\0\0\0\0\0\0\0", b"0"),
    "2^95": (b"\xff" * 12, b"0"),
    "a long name of 8 GB": (b"77777777777\0", b"L"),
    "a pax header of 2^63 bytes": (b"\x80\0\0\0\x80\0\0\0\0\0\0\0", b"x"),
    "sparse": (b"00000001000\0", b"S"),
}
"""Size and type of a file, as a stranger may write them in its header."""

_COLUMNS = pa.schema(
    {name: pa.string() for name in ("key", "status", "shard", "file", "json")}
    | {name: pa.int64() for name in ("index", "row")}
)
"""Of the sidecars."""

WAV_RATE = 8000
WAV_SAMPLES = 400


@dataclass(frozen=True)
class Known:
    """A sample as it was written."""

    key: str
    text: str
    number: int
    fault: str
    """One of `FAULTS`; "" for a good sample."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the byte tokenizer: one for each byte, one to begin and one to end."""
        return len(self.text.encode()) + 2

    @property
    def size(self) -> int | None:
        """The value of the column `json.size`. None: NULL."""
        return len(self.text) if self.number % 9 else None


@dataclass
class Corpus:
    """A dataset as it was written."""

    folder: Path
    names: list[str] = field(default_factory=list)
    samples: dict[Ref, Known] = field(default_factory=dict)
    listed: set[Ref] = field(default_factory=set)
    removed: set[Ref] = field(default_factory=set)
    """Those that were taken down."""
    has_wavs: bool = False
    has_checksums: bool = False
    has_columns: bool = False
    shards: list[ShardInfo] = field(default_factory=list)
    shown: list[ShardInfo] = field(default_factory=list)
    """The shards of the manifest as it is now."""
    s3_url: str = ""
    """Where "s3" opens it, without the last change. "": not copied yet."""

    @property
    def planned(self) -> list[Ref]:
        """Samples that a new epoch may plan, in the order of the shards."""
        return sorted(self.samples.keys() - self.listed - self.removed)

    def show(self, num_shards: int) -> None:
        """Write a manifest of so many shards, as it was before others were appended."""
        self.shown = self.shards[:num_shards]
        manifest = Manifest(tuple(self.shown), checksums="written" if self.has_checksums else None)
        (self.folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
        self.s3_url = ""

    def open(self, storage: str = "local") -> mm.Dataset:
        """Open the dataset: "local", "shared", or the URL of a folder on S3 for a copy."""
        storage_kind = None if storage.startswith("s3://") else storage
        return mm.open_dataset(self.place(storage), storage_kind=storage_kind)  # type: ignore[arg-type]

    def split(self, refs: set[Ref]) -> list[tuple[Corpus, set[Ref]]]:
        """Return the datasets that are shown, with those of some samples that are theirs."""
        return [(self, refs)]

    def place(self, storage: str) -> str | list[str]:
        """Return where it is read from. Copies the dataset to an object store once."""
        if not storage.startswith("s3://"):
            return str(self.folder)
        if not self.s3_url:
            self.s3_url = f"{storage}/{uuid.uuid4().hex}/{self.folder.name}"
            store = open_store(self.s3_url)
            for path in self.folder.iterdir():
                store.write(path.name, path.read_bytes())
        return self.s3_url


def write_corpus(
    folder: Path,
    draw: random.Random,
    *,
    prefix: str,
    has_wavs: bool,
    bad_fraction: float,
    max_shards: int = 6,
    max_samples: int = 24,
    has_columns: bool = False,
    has_checksums: bool | None = None,
) -> Corpus:
    """Write a random dataset, sometimes with a bad list. `has_checksums`: None draws it."""
    folder.mkdir(parents=True)
    corpus = Corpus(
        folder,
        has_wavs=has_wavs,
        has_checksums=draw.random() < 0.6 if has_checksums is None else has_checksums,
        has_columns=has_columns,
    )
    append_shards(corpus, draw, draw.randint(1, max_shards), prefix, bad_fraction, max_samples)
    if draw.random() < 0.3:
        refs = sorted(corpus.samples)
        corpus.listed = set(draw.sample(refs, draw.randint(0, len(refs) // 4)))
        write_bad(corpus.open(), corpus.listed)
    return corpus


def append_shards(
    corpus: Corpus,
    draw: random.Random,
    num_shards: int,
    prefix: str,
    bad_fraction: float,
    max_samples: int = 24,
) -> None:
    """Write more shards at the end of a dataset, and its manifest."""
    faults = [name for name in FAULTS if _can_have(corpus, name)]
    number = len(corpus.samples)
    for shard in range(len(corpus.names), len(corpus.names) + num_shards):
        count = draw.choice([0, 1, 2, draw.randint(0, max_samples), draw.randint(0, max_samples)])
        if shard == 0:
            count = max(count, 6)
        is_lost = shard > 0 and count and bad_fraction > 0 and draw.random() < 0.06
        samples: list[Known] = []
        for _ in range(count):
            fault = draw.choice(faults) if draw.random() < bad_fraction else ""
            key = f"{number:05d}" if draw.random() < 0.9 else f"same{shard % 2}{len(samples)}"
            text = f"{prefix}{number}:".ljust(draw.choice([8, 12, 20, draw.randint(8, 60)]), "x")
            samples.append(Known(key, text, number, "no shard" if is_lost else fault))
            number += 1
        _write_shard(corpus, shard, samples, draw)
        if is_lost:
            (corpus.folder / corpus.names[shard]).unlink()
    corpus.show(len(corpus.shards))


def _can_have(corpus: Corpus, fault: str) -> bool:
    if fault in ("no shard", "taken down"):
        return False  # that is decided for whole shards, and between parts of a run
    if fault == "wav":
        return corpus.has_wavs
    return fault != "flipped" or (corpus.has_checksums and not corpus.has_wavs)


def _write_shard(corpus: Corpus, shard: int, samples: list[Known], draw: random.Random) -> None:
    name = f"shard-{shard:06d}.tar"
    file = io.BytesIO()
    writer = TarWriter(file)
    for index, known in enumerate(samples):
        corpus.samples[shard, index] = known
        writer.add(known.key, _fields(known, corpus.has_wavs))
    writer.close()
    data = bytearray(file.getvalue())
    for known, start in zip(samples, writer.offsets, strict=False):
        if known.fault == "header":
            data[start : start + 512] = _wrong_header(bytes(data[start : start + 512]), draw)
        if known.fault == "flipped":  # in the text, which is the first member
            data[start + 512 + draw.randrange(len(known.text))] ^= 1 << draw.randrange(7)
    (corpus.folder / name).write_bytes(data)
    offsets = encode_index(writer.offsets)
    (corpus.folder / index_name(name)).write_bytes(offsets)
    if corpus.has_checksums:
        sums = encode_checksums(writer.checksums, offsets)
        (corpus.folder / checksums_name(name)).write_bytes(sums)
    if corpus.has_columns:
        _write_sidecar(corpus, name, samples)
    corpus.names.append(name)
    corpus.shards.append(ShardInfo(name, len(samples), len(data)))


def _write_sidecar(corpus: Corpus, name: str, samples: list[Known]) -> None:
    """Write the column `json.size`. NULL is a `json` without it, or no row."""
    rows = [
        {"key": known.key, "status": "ok", "shard": name, "index": index}
        | {"json": "{}" if known.size is None else json.dumps({"size": known.size})}
        for index, known in enumerate(samples)
        if known.size is not None or known.number % 2
    ]
    table = pa.Table.from_pylist(rows, schema=_COLUMNS)
    pq.write_table(table, corpus.folder / name.replace(".tar", ".parquet"))


def _wrong_header(header: bytes, draw: random.Random) -> bytes:
    """Return a header that no reader can believe. That of a liar has the right checksum."""
    damage = draw.choice(["zeros", "noise", *_LIES])
    if damage == "zeros":
        return bytes(300) + header[300:]
    if damage == "noise":
        return draw.randbytes(512)
    size, kind = _LIES[damage]
    blank = header[:124] + size + header[136:148] + b" " * 8 + kind + header[157:]
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:]


def _fields(known: Known, has_wavs: bool) -> dict[str, bytes]:
    fields = {
        "txt": known.text.encode(),
        "json": json.dumps({"number": known.number, "fault": known.fault}).encode(),
    }
    if has_wavs:
        fields["wav"] = _wav(known.number)
    if known.fault == "json":
        fields["json"] = b'{"number": '
    elif known.fault == "utf8":
        fields["txt"] = b"\xff\xfe" + fields["txt"]
    elif known.fault == "wav":
        fields["wav"] = fields["wav"][:20]
    elif known.fault == "twice":
        fields["TXT"] = b"again"
    elif known.fault == "reserved":
        fields["__source__"] = b"a stranger's"
    return fields


def _wav(number: int) -> bytes:
    """Return a recording whose sample i is ``(number * 7 + i) % 30000``."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(WAV_RATE)
        values = [(number * 7 + i) % 30000 for i in range(WAV_SAMPLES)]
        writer.writeframes(struct.pack(f"<{WAV_SAMPLES}h", *values))
    return file.getvalue()


# -- unions: several datasets that are opened as one, of which the last grows ----------------------


@dataclass
class Union(Corpus):
    """Datasets whose shards stand one behind another."""

    parts: list[Corpus] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    """The number of the first shard of each."""

    def add(self, draw: random.Random, prefix: str, bad_fraction: float) -> None:
        """Write one more dataset at the end, sometimes in a folder with a name that is taken."""
        number, like = len(self.parts), self.parts[0]
        self.parts += [
            write_corpus(
                self.folder
                / f"{like.folder.name}-other{number}"
                / draw.choice(["", like.folder.name]),
                draw,
                prefix=f"{prefix}+{number}",
                has_wavs=like.has_wavs,
                bad_fraction=bad_fraction,
                max_shards=3,
                has_columns=like.has_columns,
                has_checksums=like.has_checksums,
            )
        ]
        self.refresh()

    def refresh(self) -> None:
        """Take over what was written into the parts."""
        self.firsts = list(accumulate((len(part.shards) for part in self.parts), initial=0))
        folders = [part.folder.name for part in self.parts]
        self.shards = []
        for number, (part, first) in enumerate(zip(self.parts, self.firsts, strict=False)):
            count = folders[: number + 1].count(folders[number])
            prefix = folders[number] + f"-{count}" * (count > 1)
            self.shards += [replace(shard, name=f"{prefix}/{shard.name}") for shard in part.shards]
            self.samples |= {(first + s, i): known for (s, i), known in part.samples.items()}
            self.listed |= {(first + s, i) for s, i in part.listed}
        self.names, self.shown = [shard.name for shard in self.shards], self.shards

    def show(self, num_shards: int) -> None:
        """Write manifests of so many shards. Parts without any are not opened."""
        self.shown = self.shards[:num_shards]
        for part, first in zip(self.parts, self.firsts, strict=False):
            part.show(max(0, num_shards - first))

    def place(self, storage: str) -> list[str]:
        """Return the folders of what is shown."""
        return [str(part.place(storage)) for part in self.parts if part.shown]

    def split(self, refs: set[Ref]) -> list[tuple[Corpus, set[Ref]]]:
        """Return the datasets that are shown, with those of some samples that are theirs."""
        return [
            (part, {(s - first, i) for s, i in refs if first <= s < first + len(part.shards)})
            for part, first in zip(self.parts, self.firsts, strict=False)
            if part.shown
        ]


def grow(corpus: Corpus, draw: random.Random, kinds: random.Random) -> None:
    """Append shards to a dataset or to the last one of a union, or a dataset to a union."""
    if isinstance(corpus, Union) and kinds.random() < 0.4:
        corpus.add(kinds, "more", 0.1)
        return
    append_shards(corpus.parts[-1] if isinstance(corpus, Union) else corpus, draw, 2, "more", 0.1)
    if isinstance(corpus, Union):
        corpus.refresh()
