"""Windows of local shards: what the system's page cache holds, the process need not."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.errors import ShardError, StorageError
from mmstream.reading.fetcher import Fetcher
from mmstream.reading.reader import Job, Reader
from mmstream.storage import LocalFile, LocalStore

NUM_SAMPLES = 18
"""So many that headers are looked at together."""


@pytest.fixture
def copy(corpus, tmp_path):
    """Return a corpus that a test may spoil."""
    shutil.copytree(corpus, tmp_path / "corpus")
    return tmp_path / "corpus"


@pytest.fixture(params=[True, False], ids=["cached", "not cached"])
def cached(request, monkeypatch):
    """Let the system hold all it read, or nothing, whatever the file system of the test can do."""
    monkeypatch.setattr(LocalFile, "is_cached", lambda self, start, stop: request.param)
    return request.param


def fetched(folder, num_samples=NUM_SAMPLES, **settings):
    refs = [(0, index) for index in range(num_samples)]
    return Fetcher(mm.open_dataset(str(folder)), zero_copy=False).fetch(refs, **settings)


def test_samples_are_the_same_wherever_they_are_held(copy, cached):
    wanted = fetched(copy).take_all(0, NUM_SAMPLES)
    assert all(isinstance(value, bytes) for value in (wanted[0]["jpg"], wanted[0]["json"]))
    assert fetched(copy, later=True).take_all(0, NUM_SAMPLES) == wanted


def test_whole_epochs_are_the_same_wherever_windows_are_held(copy, cached):
    made = mm.Pipeline(mm.open_dataset(str(copy)), global_batch_size=6, window=16)
    wanted = [batch["jpg"] for batch in mm.Loader(made)]
    found = []
    reader = Reader(made.dataset, made.order, ahead=False)
    for step in range(made.order.steps_per_epoch):
        found.append([sample["jpg"] for sample in reader.step(Job(0, step, 0, 6)).samples])
    reader.close()
    assert found == wanted


def test_what_the_system_holds_the_process_does_not(copy, cached):
    held = fetched(copy, later=True)
    for path in copy.glob("*.tar"):
        path.write_bytes(b"")  # the same file, cut
    outcomes = held.take_all(0, NUM_SAMPLES)
    if cached:
        assert all(isinstance(outcome, ShardError) for outcome in outcomes)
        assert "truncated" in str(outcomes[0])
    else:
        assert all(isinstance(outcome, dict) for outcome in outcomes)


def test_a_shard_that_is_removed_or_replaced_is_read_to_its_end(copy, cached):
    wanted = fetched(copy).take_all(0, NUM_SAMPLES)
    held = fetched(copy, later=True)
    for number, path in enumerate(sorted(copy.glob("*.tar"))):
        path.unlink()
        if number:
            path.write_bytes(b"another")
    assert held.take_all(0, NUM_SAMPLES) == wanted


def test_few_samples_are_no_different(copy, cached):
    wanted = fetched(copy).take_all(0, NUM_SAMPLES)[:3]
    assert fetched(copy, 3, later=True).take_all(0, 3) == wanted


def test_a_disk_that_fails_once_is_asked_again_and_is_no_bad_sample(copy, cached, monkeypatch):
    wanted = fetched(copy).take_all(0, NUM_SAMPLES)
    held, once_more = (fetched(copy, later=True) for _ in range(2))

    def fail(_self, _part):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LocalFile, "__getitem__", fail)
    assert held.take_all(0, NUM_SAMPLES) == wanted
    broken = OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(LocalStore, "read_ranges", lambda store, ranges: [broken])
    if cached:
        with pytest.raises(OSError, match="Input/output error"):
            once_more.take_all(0, NUM_SAMPLES)
    else:
        assert once_more.take_all(0, NUM_SAMPLES) == wanted


@pytest.mark.parametrize("num_samples", [3, NUM_SAMPLES])
def test_of_a_shard_that_is_written_over_a_sample_is_old_or_new_and_never_torn(
    copy, cached, num_samples
):
    old = fetched(copy).take_all(0, NUM_SAMPLES)[:num_samples]
    held = fetched(copy, num_samples, later=True)
    path = copy / mm.open_dataset(str(copy)).name_of(0)
    start = int(mm.open_dataset(str(copy)).offsets(0)[1])
    with path.open("r+b") as file:  # in place, as cp and rsync --inplace do
        data = bytearray(path.read_bytes())
        data[start + 20] ^= 1
        file.write(data)
    os.utime(path, ns=(0, 0))  # the clock of a file system may be coarse
    found = held.take_all(0, num_samples)
    if cached:
        assert found[0] == old[0]
        assert found[2:] == old[2:]
        assert "checksum" in str(found[1])
    else:
        assert found == old


def test_odd_samples_are_read_again_as_well(copy, cached):
    path = sorted(copy.glob("*.tar"))[0]
    dataset = mm.open_dataset(str(copy))
    start = int(dataset.offsets(0)[3])
    data = bytearray(path.read_bytes())
    data[start + 20] ^= 1  # the header's checksum is wrong now
    path.write_bytes(bytes(data))
    wanted, found = (
        fetched(copy).take_all(0, NUM_SAMPLES),
        fetched(copy, later=True).take_all(0, NUM_SAMPLES),
    )
    assert str(found[3]) == str(wanted[3])
    assert "checksum" in str(found[3])
    assert found[:3] + found[4:] == wanted[:3] + wanted[4:]


def test_a_file_held_open_gives_what_was_asked_for_or_says_why_not(tmp_path):
    path = Path(tmp_path, "a")
    path.write_bytes(bytes(range(256)) * 64)
    file = LocalFile(str(path))
    assert file[250:260] == bytes([250, 251, 252, 253, 254, 255, 0, 1, 2, 3])
    assert file[5:5] == b""
    with pytest.raises(StorageError, match="ends 4 bytes before"):
        file[16380:16388]
    with pytest.raises(FileNotFoundError):
        LocalFile(str(tmp_path / "b"))
    assert file.is_cached(0, 4096) in (True, False)  # tmpfs cannot tell
    assert not file.is_cached(1 << 20, 1 << 21)


def test_files_are_closed_when_no_sample_needs_them(copy, cached):
    def num_open():
        return sum(
            os.path.realpath(file).startswith(str(copy)) for file in Path("/proc/self/fd").iterdir()
        )

    held = fetched(copy, later=True)
    assert num_open() == (1 if cached else 0)
    held.take_all(0, NUM_SAMPLES)
    assert num_open() == 0
