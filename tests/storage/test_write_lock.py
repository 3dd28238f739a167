"""One writer at a time in a folder or prefix, and dead ones do not count."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from mmstream.errors import ConfigError, MMStreamError
from mmstream.storage import LocalStore, NotAFileError, open_store, write_lock
from mmstream.storage.write_lock import LOCK_NAME, Holder
from tests.helpers.wait import wait_until

FORK = multiprocessing.get_context("fork")


def take(store):
    """Hold the lock for a moment."""
    with write_lock.write_lock(store, "index") as lock:
        lock.require()


@pytest.fixture
def quick(monkeypatch):
    """Signs of life every 50 ms, and death after 500 ms."""
    monkeypatch.setattr(write_lock, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(write_lock, "SILENCE_S", 0.5)


def holder(**changes):
    """Somebody on another machine."""
    values = {
        "token": "t", "command": "convert", "host": "far", "boot": "b", "namespace": "n",
        "pid": 7, "pid_started": 8, "since": "2026-11-22 12:03:11 UTC",
    }  # fmt: skip
    return Holder(**(values | changes))


def put(store, holder):
    store.write(LOCK_NAME, msgspec.json.encode(holder))


def hold(store, pipe):
    """Hold the lock of a store in a child process with a child of its own, until told to end."""
    with write_lock.write_lock(store, "convert"):
        grandchild = os.fork()  # as a DataLoader's worker, which outlives a killed holder
        if grandchild == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(600)  # it is killed before, unless the test process dies
            os._exit(0)
        pipe.send(grandchild)
        pipe.poll(500)


@pytest.fixture
def child(store):
    """A process that holds the lock."""
    if store.url.startswith("memory:"):
        pytest.skip("no other process has this memory")
    pipe, other_end = FORK.Pipe()
    process = FORK.Process(target=hold, args=(store, other_end))
    process.start()
    assert pipe.poll(500)
    grandchild = pipe.recv()
    yield process, pipe
    process.kill()
    process.join()
    os.kill(grandchild, signal.SIGKILL)


def test_a_second_writer_is_told_who_the_first_one_is(store, child):
    process, pipe = child
    message = (
        rf"^{re.escape(store.url)}: another convert \(pid {process.pid} on host \S+, since "
        r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC\) is writing here; wait for it, or end it$"
    )
    with pytest.raises(ConfigError, match=message):
        take(store)
    pipe.send("end")
    process.join()
    take(store)


def test_a_killed_writer_does_not_count(store, child, caplog):
    process, _ = child
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert store.exists(LOCK_NAME)
    with caplog.at_level(logging.INFO):
        take(store)
    assert f"took over the lock of another convert (pid {process.pid} " in caplog.text
    assert not store.exists(LOCK_NAME)


def test_a_second_thread_is_refused_too_and_the_lock_is_gone_at_the_end(store, monkeypatch):
    monkeypatch.setattr(write_lock, "HEARTBEAT_S", 0.05)
    with (  # noqa: PT012
        ThreadPoolExecutor(1) as thread,
        pytest.raises(KeyboardInterrupt),
        write_lock.write_lock(store, "convert") as lock,
    ):
        lock.require()
        assert store.exists(LOCK_NAME)
        assert LOCK_NAME not in store.list()
        error = thread.submit(take, store).exception()
        assert isinstance(error, ConfigError)
        assert f"(pid {os.getpid()} " in str(error)
        lock.require()
        raise KeyboardInterrupt
    assert not store.exists(LOCK_NAME)


def test_a_writer_on_another_machine_that_gives_signs_of_life_is_respected(
    store, quick, monkeypatch
):
    monkeypatch.setattr(write_lock, "SILENCE_S", 60)  # a busy machine is silent for long
    put(store, holder())
    ended = threading.Event()

    def live():
        beat = 0
        while not ended.wait(0.05):
            beat += 1
            put(store, holder(beat=beat))

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(ConfigError, match=r"pid 7 on host far, since .* is writing here"):
            take(store)
    finally:
        ended.set()
        thread.join()


def test_a_silent_writer_on_another_machine_is_taken_over_with_a_warning(store, quick, caplog):
    put(store, holder(host="far\x1b[2J\n"))  # whose name is made printable
    take(store)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert r"to see whether another convert (pid 7 on host far\x1b[2J\n, since" in warnings[0]
    assert "took over the lock" in warnings[1]
    assert not store.exists(LOCK_NAME)


@pytest.mark.slow
def test_a_lock_of_nobody_is_taken_over(store, quick):
    for garbage in (b"", b"\xff\xfe", b"[" * 5000, b'{"token": 1}'):
        store.write(LOCK_NAME, garbage)
        take(store)
        assert not store.exists(LOCK_NAME)


def test_whoever_lost_the_lock_notices_and_leaves_the_new_one(store, quick):
    with write_lock.write_lock(store, "convert") as lock:
        content, version = store.read(LOCK_NAME), store.stat(LOCK_NAME).version
        wait_until(lambda: store.read(LOCK_NAME) != content)  # its signs of life
        assert store.stat(LOCK_NAME).version != version
        put(store, holder())
        for _ in range(2):
            with pytest.raises(
                MMStreamError, match=r"lost it to another convert \(pid 7 on host f"
            ):
                lock.require()
            time.sleep(0.2)  # the heartbeat does not take it back
        store.remove(LOCK_NAME)
        with pytest.raises(MMStreamError, match="had the lock and lost it, after a pause"):
            lock.require()
        put(store, holder())
    assert msgspec.json.decode(store.read(LOCK_NAME), type=Holder) == holder()


def test_what_is_no_file_is_not_used_as_a_lock(tmp_path, quick):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / LOCK_NAME).symlink_to(victim)
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / LOCK_NAME)
    (tmp_path / "folder" / LOCK_NAME).mkdir(parents=True)
    for name in ("fifo", "folder"):
        with pytest.raises(
            NotAFileError, match=rf"{name}/\.mmstream\.lock: a .*; a file is needed"
        ):
            take(open_store(tmp_path / name))
    take(open_store(tmp_path / "link"))  # a lock of nobody
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("refused", ["flock", "link"])
def test_a_lock_in_a_folder_needs_neither_flock_nor_links(tmp_path, quick, monkeypatch, refused):
    """NFS may know no `flock`, and FAT no links."""

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl if refused == "flock" else os, refused, refuse)
    store = open_store(tmp_path)
    put(store, holder())
    take(store)
    with write_lock.write_lock(store, "convert"), ThreadPoolExecutor(1) as thread:
        assert isinstance(thread.submit(take, store).exception(), ConfigError)
    assert not list(tmp_path.iterdir())


def contend(store, mark, barrier, counts):
    barrier.wait(500)
    wins = 0
    for _ in range(10):
        try:
            with write_lock.write_lock(store, "convert") as lock:
                fd = os.open(mark, os.O_CREAT | os.O_EXCL)  # fails if another holder is inside
                os.close(fd)
                lock.require()
                mark.unlink()
                wins += 1
        except ConfigError:
            pass
    counts.put(wins)


def test_of_many_processes_that_come_and_go_never_two_hold_the_lock(store, tmp_path):
    if store.url.startswith("memory:"):
        pytest.skip("no other process has this memory")
    barrier, counts = FORK.Barrier(4), FORK.Queue()
    processes = [
        FORK.Process(target=contend, args=(store, tmp_path / "mark", barrier, counts))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert sum(counts.get() for _ in processes) >= 4


def test_a_folder_that_may_not_be_written_needs_no_lock(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(LocalStore, "write_if", refused)
    with pytest.raises(PermissionError), write_lock.write_lock(open_store(tmp_path), "index"):
        pass  # this process may write there: the lock is somebody else's
    monkeypatch.setattr(os, "access", lambda *_: False)
    with write_lock.write_lock(open_store(tmp_path), "index"):
        pass
