"""An object that is replaced while it is read by ranges is noticed, in every store."""

from __future__ import annotations

import os

import pytest

from mmstream.errors import StorageError
from mmstream.storage import (
    ObjectStat,
    ReplacedError,
    map_file,
    open_store,
)

DATA = bytes(range(256)) * 4


def test_the_version_of_a_listing_is_that_of_a_range_and_is_compared_where_it_is_known(store):
    store.write("a", DATA)
    listed = store.list()
    assert store.read_ranges([("a", 1, 3)], dict(listed)) == [DATA[1:3]]
    known = {}
    store.read_ranges([("a", 1, 3)], known)
    assert known == listed  # learned from the answer
    assert store.read_ranges([("a", 0, 2)], {"a": ObjectStat(1024, None)}) == [DATA[:2]]
    [error] = store.read_ranges([("a", 0, 2)], {"a": ObjectStat(1023, None)})
    assert "its size was 1023 bytes and is 1024" in str(error)


@pytest.mark.parametrize("content", [DATA[::-1], DATA + b"more", DATA[:900], b"x"])
def test_a_range_of_a_replaced_object_is_an_error_that_names_it(store, content):
    store.write("a", DATA)
    store.write("b", DATA)
    known = store.list()
    old = dict(known)
    store.write("a", content)
    first, second, other = store.read_ranges([("a", 0, 1), ("a", 900, 1000), ("b", 2, 5)], known)
    for error in (first, second):
        assert isinstance(error, ReplacedError)
        assert isinstance(error, StorageError)
        assert f"{store.url}/a: was replaced: its " in str(error)
        assert (error.expected, error.current) == (old["a"], store.stat("a"))
    assert other == DATA[2:5]
    assert known == old
    known["a"] = first.current  # accepted
    assert store.read_ranges([("a", 0, 1)], known) == [content[:1]]


def test_a_range_past_the_end_of_the_known_object_is_no_replacement(store):
    store.write("a", DATA)
    for start in (1000, 2000):
        [error] = store.read_ranges([("a", start, 3000)], store.list())
        assert "ends 1976 bytes before 3000" in str(error)
        assert not isinstance(error, ReplacedError)


def test_a_file_that_keeps_its_time_and_size_is_told_by_its_number(tmp_path):
    if not os.major(tmp_path.stat().st_dev):
        pytest.skip("no disk: numbers of files are not used")
    store = open_store(tmp_path)
    store.write("a", DATA)
    known, status = store.list(), (tmp_path / "a").stat()
    (tmp_path / "b").write_bytes(DATA[::-1])
    os.utime(tmp_path / "b", ns=(status.st_atime_ns, status.st_mtime_ns))
    (tmp_path / "b").replace(tmp_path / "a")
    assert isinstance(store.read_ranges([("a", 0, 2)], known)[0], ReplacedError)


def test_a_map_is_of_the_known_file_or_an_error(tmp_path):
    store = open_store(tmp_path)
    store.write("a", DATA)
    path, known = store.local_path("a"), {}
    assert bytes(map_file(path, "a", known)) == DATA
    assert known == store.list()
    store.write("a", DATA[::-1])
    with pytest.raises(ReplacedError, match="/a: was replaced"):
        map_file(path, "a", known)
    assert bytes(map_file(path, "a")) == DATA[::-1]
    store.write("a", b"")
    with pytest.raises(StorageError, match="/a: is empty"):
        map_file(path, "a")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(StorageError, match="a FIFO"):
        map_file(store.local_path("fifo"), "fifo")


def test_dropping_a_cache_changes_no_byte_and_raises_nothing(store):
    store.write("a", DATA)
    store.drop_cache("a", 0, 1024)
    store.drop_cache("absent", 0, 1024)
    assert store.read("a") == DATA
