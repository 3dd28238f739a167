"""Ground floor: ``mmstream.json``, what a dataset consists of.

The manifest names the shards with their sample counts, so the length and the order of an epoch are
known before any shard is opened. It holds no clock, host, absolute path or worker count: the same
corpus gives the same manifest everywhere. The one exception is `data_url`, which only
``mmstream index --output`` writes, for tars that lie where their reader may not write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from mmstream.errors import ManifestError

__all__ = ["MANIFEST_NAME", "MARKER_NAME", "Manifest", "ShardInfo"]

MANIFEST_NAME = "mmstream.json"
MARKER_NAME = "mmstream.unfinished.json"
FORMAT_VERSION = 1
_MAX = 1 << 50  # bytes or samples of one shard: a petabyte; sums stay within int64


@dataclass(frozen=True)
class ShardInfo:
    """One shard of a dataset."""

    name: str
    """Path of the tar, relative to the dataset's root."""
    num_samples: int
    num_bytes: int
    sha256: str | None = None
    """Of the tar's bytes; None when nobody computed it."""


@dataclass(frozen=True)
class _Head:
    """What manifests of all versions have."""

    version: int


@dataclass(frozen=True)
class Manifest:
    """What a dataset consists of, in shard order."""

    shards: tuple[ShardInfo, ...]
    fields: dict[str, int] = field(default_factory=dict)
    """How many samples have each field; empty when nobody counted."""
    source: dict[str, Any] = field(default_factory=dict)
    """Where it came from: the input's name and checksum, rows, rejects, options."""
    data_url: str | None = None
    """Where the tars lie when not beside the manifest."""
    version: int = FORMAT_VERSION

    @property
    def num_samples(self) -> int:
        """Samples over all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tars."""
        return sum(shard.num_bytes for shard in self.shards)

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON, a shard a line, the same bytes for the same content."""
        content = {
            "version": self.version,
            "num_samples": self.num_samples,
            "num_bytes": self.num_bytes,
            "fields": dict(sorted(self.fields.items())),
            "source": self.source,
            **({"data_url": self.data_url} if self.data_url else {}),
        }
        head = msgspec.json.format(msgspec.json.encode(content), indent=2)
        shards = b",\n".join(b"    " + msgspec.json.encode(shard) for shard in self.shards)
        return head[:-2] + b',\n  "shards": [\n' + shards + b"\n  ]\n}\n"

    @classmethod
    def from_bytes(cls, data: bytes, name: str = MANIFEST_NAME) -> Manifest:
        """Read a manifest.

        Raises:
            ManifestError: malformed, of a newer version, or with impossible shards.
        """
        try:
            version = msgspec.json.decode(data, type=_Head).version
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
            fits = 0 <= shard.num_samples < _MAX and 0 <= shard.num_bytes < _MAX
            if not fits or not shard.name or "\0" in shard.name:
                raise ManifestError(f"{name}: impossible shard {shard}")
            if shard.name.startswith("/") or ".." in shard.name.split("/"):
                raise ManifestError(f"{name}: shard {shard.name!r} lies outside the dataset")
        return manifest
