"""Indexing tars that others made, and proving that a dataset is whole."""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import re
import shutil
from pathlib import Path

import pytest

from mmstream import Decode, ImageDecoder
from mmstream.dataset import index as index_module
from mmstream.dataset.index import decode_index, encode_index
from mmstream.dataset.index_tars import IndexReport, index_tars
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME
from mmstream.dataset.open import open_dataset
from mmstream.dataset.verify import verify
from mmstream.decoding.sample import decode_sample
from mmstream.errors import ConfigError, ShardError
from mmstream.storage import open_store, write_lock
from tests.helpers.convert_corpus import make_corpus, run, tree
from tests.helpers.corpora import captioned, write_corpus, write_shard
from tests.helpers.foreign_tars import field_list, make_tar, read_by_mmstream
from tests.helpers.stores import watched


def index(url, **options):
    return index_tars(url, progress=False, **options)


def change(path, edit):
    data = bytearray(path.read_bytes())
    edit(data)
    path.write_bytes(data)


def flip_bit(path, position):
    change(path, lambda data: data.__setitem__(position, data[position] ^ 1))


def problems(folder, **options):
    dataset = open_dataset(folder, allow_foreign_urls=True)
    return [problem.reason for problem in verify(dataset, progress=False, **options)]


def samples_of(folder):
    return [field_list(sample) for sample in open_dataset(folder, allow_foreign_urls=True)]


A = make_tar([("a.txt", b"1"), ("a.jpg", b"2"), ("b.txt", b"3")])
B = make_tar([("./c.txt", b"4" * 700)])


@pytest.fixture
def tars(tmp_path):
    """Two plain tars of others in a folder of their own."""
    folder = tmp_path / "tars"
    folder.mkdir()
    (folder / "a.tar").write_bytes(A)
    (folder / "b.tar").write_bytes(B)
    (folder / "notes.txt").write_text("left alone")
    return folder


# -- index --------------------------------------------------------------------------------------


def test_indexes_and_a_manifest_appear_beside_the_tars(tars):
    assert index(tars) == IndexReport(num_shards=2, num_samples=3, num_built=2)
    (part,) = tars.glob("mmstream.index.*")
    assert sorted(tree(tars)) == sorted(
        ["a.tar", "a.tar.idx", "b.tar", "b.tar.idx", "notes.txt", part.name, MANIFEST_NAME]
    )
    assert samples_of(tars) == read_by_mmstream(A) + read_by_mmstream(B)
    assert open_dataset(tars).manifest.data_url is None


def test_indexing_again_changes_nothing(tars):
    index(tars)
    before, inode = tree(tars), (tars / MANIFEST_NAME).stat().st_ino
    assert index(tars).num_built == 0
    assert (tars / MANIFEST_NAME).stat().st_ino == inode
    assert index(tars, overwrite=True).num_built == 2
    assert tree(tars) == before


@pytest.mark.parametrize(("num_threads", "endings"), [(1, ["idx"]), (4, ["crc32c", "idx"])])
def test_indexes_elsewhere_leave_the_tars_alone(tars, tmp_path, num_threads, endings):
    before = tree(tars)
    out = tmp_path / "indexes" / "deep"
    for _ in range(2):
        index(tars, output=out, num_threads=num_threads, checksums="crc32c" in endings)
        assert tree(tars) == before
        (part,) = out.glob("mmstream.index.*")
        files = [f"{tar}.tar.{ending}" for tar in "ab" for ending in endings]
        assert sorted(tree(out)) == [*files, part.name, MANIFEST_NAME]
        assert samples_of(out) == read_by_mmstream(A) + read_by_mmstream(B)
        assert open_dataset(out, allow_foreign_urls=True)[0]["__url__"] == str(tars / "a.tar")
        assert problems(out) == []


def test_a_tar_that_came_or_went_changes_the_manifest(tars):
    index(tars, checksums=True)
    (tars / "c.tar").write_bytes(A)
    report = index(tars, checksums=True)
    assert (report.num_built, report.num_summed) == (1, 1)  # the others are not read again
    assert len(open_dataset(tars)) == 5
    assert all(shard.sha256 for shard in open_dataset(tars).manifest.shards)
    (tars / "a.tar").unlink()
    assert index(tars).num_built == 0
    assert samples_of(tars) == read_by_mmstream(B) + read_by_mmstream(A)


@pytest.mark.parametrize("size", [12, 1 << 40])
def test_a_damaged_index_says_overwrite_and_overwrite_cures_it(tars, size):
    index(tars)
    os.truncate(tars / "a.tar.idx", size)
    with pytest.raises(ShardError, match=r"a\.tar\.idx: .*--overwrite"):
        index(tars)
    index(tars, overwrite=True)
    assert samples_of(tars) == read_by_mmstream(A) + read_by_mmstream(B)


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_new_manifest_keeps_the_checksums_that_fit_their_indexes(converted, caplog, is_damaged):
    before = tree(converted)
    if is_damaged:
        flip_bit(converted / MANIFEST_NAME, 100)
    else:
        (converted / MANIFEST_NAME).unlink()
    index(converted)
    assert ("sha256 of tars" in caplog.text) == is_damaged
    (part,) = open_dataset(converted).manifest.index_parts
    kept = {name for name in before if not name.startswith("mmstream.index.")}
    assert tree(converted).keys() == kept | {part.name}
    assert open_dataset(converted).manifest.checksums == "indexed"
    assert problems(converted) == []
    tar = next(converted.glob("*.tar"))
    flip_bit(tar, 512)  # in the data of the first sample
    assert any("checksum" in problem for problem in problems(converted))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"<html>404</html>" * 100, "not a tar"), (gzip.compress(A), "gzipped.*mmstream convert")],
    ids=["a page", "gzipped"],
)
def test_one_bad_tar_is_named_and_the_other_indexes_stay(tars, content, reason):
    (tars / "c.tar").write_bytes(content)
    with pytest.raises(ShardError, match=rf"c\.tar: {reason}"):
        index(tars, num_threads=1)
    assert "b.tar.idx" in tree(tars)
    assert MANIFEST_NAME not in tree(tars)


def test_no_tars_is_a_config_error(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="no tars to index"):
            index(folder)
    assert not (tmp_path / "absent").exists()


def test_an_unfinished_conversion_is_not_indexed(tars):
    (tars / MARKER_NAME).write_text("{}")
    with pytest.raises(ConfigError, match="finish that first"):
        index(tars)


def test_gzipped_tars_are_left_out_or_named_when_there_is_nothing_else(tars):
    (tars / "c.tgz").write_bytes(gzip.compress(A))
    (tars / "d.tar.gz").write_bytes(gzip.compress(B))
    (tars / "notes.gz").write_bytes(gzip.compress(b"left alone"))
    assert index(tars).num_shards == 2
    for name in "a.tar", "b.tar":
        (tars / name).unlink()
    with pytest.raises(ConfigError, match=r"convert` writes them of gzipped ones"):
        index(tars)


# -- verify -------------------------------------------------------------------------------------


@pytest.fixture
def converted(tmp_path):
    """Forty rows in five shards, with checksums."""
    run(make_corpus(tmp_path), tmp_path / "out")
    assert all(shard.sha256 for shard in open_dataset(tmp_path / "out").manifest.shards)
    return tmp_path / "out"


SHARD = "shard-000001.tar"


def test_a_flipped_payload_byte_is_found_by_the_checksums_alone(converted):
    def flip(data):
        data[data.index(b"row 9")] ^= 1

    change(converted / SHARD, flip)
    assert problems(converted) == [
        f"{SHARD}: checksum differs; convert or fetch it again",
        f"{SHARD}[1] bytes unlike their checksum",
    ]


def test_a_wrong_index_is_found(converted):
    def shift(data):
        offsets = decode_index(bytes(data), "")
        offsets[2] += 512
        data[:] = encode_index(offsets)

    change(converted / f"{SHARD}.idx", shift)
    assert problems(converted) == [
        f"{SHARD}.idx: the index is not this tar's: 1 of 9 offsets differ; "
        f"run `mmstream index {converted} --overwrite`"
    ]
    index(converted, overwrite=True)
    assert problems(converted) == []


def test_a_tar_that_was_replaced_is_one_problem_with_a_count(tmp_path):
    folder = Path(write_corpus(tmp_path, [30, 40]))
    samples = [(f"new{n}", {"txt": b"n" * 100 * n}) for n in range(50)]
    keep = (folder / f"{SHARD}.idx").read_bytes()
    write_shard(folder, SHARD, samples)
    (folder / f"{SHARD}.idx").write_bytes(keep)
    size, reason = problems(folder)
    assert "the manifest says" in size
    assert reason.startswith(
        f"{SHARD}.idx: the index is not this tar's: 40 samples, the tar has 50"
    )
    assert re.search(r"\(\d\d cannot be read, the first: shard-000001.tar\[\d\]", reason)
    index(folder)
    assert problems(folder) == []


@pytest.mark.parametrize("damage", [None, b"", b"123", encode_index([0, 512])])
def test_a_missing_or_damaged_index_is_one_problem(converted, damage):
    path = converted / f"{SHARD}.idx"
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    (reason,) = problems(converted)
    assert reason.startswith(f"{SHARD}: no index" if damage is None else f"{SHARD}.idx: ")
    option = "" if damage is None else " --overwrite"
    assert reason.endswith(f"; the tar is there: run `mmstream index {converted}{option}`")
    index(converted, overwrite=damage is not None)
    assert problems(converted) == []


def test_samples_of_a_shard_without_an_index_are_checked_all_the_same(tmp_path):
    tars, indexes = Path(write_corpus(tmp_path / "tars", [4, 9])), tmp_path / "its index"
    index(tars, output=indexes)
    start = int(decode_index((tars / f"{SHARD}.idx").read_bytes(), "")[3])
    change(tars / SHARD, lambda data: data.__setitem__(slice(start + 512, start + 514), b"\0\0"))
    (indexes / f"{SHARD}.idx").unlink()

    def decode(sample):
        decode_sample(sample, Decode(image=ImageDecoder(size=16)))

    (missing, image) = problems(indexes, decode=decode)
    assert missing.endswith(f"run `mmstream index {tars} --output '{indexes}'`")
    assert image.startswith(f"{SHARD}[3] 000007.jpg: ")


def test_a_key_that_comes_twice_in_a_shard_is_found(tmp_path):
    samples = [(key, captioned(0)) for key in ("a", "b", "a")]
    write_shard(tmp_path, "x.tar", samples)
    assert problems(tmp_path) == ["x.tar: key 'a' comes 2 times, not in one piece"]


# -- checksums ----------------------------------------------------------------------------------


def checksummed(folder):
    """Files with checksums, by name."""
    return {path.name for path in Path(folder).glob("*.crc32c")}


def test_checksums_of_foreign_tars_are_made_on_request(tars, caplog, monkeypatch):
    monkeypatch.setattr(index_module, "READ_BYTES", 1000)  # so the end is a read of its own
    index(tars)
    assert checksummed(tars) == set()
    caplog.set_level("INFO")
    assert index(tars, checksums=True).num_summed == 2
    assert caplog.messages[0] == f"{tars}: 0.00 GB are read for checksums"
    manifest = open_dataset(tars).manifest
    assert manifest.checksums == "indexed"
    hashes = [hashlib.sha256(data).hexdigest() for data in (A, B)]
    assert [shard.sha256 for shard in manifest.shards] == hashes
    assert checksummed(tars) == {"a.tar.crc32c", "b.tar.crc32c"}
    assert samples_of(tars) == read_by_mmstream(A) + read_by_mmstream(B)
    assert problems(tars) == []


def test_what_was_indexed_with_checksums_is_read_again_only_on_request(tars):
    index(tars, checksums=True)
    before = tree(tars)
    for options, expected in (
        ({"checksums": True}, (0, 0)),
        ({}, (0, 0)),
        ({"overwrite": True}, (2, 0)),
        ({"checksums": True, "overwrite": True}, (2, 2)),
    ):
        report = index(tars, **options)
        assert (report.num_built, report.num_summed) == expected
        assert tree(tars) | before == tree(tars)  # and a part of the manifest between


def test_checksums_of_another_tar_are_dropped_and_the_dataset_says_so(converted, caplog):
    write_shard(converted, SHARD, [(f"new{n}", {"txt": b"n" * 600 * n}) for n in range(8)])
    index(converted, overwrite=True)
    assert f"{SHARD}.crc32c" not in checksummed(converted)
    assert open_dataset(converted).manifest.checksums is None
    assert any("1 of 5 tars have no checksums" in text for text in caplog.messages)
    assert len(list(open_dataset(converted))) == 38
    assert index(converted, checksums=True).num_summed == 5
    assert open_dataset(converted).manifest.checksums == "indexed"
    assert problems(converted) == []


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_checksums_of_bytes_that_changed_since_the_old_ones_are_a_warning(converted, caplog):
    flip_bit(converted / SHARD, 700)
    index(converted, checksums=True)
    assert warnings_of(caplog) == []  # what stands is not read again
    index(converted, checksums=True, overwrite=True)
    assert [text.partition(":")[0] for text in warnings_of(caplog)] == [SHARD]
    assert problems(converted) == []


USELESS_CHECKSUMS = {
    "lost": Path.unlink,
    "short": lambda path: path.write_bytes(path.read_bytes()[:-4]),
    "endless": lambda path: os.truncate(path, 1 << 40),
    "a bit": lambda path: flip_bit(path, 5),
    "another tar's": lambda path: shutil.copy(path.with_name("shard-000002.tar.crc32c"), path),
}


@pytest.mark.parametrize("damage", USELESS_CHECKSUMS)
def test_checksums_that_are_no_use_are_one_problem_with_the_cure(converted, damage):
    USELESS_CHECKSUMS[damage](converted / f"{SHARD}.crc32c")
    (reason,) = problems(converted)
    assert reason.startswith(SHARD)
    assert reason.endswith(f"; run `mmstream index {converted} --checksums`")
    assert index(converted, checksums=True).num_summed == 1
    assert problems(converted) == []


def test_one_wrong_read_is_no_problem(converted):
    seen = set()

    def once_wrong(name, bounds, answer):
        if bounds is None or name in seen or len(answer) <= 4000:
            return answer
        seen.add(name)
        middle = len(answer) // 2
        return answer[:middle] + bytes([answer[middle] ^ 1]) + answer[middle + 1 :]

    assert list(verify(watched(open_dataset(converted), once_wrong), progress=False)) == []
    assert len(seen) == 5


def test_quick_compares_sizes_and_reads_no_sample(converted):
    dataset = watched(open_dataset(converted))
    assert list(verify(dataset, progress=False, quick=True)) == []
    assert dataset.store.ranges == []
    for name in (SHARD, f"{SHARD}.idx", f"{SHARD}.crc32c"):
        change(converted / name, lambda data: data.extend(b"more"))
    (converted / "shard-000002.tar.crc32c").unlink()
    reasons = problems(converted, quick=True)
    assert [reason.partition(":")[0] for reason in reasons] == [
        SHARD,
        f"{SHARD}.idx",
        f"{SHARD}.crc32c",
        "shard-000002.tar.crc32c",
    ]


@pytest.mark.slow
def test_two_calls_do_not_index_one_folder_at_a_time(tars, tmp_path, monkeypatch):
    monkeypatch.setattr(write_lock, "HEARTBEAT_S", 0.05)
    with write_lock.write_lock(open_store(tars), "convert"):
        with pytest.raises(ConfigError, match=r"another convert \(pid .* is writing here"):
            index(tars)
        assert index(tars, output=tmp_path / "elsewhere").num_shards == 2
    assert index(tars).num_shards == 2
    assert not list(tars.glob(".*"))
