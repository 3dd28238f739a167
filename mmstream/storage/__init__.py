"""Bytes in and out of a local folder, an object store, or memory. Remote requests are retried.

    store.py     what every store can do; many requests at once; an object as a file; names
    local.py     a folder of this machine, or of NFS, Lustre and the like; new files
    remote.py    a prefix of an object store or web server, through fsspec: clients, requests
    upload.py    a new object in S3: its parts are sent while it is written
    responses.py     what responses mean: headers, refusals of S3, errors without secrets
    retry.py     how long failing requests are sent again
    range_client.py  clients that open ranges of objects, for the hot read path
    s3_endpoint.py   where a bucket is, which credentials open it, signatures; the session of s3fs
    http_client.py   HTTP requests whose responses are read in pieces
    transfers.py  ranges of a reader process: in which order, how many at a time, again when
    memory.py    objects in this process (``memory://``), for tests and small corpora
    union.py     several folders that are read as one
    node_cache.py    samples of remote shards on a disk of this machine
    write_lock.py    one writer at a time in a folder or prefix

A store has a root: a folder, or a prefix such as ``s3://bucket/corpus``. Everything else names
objects relative to it. Stores are plain values. They can be pickled and compared, and they hold no
connection.

Credentials and endpoints come from the environment (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``,
``~/.aws``), as for every other S3 tool. Clients follow its changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from mmstream.errors import ConfigError
from mmstream.storage.local import LocalStore, SharedStore, is_shared, map_file, open_file
from mmstream.storage.memory import MemoryStore
from mmstream.storage.remote import RemoteStore
from mmstream.storage.retry import patience_limit_s
from mmstream.storage.store import (
    BUCKET_SCHEMES,
    Access,
    NotAFileError,
    ObjectStat,
    ReplacedError,
    RequestError,
    Store,
    is_remote,
    join_url,
    local_path,
    require_known,
    require_no_secret,
    require_two_slashes,
    split_url,
)
from mmstream.storage.union import SCHEME, UnionStore, refuse_union

__all__ = [
    "Access",
    "LocalStore",
    "MemoryStore",
    "NotAFileError",
    "ObjectStat",
    "RemoteStore",
    "ReplacedError",
    "RequestError",
    "SharedStore",
    "Store",
    "UnionStore",
    "is_remote",
    "is_shared",
    "join_url",
    "map_file",
    "open_file",
    "open_store",
    "require_known",
    "split_url",
]


def require_shared(urls: Iterable[str], num_workers: int) -> None:
    """Raise a ConfigError where worker processes would need the memory of this one."""
    for url in urls:
        if url.startswith("memory://") and num_workers > 1:
            raise ConfigError(f"{url}: only this process has its memory://; use num_workers=1")


def open_store(url: str | os.PathLike[str]) -> Store:
    """Return the store of a folder or a URL prefix. Nothing is read, and nothing must exist yet.

    Args:
        url: A local folder, ``file://`` and a folder, ``memory://`` and any name, or a prefix that
            fsspec knows: ``s3://bucket/corpus``, ``gs://``, ``az://``, ``https://``, ``hf://``.

    Raises:
        ConfigError: An empty name, the name of a union, a URL without a host or bucket, or one with
            a password or a signature in it, or with one slash after its scheme. For a remote store:
            a patience (``MMSTREAM_STORAGE_PATIENCE_S``) that is not a number of seconds.
    """
    name = os.fspath(url)
    require_two_slashes(name)
    if name in ("", "file://"):
        raise ConfigError("the name of the folder is empty; give a path or a URL")
    if not is_remote(name):
        return LocalStore(str(Path(local_path(name)).absolute()))
    scheme, _, location = name.partition("://")
    if scheme == SCHEME:
        refuse_union(name)
    require_no_secret(name)
    if not location.strip("/") or (scheme in BUCKET_SCHEMES and location.startswith("/")):
        raise ConfigError(f"{name}: names no bucket; write {scheme}://bucket/prefix")
    if scheme == "memory":
        return MemoryStore(name.rstrip("/"))
    patience_limit_s()  # a wrong setting would else be refused only once the storage fails
    return RemoteStore(name.rstrip("/"))
