"""A dataset is read the same way from every store, also from one that users wrote themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import mmstream as mm
from mmstream.dataset.bad_list import write_bad
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.verify import verify
from mmstream.errors import StorageError
from mmstream.storage import Access, MemoryStore, ObjectStat, Store, open_store

SETTINGS = {"global_batch_size": 4, "seed": 3, "window": 16}


@pytest.fixture
def memory_corpus(corpus, memory_url):
    """The URL of a copy of `corpus` in memory."""
    store = open_store(memory_url)
    for path in Path(corpus).iterdir():
        store.write(path.name, path.read_bytes())
    return memory_url


def keys_of(dataset: mm.Dataset, **loader_settings) -> list[list[str]]:
    """The keys of one epoch, batch by batch."""
    loader = mm.Loader(mm.Pipeline(dataset, **SETTINGS), **loader_settings)
    return [batch["__key__"] for batch in loader]


def test_a_dataset_in_memory_has_the_samples_of_its_copy_on_disk(corpus, memory_corpus):
    in_memory, on_disk = mm.open_dataset(memory_corpus), mm.open_dataset(corpus)
    assert isinstance(in_memory.store, MemoryStore)
    assert len(in_memory) == len(on_disk) == 97
    for sample, expected in zip(in_memory, on_disk, strict=True):
        assert sample["__url__"].startswith(memory_corpus)
        assert {**sample, "__url__": ""} == {**expected, "__url__": ""}


@pytest.mark.slow
@pytest.mark.parametrize("multiprocessing_context", ["fork", "forkserver", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*")
def test_worker_processes_read_a_dataset_in_memory(corpus, memory_corpus, multiprocessing_context):
    expected = keys_of(mm.open_dataset(corpus), num_workers=0)
    batches = keys_of(
        mm.open_dataset(memory_corpus),
        num_workers=2,
        multiprocessing_context=multiprocessing_context,
    )
    assert batches == expected
    assert sum(map(len, batches)) == 96  # 97 samples in whole batches


def test_tars_in_memory_are_indexed_verified_and_given_a_bad_list(memory_corpus):
    store = open_store(memory_corpus)
    indexes = {name: store.read(name) for name in store.list() if name.endswith(".idx")}
    for name in [*indexes, "mmstream.json"]:
        store.remove(name)
    assert len(mm.open_dataset(memory_corpus)) == 97  # indexed while it is opened
    assert index_tars(memory_corpus, progress=False).num_built == 5
    assert {name: store.read(name) for name in indexes} == indexes
    assert list(verify(mm.open_dataset(memory_corpus), progress=False)) == []
    write_bad(mm.open_dataset(memory_corpus), [(0, 3)])
    assert mm.open_dataset(memory_corpus).bad.tolist() == [[0, 3]]


def test_rows_are_converted_into_memory(tmp_path, memory_url):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a cat"}\n{"text": "a dog"}\n')
    mm.convert(rows, memory_url, progress=False)
    assert [sample["txt"] for sample in mm.open_dataset(memory_url)] == [b"a cat", b"a dog"]


@dataclass(frozen=True)
class ReadOnlyStore:
    """A store that is related to none of ours. It reads from a dict, and writes nothing."""

    url: str
    objects: tuple[tuple[str, bytes], ...]

    access: ClassVar[Access] = Access(0, 1000, 512, 512, concurrent=True)

    def url_of(self, name):
        return f"{self.url}/{name}"

    def local_path(self, name):
        return None

    def read(self, name, max_bytes=None):
        try:
            return dict(self.objects)[name]
        except KeyError:
            raise FileNotFoundError(name) from None

    def read_range(self, name, start, stop):
        data = self.read(name)
        if stop > len(data):
            raise StorageError(f"{name}: ends before {stop}")
        return data[start:stop]

    def read_ranges(self, ranges, known=None):
        outcomes = []
        for name, start, stop in ranges:
            try:
                outcomes.append(self.read_range(name, start, stop))
            except OSError as error:
                outcomes.append(error)
        return outcomes

    def drop_cache(self, name, start, stop):
        pass

    def size(self, name):
        return len(self.read(name))

    def stat(self, name):
        return ObjectStat(self.size(name), None)

    def list(self):
        return {name: ObjectStat(len(data), None) for name, data in sorted(self.objects)}


def test_a_store_that_users_wrote_is_read_like_ours(corpus):
    store: Store = ReadOnlyStore(
        "archive:/corpus",
        tuple((path.name, path.read_bytes()) for path in Path(corpus).iterdir()),
    )
    on_disk = mm.open_dataset(corpus)
    dataset = mm.Dataset(on_disk.manifest, store)
    assert keys_of(dataset, num_workers=0) == keys_of(on_disk, num_workers=0)
    assert list(verify(dataset, progress=False)) == []
