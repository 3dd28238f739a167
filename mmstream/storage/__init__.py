"""Ground floor: bytes in and out of a local folder or an object store, and the only retries.

    urls.py      names of objects
    local.py     a folder
    remote.py    a prefix behind fsspec (``s3://``): clients, retries

A store is a root (a folder, or a prefix such as ``s3://bucket/corpus``) and everything else names
objects relative to it. Stores are plain values: they pickle, compare, and hold no connection.

Credentials and endpoints are the environment's business (``AWS_ACCESS_KEY_ID``,
``AWS_ENDPOINT_URL``, ``~/.aws``), as for every other S3 tool; a client follows its changes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

from mmstream.errors import ConfigError
from mmstream.storage.local import LocalFile, LocalStore
from mmstream.storage.remote import RemoteStore
from mmstream.storage.urls import is_remote, join_url, split_url

__all__ = [
    "LocalFile",
    "LocalStore",
    "RemoteStore",
    "Store",
    "is_remote",
    "join_url",
    "open_store",
    "split_url",
]

Store: TypeAlias = LocalStore | RemoteStore
"""Where shards, indexes, manifests and checkpoints lie."""


def open_store(url: str | os.PathLike[str]) -> Store:
    """Return the store of a folder or a prefix; nothing is read and nothing must exist yet.

    Raises:
        ConfigError: an empty name, or a URL without a host or bucket.
    """
    name = os.fspath(url)
    if name.startswith("file://"):
        name = name.removeprefix("file://")
    if not name:
        raise ConfigError("storage: the folder's name is empty")
    if not is_remote(name):
        return LocalStore(str(Path(name).expanduser().absolute()))
    scheme, _, rest = name.partition("://")
    if not rest.strip("/"):
        raise ConfigError(f"{name}: names no bucket; write {scheme}://bucket/prefix")
    return RemoteStore(name.rstrip("/"))
