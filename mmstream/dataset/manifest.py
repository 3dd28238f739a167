"""``mmstream.json``: what a dataset consists of.

The manifest names the shards with their sample counts. So the length and the order of an epoch are
known before any shard is opened. The same dataset has the same manifest everywhere: it holds no
time, host, absolute path or number of workers. There is one exception, `data_url`, which only
``mmstream index --output`` writes: the tars lie where the reader may not write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from mmstream.errors import ManifestError

__all__ = ["MANIFEST_NAME", "MARKER_NAME", "Manifest", "ShardInfo"]

MANIFEST_NAME = "mmstream.json"
MARKER_NAME = "mmstream.unfinished.json"
"""Lies in the folder of a conversion that has not finished."""

FORMAT_VERSION = 1

_MAX_COUNT = 1 << 50
"""Bytes or samples of one shard stay below this (a petabyte), so that sums fit in int64."""


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


@dataclass(frozen=True)
class _Versioned:
    """The field that manifests of all versions have."""

    version: int


@dataclass(frozen=True)
class Manifest:
    """What a dataset consists of, in shard order."""

    shards: tuple[ShardInfo, ...]
    fields: dict[str, int] = field(default_factory=dict)
    """How many samples have each field. Empty: they were never counted."""
    source: dict[str, Any] = field(default_factory=dict)
    """Where the dataset came from: name and checksum of the input, rows, rejects, options."""
    data_url: str | None = None
    """Where the tars lie. None: beside the manifest."""
    checksums: Literal["written", "indexed"] | None = None
    """Who made the checksums of the samples, ``NAME.tar.crc32c``: the converter that wrote the
    tars, or ``mmstream index --checksums`` later. None: there are none."""
    version: int = FORMAT_VERSION

    @property
    def num_samples(self) -> int:
        """Samples of all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tars."""
        return sum(shard.num_bytes for shard in self.shards)

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON, one shard per line. Equal manifests give equal bytes."""
        content = {
            "version": self.version,
            "num_samples": self.num_samples,
            "num_bytes": self.num_bytes,
            "fields": dict(sorted(self.fields.items())),
            "source": self.source,
            **({"data_url": self.data_url} if self.data_url else {}),
            **({"checksums": self.checksums} if self.checksums else {}),
        }
        head = msgspec.json.format(msgspec.json.encode(content), indent=2)
        shards = b",\n".join(b"    " + msgspec.json.encode(shard) for shard in self.shards)
        return head[:-2] + b',\n  "shards": [\n' + shards + b"\n  ]\n}\n"

    @classmethod
    def from_bytes(cls, data: bytes, name: str = MANIFEST_NAME) -> Manifest:
        """Read a manifest.

        Args:
            data: The content of the file.
            name: Of the file, for messages.

        Raises:
            ManifestError: The manifest is malformed, of a newer version, or has impossible shards.
        """
        try:
            version = msgspec.json.decode(data, type=_Versioned).version
            if version != FORMAT_VERSION:
                raise ManifestError(
                    f"{name}: format version {version}, this mmstream reads "
                    f"{FORMAT_VERSION}; install a newer mmstream"
                )
            manifest = msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ManifestError(
                f"{name}: {error}; run `mmstream index` to make a new one"
            ) from None
        names = [shard.name for shard in manifest.shards]
        if len(set(names)) != len(names):
            raise ManifestError(f"{name}: a shard is named twice")
        for shard in manifest.shards:
            counts_fit = 0 <= shard.num_samples < _MAX_COUNT and 0 <= shard.num_bytes < _MAX_COUNT
            if not counts_fit or not shard.name or "\0" in shard.name:
                raise ManifestError(f"{name}: impossible shard {shard}")
            if shard.name.startswith("/") or ".." in shard.name.split("/"):
                raise ManifestError(f"{name}: shard {shard.name!r} lies outside the dataset")
        return manifest
