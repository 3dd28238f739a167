"""Where samples lie: `Dataset.bounds`, and the requests that it needs."""

from __future__ import annotations

import numpy as np
import pytest

import mmstream as mm
from mmstream.errors import ShardError
from mmstream.storage import open_store
from tests.helpers.corpora import write_corpus
from tests.helpers.stores import watched

COUNTS = [30, 1, 0, 40, 26]


@pytest.fixture(params=[True, False], ids=["checksums", "no checksums"])
def dataset(request, tmp_path):
    return watched(mm.open_dataset(write_corpus(tmp_path, COUNTS, checksums=request.param)))


def test_bounds_are_those_of_the_index_in_the_order_that_was_asked_for(dataset):
    index = np.array([3, 0, 39, 3])
    bounds = dataset.bounds(3, index)
    offsets, checksums = dataset.index_of(3)
    assert np.array_equal(bounds.start, offsets[index])
    assert np.array_equal(bounds.stop, offsets[index + 1])
    assert {column.dtype for column in bounds if column is not None} == {np.dtype(np.int64)}
    if checksums is None:
        assert bounds.checksum is None
    else:
        assert np.array_equal(bounds.checksum, checksums[index])


def test_the_indexes_of_many_shards_come_in_one_round_of_requests_and_no_size_is_asked_for(dataset):
    num_files = 2 if dataset.has_checksums else 1
    assert dataset.load_indexes([0, 3, 3, 4, 1]) == 4 * num_files
    assert [len(request) for request in dataset.store.range_reads] == [4 * num_files]
    for shard in (0, 1, 3, 4):
        dataset.bounds(shard, np.array([0]))
    assert len(dataset.store.range_reads) == 1
    assert not dataset.store.size_reads
    assert dataset.load_indexes([0, 3]) == 0
    assert dataset.load_indexes([0, 2]) == num_files
    assert len(dataset.store.range_reads) == 2


def test_the_error_of_a_shard_comes_at_its_bounds(dataset):
    store = open_store(dataset.store.url)
    store.remove("shard-000000.tar.idx")
    store.write("shard-000001.tar.idx", b"short")
    store.write("shard-000003.tar.idx", store.read("shard-000003.tar.idx") + bytes(8))
    dataset.load_indexes(range(5))
    with pytest.raises(ShardError, match=r"no index shard-000000\.tar\.idx"):
        dataset.bounds(0, np.array([0]))
    with pytest.raises(ShardError, match="5 bytes, but the manifest says 1 samples"):
        dataset.bounds(1, np.array([0]))
    if dataset.has_checksums:  # they tell that the first bytes are the index
        assert dataset.bounds(3, np.array([0])).start.tolist() == [0]
    else:
        with pytest.raises(ShardError, match="336 bytes, but the manifest says 40 samples"):
            dataset.bounds(3, np.array([0]))
    assert dataset.bounds(4, np.array([0])).start.tolist() == [0]
