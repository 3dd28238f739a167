"""A corpus of shards: its length, its indexes, and random access to one raw sample.

`open_dataset` takes a folder or prefix with a manifest, a folder of plain tars, one tar, a list or
a brace pattern. Opening reads a manifest, or lists a folder; no shard is opened. An index is
fetched whole, once, when its shard is first used.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

import braceexpand
import msgspec
import numpy as np
import numpy.typing as npt

from mmstream.errors import ConfigError, ManifestError, SampleError, ShardError, where
from mmstream.index import build_index, decode_index, index_name, num_indexed
from mmstream.manifest import MANIFEST_NAME, MARKER_NAME, Manifest, ShardInfo
from mmstream.sample import Lineage, Sample
from mmstream.storage import LocalStore, Store, is_remote, open_store, split_url
from mmstream.tar import parse_sample

__all__ = ["Dataset", "DatasetView", "open_dataset"]

Ints = npt.NDArray[np.int64]

MAX_INDEXES = 4096
"""Indexes kept in memory; of 5,000-sample shards that is 160 MB."""


class Dataset(Sequence[Sample]):
    """The samples of a corpus, in the order of its shards. Make one with `open_dataset`.

    Picklable: what crosses to a worker is the manifest, not connections or indexes.

    Attributes:
        manifest: shards, fields, where the corpus came from.
        store: where the tars lie.
        index_store: where the indexes lie; the same store unless `index --output` wrote them.
    """

    def __init__(
        self,
        manifest: Manifest,
        store: Store,
        index_store: Store | None = None,
        offsets: Mapping[str, Ints] | None = None,
    ) -> None:
        self.manifest, self.store = manifest, store
        self.index_store = store if index_store is None else index_store
        self._built = dict(offsets or {})  # of tars without an index, built at opening
        self._indexes: dict[int, Ints] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_indexes": {}}

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    @overload
    def __getitem__(self, item: int) -> Sample: ...
    @overload
    def __getitem__(self, item: slice) -> DatasetView: ...
    def __getitem__(self, item: int | slice) -> Sample | DatasetView:
        """Return sample `item` as a dict of bytes, or a view of a slice.

        Raises:
            IndexError: no such sample.
            SampleError, ShardError, StorageError: it cannot be read.
        """
        if isinstance(item, slice):
            return DatasetView(self, range(*item.indices(len(self))))
        number = operator.index(item)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"sample {item} of {len(self)}")
        shard = int(np.searchsorted(self._ends, number, side="right"))
        index = number - int(self._ends[shard] - self.counts[shard])
        return self.read(shard, index)

    def __repr__(self) -> str:
        size = f"{self.manifest.num_bytes / 1e6:,.1f} MB"
        return (
            f"<Dataset {self.store.url}: {len(self):,} samples, {self.num_shards} shards, {size}>"
        )

    def _repr_html_(self) -> str:
        from mmstream.display import dataset_html

        return dataset_html(self)

    @cached_property
    def counts(self) -> Ints:
        """Samples of each shard, int64 [num_shards]."""
        return np.array([shard.num_samples for shard in self.manifest.shards], dtype=np.int64)

    @cached_property
    def _ends(self) -> Ints:
        return np.cumsum(self.counts)

    @property
    def num_shards(self) -> int:
        """Shards of the corpus."""
        return len(self.manifest.shards)

    def name_of(self, shard: int) -> str:
        """Return a shard's name, relative to the corpus' root."""
        return self.manifest.shards[shard].name

    def offsets(self, shard: int) -> Ints:
        """Return a shard's index: int64 [num_samples + 1] byte offsets.

        Raises:
            ShardError: no index, a damaged one, or one that does not fit the manifest.
        """
        found = self._indexes.get(shard)
        if found is None:
            found = self._load_index(shard)
            if len(self._indexes) >= MAX_INDEXES:
                self._indexes.pop(list(self._indexes)[0], None)  # noqa: RUF015 - threads share it
            self._indexes[shard] = found
        return found

    def read(self, shard: int, index: int) -> Sample:
        """Return one raw sample; errors as `dataset[i]`."""
        name = self.name_of(shard)
        offsets = self.offsets(shard)
        start, stop = int(offsets[index]), int(offsets[index + 1])
        try:
            data = self.store.read_range(name, start, stop)
        except OSError as error:
            raise self.explain(error, shard, stop) from error
        return self.parse(data, shard, index)

    def parse(self, data: bytes | memoryview, shard: int, index: int) -> Sample:
        """Return the sample in a byte range of a shard. Raises SampleError with its address."""
        name = self.name_of(shard)
        try:
            sample = parse_sample(data, self.store.url_of(name))
        except SampleError as error:
            raise SampleError(f"{where(name, index)} {error}") from error
        sample["__lineage__"] = Lineage(shard, index)
        return sample

    def explain(self, error: OSError, shard: int, stop: int) -> OSError | ShardError:
        """Tell a shard that is gone or too short (ShardError) from storage that fails."""
        name = self.name_of(shard)
        if isinstance(error, FileNotFoundError):
            return ShardError(f"{name}: no such shard in {self.store.url}")
        try:
            size = self.store.size(name)
        except OSError:
            return error
        if size < stop:
            return ShardError(f"{name}: truncated: {size} bytes, its index says {stop} and more")
        return error

    def _load_index(self, shard: int) -> Ints:
        info = self.manifest.shards[shard]
        name = index_name(info.name)
        if info.name in self._built:
            return self._built[info.name]
        try:
            offsets = decode_index(self.index_store.read(name), name)
        except FileNotFoundError:
            raise ShardError(
                f"{info.name}: no index {name} in {self.index_store.url}; run `mmstream index`"
            ) from None
        if offsets.size != info.num_samples + 1:
            raise ShardError(
                f"{name}: {offsets.size - 1} samples, the manifest says {info.num_samples}; "
                "run `mmstream index --overwrite`"
            )
        if offsets[-1] > info.num_bytes:
            raise ShardError(
                f"{info.name}: {info.num_bytes} bytes, its index goes to {offsets[-1]}: truncated, "
                "or the index is not this tar's"
            )
        return offsets


class DatasetView(Sequence[Sample]):
    """A slice of a dataset: reads a sample when it is asked for."""

    def __init__(self, dataset: Dataset, rows: range) -> None:
        self.dataset, self._rows = dataset, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, item: int) -> Sample: ...
    @overload
    def __getitem__(self, item: slice) -> DatasetView: ...
    def __getitem__(self, item: int | slice) -> Sample | DatasetView:
        if isinstance(item, slice):
            return DatasetView(self.dataset, self._rows[item])
        return self.dataset[self._rows[item]]

    def __iter__(self) -> Iterator[Sample]:
        return (self.dataset[row] for row in self._rows)

    def __repr__(self) -> str:
        return f"<{len(self):,} samples of {self.dataset!r}>"

    def _repr_html_(self) -> str:
        from mmstream.display import view_html

        return view_html(self)


def open_dataset(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Dataset:
    """Open a corpus.

    Args:
        source: a folder or prefix with a manifest or with plain tars, one tar, a list of tars, or
            a brace pattern such as ``"s3://bucket/shard-{000000..000099}.tar"``.

    Returns:
        The dataset. Local tars without an index are indexed in memory here, a few milliseconds
        a thousand samples; ``mmstream index`` does so once and for all.

    Raises:
        ManifestError: a conversion that has not finished, no shards, a malformed manifest, or
            remote tars without an index.
        FileNotFoundError, StorageError: as the storage.
    """
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        if "{" not in name and not name.endswith((".tar", ".tgz", ".tar.gz")):
            return _open_folder(open_store(name))
        urls = list(braceexpand.braceexpand(name)) if "{" in name else [name]
    else:
        urls = [os.fspath(item) for item in source]
    if not urls:
        raise ConfigError("open_dataset: the list of tars is empty")
    return _open_tars(urls)


def _open_folder(store: Store) -> Dataset:
    found = store.list()
    if MARKER_NAME in found:
        raise ManifestError(f"{store.url}: conversion has not finished; {_finisher(store)}")
    if MANIFEST_NAME in found:
        manifest = Manifest.from_bytes(store.read(MANIFEST_NAME), store.url_of(MANIFEST_NAME))
        data = open_store(manifest.data_url) if manifest.data_url else store
        return Dataset(manifest, data, store)
    names = [name for name in found if name.endswith(".tar")]
    if not names:
        folder = isinstance(store, LocalStore) and not os.path.isdir(store.url)  # noqa: PTH112
        reason = "no such folder" if folder else f"neither {MANIFEST_NAME} nor tars in it"
        raise ManifestError(f"{store.url}: {reason}")
    return _open_plain(store, names, found)


def _finisher(store: Store) -> str:
    """Return what to do about an unfinished conversion: the command that its marker names."""
    try:
        marker = msgspec.json.decode(store.read(MARKER_NAME))
        return f"finish it with: {marker['command']}"
    except (OSError, KeyError, TypeError, RecursionError, UnicodeError, msgspec.MsgspecError):
        return "run the same `mmstream convert` again to finish it"


def _open_tars(urls: Sequence[str]) -> Dataset:
    """Open tars by name; their root is the folder that they share."""
    paths = [url if is_remote(url) else open_store(url).url for url in urls]
    if len({is_remote(path) for path in paths}) > 1:
        raise ConfigError("open_dataset: local tars and remote ones in one list")
    folders = [split_url(path)[0] for path in paths]
    root = os.path.commonpath(folders) if not is_remote(paths[0]) else _common_prefix(folders)
    store = open_store(root)
    names = [path[len(store.url) :].lstrip("/") for path in paths]
    if len(set(names)) != len(names):
        raise ConfigError("open_dataset: a tar is named twice")
    sizes: dict[str, int] = {}
    for folder in dict.fromkeys(folders):
        prefix = folder[len(store.url) :].strip("/")
        listed = open_store(folder).list()
        sizes |= {f"{prefix}/{name}" if prefix else name: size for name, size in listed.items()}
    return _open_plain(store, names, sizes)


def _common_prefix(folders: Sequence[str]) -> str:
    parts = [folder.split("/") for folder in folders]
    shared = os.path.commonprefix(parts)  # noqa: RUF071 - of lists, so by whole parts
    if len(shared) < 3:  # "s3:", "", bucket
        raise ConfigError(f"open_dataset: tars of one corpus lie in one bucket, not {folders[:2]}")
    return "/".join(shared)


def _open_plain(store: Store, names: Sequence[str], sizes: Mapping[str, int]) -> Dataset:
    """Open tars without a manifest: counts come from the sizes of their indexes."""
    shards, built = [], {}
    for name in names:
        if name not in sizes:
            raise FileNotFoundError(f"{store.url_of(name)}: no such tar")
        index_bytes = sizes.get(index_name(name))
        if index_bytes is not None:
            count = num_indexed(index_bytes)
        elif isinstance(store, LocalStore):
            built[name] = build_index(store, name)
            count = built[name].size - 1
        else:
            raise ManifestError(
                f"{store.url_of(name)}: no index beside it; run `mmstream index {store.url}` "
                "(with --output FOLDER where you may not write)"
            )
        shards.append(ShardInfo(name, count, sizes[name]))
    return Dataset(Manifest(tuple(shards)), store, offsets=built)
