"""Parts of an index: written with the manifest, read in place of .idx files, never trusted.

And datasets on an object store, which open with few requests.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mmstream as mm
from mmstream.dataset import open as open_module, shard_indexes
from mmstream.dataset.bad_list import BAD_NAME, REMOVED_NAME
from mmstream.dataset.index import encode_checksums, sample_checksum
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME, Manifest
from mmstream.dataset.shard_indexes import map_whole
from mmstream.dataset.verify import verify
from mmstream.errors import ManifestError, ShardError, StorageError
from mmstream.storage import LocalStore, ObjectStat, open_store
from tests.helpers.corpora import write_corpus, write_shard
from tests.helpers.stores import WatchedStore, watched

COUNTS = [30, 1, 0, 40, 26]


@pytest.fixture
def folder(tmp_path):
    """A dataset with an index in one part. Its shards have checksums."""
    folder = write_corpus(tmp_path / "corpus", COUNTS, checksums=True)
    index_tars(folder, progress=False)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of cached parts, of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mmstream" / "index"


def remote(folder, **options):
    """The dataset as if it lay on an object store."""
    return watched(mm.open_dataset(folder), maps_files=False, concurrent=True, **options)


def part_of(folder):
    (part,) = mm.open_dataset(folder).manifest.index_parts
    return part


def assert_right(dataset, folder):
    """All bounds are those of the .idx files."""
    plain = replace(dataset.manifest, index_parts=())
    right = mm.Dataset(plain, open_store(folder))
    for shard, count in enumerate(COUNTS):
        index = np.arange(count)
        for column, expected in zip(
            dataset.shards.bounds(shard, index), right.shards.bounds(shard, index), strict=True
        ):
            assert np.array_equal(column, expected)


def flipped(data, position):
    """The bytes with one bit flipped."""
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def without_files(folder):
    """Remove the .idx and .crc32c files."""
    for path in [*Path(folder).glob("*.idx"), *Path(folder).glob("*.crc32c")]:
        path.unlink()


def test_a_local_part_is_mapped_and_no_other_file_is_needed(folder):
    dataset = watched(mm.open_dataset(folder))
    assert_right(dataset, folder)
    assert dataset.store.range_reads == []
    without_files(folder)
    assert len(list(mm.Loader(mm.Pipeline(mm.open_dataset(folder), global_batch_size=8)))) == 12


def test_a_remote_part_is_read_whole(folder):
    part = part_of(folder)
    dataset = remote(folder)
    assert dataset.shards.indexes.load(range(5)) == 1
    assert_right(dataset, folder)
    assert dataset.store.ranges == [(part.name, 0, part.num_bytes)]


def test_the_table_and_single_shards_of_a_large_part_are_read_by_ranges(folder, monkeypatch):
    monkeypatch.setattr(shard_indexes, "MAX_PART_IN_MEMORY", 10)
    dataset = remote(folder)
    assert dataset.shards.indexes.load([0, 3]) == 3
    assert len(dataset.store.range_reads) == 2  # the table; then both shards at once
    assert dataset.shards.indexes.load([3]) == 0
    assert_right(dataset, folder)


@pytest.mark.parametrize("location", ["local", "remote"])
@pytest.mark.parametrize("damage", ["lost", "short", "empty", "foreign", "bytes", "a folder"])
def test_a_part_that_is_lost_or_damaged_is_a_warning_and_the_files_are_read(
    folder, damage, location, caplog
):
    path = Path(folder, part_of(folder).name)
    data = path.read_bytes()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage != "lost":
        foreign = bytes(len(data))
        path.write_bytes(
            {"short": data[:-1], "empty": b"", "foreign": foreign, "bytes": data[:-1] + b"\x07"}[
                damage
            ]
        )
    dataset = mm.open_dataset(folder) if location == "local" else remote(folder)
    with caplog.at_level(logging.WARNING):
        assert_right(dataset, folder)
    (message,) = {record.getMessage() for record in caplog.records}
    assert path.name in message
    assert "are read instead; run `mmstream index`" in message


def test_a_part_of_other_shards_is_not_used(folder, caplog):
    dataset = mm.open_dataset(folder)
    shards = list(dataset.manifest.shards)
    shards[0] = replace(shards[0], num_bytes=shards[0].num_bytes + 512)
    dataset = mm.Dataset(replace(dataset.manifest, shards=tuple(shards)), dataset.store)
    dataset.shards.bounds(3, np.array([0]))
    assert "of other shards than the manifest names" in caplog.text


def test_bytes_that_come_wrong_once_are_read_again(folder, monkeypatch):
    monkeypatch.setattr(shard_indexes, "MAX_PART_IN_MEMORY", 0)
    reads = []

    def flip(name, bounds, answer):
        reads.append(bounds)
        return answer if len(reads) != 2 else flipped(answer, len(answer) - 1)

    dataset = watched(mm.open_dataset(folder), flip, maps_files=False, concurrent=True)
    counted = []
    dataset.shards.bounds(3, np.array([0]), counted.append)
    assert counted == [1]


def test_a_storage_that_fails_is_an_error_and_no_warning(folder, caplog):
    def fail(name, bounds, answer):
        return StorageError("away")

    dataset = watched(mm.open_dataset(folder), fail, maps_files=False, concurrent=True)
    dataset.shards.indexes.load([0])
    with pytest.raises(StorageError, match="away"):
        dataset.shards.bounds(0, np.array([0]))
    assert not caplog.records


def test_checksums_that_a_part_lacks_come_from_the_files(folder, caplog):
    manifest = mm.open_dataset(folder).manifest
    plain = write_corpus(Path(folder).parent / "plain", COUNTS)
    index_tars(plain, progress=False)
    part = part_of(plain)
    Path(folder, part.name).write_bytes(Path(plain, part.name).read_bytes())
    dataset = mm.Dataset(replace(manifest, index_parts=(part,)), open_store(folder))
    assert_right(dataset, folder)
    assert "has no checksums" in caplog.text


# -- writing --------------------------------------------------------------------------------------


def append(folder, name):
    write_shard(folder, name, [(f"{i:06d}", {"txt": b"x"}) for i in range(3)], checksums=True)


def test_the_part_of_the_manifest_before_stays_and_older_ones_go(folder):
    names = [part_of(folder).name]
    for number in range(3):
        append(folder, f"shard-000000-{number}.tar")
        index_tars(folder, progress=False)
        part = part_of(folder)
        assert (part.first_shard, part.last_shard) == (0, 5 + number)  # it is of all tars
        names.append(part.name)
    assert {path.name for path in Path(folder).glob("mmstream.index.*")} == set(names[-2:])


@pytest.mark.parametrize(
    "change",
    [
        {"first_shard": 1, "last_shard": 0},
        {"first_shard": -1},
        {"last_shard": 5},
        {"num_bytes": 0},
        {"sha256": "x" * 64},
        {"name": "../mmstream.json"},
    ],
    ids=str,
)
def test_parts_that_cannot_be_are_refused_with_the_manifest(folder, change):
    manifest = mm.open_dataset(folder).manifest
    part = replace(manifest.index_parts[0], **change)
    with pytest.raises(ManifestError, match="cannot be a part of the index"):
        Manifest.from_bytes(replace(manifest, index_parts=(part,)).to_bytes())
    with pytest.raises(ManifestError, match="cannot be a part of the index"):
        Manifest.from_bytes(
            replace(manifest, index_parts=(manifest.index_parts[0],) * 2).to_bytes()
        )


# -- remote files that never change ---------------------------------------------------------------


def read_mapped(dataset, folder):
    """Return the bytes of a remote file as a map of its copy, and what was read for it."""
    part = part_of(folder)
    assert bytes(map_whole(dataset.store, part)) == Path(folder, part.name).read_bytes()
    return dataset.store.ranges


def test_a_remote_file_is_copied_once_to_this_machine(folder, cache):
    part = part_of(folder)
    assert read_mapped(remote(folder), folder) == [(part.name, 0, part.num_bytes)]
    assert [path.name for path in cache.glob("[!.]*[!k]")] == [part.sha256]
    assert cache.stat().st_mode & 0o777 == 0o700
    assert read_mapped(remote(folder), folder) == []


def linked(path, data, target):
    target.write_bytes(data)
    path.symlink_to(target)


DAMAGED = {
    "short": lambda path, data, _: path.write_bytes(data[:-1]),
    "empty": lambda path, data, _: path.write_bytes(b""),
    "a link": linked,
    "absent target": lambda path, _, target: path.symlink_to(target),
}
"""What may lie where a copy was: from its path, its bytes and a place elsewhere."""


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_copy_is_fetched_again(folder, cache, damage, tmp_path):
    read_mapped(remote(folder), folder)
    (path,) = cache.glob("[!.]*[!k]")
    data = path.read_bytes()
    path.unlink()
    DAMAGED[damage](path, data, tmp_path / "elsewhere")
    assert len(read_mapped(remote(folder), folder)) == 1
    assert read_mapped(remote(folder), folder) == []  # what was fetched is kept


def test_bytes_that_come_wrong_once_are_fetched_again(folder, cache):
    reads = []

    def flip(name, bounds, answer):
        reads.append(bounds)
        return flipped(answer, 99) if len(reads) == 1 else answer

    dataset = watched(mm.open_dataset(folder), flip, maps_files=False, concurrent=True)
    assert len(read_mapped(dataset, folder)) == 2


def test_a_copy_on_a_disk_that_can_only_be_read_is_used(folder, cache, monkeypatch):
    read_mapped(remote(folder), folder)

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(shard_indexes.os, "utime", refuse)
    assert read_mapped(remote(folder), folder) == []


def full_disk(cache, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))


def no_maps(cache, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(shard_indexes, "mmap", refuse)


def no_home(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/dev/null")


def others_may_write(cache, monkeypatch):
    cache.mkdir(parents=True)
    cache.parent.chmod(0o777)


NO_CACHE = {
    "no room": lambda cache, patch: patch.setattr(shard_indexes, "MAX_SHARE_OF_DISK", 0),
    "full": full_disk,
    "no maps": no_maps,
    "not writable": lambda cache, patch: cache.parent.parent.write_bytes(b"a file"),
    "of others": others_may_write,
    "no home": no_home,
}


@pytest.mark.parametrize("case", NO_CACHE)
def test_a_file_that_the_cache_does_not_take_is_read_into_memory(
    folder, cache, case, monkeypatch, caplog
):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    NO_CACHE[case](cache, monkeypatch)
    try:
        read_mapped(remote(folder), folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if case != "no maps":
        assert not [path for path in cache.glob("*") if path.suffix != ".lock"]
    assert "because the cache took no copy" in caplog.text


def test_unused_copies_leave_the_cache_when_another_one_comes(folder, cache):
    cache.mkdir(parents=True, mode=0o700)
    cache.parent.chmod(0o700)
    old = cache / ("0" * 64)
    old.write_bytes(b"old")
    os.utime(old, (0, 0))
    read_mapped(remote(folder), folder)
    assert not old.exists()


# -- verify ---------------------------------------------------------------------------------------


def reasons(folder, **settings):
    return [p.reason for p in verify(mm.open_dataset(folder), progress=False, **settings)]


@pytest.mark.parametrize("quick", [False, True])
def test_verify_says_where_a_part_is_lost_or_damaged(folder, quick):
    assert reasons(folder, quick=quick) == []
    path = Path(folder, part_of(folder).name)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"?")
    assert [path.name in reason for reason in reasons(folder, quick=quick)] == [True] * (not quick)
    path.write_bytes(data[:-1])
    (reason,) = reasons(folder, quick=quick)
    assert reason.startswith(f"{path.name}: 817 bytes, the manifest says 818; run `mmstream index")
    path.unlink()
    (reason,) = reasons(folder, quick=quick)
    assert reason.startswith(f"{path.name}: no such part of the index in {folder}; run `mmstream ")
    index_tars(folder, progress=False)
    assert reasons(folder, quick=quick) == []


def test_verify_compares_checksums_of_a_part_with_those_of_the_file(folder):
    path = Path(folder, "shard-000001.tar")
    index = Path(folder, "shard-000001.tar.idx").read_bytes()
    data = flipped(path.read_bytes(), 600)
    path.write_bytes(data)
    stop = int.from_bytes(index[8:16], "little")
    column = encode_checksums([sample_checksum(data[:stop])], index)
    Path(folder, "shard-000001.tar.crc32c").write_bytes(column)
    (reason,) = reasons(folder)
    assert "has other checksums than its file of checksums" in reason


# -- where samples lie: the requests that it needs -------------------------------------------------


@pytest.fixture(params=[True, False], ids=["checksums", "no checksums"])
def dataset(request, tmp_path):
    return watched(mm.open_dataset(write_corpus(tmp_path, COUNTS, checksums=request.param)))


def test_the_indexes_of_many_shards_come_in_one_round_of_requests_and_no_size_is_asked_for(dataset):
    num_files = 2 if dataset.has_checksums else 1
    assert dataset.shards.indexes.load([0, 3, 3, 4, 1]) == 4 * num_files
    assert [len(request) for request in dataset.store.range_reads] == [4 * num_files]
    for shard in (0, 1, 3, 4):
        dataset.shards.bounds(shard, np.array([0]))
    assert len(dataset.store.range_reads) == 1
    assert not dataset.store.size_reads
    assert dataset.shards.indexes.load([0, 3]) == 0
    assert dataset.shards.indexes.load([0, 2]) == num_files
    assert len(dataset.store.range_reads) == 2


def test_the_error_of_a_shard_comes_at_its_bounds(dataset):
    store = open_store(dataset.store.url)
    store.remove("shard-000000.tar.idx")
    store.write("shard-000001.tar.idx", b"short")
    store.write("shard-000003.tar.idx", store.read("shard-000003.tar.idx") + bytes(8))
    dataset.shards.indexes.load(range(5))
    with pytest.raises(ShardError, match=r"no index shard-000000\.tar\.idx"):
        dataset.shards.bounds(0, np.array([0]))
    with pytest.raises(ShardError, match="5 bytes, but the manifest says 1 samples"):
        dataset.shards.bounds(1, np.array([0]))
    if dataset.has_checksums:  # they tell that the first bytes are the index
        assert dataset.shards.bounds(3, np.array([0])).start.tolist() == [0]
    else:
        with pytest.raises(ShardError, match="336 bytes, but the manifest says 40 samples"):
            dataset.shards.bounds(3, np.array([0]))
    assert dataset.shards.bounds(4, np.array([0])).start.tolist() == [0]


# -- opening a dataset on an object store ---------------------------------------------------------


@pytest.fixture
def opened(folder, monkeypatch):
    """Open the folder as if it lay on an object store."""

    def open_remote(**options):
        store = WatchedStore(open_store(folder), maps_files=False, concurrent=True)
        monkeypatch.setattr(open_module, "open_store", lambda url: store)
        return mm.open_dataset(folder, **options)

    return open_remote


def test_three_rounds_of_requests_lead_to_the_first_data_range(opened):
    dataset = opened()
    store = dataset.store
    assert sorted(store.whole_reads) == [BAD_NAME, MANIFEST_NAME, REMOVED_NAME]
    assert (store.num_lists, store.size_reads, store.ranges) == (0, [], [])
    assert dataset[0]["__key__"] == "000000"
    (part,) = dataset.manifest.index_parts
    assert [name for name, _, _ in store.ranges] == [part.name, "shard-000000.tar"]
    assert (store.num_lists, store.size_reads) == (0, [])
    assert sorted(opened(bad_list=False).store.whole_reads) == [MANIFEST_NAME, REMOVED_NAME]


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
    with pytest.raises(
        mm.errors.ShardError, match=r"shard-000000\.tar: is not the shard that was inde"
    ):
        plain[0]
    assert plain[40]["__key__"] == "000040"
    assert plain.store.size_reads == []


def test_the_version_of_a_shard_is_that_of_its_first_answer(folder, opened):
    dataset = opened(checksums=False)
    size = dataset.manifest.shards[3].num_bytes
    name = dataset.name_of(3)
    assert dataset.shards.known[name] == ObjectStat(size, None)
    assert dataset[40]["__key__"] == "000040"
    assert dataset.shards.known[name] == LocalStore(folder).stat(name)
    assert pickle.loads(pickle.dumps(dataset)).shards.known == dataset.shards.known
