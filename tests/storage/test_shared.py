"""Folders of network file systems: found by their mounts, read again where reads fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.dataset import open as opening
from mmstream.dataset.index_tars import index_tars
from mmstream.errors import ConfigError, StorageError
from mmstream.storage import LocalStore, ReplacedError, SharedStore, local
from mmstream.storage.local import file_system_of
from mmstream.storage.write_lock import write_lock
from tests.helpers.corpora import write_corpus

MOUNTS = """\
22 1 254:1 / / rw,noatime shared:1 - ext4 /dev/vda1 rw
23 22 0:21 / /proc rw,nosuid - proc proc rw
31 22 0:45 / /home rw,relatime shared:9 master:2 - nfs4 server:/export/home rw,vers=4.2,hard
32 31 259:3 / /home/me/scratch rw - xfs /dev/nvme1n1 rw
33 22 0:46 / /lustre rw,flock - lustre 10.0.0.1@o2ib:/fs rw
34 22 0:47 / /gpfs/my\\040data rw - gpfs gpfs0 rw
35 22 0:48 / /ceph rw - ceph mon:6789:/ rw
36 22 0:49 / /beegfs rw - beegfs beegfs_nodev rw
37 22 0:50 / /s3 rw - fuse.mountpoint-s3 mountpoint-s3 rw
38 22 0:51 / /rootless rw - fuse.fuse-overlayfs fuse-overlayfs rw
39 22 0:52 / /windows rw - cifs //server/share rw
40 22 0:53 / /host rw - 9p host rw,trans=virtio
41 22 0:54 / /over rw - ext4 /dev/vdb rw
42 41 0:55 / /over rw - nfs server:/over rw
43 22 0:56 / /auto rw - autofs systemd-1 rw
a line that means nothing
"""


@pytest.mark.parametrize(
    ("path", "kind", "is_shared"),
    [
        ("/data", "ext4", False),
        ("/home", "nfs4", True),
        ("/home/me/shards", "nfs4", True),
        ("/home/me/scratch/shards", "xfs", False),
        ("/homes", "ext4", False),
        ("/lustre/a", "lustre", True),
        ("/gpfs/my data/a", "gpfs", True),
        ("/ceph", "ceph", True),
        ("/beegfs/a", "beegfs", True),
        ("/s3/bucket", "fuse.mountpoint-s3", True),
        ("/rootless/a", "fuse.fuse-overlayfs", False),
        ("/windows/a", "cifs", True),
        ("/host/a", "9p", True),
        ("/over/a", "nfs", True),  # the later mount hides the earlier one
        ("/", "ext4", False),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_longest_mount(path, kind, is_shared, monkeypatch):
    assert file_system_of(path, MOUNTS) == kind
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: MOUNTS)
    assert local.is_shared(path) is is_shared


def test_where_the_system_hides_parts_of_proc_folders_are_local_and_locks_work(
    monkeypatch, tmp_path
):
    def absent(*_: object, **__: object) -> str:
        raise FileNotFoundError("/proc/self/mountinfo")

    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr(Path, "readlink", absent)
    assert not local.is_shared(str(tmp_path))
    with write_lock(LocalStore(str(tmp_path)), "test") as lock:
        lock.require()


@pytest.fixture
def store(tmp_path) -> SharedStore:
    LocalStore(str(tmp_path)).write("a.tar", bytes(range(256)) * 100)
    return SharedStore(str(tmp_path))


def failing(monkeypatch: pytest.MonkeyPatch, name: str, *codes: int, forever: int = 0) -> list[int]:
    """Have calls of `os` fail with these errors first; return the list of calls."""
    real: Callable[..., object] = getattr(os, name)
    errors = chain(codes, repeat(forever))
    calls: list[int] = []

    def call(*arguments: object, **options: object) -> object:
        calls.append(code := next(errors))
        if code:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, call)
    return calls


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_read_that_fails_for_a_while_is_tried_again(store, monkeypatch, pauses, code, call):
    calls = failing(monkeypatch, call, code, code)
    assert store.read_range("a.tar", 3, 9) == bytes(range(3, 9))
    assert calls[:3] == [code, code, 0]
    assert len(pauses) == 2


def test_missing_rights_are_not_tried_again(store, monkeypatch, pauses):
    failing(monkeypatch, "open", forever=errno.EACCES)
    with pytest.raises(StorageError, match=r"a\.tar: Permission denied"):
        store.read_range("a.tar", 0, 1)
    assert not pauses


@pytest.mark.parametrize("content", [b"x" * 25_600, b"x" * 30_000, b"x" * 20_000])
def test_a_file_that_is_written_over_while_it_is_open_is_noticed(store, content):
    known, path = {}, Path(store.url_of("a.tar"))
    assert store.read_ranges([("a.tar", 0, 2)], known) == [b"\0\1"]
    earlier = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()
    os.utime(path, ns=(earlier, earlier + 1))  # clocks of file systems are coarse
    [error] = store.read_ranges([("a.tar", 2, 4)], known)
    assert isinstance(error, ReplacedError)
    assert error.current == store.stat("a.tar")
    assert store.read_range("a.tar", 2, 4) == b"xx"


def test_a_folder_is_opened_as_its_mount_or_its_user_says(tmp_path, monkeypatch, memory_url):
    folder = write_corpus(tmp_path / "a", [4])
    assert type(mm.open_dataset(folder).store) is LocalStore
    assert type(mm.open_dataset(folder, storage_kind="shared").store) is SharedStore
    monkeypatch.setattr(opening, "is_shared", lambda path: True)
    assert type(mm.open_dataset(folder).store) is SharedStore
    assert type(mm.open_dataset(f"{folder}/shard-000000.tar").store) is SharedStore
    assert type(mm.open_dataset(folder, storage_kind="local").store) is LocalStore
    with pytest.raises(ConfigError, match="give 'local', 'shared' or None"):
        mm.open_dataset(folder, storage_kind="nfs")
    remote = write_corpus(memory_url, [4])
    with pytest.raises(ConfigError, match="is for folders"):
        mm.open_dataset(remote, storage_kind="local")
    index_tars(folder, output=f"{memory_url}/index", progress=False)  # the tars are in a folder
    dataset = mm.open_dataset(f"{memory_url}/index", allow_foreign_urls=True, storage_kind="shared")
    assert type(dataset.store) is SharedStore
