"""What is no file is refused where it would be opened, and never waited for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from mmstream.errors import StorageError
from mmstream.storage import LocalStore

KINDS = {
    "fifo": "a FIFO",
    "folder": "a folder",
    "device": "a device",
    "socket": "a socket|such de",
    "link to itself": "levels of symbolic links",
}


@pytest.fixture(params=KINDS)
def special(request, tmp_path, monkeypatch):
    """A store with an entry "x" that is no file, and what messages call it."""
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    if request.param == "fifo":
        os.mkfifo("x")
    elif request.param == "folder":
        Path("x").mkdir()
    elif request.param == "link to itself":
        Path("x").symlink_to("x")
    elif request.param == "device":
        Path("x").symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind("x")
    return LocalStore(str(tmp_path)), KINDS[request.param]


@pytest.mark.timeout(120)
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
