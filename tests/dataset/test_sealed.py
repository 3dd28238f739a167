"""Manifests and bad lists that come wrong, were edited, or are not files."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import mmstream as mm
from mmstream.dataset.bad_list import BAD_NAME, write_bad
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME, Manifest, ShardInfo, read_sealed
from mmstream.errors import ManifestError
from mmstream.storage import open_store as real
from tests.helpers.convert_corpus import make_corpus, run
from tests.helpers.corpora import write_corpus
from tests.helpers.stores import WatchedStore

MANIFEST = Manifest((ShardInfo("a.tar", 3, 4096), ShardInfo("b.tar", 1, 2048, "ab" * 32)))
NAMES = [MANIFEST_NAME, BAD_NAME]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path, [4, 3], lambda number: {"txt": b"%d" % number})
    write_bad(mm.open_dataset(tmp_path), [(0, 1), (1, 0)])
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def remove_seal(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "crc32c" not in line))


@given(st.integers(min_value=0), st.integers(0, 7))
def test_no_flipped_bit_of_a_manifest_passes(position: int, bit: int) -> None:
    data = bytearray(MANIFEST.to_bytes())
    data[position % len(data)] ^= 1 << bit
    with suppress(ManifestError):
        assert Manifest.from_bytes(bytes(data)) == MANIFEST  # a bit of the seal itself


@pytest.mark.parametrize("name", NAMES)
def test_an_edited_file_is_refused_until_its_seal_is_removed(corpus: Path, name: str) -> None:
    edit(corpus / name, "shard-000001.tar", "shard-000002.tar")
    with pytest.raises(ManifestError, match=rf'{name}: was edited .*; .*remove its "crc32c" line'):
        mm.open_dataset(corpus)
    edit(corpus / name, "shard-000002.tar", "shard-000001.tar")
    edit(corpus / name, '"version": 1', '"version":  1')
    remove_seal(corpus / name)
    dataset = mm.open_dataset(corpus)
    assert dataset.bad.tolist() == [[0, 1], [1, 0]]
    assert len(dataset) == 7


@pytest.mark.parametrize("name", NAMES)
def test_a_read_that_came_wrong_is_done_again(
    corpus: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, reads = np.random.default_rng(0), []

    def flip(read_name, bounds, answer):
        reads.append(read_name)
        if read_name != name or reads.count(name) > 2:
            return answer
        data = bytearray(answer)
        data[int(random.integers(len(data) - 60))] ^= 4
        return bytes(data)

    monkeypatch.setattr(
        "mmstream.dataset.open.open_store", lambda url: WatchedStore(real(url), flip)
    )
    dataset = mm.open_dataset(corpus)
    assert reads.count(name) == 3
    assert dataset.bad.tolist() == [[0, 1], [1, 0]]
    assert dataset.manifest.num_samples == 7


def test_reads_that_differ_each_time_end(corpus: Path) -> None:
    reads = []

    def flip(_name, _bounds, answer):
        reads.append(1)
        return answer.replace(b"shard", b"shar%d" % len(reads))

    store = WatchedStore(real(corpus), flip)
    with pytest.raises(ManifestError, match="crc32c differs"):
        read_sealed(store, MANIFEST_NAME, 1 << 20, Manifest.from_bytes)
    assert len(reads) == 4


def test_a_file_that_is_too_large_is_not_read(corpus: Path) -> None:
    with (corpus / MANIFEST_NAME).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(mm.errors.StorageError, match="the most that it can have"):
        mm.open_dataset(corpus)


# -- what is there and is not a file --------------------------------------------------------------


KINDS = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link that leads nowhere": lambda path: path.symlink_to(path.with_name("gone")),
    "Too many levels": lambda path: path.symlink_to(path.name),  # a loop
}
"""What may stand there, by what the error calls it."""
FILES = [MANIFEST_NAME, BAD_NAME, MARKER_NAME]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_what_says_what_a_dataset_is_and_is_no_file_is_named(tmp_path, name, kind):
    folder = tmp_path / "corpus"
    write_corpus(folder, [3, 4])
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    for call in (mm.open_dataset, lambda url: index_tars(url, progress=False)):
        with pytest.raises(ManifestError, match=f"{name}: {kind}") as caught:
            call(folder)
        assert "\n" not in str(caught.value)
    with pytest.raises(ManifestError, match=f"{name}: {kind}"):
        mm.open_dataset(folder / "shard-000000.tar")


@pytest.mark.parametrize("name", FILES)
def test_convert_does_not_pass_over_it_either(tmp_path, name):
    rows, folder = make_corpus(tmp_path), tmp_path / "out"
    run(rows, folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ManifestError, match=f"{name}: a FIFO"):
        run(rows, folder)


def test_a_link_to_a_manifest_is_followed(tmp_path):
    folder = tmp_path / "corpus"
    write_corpus(folder, [3, 4])
    shutil.move(folder / MANIFEST_NAME, tmp_path / "elsewhere.json")
    (folder / MANIFEST_NAME).symlink_to(tmp_path / "elsewhere.json")
    assert len(mm.open_dataset(folder)) == 7
