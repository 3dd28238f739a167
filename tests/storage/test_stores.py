"""All stores keep one contract: the same suite runs on a folder, in memory and on an S3 server."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from contextlib import closing
from pathlib import Path

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem

import mmstream as mm
from mmstream.errors import ConfigError, StorageError
from mmstream.storage import (
    LocalStore,
    MemoryStore,
    RemoteStore,
    Store,
    open_store,
    remote,
)
from mmstream.storage.store import MAX_REQUESTS_SIDE_BY_SIDE, map_requests

DATA = bytes(range(256)) * 4


def sizes(store: Store) -> dict[str, int]:
    """The bytes of all objects that a store lists."""
    return {name: stat.size for name, stat in store.list().items()}


NAMES = ["a.bin", "sp ace", "per%20cent", "q?x=1", "h#sh", "ümlaut", "a+b", "[x]"]


@pytest.mark.parametrize(("name", "data"), [*((name, DATA) for name in NAMES), ("empty", b"")])
def test_what_was_written_last_is_read(store, name, data):
    store.write(name, b"what lay there before")
    store.write(name, data)
    assert store.read(name) == data
    assert store.read_range(name, 0, len(data)) == data
    assert store.size(name) == len(data)
    assert store.exists(name)
    assert sizes(store) == {name: len(data)}


def test_names_may_lie_in_folders_which_are_not_listed(store):
    store.write("reports/deep/a.json", b"{}")
    store.write("top", b"1")
    assert store.read("reports/deep/a.json") == b"{}"
    assert sizes(store) == {"top": 1}
    assert list(store.folders()) == ["reports"]
    assert list(open_store(store.url_of("nothing")).folders()) == []
    assert sizes(open_store(store.url_of("reports/deep"))) == {"a.json": 2}
    assert not store.exists("reports")
    assert not store.exists("reports/deep")


def test_a_version_stays_until_the_object_is_replaced(store):
    store.write("a", DATA)
    first = store.stat("a")
    assert first.version
    assert store.read("a") == DATA
    assert store.stat("a") == first == store.list()["a"]
    store.write("a", DATA[::-1])
    assert store.stat("a").size == first.size
    assert store.stat("a").version != first.version
    assert store.list()["a"] == store.stat("a")


def test_an_object_above_the_limit_of_its_reader_is_not_read(store):
    store.write("a", DATA)
    assert store.read("a", max_bytes=len(DATA)) == DATA
    with pytest.raises(StorageError, match=r"/a: 1024 bytes, 1023 are the most"):
        store.read("a", max_bytes=1023)


def test_a_list_sees_what_was_written_and_removed_since_but_for_dotted_names(store):
    assert store.list() == {}
    for name in ("b", "a", "c.tar", ".hidden"):
        store.write(name, b"x")
    assert list(sizes(store).items()) == [("a", 1), ("b", 1), ("c.tar", 1)]
    assert open_store(store.url_of("a")).list() == {}
    for _ in range(2):  # removing what is absent is fine
        store.remove("a")
    assert list(store.list()) == ["b", "c.tar"]
    assert not store.exists("a")


@pytest.mark.parametrize("call", ["read", "size", "stat", "read_range"])
def test_what_is_absent_is_a_file_not_found_that_names_it(store, call):
    arguments = (0, 4) if call == "read_range" else ()
    store.write("near.bin", DATA)
    with pytest.raises(FileNotFoundError, match=r"absent\.bin"):
        getattr(store, call)("absent.bin", *arguments)
    assert not store.exists("absent.bin")


@pytest.mark.parametrize(("start", "stop"), [(1000, 1025), (1024, 1030), (5000, 5001)])
def test_a_range_past_the_end_is_an_error_and_not_short_data(store, pauses, start, stop):
    store.write("a", DATA)
    with pytest.raises(StorageError, match=f"ends {stop - 1024} bytes before {stop}"):
        store.read_range("a", start, stop)
    assert pauses == []  # an answer, not a fault


def test_ranges_come_in_order_with_errors_in_their_places(store):
    store.write("a", DATA)
    store.write("b", b"0123456789")
    wanted = [
        ("b", 2, 4),
        ("absent", 0, 1),
        ("a", 0, 3),
        ("b", 8, 12),
        ("a", 4, 4),
        ("a", 1000, 1024),
    ]
    outcomes = store.read_ranges(wanted)
    assert [data for data in outcomes if isinstance(data, bytes)] == [
        b"23",
        DATA[:3],
        b"",
        DATA[1000:],
    ]
    assert isinstance(outcomes[1], FileNotFoundError)
    assert isinstance(outcomes[3], StorageError)
    assert store.read_ranges([]) == []


def test_a_created_object_appears_whole_at_the_end_of_the_block(store):
    with store.create("deep/a.tar") as file:
        file.write(DATA)
        file.flush()
        assert file.tell() == len(DATA)
        assert not store.exists("deep/a.tar")
        assert open_store(store.url_of("deep")).list() == {}
    assert store.read("deep/a.tar") == DATA


@pytest.mark.parametrize("old", [[], ["a.tar"]], ids=["nothing", "the old object"])
def test_an_error_in_the_block_leaves_what_was_there(store, old):
    for name in old:
        store.write(name, b"old")
    with pytest.raises(KeyError), store.create("a.tar") as file:  # noqa: PT012
        file.write(DATA)
        raise KeyError("in the middle")
    assert {name: store.read(name) for name in store.list()} == dict.fromkeys(old, b"old")
    folder = store.local_path("")
    assert folder is None or os.listdir(folder) == old  # noqa: PTH208


@pytest.mark.slow
def test_worker_processes_read_a_dataset_in_memory(corpus, memory_url):
    for path in Path(corpus).iterdir():
        open_store(memory_url).write(path.name, path.read_bytes())
    keys = []
    for url, num_workers in ((corpus, 0), (memory_url, 2)):
        pipeline = mm.Pipeline(mm.open_dataset(url), global_batch_size=4, seed=3)
        with closing(mm.Loader(pipeline, num_workers=num_workers)) as loader:
            keys.append([batch["__key__"] for batch in loader])
    assert keys[0] == keys[1]


def test_open_store_knows_folders_files_and_prefixes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_store("some/folder") == LocalStore(str(tmp_path / "some/folder"))
    assert open_store(tmp_path) == open_store(f"file://{tmp_path}") == LocalStore(str(tmp_path))
    assert open_store("file:///a%20b/50%/%C3%B6") == LocalStore("/a b/50%/ö")
    assert open_store("file://localhost/localhost/a") == LocalStore("/localhost/a")
    assert open_store("/a%20b") == LocalStore("/a%20b")
    assert open_store("s3://bucket/corpus/") == RemoteStore("s3://bucket/corpus")
    assert open_store("s3://bucket") == RemoteStore("s3://bucket")


def test_other_users_of_fsspec_see_the_objects_of_a_memory_store(memory_url):
    store = open_store(memory_url)
    assert store == MemoryStore(memory_url)
    store.write("deep/a", DATA)
    assert fsspec.filesystem("memory").cat_file(f"{memory_url}/deep/a") == DATA
    fsspec.filesystem("memory").pipe_file(f"{memory_url}/b", b"theirs")
    assert store.read("b") == b"theirs"


def test_a_pickled_memory_store_brings_its_objects_and_replaces_none(memory_url):
    store = open_store(memory_url)
    store.write("kept", b"old")
    store.write("deep/gone", DATA)
    open_store(f"{memory_url}-beside").write("other", DATA)
    deep = open_store(f"{memory_url}/deep")
    pickled, listed = pickle.dumps(store), deep.list()
    store.write("kept", b"new")
    store.remove("deep/gone")
    open_store(f"{memory_url}-beside").remove("other")
    assert pickle.loads(pickled) == store
    assert store.read("kept") == b"new"
    assert store.read("deep/gone") == DATA
    assert deep.list() == listed  # of the same version
    assert not open_store(f"{memory_url}-beside").exists("other")


@pytest.mark.parametrize(
    "url", ["", "file://", "s3://", "s3:///", "s3:///corpus", "gs:///x", "memory://"]
)
def test_open_store_refuses_a_name_without_a_place(url):
    with pytest.raises(ConfigError):
        open_store(url)


def test_a_scheme_that_nobody_knows_is_the_callers_mistake():
    with pytest.raises(ConfigError, match="nonsense"):
        open_store("nonsense://bucket/x").read("a")


def test_requests_to_an_object_store_wait_side_by_side_until_one_fails():
    sent, all_sent = [], threading.Barrier(MAX_REQUESTS_SIDE_BY_SIDE, timeout=500)

    def request(item):
        sent.append(item)
        if item < MAX_REQUESTS_SIDE_BY_SIDE:
            all_sent.wait()
        else:
            time.sleep(0.05)  # all of them take far longer than noticing the error
        if item in (3, 5):
            raise OSError(f"failed {item}")

    with pytest.raises(OSError, match="failed 3"):
        map_requests(open_store("s3://bucket/x"), request, range(10_000))
    assert MAX_REQUESTS_SIDE_BY_SIDE <= len(sent) < 10_000


def test_ranges_of_an_asynchronous_client_are_requested_side_by_side(monkeypatch):
    class Client(AsyncFileSystem):
        num_in_flight = most_in_flight = 0

        async def _cat_file(self, path, start=None, end=None, **_):
            self.num_in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
            await asyncio.sleep(0)  # while all others begin that may
            self.num_in_flight -= 1
            return bytes(end - start)

    client = Client(skip_instance_cache=True)
    monkeypatch.setattr(remote, "_client", lambda url: client)
    ranges = [("a", start, start + 1) for start in range(500)]
    assert open_store("gs://bucket/x").read_ranges(ranges) == [bytes(1)] * 500
    assert client.most_in_flight == remote.MAX_REQUESTS_IN_FLIGHT
