"""What is no file is refused where it would be opened, and never waited for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from mmstream.errors import StorageError
from mmstream.storage import LocalStore


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
    """A store with an entry "x" that is no file, and what messages call it."""
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
