"""Small JSON files with a version and a seal: a checksum, so that a wrong read of one is noticed.

Manifests, bad lists, measures and plans are such files. The seal is the last key of the file, on a
line of its own. It is the CRC-32C of all bytes before this line::

      ]
      ,"crc32c": "0a1b2c3d"
    }

A file without a seal is accepted: a person who edits a file removes the line. A seal is no
protection against people: whoever changes a file can seal it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import crc32c
import msgspec

from mmstream.errors import ConfigError, ManifestError, escaped
from mmstream.storage import Store, is_remote, patience

T = TypeVar("T")

MAX_READS = 4
"""Reads of a file whose bytes are damaged: storage may have delivered them wrong."""

_SEAL = re.compile(rb'  ,"crc32c": "([0-9a-f]{8})"\n\}\s*\Z')


def seal(data: bytes) -> bytes:
    r"""Return a JSON object with a seal. Equal objects give equal bytes.

    Args:
        data: The object. It has one key or more, and ends with a ``}`` on a line of its own.

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
    _check_seal(data, name, cure)
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


def _check_seal(data: bytes, name: str, cure: str) -> None:
    match = _SEAL.search(data, max(0, len(data) - 64))
    if match is not None and int(match[1], 16) != crc32c.crc32c(data[: match.start()], 0, 0):
        raise ManifestError(
            f"{name}: was edited or damaged after it was written (crc32c differs); {cure}, or "
            'remove its "crc32c" line to accept it as it is'
        )


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
            if len(earlier) + 1 == MAX_READS or (data in earlier and is_near):
                raise
        if data in earlier:  # a proxy may answer in place of the storage for a while
            patience.pause(store.url_of(name), 0.5 * 2 ** len(earlier))
        earlier.append(data)
        store.drop_cache(name, 0, len(data))
