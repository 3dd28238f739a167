"""A dataset in memory is read, indexed, verified and written as one in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import mmstream as mm
from mmstream.dataset.bad_list import write_bad
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.verify import verify
from mmstream.storage import MemoryStore, open_store

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


@pytest.mark.slow
@pytest.mark.parametrize("multiprocessing_context", ["fork", "forkserver"])
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
    dataset = mm.open_dataset(memory_corpus)  # indexed meanwhile
    assert isinstance(dataset.store, MemoryStore)
    assert [sample["__url__"].startswith(memory_corpus) for sample in dataset] == [True] * 97
    assert index_tars(memory_corpus, progress=False).num_built == 5
    assert {name: store.read(name) for name in indexes} == indexes
    assert list(verify(mm.open_dataset(memory_corpus), progress=False)) == []
    write_bad(mm.open_dataset(memory_corpus), [(0, 3)])
    assert mm.open_dataset(memory_corpus).bad.tolist() == [[0, 3]]
