"""A shard that is replaced while a run reads it stops the run by name. No batch mixes two files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.errors import ShardError, StorageError
from mmstream.storage import is_remote, open_store
from tests.helpers.corpora import write_corpus
from tests.helpers.stores import FarStore, watched
from tests.helpers.topology import batches_around, epochs, small_loader

SHARD = "shard-000001.tar"
SINCE = "(was replaced while this run read it|is not the shard that was indexed)"
WITHDRAWN = rf"^{SHARD}: {SINCE}: its .*; start a new run, or put the "


def same_size(data: bytes) -> bytes:
    """Other captions in a tar of the same length."""
    return data.replace(b"caption", b"CAPTION")


def longer(data: bytes) -> bytes:
    return data + bytes(10_240)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def folder(request, tmp_path) -> str:
    """40 samples in each of two shards."""
    root = tmp_path if request.param == "local" else request.getfixturevalue("s3")
    return write_corpus(f"{root}/{tmp_path.name}", [40, 40])


def noticed_unread(folder: str):
    """A change that is noticed in a shard that was never read. In S3, only its size is known."""
    return longer if is_remote(folder) else same_size


def replace(folder: str, change=same_size) -> None:
    store = open_store(folder)
    store.write(SHARD, change(store.read(SHARD)))


def read_until_replaced(loader: mm.Loader, change) -> list[dict]:
    """Return the batches that came before the error."""
    batches: list[dict] = []
    with pytest.raises(ShardError, match=WITHDRAWN):
        batches.extend(batches_around(epochs(loader), change))
    loader.close()
    return batches


@pytest.mark.parametrize(
    ("change", "num_workers"),
    [(same_size, 0), pytest.param(longer, 2, marks=pytest.mark.slow)],
)
def test_a_shard_replaced_in_mid_run_stops_it_and_is_named(folder, change, num_workers):
    expected = [batch["__key__"] for batch in epochs(small_loader(folder))]
    loader = small_loader(folder, num_workers)
    batches = read_until_replaced(loader, lambda: replace(folder, change))
    assert [batch["__key__"] for batch in batches] == expected[: len(batches)]
    assert len(batches) < len(expected)
    assert all(bytes(text).startswith(b"caption") for batch in batches for text in batch["txt"])


@pytest.mark.slow
def test_a_shard_replaced_before_its_first_read_is_noticed_too(folder):
    loader, dataset = small_loader(folder), mm.open_dataset(folder)
    replace(folder, noticed_unread(folder))
    with pytest.raises(ShardError, match=WITHDRAWN):
        list(loader)
    assert dataset[0]["txt"]
    with pytest.raises(ShardError, match=WITHDRAWN):
        dataset[40]
    if not is_remote(folder):  # there, the manifest says another size
        assert len(list(small_loader(folder))) == 20  # a new run has no quarrel with the new shard


@pytest.mark.parametrize("checksums", [False, True])
def test_a_policy_may_count_its_samples_as_bad(tmp_path, checksums):
    folder = write_corpus(tmp_path, [40, 40], checksums=checksums)
    policy = mm.BadSamplePolicy(shards=True, max_fraction=1)
    loader = small_loader(folder, bad_samples=policy)
    texts = [
        bytes(text)
        for batch in batches_around(loader, lambda: replace(folder))
        for text in batch["txt"]
    ]
    assert len(texts) == 80
    assert all(text.startswith(b"caption") for text in texts)
    assert set(loader.stats.bad) == {"ChecksumError" if checksums else "ShardError"}


def test_the_old_file_put_back_is_read_on(tmp_path):
    folder = write_corpus(tmp_path / "corpus", [40, 40])
    path = Path(folder, SHARD)
    dataset = mm.open_dataset(folder)
    text = dataset[40]["txt"]
    path.rename(tmp_path / "aside")
    shutil.copy(tmp_path / "aside", path)
    with pytest.raises(ShardError, match=WITHDRAWN):
        dataset[40]
    (tmp_path / "aside").replace(path)
    assert dataset[40]["txt"] == text


def test_samples_that_are_read_together_are_read_once_more_where_a_range_failed(tmp_path):
    failures: list[StorageError] = []

    def fail(name, bounds, answer):
        return failures.pop() if failures else answer

    dataset = watched(mm.open_dataset(write_corpus(tmp_path, [2])))
    expected = dataset.shards.read_bytes([(0, 0), (0, 1)])
    dataset.store.change = fail
    failures[:] = [StorageError("away")]
    assert dataset.shards.read_bytes([(0, 0), (0, 1)]) == expected
    failures[:] = [StorageError("away")] * 3
    with pytest.raises(StorageError):
        dataset.shards.read_bytes([(0, 0), (0, 1)])


def test_with_checksums_a_touched_file_is_a_warning_and_no_error(tmp_path, caplog):
    folder = write_corpus(tmp_path, [40, 40], checksums=True)
    expected = [[*map(bytes, batch["txt"])] for batch in small_loader(folder)]
    loader, texts = small_loader(folder), []
    for batch in batches_around(loader, lambda: os.utime(tmp_path / SHARD)):
        texts.append([*map(bytes, batch["txt"])])
    assert texts == expected
    assert loader.stats.num_bad == 0
    loader = small_loader(write_corpus(tmp_path / "plain", [40, 40]))
    with pytest.raises(ShardError, match=WITHDRAWN):  # it is another one
        list(batches_around(loader, lambda: os.utime(tmp_path / "plain" / SHARD)))
    [warning] = [text for text in caplog.messages if "was replaced" in text]
    assert warning.startswith(f"{SHARD}: was replaced while this run read it: its version was ")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_worker_reads_itself_is_of_the_version_that_the_reader_process_read(
    tmp_path, num_workers
):
    old, new = (write_corpus(tmp_path / name, [64]) for name in ("old", "new"))
    name = "shard-000000.tar"
    data = Path(old, name).read_bytes()
    start = data.index(b"\xff\xd8", len(data) // 2)
    Path(old, name).write_bytes(data[:start] + b"--" + data[start + 2 :])  # one broken picture
    local = mm.open_dataset(old)
    store = FarStore(local.store)
    loader = mm.Loader(
        mm.Pipeline(
            mm.Dataset(local.manifest, store, store),  # sizes are known, and no versions
            global_batch_size=8,
            shuffle=False,
            decode=mm.Decode(image=mm.ImageDecoder(size=16)),
            bad_samples=mm.BadSamplePolicy(max_fraction=1.0),
        ),
        num_workers=num_workers,
    )
    batches = iter(loader)
    next(batches)  # the reader process has all samples by the next step
    shutil.copy(Path(new, name), tmp_path / "copy")
    (tmp_path / "copy").replace(Path(old, name))
    with pytest.raises(ShardError, match=f"^{name}: was replaced while this run read it"):
        list(batches)
    loader.close()


def test_with_checksums_the_bytes_that_are_there_now_decide(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "caption"}\n' * 40)
    mm.convert(rows, tmp_path / "shards", progress=False, num_workers=0)
    policy = mm.BadSamplePolicy(quarantine=None, max_consecutive=0, action="raise")
    loader = small_loader(str(tmp_path / "shards"), window=40, bad_samples=policy)
    batches = iter(loader)
    next(batches)
    [path] = (tmp_path / "shards").glob("*.tar")
    with path.open("r+b") as file:
        file.write(same_size(path.read_bytes()))
    with pytest.raises(mm.errors.ChecksumError):
        next(batches)
