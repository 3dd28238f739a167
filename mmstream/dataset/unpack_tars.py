"""Unpack gzipped tars to plain ones: a gzipped tar cannot be read from its middle.

`index_tars` calls it with ``repack=True``, before it makes indexes.
"""

from __future__ import annotations

import gzip
import shutil
import zlib

from mmstream.dataset.checksums import checksums_name
from mmstream.dataset.index import index_name
from mmstream.errors import ConfigError, ShardError
from mmstream.storage import Store

__all__ = ["GZIPPED", "copy_plain_tars", "unpack_tars"]

GZIPPED = (".tar.gz", ".tgz")


def unpack_tars(
    store: Store, target: Store, sizes: dict[str, int], overwrite: bool
) -> tuple[list[str], int]:
    """Unpack the gzipped tars of one store into another.

    Returns:
        The names of the plain tars, and how many were unpacked by this call. A plain tar that
        existed already stays, unless `overwrite` is set.
    """
    plain_names: dict[str, str] = {}
    for name, size in sizes.items():
        if not name.endswith((".tar", *GZIPPED)) or size < 2:
            continue
        if store.read_range(name, 0, 2) != b"\x1f\x8b":
            continue
        plain_name = name.removesuffix(".gz").removesuffix(".tgz")
        if not plain_name.endswith(".tar"):
            plain_name += ".tar"
        if plain_name == name and target == store:
            raise ConfigError(f"{name}: is gzipped under a plain name; give --output FOLDER")
        plain_names[name] = plain_name
    num_unpacked = 0
    target_names = target.list()
    for name, plain_name in plain_names.items():
        if plain_name in target_names and not overwrite:
            continue
        for old_name in (index_name(plain_name), checksums_name(plain_name)):
            target.remove(old_name)  # if there is one, it belongs to an older tar
        try:
            with (
                gzip.open(_ObjectReader(store, name, sizes[name])) as source,  # type: ignore[call-overload]
                target.create(plain_name) as file,
            ):
                shutil.copyfileobj(source, file, 1 << 20)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ShardError(f"{name}: cannot be unpacked: {error}") from error
        num_unpacked += 1
    return list(plain_names.values()), num_unpacked


def copy_plain_tars(store: Store, target: Store, sizes: dict[str, int]) -> None:
    """Copy the tars that are not gzipped beside the unpacked ones: a dataset has one folder."""
    target_names = target.list()
    for name, size in sizes.items():
        if name.endswith(".tar") and name not in target_names:
            with target.create(name) as file:
                shutil.copyfileobj(_ObjectReader(store, name, size), file, 1 << 20)


class _ObjectReader:
    """An object of a store as a readable file, for code that reads from front to back."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        self._store = store
        self._name = name
        self._size = size
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._size, self._position + size)
        if stop <= self._position:
            return b""
        data = self._store.read_range(self._name, self._position, stop)
        self._position = stop
        return data
