"""The sidecar of a shard: a Parquet file with one row for each sample and for each reject.

    rows -> formats -> media -> shard + SIDECAR

``shard-000000.parquet`` lies beside ``shard-000000.tar``. ``mmstream index --columns`` writes it
for tars of any origin, beside their indexes. `mmstream.dataset.columns` reads it.

It says what the shard holds without its bytes: where each sample came from, its sizes, and hashes
of its media and text. DuckDB, pandas and polars open it. The columns that users of img2dataset know
have the same names as there.

`duplicates.py` compares the hashes. The rule that says what the text of a sample is needs its
fields alone. So samples of a conversion and samples of any other tar have the same hashes where
they say the same.

Perceptual hashes are 256 bits that hardly change when a picture is encoded again or resized:

    image -> grey, 64 x 64 -> its 16 x 16 lowest frequencies -> 1 bit each: above their median

The idea is that of PDQ (Facebook, 2019) and of pHash. Two pictures are compared by the number of
bits that differ, their Hamming distance. Two unrelated pictures differ in about 128 bits. Pictures
are decoded as small as the format can (JPEG: scaled while it is decoded), so a hash costs a
fraction of a full decoding.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm
from xxhash import xxh3_128_digest

from mmstream.converting.draft import Media, RowError, media_of
from mmstream.converting.formats.fields import without_secrets
from mmstream.converting.media.load import checked, facts_of_frames
from mmstream.converting.options import MediaOptions
from mmstream.converting.rows.records import Row, encodable
from mmstream.dataset.bad_list import digest_of, read_removed
from mmstream.dataset.columns import (
    INDEX_CHECKSUM,
    is_sidecar,
    open_sidecar,
    read_rows,
    sidecar_name,
)
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index import index_checksum
from mmstream.dataset.select import forget_conditions
from mmstream.errors import ConfigError, DecodeError, ShardError
from mmstream.media.fields import json_object
from mmstream.media.types import kind_of
from mmstream.processes.workers import run_in_processes
from mmstream.storage import Store

MAX_GROUP_BYTES = 3 << 19
"""Most bytes of a row group in memory, about: 5,000 rows of text, or 1,000 with pictures. To write
5,000 rows in five groups takes three times as long."""

ROW_BYTES = 200
MEDIUM_BYTES = 1000
"""What a row, and each medium of it, takes in memory besides its texts."""

HASHED_BYTES = 1 << 20
"""A thread computes the SHA-256 of media while the next are read. It gets so many bytes at once,
and as many wait for it at most."""

MAX_HELD_BYTES = 32 << 20
"""A sidecar is held in memory while it is written; a larger one is in a temporary file."""

COPIED_BYTES = 1 << 20

MAX_SCALAR_CHARACTERS = 256
"""Longer texts of a ``json`` are not a column."""

FACTS = {
    "width": pa.int32(),
    "height": pa.int32(),
    "original_width": pa.int32(),
    "original_height": pa.int32(),
    "rotation": pa.int32(),
    "duration_s": pa.float64(),
    "fps": pa.float64(),
    "num_frames": pa.int64(),
    "sample_rate": pa.int32(),
    "num_channels": pa.int32(),
    "codec": pa.string(),
}
"""What `Media.facts` may hold."""

MEDIUM = pa.struct(
    [
        pa.field("field", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("num_bytes", pa.int64(), nullable=False),
        pa.field("xxh3", pa.binary(16), nullable=False),
        pa.field("perceptual_hash", pa.binary(32)),
        *(pa.field(name, kind) for name, kind in FACTS.items()),
    ]
)

SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("error_message", pa.string()),
        pa.field("shard", pa.string(), nullable=False),
        pa.field("index", pa.int32()),
        pa.field("file", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("split", pa.string()),
        pa.field("id", pa.string()),
        pa.field("url", pa.string()),
        pa.field("license", pa.string()),
        pa.field("caption", pa.string()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("original_width", pa.int32()),
        pa.field("original_height", pa.int32()),
        pa.field("sha256", pa.string()),
        pa.field("num_bytes", pa.int64()),
        pa.field("num_text_bytes", pa.int64()),
        pa.field("text_xxh3", pa.binary(16)),
        pa.field("media", pa.list_(pa.field("element", MEDIUM, nullable=False))),
        pa.field("json", pa.string()),
    ]
)
"""The columns. docs/conversion.md says what each of them means."""

_FEW_VALUES = ["status", "error_message", "shard", "file", "split", "license"] + [
    f"media.list.element.{name}" for name in ("field", "kind", "codec", "sample_rate")
]
"""Columns that are stored as a dictionary, because their values repeat."""

_SHA256 = SCHEMA.get_field_index("sha256")

_IDS = ("id", "uid", "image_id", "sample_id", "videoid", "video_id")
_URLS = ("url", "image_url", "source_url", "contenturl", "raw_url", "coco_url", "source")
_URLS_AND_MEDIA = (*_URLS, "image", "video", "audio")  # a row may name its medium by URL
_LICENSES = ("license", "licence", "license_name", "license_url")
_ORIGINS = frozenset((*_IDS, *_URLS_AND_MEDIA, *_LICENSES))
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")


def id_of(values: Mapping[str, Any]) -> str | None:
    """Return the id of a row or of a ``json``: ``id``, ``uid``, ``image_id`` and others."""
    return _first_text(values, _IDS)


class SidecarWriter:
    """Writes the sidecar of one shard, row by row, while the shard is written.

    A context manager: the file appears when the block ends without an error. The same rows give the
    same bytes with the same versions of pyarrow (and of Pillow, for perceptual hashes).

    Args:
        store: The destination.
        shard: Name of the shard.
        split: Name of the split that the shard belongs to.
        perceptual_hash: Makes the perceptual hash of an image's bytes. Default: there is none.
        index: Checksum of the shard's index, where the shard is not written just now.

    Attributes:
        num_bytes: Size of the file, after the block.
        sha256: Checksum of the file, after the block.
    """

    def __init__(
        self,
        store: Store,
        shard: str,
        split: str | None = None,
        perceptual_hash: Callable[[bytes], bytes | None] | None = None,
        index: bytes | None = None,
    ) -> None:
        self._store, self._shard, self._split = store, shard, split
        self._perceptual_hash = perceptual_hash
        self._index = index
        self._rows: list[tuple[Any, ...]] = []  # values in the order of SCHEMA, but for the SHA-256
        self._sha256s: list[str | None] = []
        self._group_bytes = self._num_samples = 0
        self._stack = ExitStack()
        self._thread = self._stack.enter_context(ThreadPoolExecutor(1, "mmstream-sha256"))
        file = tempfile.SpooledTemporaryFile(MAX_HELD_BYTES)  # noqa: SIM115 - closed by the stack
        self._file = self._stack.enter_context(file)
        self._unhashed: list[tuple[int, bytes]] = []  # position in `_sha256s`, and the medium
        self._unhashed_bytes = 0
        self._hashing = self._thread.submit(_add_sha256, [], [])

    def __enter__(self) -> SidecarWriter:
        self._writer = pq.ParquetWriter(
            self._file,
            SCHEMA,
            compression="zstd",
            use_dictionary=_FEW_VALUES,
            store_schema=False,
            version="2.6",
        )
        if self._index is not None:
            self._writer.add_key_value_metadata({INDEX_CHECKSUM: self._index})
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            if kind is None:
                self._flush()
            self._writer.close()
            if kind is None:
                self._store_file()

    def _store_file(self) -> None:
        self.num_bytes = self._file.seek(0, io.SEEK_END)
        self._file.seek(0)
        self.sha256 = hashlib.file_digest(self._file, "sha256").hexdigest()
        self._file.seek(0)
        with self._store.create(sidecar_name(self._shard)) as file:
            shutil.copyfileobj(self._file, file, COPIED_BYTES)

    def add_sample(
        self, row: Row, key: str, fields: Mapping[str, bytes], media: Sequence[Media]
    ) -> None:
        """Add a sample.

        Args:
            row: It came from.
            key: Of the sample.
            fields: {field: bytes} of the sample, as the tar holds it.
            media: Its media. Their bytes are among `fields`.
        """
        content = json_object(fields["json"]) if "json" in fields else {}
        text, scalars = text_of(fields, content), scalars_of(content)
        caption = fields["txt"].decode("utf-8", "replace") if media and "txt" in fields else None
        described = self._described(media, fields) if media else ()
        first = described[0] if described else {}
        origin = self._origin(row)
        values = (
            encodable(key),
            "success",
            None,
            self._shard,
            self._num_samples,
            *origin,
            caption,
            first.get("width"),
            first.get("height"),
            first.get("original_width"),
            first.get("original_height"),
            sum(map(len, fields.values())),
            None if text is None else len(text),
            None if text is None else content_hash(text),
            described,
            scalars,
        )
        self._add(values, media, key, caption, scalars, *origin[3:])
        self._num_samples += 1

    def add_reject(
        self,
        row: Row,
        key: str,
        reason: str | None,
        status: Literal["rejected", "damaged", "erased"] = "rejected",
    ) -> None:
        """Add a row that became no sample, or a sample that cannot be read or was erased.

        Args:
            row: The row.
            key: The key that its sample would have.
            reason: Why there is no sample. None: it was erased.
            status: Damaged and erased ones are samples of the shard.
        """
        origin, message = self._origin(row), reason if reason is None else encodable(reason)
        index = None if status == "rejected" else self._num_samples
        leading_values = (encodable(key), status, message, self._shard, index, *origin)
        self._num_samples += index is not None
        values = leading_values + (None,) * (len(SCHEMA) - 1 - len(leading_values))
        self._add(values, (), key, reason, *origin[3:])

    def _origin(self, row: Row) -> tuple[str, int, str | None, str | None, str | None, str | None]:
        """Return where a row comes from: file, row, split, id, url and license."""
        fields = row.value if isinstance(row.value, dict) else {}
        names = [str(name).lower() for name in fields]
        if _ORIGINS.isdisjoint(names):
            return row.file, row.number, self._split, None, None, None
        values = dict(zip(names, fields.values(), strict=True))
        url = _first_text(values, _URLS_AND_MEDIA, _URL)
        return (
            row.file,
            row.number,
            self._split,
            id_of(values),
            url and without_secrets(url),
            _first_text(values, _LICENSES),
        )

    def _described(
        self, media: Sequence[Media], fields: Mapping[str, bytes]
    ) -> tuple[dict[str, Any], ...]:
        names = dict(fields)  # of the media that are not described yet
        described = []
        for medium in media:
            field = next(name for name, data in names.items() if data is medium.data)
            del names[field]  # a medium that comes twice has two fields
            kind = kind_of(medium.extension) or "image"
            hash_image = self._perceptual_hash if kind == "image" else None
            content = medium.content
            columns = {
                "field": encodable(field),
                "kind": kind,
                "num_bytes": len(content),
                "xxh3": content_hash(content),
                "perceptual_hash": hash_image and hash_image(medium.data),
            }
            facts = {name: value for name, value in medium.facts.items() if name in FACTS}
            described.append(columns | facts)
        return tuple(described)

    def _add(self, values: tuple[Any, ...], media: Sequence[Media], *texts: str | None) -> None:
        """Add a row.

        Python's garbage collector looks at thousands of lists again and again, but not at tuples
        of strings and numbers.

        Args:
            values: In the order of the columns, without the SHA-256.
            media: Of the row. The SHA-256 is that of the first one.
            texts: Those of the values that may be long.
        """
        self._rows.append(values)
        self._sha256s.append(None)
        if media:  # handing media over to the thread one by one is slow
            data = media[0].content
            self._unhashed.append((len(self._sha256s) - 1, data))
            self._unhashed_bytes += len(data)
            if self._unhashed_bytes >= HASHED_BYTES:
                self._begin_hashing()
        self._group_bytes += ROW_BYTES + len(media) * MEDIUM_BYTES
        for text in texts:
            if text is not None:
                self._group_bytes += len(text)
        if self._group_bytes >= MAX_GROUP_BYTES:
            self._flush()

    def _begin_hashing(self) -> None:
        """Let the thread hash what waits, after what it hashes now."""
        self._hashing.result()
        self._hashing = self._thread.submit(_add_sha256, self._sha256s, self._unhashed)
        self._unhashed, self._unhashed_bytes = [], 0

    def _flush(self) -> None:
        self._begin_hashing()
        self._hashing.result()
        if self._rows:
            columns: list[Sequence[Any]] = list(zip(*self._rows, strict=True))
            columns.insert(_SHA256, self._sha256s)
            arrays = list(map(pa.array, columns, SCHEMA.types))
            self._writer.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA))
        self._rows, self._sha256s, self._group_bytes = [], [], 0


def write_sidecars(
    dataset: Dataset, *, overwrite: bool = False, num_workers: int = 1, progress: bool = True
) -> int:
    """Write the sidecars of all shards that have none, or an old one. They lie beside the indexes.

    What the bytes of a shard do not tell is kept of an old one: rejected rows, where samples are
    from, perceptual hashes. A sample that cannot be read, or was erased, has a row of NULLs.

    Args:
        dataset: Whose shards are read, all bytes of them.
        overwrite: Write those too that exist already.
        num_workers: Processes.
        progress: Show a progress bar (on a terminal only).

    Returns:
        The number of sidecars that were written.

    Raises:
        ConfigError: A table of another program has the name of a sidecar.
        ShardError, StorageError: A shard cannot be read.
        MMStreamError: A process died. The sidecars that are written are kept.
    """
    erased = read_removed(dataset.index_store).erased
    jobs = [
        (dataset, shard, overwrite, frozenset(erased.get(dataset.name_of(shard), ())))
        for shard in range(dataset.num_shards)
    ]
    num_samples, num_written = int(dataset.counts.sum()), 0
    is_hidden = None if progress else True
    try:
        with tqdm(
            total=num_samples, unit=" samples", unit_scale=True, desc="columns", disable=is_hidden
        ) as bar:
            for job, is_written in run_in_processes(_write, jobs, num_workers, command="index"):
                bar.update(int(dataset.counts[job[1]]))
                num_written += is_written
    finally:
        if num_written:
            forget_conditions(dataset)
    return num_written


def _write(job: tuple[Dataset, int, bool, frozenset[int]]) -> bool:
    """Write the sidecar of a shard. Return False where a whole one is there."""
    dataset, shard, overwrite, erased = job
    if not overwrite and (scalars := _old_rows(dataset, shard, ["json"])) is not None:
        num_samples = len(scalars) - scalars["index"].null_count
        if "json" in scalars.column_names and num_samples == dataset.counts[shard]:
            return False
    table = _old_rows(dataset, shard)
    old = [] if table is None else table.to_pylist()
    old_rows = {row["index"]: row for row in old}
    old_media = {medium["xxh3"]: medium for row in old for medium in row.get("media") or ()}
    name, split = dataset.name_of(shard), old[0].get("split") if old else None
    with SidecarWriter(
        dataset.index_store,
        name,
        split,
        lambda data: old_media.get(content_hash(data), {}).get("perceptual_hash"),
        b"%08x" % index_checksum(name, dataset.shards.offsets(shard)),
    ) as sidecar:
        samples = dataset.shards.samples(shard, np.arange(dataset.counts[shard]))
        for index, sample in enumerate(samples):
            if not isinstance(sample, dict):
                own = Row(index, name, index + 1, None)
                sidecar.add_reject(own, "", str(sample), "damaged")
                continue
            if index in erased:
                sidecar.add_reject(Row(index, "", 0, None), sample["__key__"], None, "erased")
                continue
            fields = {field: data for field, data in sample.items() if not field.startswith("__")}
            row = old_rows.get(index)
            if row is not None and row["key"] == encodable(sample["__key__"]):
                own = Row(index, row["file"], row["row"], row)
            else:
                own = Row(index, name, index + 1, json_object(fields.get("json")))
            media = [_with_facts(medium, old_media) for medium in media_of(fields)]
            sidecar.add_sample(own, sample["__key__"], fields, media)
        for row in old:
            if row["index"] is None:
                own = Row(0, row["file"], row["row"], row)
                sidecar.add_reject(own, row["key"], row["error_message"] or "")
    return True


def _old_rows(
    dataset: Dataset, shard: int, columns: Sequence[str] | None = None
) -> pa.Table | None:
    """Return the rows of a sidecar that is there. None: there is none, or it must not be used."""
    try:
        table = read_rows(dataset, shard, columns)
        names = [name for name in table.column_names if name in SCHEMA.names]
        return table.select(names).cast(pa.schema([SCHEMA.field(name) for name in names]))
    except ConfigError:  # a table of another program
        if dataset.index_store.exists(sidecar_name(dataset.name_of(shard))):
            raise
    except (FileNotFoundError, ShardError, pa.ArrowException, ValueError):  # or of other types
        pass
    return None


def empty_rows(
    store: Store, shard: str, keys: Mapping[int, str], rejects: Collection[int] = ()
) -> bytes | None:
    """Return a sidecar in which the rows of erased samples say nothing, as bytes of the file.

    Args:
        store: Holds the sidecar.
        shard: Name of the shard.
        keys: The new keys of erased samples, by their indexes.
        rejects: Positions among its rejects of those that say nothing either.

    Returns:
        None where there is none, or a table of another program.

    Raises:
        ShardError: It is damaged.
        StorageError: The storage failed after retries.
    """
    table = _own_table(store, shard)
    if table is None:
        return None
    rows, position = table.to_pylist(), -1
    for number, row in enumerate(rows):
        index = row["index"]
        position += index is None
        if index in keys or (index is None and position in rejects):
            status, key = (row["status"], "") if index is None else ("erased", keys[index])
            kept = {"shard": shard, "index": index, "split": row.get("split")}
            rows[number] = {**kept, "key": key, "status": status, "file": "", "row": 0}
    buffer = io.BytesIO()
    pq.write_table(
        pa.Table.from_pylist(rows, table.schema),
        buffer,
        compression="zstd",
        use_dictionary=_FEW_VALUES,
        store_schema=False,
        version="2.6",
    )
    return buffer.getvalue()


def are_of_erased(store: Store, shard: str, digests: Collection[str]) -> list[bool] | None:
    """Return of each reject of a sidecar whether it has the key or the id of an erased sample.

    None: there is no sidecar. Errors are those of `empty_rows`.

    Args:
        store: Holds the sidecar.
        shard: Name of the shard.
        digests: What `digest_of` made of the keys and ids of erased samples.
    """
    table = _own_table(store, shard, ["key", "id", "index"])
    if table is None:
        return None
    return [
        digest_of(row["key"]) in digests or digest_of(row.get("id") or "", "id") in digests
        for row in table.to_pylist()
        if row["index"] is None
    ]


def _own_table(store: Store, shard: str, columns: list[str] | None = None) -> pa.Table | None:
    """Return a sidecar, or some columns. None: there is none, or a table of another program."""
    try:
        file = open_sidecar(store, shard)
        if is_sidecar(file.schema_arrow.names):
            return file.read(columns, use_threads=False)
    except FileNotFoundError:
        pass
    except (pa.ArrowException, ValueError) as error:
        raise ShardError(f"{store.url_of(sidecar_name(shard))}: damaged ({error})") from None
    return None


def _with_facts(medium: Media, old_media: Mapping[bytes, Mapping[str, Any]]) -> Media:
    """Return a medium with what a header tells, as `convert` has it. A bad one has no facts."""
    old = old_media.get(content_hash(medium.content), {})
    facts: Mapping[str, Any] = {name: old[name] for name in FACTS if old.get(name) is not None}
    if not facts:
        with suppress(RowError):
            kind = kind_of(medium.extension) or "image"
            facts = (
                facts_of_frames(medium, [f"frame {i}" for i in range(len(medium.frames))])
                if medium.frames
                else checked(kind, medium.data, MediaOptions()).facts
            )
    return replace(medium, facts=facts)


def _add_sha256(sha256s: list[str | None], media: Sequence[tuple[int, bytes]]) -> None:
    for position, data in media:
        sha256s[position] = hashlib.sha256(data).hexdigest()


def _first_text(
    values: Mapping[str, Any], names: Sequence[str], pattern: re.Pattern[str] | None = None
) -> str | None:
    """Return the first of these values that is a text or an integer, and matches."""
    if values.keys().isdisjoint(names):
        return None
    for name in names:
        value = values.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            text = str(value)
            if text and (pattern is None or pattern.match(text)):
                return text.encode("utf-8", "replace").decode()
    return None


_DIALOGUES = ("messages", "conversations", "chosen", "rejected")
_TEXTS = ("captions", "caption", "text")


content_hash = xxh3_128_digest
"""Returns 16 bytes that tell contents apart.

Two different contents have the same hash with a chance of 2^-128. It is not protection against
somebody who makes such contents on purpose.
"""


def scalars_of(content: Mapping[str, Any]) -> str | None:
    """Return the short texts, the numbers, and true and false of a ``json``, as JSON.

    Integers beyond 64 bits are left out: no column could hold them.

    Examples:
        >>> scalars_of({"lang": "zh", "score": 0.5, "captions": ["a cat"], "hash": 2**80})
        '{"lang":"zh","score":0.5}'
    """
    scalars = {
        name: value
        for name, value in content.items()
        if ((kind := type(value)) is str and len(value) <= MAX_SCALAR_CHARACTERS)
        or kind is float
        or kind is bool
        or (kind is int and -(1 << 63) <= value < 1 << 63)
    }
    return msgspec.json.encode(scalars).decode() if scalars else None


def text_of(fields: Mapping[str, Any], content: Mapping[str, Any] | None = None) -> bytes | None:
    r"""Return the text of a sample in UTF-8, or None if it has none.

    It is what its ``json`` says: all texts of a conversation, or all captions, with a line end
    between them. Without such a ``json``, it is the field ``txt``.

    Args:
        fields: {field: bytes} of the sample. Other values are ignored.
        content: What its ``json`` holds, where that is known.

    Examples:
        >>> text_of({"jpg": b"", "txt": b"a cat", "json": b'{"captions": ["a cat", "a pet"]}'})
        b'a cat\na pet'
        >>> text_of({"txt": b"a cat"})
        b'a cat'
    """
    data = fields.get("json")
    if isinstance(data, bytes):
        text = "\n".join(_texts(json_object(data) if content is None else content))
        if text:
            return text.encode("utf-8", "surrogatepass")
    text_field = fields.get("txt", fields.get("text"))
    return text_field if isinstance(text_field, bytes) and text_field else None


def _texts(content: Mapping[str, Any]) -> list[str]:
    if not content.keys().isdisjoint(_DIALOGUES):
        dialogues = [content[name] for name in _DIALOGUES if isinstance(content.get(name), list)]
        if turns := [turn for dialogue in dialogues for turn in dialogue]:
            return [text for turn in turns for text in _texts_of_turn(turn)]
    for name in _TEXTS:
        value = content.get(name)
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and (texts := [item for item in value if isinstance(item, str)]):
            return texts
    return []


def _texts_of_turn(turn: Any) -> Iterator[str]:
    """Yield the texts of a message: ``content`` (text, or parts), or LLaVA's ``value``."""
    if not isinstance(turn, dict):
        return
    content = turn.get("content", turn.get("value"))
    for item in content if isinstance(content, list) else [content]:
        text = item.get("text") if isinstance(item, dict) else item
        if isinstance(text, str):
            yield text


HASH_BYTES = 32

SIDE = 64
"""Pixels a side of the small picture."""

FREQUENCIES = 16
"""Lowest frequencies a side, without the constant one."""

MAX_PIXELS = 50_000_000
"""Larger pictures get no hash: decoding them takes too much memory."""

MIN_CONTRAST = 4.0
"""Least standard deviation of grey levels (0 to 255). A flatter picture has noise to compare."""


def perceptual_hash(data: bytes) -> bytes | None:
    """Return the 32 bytes of a picture's hash.

    The first frame of an animation counts. The picture is that of training: see `media.image`.

    Args:
        data: The bytes of an image file.

    Returns:
        256 bits, or None for a picture that cannot be decoded, is too large, or is almost of one
        colour: its bits would be noise.
    """
    try:
        pixels = _small_grey(data)
    except DecodeError:
        return None
    if float(pixels.std()) < MIN_CONTRAST:
        return None
    frequencies = _DCT @ pixels @ _DCT.T
    bits = frequencies > np.median(frequencies)
    return np.packbits(bits).tobytes()


def _small_grey(data: bytes) -> npt.NDArray[np.float32]:
    """Return the picture as training sees it, made small: upright, transparency on white."""
    from mmstream.converting.media.images import unwarned  # planning does without Pillow
    from mmstream.media import image, pillow
    from mmstream.media.limits import MAX_MEMORY, Limits
    from mmstream.media.orientation import upright

    is_jpeg = data.startswith(image.JPEG_START)
    plugin = _drafted_jpeg if is_jpeg else image.plugin_of(data)
    with unwarned:
        picture = pillow.decode_with_pillow(
            plugin, data, Limits.start(MAX_PIXELS, MAX_MEMORY, None), convert=_shrunk
        )
    return upright(picture.pixels, picture.orientation)[:, :, 0].astype(np.float32)


def _drafted_jpeg(file: io.BytesIO) -> Any:
    from PIL.JpegImagePlugin import JpegImageFile

    image = JpegImageFile(file)
    image.draft("L", (2 * SIDE, 2 * SIDE))
    return image


def _shrunk(image: Any) -> npt.NDArray[np.uint8]:
    from PIL import Image

    from mmstream.media.pillow import to_rgb

    grey = Image.fromarray(to_rgb(image)).convert("L")
    return np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.BILINEAR))[:, :, None]


def _dct_rows() -> npt.NDArray[np.float32]:
    """Return the rows 1 to 16 of the cosine transform (DCT-II) of 64 values: float32 [16, 64]."""
    frequency = np.arange(1, FREQUENCIES + 1)[:, None]
    position = 2 * np.arange(SIDE)[None, :] + 1
    return np.cos(np.pi * frequency * position / (2 * SIDE)).astype(np.float32)


_DCT = _dct_rows()
