"""Media behind the URLs of object stores, read with the caller's credentials.

    references (which prefixes are allowed) -> OBJECTS

Storage that fails ends the conversion: that is no fault of a row. An object that is missing is one.
"""

from __future__ import annotations

from functools import lru_cache

from mmstream.converting.draft import RowError
from mmstream.converting.media.access import MediaAccess
from mmstream.converting.media.references import object_prefix
from mmstream.errors import StorageError
from mmstream.storage import Store, open_store
from mmstream.storage.store import TooLargeError

__all__ = ["object_size", "read_object", "read_object_range"]


def read_object(url: str, access: MediaAccess, max_bytes: int) -> bytes:
    """Return a whole object.

    Args:
        url: Under a prefix that `access` allows.
        access: What may be read.
        max_bytes: The largest object that is read.

    Raises:
        RowError: It is missing, empty or too large. The message does not name it.
        StorageError: Storage failed after retries.
    """
    store, name = _locate(url, access)
    try:
        data = store.read(name, max_bytes)
    except FileNotFoundError as error:
        raise _missing(error) from None
    except TooLargeError:
        raise RowError(f"more than {max_bytes:,} bytes") from None
    if not data:
        raise RowError("empty file")
    return data


def read_object_range(url: str, access: MediaAccess, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of an object; errors as `read_object`."""
    size = object_size(url, access)
    if stop > size:
        raise RowError(f"bytes {start} to {stop} of an object of {size}")
    store, name = _locate(url, access)
    return store.read_range(name, start, stop)


def object_size(url: str, access: MediaAccess) -> int:
    """Return the size of an object in bytes; errors as `read_object`."""
    store, name = _locate(url, access)
    try:
        return store.size(name)
    except FileNotFoundError as error:
        raise _missing(error) from None


def _missing(error: FileNotFoundError) -> RowError | StorageError:
    """Return the error of an object that does not exist. A missing bucket is no fault of a row."""
    if str(error).endswith("no such bucket"):
        return StorageError(str(error))
    return RowError("no such object")


def _locate(url: str, access: MediaAccess) -> tuple[Store, str]:
    prefix = object_prefix(url, access)
    assert prefix is not None  # `parse_reference` refused it
    return _store(prefix), url[len(prefix) + 1 :]


@lru_cache(maxsize=64)
def _store(prefix: str) -> Store:
    return open_store(prefix)
