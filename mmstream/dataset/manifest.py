"""``mmstream.json``: what a dataset consists of.

The manifest names the shards with their sample counts. So the length and the order of an epoch are
known before any shard is opened. The same dataset has the same manifest everywhere: it holds no
time, host, absolute path or number of workers. There is one exception, `data_url`, which only
``mmstream index --output`` writes: the tars lie where the reader may not write.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, TypeVar

import crc32c
import msgspec

from mmstream.errors import ConfigError, ManifestError, escaped
from mmstream.storage import Store, is_remote, retry
from mmstream.tar.header import BLOCK

MANIFEST_NAME = "mmstream.json"
INDEX_PART_NAME = re.compile(r"mmstream\.index\.[0-9a-f]{12}")
"""Names of the parts of an index."""

MARKER_NAME = "mmstream.unfinished.json"
"""Marks the folder of a conversion that has not finished."""

FORMAT_VERSION = 1

MAX_BYTES = 1 << 53
"""Bytes of all shards together stay below this (9 petabytes), so that sums fit in int64."""

MAX_MANIFEST_BYTES = 256 << 20
"""Largest file: about two million shards."""

MAX_NAME_BYTES = 1024
"""Longest name of a shard, as in S3."""

_CURE = (
    "run `mmstream index` to make a new one; or, for the manifest of a conversion, run "
    "`mmstream convert --overwrite`"
)

_NEVER_IN_NAMES = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Kinds of characters: control, direction and other invisible ones, surrogates, line ends."""


@dataclass(frozen=True)
class ShardInfo:
    """One shard of a dataset."""

    name: str
    """Path of the tar, relative to the dataset's root."""
    num_samples: int
    num_bytes: int
    """Size of the tar."""
    sha256: str | None = None
    """Checksum of the tar. None: it was never computed."""


def is_same_shard(shard: ShardInfo, other: ShardInfo) -> bool:
    """Tell whether two entries are of one shard. Checksums count where both have one."""
    if None in (shard.sha256, other.sha256):
        return replace(shard, sha256=None) == replace(other, sha256=None)
    return shard == other


@dataclass(frozen=True)
class IndexPart:
    """A part of the dataset's index, for some shards in a row (see `index.py`)."""

    name: str
    """Name of the file beside the manifest: ``mmstream.index.`` and 12 hex digits of its sha256."""
    num_bytes: int
    sha256: str
    first_shard: int
    """Position in the manifest of the first shard that it describes."""
    last_shard: int
    """Position of the last one."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a dataset, in shard order."""

    shards: tuple[ShardInfo, ...]
    fields: dict[str, int] = field(default_factory=dict)
    """How many samples have each field. Empty: they were never counted."""
    source: dict[str, Any] = field(default_factory=dict)
    """Where the dataset came from: name and checksum of the input, rows, rejects, options."""
    data_url: str | None = None
    """Where the tars lie. None: beside the manifest."""
    checksums: Literal["written", "indexed"] | None = None
    """The origin of the checksums of samples, ``NAME.tar.crc32c``: the converter that wrote the
    tars, or ``mmstream index --checksums`` later. None: there are none."""
    index_parts: tuple[IndexPart, ...] = ()
    """The index in parts, ascending. Shards that none describes have their ``NAME.tar.idx``."""
    erased: dict[str, str] = field(default_factory=dict)
    """{name of a shard of which samples were erased: sha256 of the tar since}. The `sha256` of such
    a shard stays what it was: states, bakes and measures know the shard by it."""
    version: int = FORMAT_VERSION

    def __reduce__(self) -> tuple[Any, ...]:
        # As columns: they are made, sent and read faster than an object for each shard.
        columns = ("name", "num_samples", "num_bytes", "sha256")
        shards = [[getattr(shard, column) for shard in self.shards] for column in columns]
        others = {item.name: getattr(self, item.name) for item in fields(self)[1:]}
        return _unpickled, (shards, others)

    @property
    def num_samples(self) -> int:
        """Samples of all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tars."""
        return sum(shard.num_bytes for shard in self.shards)

    def to_bytes(self) -> bytes:
        """Return the manifest as sealed JSON, one shard per line. Equal ones give equal bytes."""
        content = {
            "version": self.version,
            "num_samples": self.num_samples,
            "num_bytes": self.num_bytes,
            "fields": dict(sorted(self.fields.items())),
            "source": self.source,
            **({"data_url": self.data_url} if self.data_url else {}),
            **({"checksums": self.checksums} if self.checksums else {}),
            **({"index_parts": self.index_parts} if self.index_parts else {}),
            **({"erased": self.erased} if self.erased else {}),
        }
        head = msgspec.json.format(msgspec.json.encode(content), indent=2)
        shards = b",\n".join(b"    " + msgspec.json.encode(shard) for shard in self.shards)
        return seal(head[:-2] + b',\n  "shards": [\n' + shards + b"\n  ]\n}\n")

    @classmethod
    def from_bytes(cls, data: bytes, name: str = MANIFEST_NAME) -> Manifest:
        """Read a manifest.

        Args:
            data: The content of the file.
            name: Of the file, for messages.

        Raises:
            ManifestError: The manifest is damaged, malformed, of a newer version, or has impossible
                shards.
        """
        manifest = decode_sealed(data, name, cls, newest=FORMAT_VERSION, cure=_CURE)
        names = [shard.name for shard in manifest.shards]
        if len(set(names)) != len(names):
            raise ManifestError(f"{name}: a shard is named twice")
        for shard in manifest.shards:
            if fault := name_fault(shard.name):
                raise ManifestError(f"{name}: shard {escaped(repr(shard.name))} {fault}")
            # Each sample has one header or more.
            if not 0 <= shard.num_samples * BLOCK <= shard.num_bytes < MAX_BYTES:
                raise ManifestError(
                    f"{name}: {escaped(shard.name)} cannot have {shard.num_samples} samples in "
                    f"{shard.num_bytes} bytes; {_CURE}"
                )
        if manifest.num_bytes >= MAX_BYTES:
            raise ManifestError(f"{name}: shards of {manifest.num_bytes} bytes together; {_CURE}")
        _require_parts(manifest, name)
        return manifest

    @classmethod
    def read(cls, store: Store) -> Manifest:
        """Read the manifest of a folder or prefix. A damaged one is read again.

        Raises:
            ManifestError: As `from_bytes`.
            FileNotFoundError: There is none.
            StorageError: The storage failed, or the file is too large.
        """
        url = store.url_of(MANIFEST_NAME)
        return read_sealed(
            store, MANIFEST_NAME, MAX_MANIFEST_BYTES, lambda data: cls.from_bytes(data, url)
        )


def _unpickled(shards: Sequence[Sequence[Any]], others: dict[str, Any]) -> Manifest:
    return Manifest(tuple(map(ShardInfo, *shards)), **others)


def index_part_name(sha256: str) -> str:
    """Return the name of a part of an index by its content."""
    return f"mmstream.index.{sha256[:12]}"


def _require_parts(manifest: Manifest, name: str) -> None:
    """Raise a ManifestError where parts of the index cannot be those of the shards."""
    next_shard = 0
    for part in manifest.index_parts:
        is_named = re.fullmatch("[0-9a-f]{64}", part.sha256) and part.name == index_part_name(
            part.sha256
        )
        is_next = next_shard <= part.first_shard <= part.last_shard < len(manifest.shards)
        if not (is_named and is_next and 0 < part.num_bytes < MAX_BYTES):
            raise ManifestError(
                f"{name}: {escaped(part.name)} cannot be a part of the index, shards "
                f"{part.first_shard} to {part.last_shard}; {_CURE}"
            )
        next_shard = part.last_shard + 1


def name_fault(name: str) -> str:
    """Return what is wrong with the name of a shard; "" if it is in its one normal form.

    A shard that had two names would come twice in an epoch.

    Examples:
        >>> name_fault("train/shard-000000.tar")
        ''
        >>> name_fault("./shard-000000.tar")
        'is not in normal form'
    """
    if len(name.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
        return f"is longer than {MAX_NAME_BYTES:,} bytes"
    segments = name.split("/")
    if name.startswith("/") or ".." in segments:
        return "lies outside the dataset"
    if "" in segments or "." in segments or "\\" in name:
        return "is not in normal form"
    if not name.isprintable() and {unicodedata.category(char) for char in name} & _NEVER_IN_NAMES:
        return "has characters that cannot be shown"
    return ""


def require_name(name: str) -> None:
    """Raise a ConfigError where a name that a person gives cannot stand in that of a file."""
    if name_fault(name) or "/" in name or len(name.encode()) > 100:
        raise ConfigError(f"name {escaped(repr(name))}: cannot stand in the name of a file")


# -- sealed files ----------------------------------------------------------------------------------
#
# Small JSON files have a version and a seal, so that a wrong read of one is noticed. Manifests, bad
# lists, measures and plans are such files. The seal is the last key of the file, on a line of its
# own. It is the CRC-32C of all bytes before this line::
#
#       ]
#       ,"crc32c": "0a1b2c3d"
#     }
#
# A file without a seal is accepted: a person who edits a file removes the line. A seal is no
# protection against people: whoever changes a file can seal it again.

T = TypeVar("T")

MAX_SEALED_READS = 4
"""Reads of a file whose bytes are damaged: storage may have delivered them wrong."""

_SEAL = re.compile(rb'  ,"crc32c": "([0-9a-f]{8})"\n\}\s*\Z')


def seal(data: bytes) -> bytes:
    r"""Return a JSON object with a seal. Equal objects give equal bytes.

    Args:
        data: The object. It has one key or more, and ends with a ``}`` on a separate line.

    Examples:
        >>> print(seal(b'{\n  "version": 1\n}\n').decode(), end="")
        {
          "version": 1
          ,"crc32c": "e74a76cb"
        }
    """
    body = data.removesuffix(b"}\n")
    return body + b'  ,"crc32c": "%08x"\n}\n' % crc32c.crc32c(body, 0, 0)


@dataclass(frozen=True)
class _Versioned:
    """The field that files of all versions have."""

    version: int


def decode_sealed(data: bytes, name: str, kind: type[T], *, newest: int, cure: str) -> T:
    """Return what a file holds, after it was compared with its seal, if it has one.

    Args:
        data: The content of the file.
        name: Of the file, for messages.
        kind: The type of the content.
        newest: The highest version that is read.
        cure: What makes a new file, for messages.

    Raises:
        ManifestError: The file is not the one that was sealed, is malformed, or of a newer version.
    """
    match = _SEAL.search(data, max(0, len(data) - 64))
    if match is not None and int(match[1], 16) != crc32c.crc32c(data[: match.start()], 0, 0):
        raise ManifestError(
            f"{name}: was edited or damaged after it was written (crc32c differs); {cure}, or "
            'remove its "crc32c" line to accept it as it is'
        )
    if is_remote(name) and not data.lstrip().startswith(b"{"):
        begin = escaped(data[:40].decode("latin-1"))
        cure = f"a proxy may answer in place of the storage: it begins with {begin!r}"
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if not 1 <= version <= newest:
            raise ManifestError(
                f"{name}: format version {version}, this mmstream reads 1 to {newest}; install a "
                "newer mmstream"
            )
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ConfigError, UnicodeError, RecursionError) as error:
        raise ManifestError(f"{name}: {escaped(error)}; {cure}") from None


def read_sealed_as(
    store: Store, name: str, max_bytes: int, kind: type[T], *, newest: int, cure: str
) -> T:
    """Return a file of a store as `kind`. Arguments are those of `read_sealed` and `decode_sealed`.

    Raises:
        ManifestError, FileNotFoundError, StorageError: As `read_sealed`.
    """
    url = store.url_of(name)
    decode = partial(decode_sealed, name=url, kind=kind, newest=newest, cure=cure)
    return read_sealed(store, name, max_bytes, decode)


def read_sealed(store: Store, name: str, max_bytes: int, decode: Callable[[bytes], T]) -> T:
    """Return what a file of a store holds. A damaged one is read again, past the caches.

    Args:
        store: Holds the file.
        name: Of the file.
        max_bytes: A larger file is an error, and is not read.
        decode: Makes the value, and raises ManifestError where the bytes are damaged.

    Raises:
        ManifestError: Two reads of a file, or four of an object behind a network, gave no bytes
            that `decode` takes.
        FileNotFoundError: No such file.
        StorageError: The storage failed, or the file is too large.
    """
    earlier: list[bytes] = []
    while True:
        data = store.read(name, max_bytes=max_bytes)
        try:
            return decode(data)
        except ManifestError:
            is_near = not store.access.concurrent
            if len(earlier) + 1 == MAX_SEALED_READS or (data in earlier and is_near):
                raise
        if data in earlier:  # a proxy may answer in place of the storage for a while
            retry.pause(store.url_of(name), 0.5 * 2 ** len(earlier))
        earlier.append(data)
        store.drop_cache(name, 0, len(data))


# -- JSON that is not sealed -----------------------------------------------------------------------


def read_json(store: Store, name: str) -> dict[str, Any]:
    """Return the object that a file holds.

    Raises:
        ManifestError: It is not JSON, or no object.
    """
    try:
        return msgspec.json.decode(store.read(name), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ManifestError(f"{store.url_of(name)}: {error}") from None


def json_lines(value: object) -> bytes:
    """Return a value as JSON for people: a line for each entry.

    Raises:
        ConfigError: A text in it is not UTF-8, such as the name of a file from an old disk.
    """
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"a name that is not UTF-8 cannot be written down: {escaped(error.object)}; rename "
            "that file or folder, or name a link to it"
        ) from None
