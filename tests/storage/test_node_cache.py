"""The node cache: files of samples, the room that they take, and what is wrong with them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c

from mmstream.errors import ConfigError
from mmstream.storage import node_cache
from mmstream.storage.node_cache import (
    PAGE_BYTES,
    CachedSamples,
    CacheFile,
    CacheQuota,
    NodeCache,
    open_cache_dir,
)
from tests.helpers.wait import wait_until

SHARD = np.random.default_rng(0).bytes(40_000)
FOLDER, OTHER_FOLDER = "a" * 16, "b" * 16
SAMPLE_BYTES = 1_000


def file_of(number: int = 0, folder: str = FOLDER) -> CacheFile:
    return CacheFile(folder, f"{number:040x}", 40, len(SHARD))


def samples_of(first: int, end: int) -> CachedSamples:
    numbers = np.arange(first, end)
    starts = numbers * SAMPLE_BYTES
    crcs = [crc32c(SHARD[i : i + SAMPLE_BYTES]) for i in starts.tolist()]
    return CachedSamples(numbers, starts, starts + SAMPLE_BYTES, np.array(crcs, dtype=np.int64))


def write(cache: NodeCache, file: CacheFile, first: int, end: int) -> None:
    data = memoryview(SHARD)[first * SAMPLE_BYTES : end * SAMPLE_BYTES]
    cache.write(file, samples_of(first, end), data, first * SAMPLE_BYTES)


def read(cache: NodeCache, file: CacheFile, first: int, end: int) -> dict[int, bytes]:
    """The samples that are there, by their number."""
    samples = {}
    for number, location in cache.find(file, samples_of(first, end)).items():
        view = memoryview(bytearray(SAMPLE_BYTES))
        if cache.read(location, view):
            samples[first + number] = bytes(view)
    return samples


def expected(first: int, end: int) -> dict[int, bytes]:
    return {
        number: SHARD[number * SAMPLE_BYTES : (number + 1) * SAMPLE_BYTES]
        for number in range(first, end)
    }


def written(cache: NodeCache) -> None:
    """Wait until all is written that is queued."""
    cache.close()
    wait_until(lambda: not cache._thread.is_alive())


def fill(cache: NodeCache, *pieces: tuple[CacheFile, int, int]) -> NodeCache:
    """Write pieces of files, and wait until they are on the disk."""
    for piece in pieces:
        write(cache, *piece)
    written(cache)
    return cache


def assert_usable(new_cache: Callable[[], NodeCache]) -> None:
    """A file that was not used is rewritten, once more where a late removal took it."""
    for _ in range(3):
        fill(new_cache(), (file_of(), 0, 10))
        if (found := read(new_cache(), file_of(), 0, 10)) == expected(0, 10):
            return
    assert found == expected(0, 10)


def counted_bytes(quota: CacheQuota) -> int:
    with quota._counts() as counts:
        return sum(counts.values())


def bytes_on_disk(root: str) -> int:
    paths = (path for path in Path(root).rglob("*") if len(path.name) == 40)
    return sum(path.stat().st_blocks * 512 for path in paths)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return open_cache_dir(str(tmp_path / "cache"), None)


@pytest.fixture
def new_cache(root: str) -> Iterator[Callable[..., NodeCache]]:
    caches: list[NodeCache] = []

    def make(max_bytes: int = 1 << 30, needs: dict[str, int] | None = None) -> NodeCache:
        caches.append(NodeCache(root, needs or {FOLDER: 0}, max_bytes))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()


def test_what_was_written_in_pieces_is_read_in_other_pieces(new_cache, root):
    pieces = [(10, 20), (0, 5), (5, 10), (7, 15), (25, 30)]  # what is there is not written again
    cache = fill(new_cache(), *((file_of(), *ends) for ends in pieces))
    assert cache.counts.pop()["num_cached_bytes"] == 25_000
    cache = new_cache()
    assert read(cache, file_of(), 0, 40) == expected(0, 20) | expected(25, 30)
    assert read(cache, file_of(), 7, 13) == expected(7, 13)
    assert read(cache, file_of(), 30, 40) == {}
    assert read(cache, file_of(1), 0, 10) == {}
    assert cache.counts.pop()["num_cache_hit_bytes"] == 31_000


@pytest.mark.parametrize("num_samples", [1, 3, 9])
def test_room_is_counted_as_the_disk_counts_it(new_cache, root, num_samples):
    starts = np.random.default_rng(1).permutation(np.arange(0, 40, num_samples))
    fill(new_cache(), *((file_of(), n, min(n + num_samples, 40)) for n in starts.tolist()))
    counted = json.loads(Path(root, "room").read_text())[FOLDER]
    on_disk = bytes_on_disk(root)
    assert on_disk <= counted <= on_disk + starts.size * PAGE_BYTES


@pytest.mark.parametrize(
    ("place", "damage", "served", "is_removed"),
    [
        pytest.param(0, b"other", (0, 0), True, id="its first bytes"),
        pytest.param(20, b"\xff", (0, 0), True, id="its name"),
        pytest.param(4096 + 300, b"damaged", (1, 10), True, id="the bytes of a sample"),
        pytest.param(44, bytes(4), (1, 10), False, id="the checksum of a sample"),
        *(pytest.param(cut, None, (0, 0), cut > 0, id=f"cut at {cut}") for cut in (0, 30, 8_000)),
    ],
)
def test_a_damaged_file_is_removed_and_read_from_storage(
    new_cache, root, place, damage, served, is_removed, caplog
):
    fill(new_cache(), (file_of(), 0, 10))
    path = Path(file_of().path(root))
    if damage is None:
        os.truncate(path, place)
    else:
        with path.open("r+b") as file:
            file.seek(place)
            file.write(damage)
    cache = new_cache()
    assert read(cache, file_of(), 9, 10) == (expected(9, 10) if served[1] else {})
    found = read(cache, file_of(), 0, 10)
    if is_removed:
        assert found.items() <= expected(*served).items()  # it may be removed at any moment
        wait_until(lambda: "damaged file" in caplog.text and counted_bytes(cache._quota) == 0)
        assert not path.exists()
        assert cache.counts.pop()["num_cache_damaged"] == 1
    else:
        assert found == expected(*served)
    assert_usable(new_cache)


def test_a_process_killed_between_bytes_and_checksum_leaves_no_sample(
    new_cache, monkeypatch: pytest.MonkeyPatch
):
    cache, write_all = new_cache(), node_cache._write_all

    def killed(descriptor: int, view: memoryview, start: int) -> None:
        if 40 <= start < 4096:
            raise OSError(errno.EIO, "killed")
        write_all(descriptor, view, start)

    monkeypatch.setattr(node_cache, "_write_all", killed)
    fill(cache, (file_of(), 0, 10))
    monkeypatch.setattr(node_cache, "_write_all", write_all)
    cache = new_cache()
    assert read(cache, file_of(), 0, 10) == {}
    fill(cache, (file_of(), 5, 10))
    assert read(new_cache(), file_of(), 0, 10) == expected(5, 10)


def test_a_link_in_the_place_of_a_file_is_not_followed(new_cache, root, tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    path = Path(file_of().path(root))
    path.parent.mkdir(parents=True)
    path.symlink_to(precious)
    fill(new_cache(), (file_of(), 0, 10))
    assert precious.read_bytes() == b"mine"
    cache = new_cache()
    assert read(cache, file_of(), 0, 10) == {}
    written(cache)  # its thread removes the link
    assert_usable(new_cache)
    assert precious.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("change", "is_right"),
    [
        pytest.param(lambda path: None, True, id="nothing"),
        pytest.param(lambda path: path.unlink(), False, id="removed"),
        pytest.param(lambda path: os.truncate(path, 4096 + 3_500), False, id="cut in the sample"),
        pytest.param(lambda path: os.truncate(path, 0), False, id="cut"),
        pytest.param(
            lambda path: path.write_bytes(path.read_bytes()[:4096] + bytes(40_000)),
            False,
            id="zeros",
        ),
        pytest.param(lambda path: (path.unlink(), path.mkdir()), False, id="a folder"),
        pytest.param(lambda path: (path.unlink(), os.mkfifo(path)), False, id="a pipe"),
        pytest.param(
            lambda path: path.symlink_to(path.rename(path.with_name("other"))), False, id="a link"
        ),
    ],
)
def test_a_sample_that_was_found_is_compared_when_it_is_read(new_cache, root, change, is_right):
    fill(new_cache(), (file_of(), 0, 10))
    path, samples = Path(file_of().path(root)), samples_of(3, 4)
    cache = new_cache()
    [location] = cache.find(file_of(), samples).values()
    change(path)
    view = memoryview(bytearray(SAMPLE_BYTES))
    assert cache.read(location, view) == is_right
    assert not is_right or bytes(view) == expected(3, 4)[3]


@pytest.mark.parametrize(("call", "code"), [("preadv", errno.EIO), ("pwrite", errno.ENOSPC)])
def test_a_disk_that_fails_or_is_full_ends_writing_with_one_warning(
    new_cache, root, monkeypatch, caplog, call, code
):
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    fill(new_cache(), (file_of(), 0, 10))
    cache = new_cache()
    wait_until(lambda: cache._quota is not None)
    monkeypatch.setattr(os, call, fail)
    for number in range(3):
        if call == "preadv":
            assert read(cache, file_of(), 0, 10) == {}
        write(cache, file_of(1 + number), 0, 10)
    wait_until(lambda: not cache._is_writing)
    write(cache, file_of(), 0, 10)
    assert not cache._queue
    assert caplog.text.count(f"takes nothing more: {os.strerror(code)}") == 1
    assert Path(file_of().path(root)).exists()


def test_the_limit_is_kept_and_what_is_there_stays(new_cache, root):
    limit = 100_000
    fill(new_cache(limit), *((file_of(number), 0, 40) for number in range(10)))
    assert limit - PAGE_BYTES < bytes_on_disk(root) <= limit
    fill(new_cache(limit), *((file_of(number), 0, 40) for number in range(10, 20)))
    assert bytes_on_disk(root) <= limit
    assert read(new_cache(limit), file_of(0), 0, 40) == expected(0, 40)
    assert read(new_cache(limit), file_of(2), 0, 40) == expected(0, 4)  # as far as there was room
    assert read(new_cache(limit), file_of(10), 0, 40) == {}


@pytest.mark.parametrize("is_removed", [False, True])
def test_room_that_is_made_for_a_file_is_never_made_of_that_file(new_cache, root, is_removed):
    file = file_of()
    path = Path(file.path(root))
    fill(new_cache(), (file, 0, 4))
    os.utime(path, (1, 1))  # an earlier run has written it

    def reserve(num_bytes: np.ndarray) -> int:
        assert path.stat().st_mtime > 1
        if is_removed:  # by another process, which found it damaged
            path.unlink()
        return num_bytes.size

    samples, data = samples_of(4, 8), memoryview(SHARD)[4 * SAMPLE_BYTES : 8 * SAMPLE_BYTES]
    node_cache.write_samples(str(path), file, samples, data, 4 * SAMPLE_BYTES, reserve)
    assert path.exists() != is_removed  # a new file takes more than was reserved
    assert read(new_cache(), file, 0, 8) == ({} if is_removed else expected(0, 8))


def test_leftovers_of_runs_that_are_over_go_first_the_oldest_before_others(new_cache, root):
    others = [file_of(number, OTHER_FOLDER) for number in range(3)]
    fill(new_cache(needs={OTHER_FOLDER: 0}), *((file, 0, 40) for file in others))
    for file, used_at in zip(others, (3_000, 1_000, 2_000), strict=True):
        os.utime(file.path(root), (used_at, used_at))
    fill(new_cache(140_000), (file_of(), 0, 40))
    assert [Path(file.path(root)).exists() for file in others] == [True, False, True]
    assert read(new_cache(), file_of(), 0, 40) == expected(0, 40)


def test_what_another_run_uses_is_no_leftover(new_cache, root):
    other = new_cache(needs={OTHER_FOLDER: 0})
    write(other, file_of(0, OTHER_FOLDER), 0, 40)
    wait_until(lambda: not other._queue and bytes_on_disk(root) >= 40_000)
    cache = fill(new_cache(60_000), (file_of(), 0, 40))
    assert read(other, file_of(0, OTHER_FOLDER), 0, 40) == expected(0, 40)
    assert read(cache, file_of(), 0, 40) == expected(0, 8)


def test_what_nobody_has_used_for_two_epochs_is_a_leftover(new_cache, root):
    fill(new_cache(100_000), (file_of(0), 0, 40), (file_of(1), 0, 40))
    for number in range(2):
        os.utime(file_of(number).path(root), (1_000, 1_000))
    cache = new_cache(100_000)
    assert read(cache, file_of(1), 0, 40)  # an epoch uses one of them
    write(cache, file_of(2), 0, 40)
    wait_until(lambda: not cache._queue)
    assert Path(file_of(0).path(root)).exists()  # the other may be needed later
    wait_until(lambda: cache._quota is not None)
    cache.begin_epoch()
    cache.begin_epoch()
    fill(cache, (file_of(2), 0, 40))
    assert [Path(file_of(number).path(root)).exists() for number in range(3)] == [False, True, True]


def test_the_dataset_that_comes_again_soonest_gets_the_room(new_cache, root):
    needs = {FOLDER: 90_200, OTHER_FOLDER: 90_200}
    cache = new_cache(140_000, needs)
    for number in range(3):
        write(cache, file_of(number, OTHER_FOLDER), 0, 40)
    wait_until(lambda: not cache._queue)
    fill(cache, *((file_of(number), 0, 40) for number in range(2)))
    cache = new_cache(140_000, needs)
    for number in range(2):
        assert read(cache, file_of(number), 0, 40) == expected(0, 40)
    rare = [read(cache, file_of(number, OTHER_FOLDER), 0, 40) for number in range(3)]
    assert [len(samples) for samples in rare] == [40, 0, 0]


def test_a_part_of_the_disk_stays_free(new_cache, root, monkeypatch):
    monkeypatch.setattr(node_cache, "MIN_FREE_SHARE", 1.0)  # others write to this disk, too
    fill(new_cache(), (file_of(), 0, 10))
    assert bytes_on_disk(root) == 0


def test_without_a_limit_the_cache_takes_the_same_at_each_start(new_cache, root, caplog):
    caplog.set_level("INFO")
    disk = os.statvfs(root)
    free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    expected = max(0, min(0.8 * free, free - 0.15 * size))
    for _ in range(2):
        quota = CacheQuota(root, {FOLDER: 0}, None)
        assert quota.max_bytes == pytest.approx(expected, rel=0.2)
        quota.close()
        cache = new_cache()
        write(cache, file_of(), 0, 40)
        written(cache)
    assert "GB of the disk are free" in caplog.text


@pytest.mark.parametrize("content", [None, b"", b"no JSON", b"[1]", b'{"a": -1}'], ids=str)
def test_room_is_counted_anew_where_the_count_is_damaged_or_nobody_uses_a_dataset(
    new_cache, root, content
):
    fill(new_cache(), (file_of(), 0, 40))
    room = Path(root, "room")
    assert json.loads(room.read_text())[FOLDER] > 40_000
    if content is None:
        Path(file_of().path(root)).unlink()  # by hand
    else:
        room.write_bytes(content)
    quota = CacheQuota(root, {FOLDER if content is None else OTHER_FOLDER: 0}, 1 << 30)
    assert counted_bytes(quota) == bytes_on_disk(root)
    quota.close()


def test_a_new_folder_is_private(tmp_path):
    parent = tmp_path / "new" / "cache"
    path = Path(open_cache_dir(str(parent), None))
    assert path.name == f"mmstream-{os.geteuid()}"
    assert path.stat().st_mode & 0o777 == 0o700
    parent.chmod(0o1777)  # as /tmp
    assert open_cache_dir(str(parent), None) == str(path)


OTHERS = "is not a folder of this user alone"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder, _: folder.chmod(0o777), OTHERS),
        (lambda folder, _: folder.chmod(0o750), OTHERS),
        (lambda folder, _: (folder.rmdir(), folder.symlink_to("/")), OTHERS),
        (lambda folder, _: (folder.rmdir(), folder.write_bytes(b"")), OTHERS),
        (lambda folder, _: folder.parent.chmod(0o777), "all users may rename"),
        (lambda folder, patch: patch.setattr(os, "geteuid", lambda: 12345), OTHERS),
        (lambda _, patch: patch.setattr(node_cache, "is_shared", lambda _: True), "a network"),
        (
            lambda _, patch: patch.setattr(node_cache, "file_system_of", lambda *_: "tmpfs"),
            "give max_cache_bytes, too",
        ),
    ],
)
def test_a_folder_that_others_may_change_or_that_is_no_disk_is_refused(
    tmp_path, monkeypatch, change, message
):
    (tmp_path / "mmstream-12345").mkdir(mode=0o700)  # of another user
    change(Path(open_cache_dir(str(tmp_path), None)), monkeypatch)
    with pytest.raises(ConfigError, match=message):
        open_cache_dir(str(tmp_path), None)
    if "max_cache_bytes" in message:
        open_cache_dir(str(tmp_path), 1 << 20)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="give another folder"):
        open_cache_dir(str(tmp_path / "file" / "below"), None)


def test_a_folder_may_be_used_where_the_system_hides_its_mounts(tmp_path, monkeypatch):
    monkeypatch.setattr(node_cache, "mounts", lambda: "")
    assert open_cache_dir(str(tmp_path), None)
