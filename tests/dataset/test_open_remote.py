"""Opening a dataset on an object store: few requests, and nothing is listed."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import numpy as np
import pytest

import mmstream as mm
from mmstream.dataset import open as open_module
from mmstream.dataset.bad_list import BAD_NAME
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME, Manifest, ShardInfo
from mmstream.errors import ManifestError
from mmstream.storage import LocalStore, ObjectStat, open_store, remote
from tests.helpers.corpora import write_corpus
from tests.helpers.stores import WatchedStore

COUNTS = [30, 1, 0, 40, 26]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_corpus(tmp_path / "corpus", COUNTS, checksums=True)
    index_tars(folder, progress=False)
    return folder


@pytest.fixture
def opened(folder, monkeypatch):
    """Open the folder as if it lay on an object store."""

    def open_remote(**options):
        store = WatchedStore(open_store(folder), maps_files=False, concurrent=True)
        monkeypatch.setattr(open_module, "open_store", lambda url: store)
        return mm.open_dataset(folder, **options)

    return open_remote


def test_three_requests_lead_to_the_first_data_range(opened):
    dataset = opened()
    store = dataset.store
    assert sorted(store.whole_reads) == [BAD_NAME, MANIFEST_NAME]
    assert (store.num_lists, store.size_reads, store.ranges) == (0, [], [])
    assert dataset[0]["__key__"] == "000000"
    (part,) = dataset.manifest.index_parts
    assert [name for name, _, _ in store.ranges] == [part.name, "shard-000000.tar"]
    assert (store.num_lists, store.size_reads) == (0, [])
    assert sorted(opened(bad_list=False).store.whole_reads) == [MANIFEST_NAME]


def test_without_a_manifest_tars_and_a_marker_are_found_by_one_listing(folder, opened):
    Path(folder, MANIFEST_NAME).unlink()
    dataset = opened()
    assert (len(dataset), dataset.store.num_lists, dataset.store.size_reads) == (97, 1, [])
    Path(folder, MARKER_NAME).write_text("{}")
    with pytest.raises(ManifestError, match="has not finished"):
        opened()


def test_a_shard_of_another_size_than_the_manifest_says_is_noticed_by_its_first_answer(
    folder, opened, caplog
):
    path = Path(folder, "shard-000000.tar")
    path.write_bytes(path.read_bytes() + bytes(512))
    dataset = opened()
    with caplog.at_level(logging.WARNING):
        assert dataset[0]["__key__"] == "000000"  # its bytes fit their checksum
    assert "shard-000000.tar: is not the shard that was indexed: its size was" in caplog.text
    plain = opened(checksums=False)
    with pytest.raises(mm.ShardError, match=r"shard-000000\.tar: is not the shard that was inde"):
        plain[0]
    assert plain[40]["__key__"] == "000040"
    assert plain.store.size_reads == []


def test_the_version_of_a_shard_is_that_of_its_first_answer(folder, opened):
    dataset = opened(checksums=False)
    size = dataset.manifest.shards[3].num_bytes
    assert dataset.known_stat(3) == ObjectStat(size, None)
    assert dataset[40]["__key__"] == "000040"
    assert dataset.known_stat(3) == LocalStore(folder).stat("shard-000003.tar")
    copy = pickle.loads(pickle.dumps(dataset))
    assert [copy.known_stat(shard) for shard in range(5)] == [
        dataset.known_stat(shard) for shard in range(5)
    ]


@pytest.mark.s3
def test_a_large_manifest_comes_in_ranges_side_by_side(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "OBJECT_RANGE_BYTES", 1000)
    shards = tuple(ShardInfo(f"shard-{i:06d}.tar", 1, 1024, f"{i:064x}") for i in range(60))
    store = open_store(f"{s3}/{tmp_path.name}")
    store.write(MANIFEST_NAME, Manifest(shards).to_bytes())
    assert mm.open_dataset(store.url).manifest.shards == shards
    assert np.all(mm.open_dataset(store.url).counts == 1)
