"""Files are written under names that nobody else has; what is not a file is not waited for."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from mmstream.errors import StorageError
from mmstream.storage import LocalStore, open_store
from mmstream.storage.local import create_file, remove_temporaries


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_two_writers_of_one_name_never_share_a_file(tmp_path):
    store = open_store(tmp_path)
    with store.create("a.tar") as first:
        first.write(b"1" * 10_000)
        with store.create("a.tar") as second:
            assert len(names(tmp_path)) == 2
            second.write(b"2" * 20_000)
        assert (tmp_path / "a.tar").read_bytes() == b"2" * 20_000
        first.write(b"1" * 10_000)
    assert (tmp_path / "a.tar").read_bytes() == b"1" * 20_000
    assert names(tmp_path) == ["a.tar"]


def test_links_that_were_put_in_the_way_are_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    out = tmp_path / "out"
    out.mkdir()
    (out / ".a.tar.tmp").symlink_to(victim)
    (out / "a.tar").symlink_to(victim)
    open_store(out).write("a.tar", b"new")
    assert victim.read_bytes() == b"precious"
    assert not (out / "a.tar").is_symlink()
    assert (out / "a.tar").read_bytes() == b"new"

    monkeypatch.setattr("mmstream.storage.local.secrets.token_hex", lambda _: "0")
    (out / f".b.tar.{os.getpid()}-0.tmp").symlink_to(victim)  # even if the name were guessed
    with pytest.raises(FileExistsError):
        open_store(out).write("b.tar", b"new")
    assert victim.read_bytes() == b"precious"


def test_a_file_that_another_program_cut_is_not_committed(tmp_path):
    def cut_while_written():
        with create_file(tmp_path / "a.tar") as file:
            file.write(b"x" * 5000)
            file.flush()
            os.truncate(next(tmp_path.glob(".a.tar.*")), 100)

    with pytest.raises(StorageError, match=r"a\.tar: 5000 bytes were written, .* has 100; see"):
        cut_while_written()
    assert names(tmp_path) == []


def test_a_file_has_the_mode_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        open_store(tmp_path).write("a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_what_killed_writers_left_is_removed_by_its_final_name(tmp_path):
    left = [".shard-000001.tar.41-0a1b2c.tmp", ".shard-1.tar.idx.7-0.tmp"]
    stays = [
        ".shard-000001.tar",
        ".shard-000001.tar.tmp",
        ".shard-x.tar.tmp",
        ".notes.tmp",
        "shard-000001.tar.tmp",
    ]
    for name in left + stays:
        (tmp_path / name).write_bytes(b"")
    remove_temporaries(tmp_path, r"shard-\d+\.tar(\.idx)?")
    assert names(tmp_path) == sorted(stays)
    remove_temporaries(tmp_path / "absent", "a")


def bind(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(name)


KINDS = {
    "fifo": (os.mkfifo, "a FIFO"),
    "folder": (os.mkdir, "a folder"),
    "device": (lambda name: Path(name).symlink_to("/dev/zero"), "a device"),
    "socket": (bind, "a socket|such de"),
    "link to itself": (lambda name: Path(name).symlink_to(name), "levels of symbolic links"),
}


@pytest.fixture(params=KINDS)
def special(request, tmp_path, monkeypatch):
    """A store with an entry "x" that is not a file, and what messages call it."""
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    make, kind = KINDS[request.param]
    make("x")
    return LocalStore(str(tmp_path)), kind


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda store: store.read("x"), id="read"),
        pytest.param(lambda store: store.read("x", max_bytes=100), id="read at most"),
        pytest.param(lambda store: store.read_range("x", 0, 10), id="read_range"),
        pytest.param(lambda store: store.stat("x"), id="stat"),
        pytest.param(lambda store: store.size("x"), id="size"),
    ],
)
def test_what_is_no_file_is_refused_and_named(special, call):
    store, kind = special
    with pytest.raises(StorageError, match=rf"/x: .*({kind}).*; a file is needed") as caught:
        call(store)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_no_object(special):
    store, kind = special
    assert not store.exists("x")
    assert store.list() == {}
    assert store.folders() == (["x"] if kind == "a folder" else [])
