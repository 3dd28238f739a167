"""Opening a corpus in every way, random access, and what is said when that fails."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from mmstream.converting.convert import convert
from mmstream.dataset.index import encode_index
from mmstream.dataset.manifest import MANIFEST_NAME, Manifest, ShardInfo
from mmstream.dataset.open import open_dataset
from mmstream.errors import ConfigError, ManifestError, SampleError, ShardError
from tests.helpers.corpora import captioned, write_corpus, write_shard
from tests.helpers.foreign_tars import FOREIGN, field_list, make_tar, read_by_webdataset


def keys(dataset):
    return [sample["__key__"] for sample in dataset]


@pytest.fixture
def folder(tmp_path):
    """Seven samples in three shards, with indexes and a manifest."""
    return Path(write_corpus(tmp_path / "corpus", [3, 0, 4]))


ALL = [f"{i:06d}" for i in range(7)]


# -- the ways of opening ------------------------------------------------------------------------


def test_a_folder_with_a_manifest_opens_without_touching_a_shard(folder):
    for path in folder.glob("*.tar*"):
        path.unlink()
    dataset = open_dataset(folder)
    assert len(dataset) == 7
    assert dataset.counts.tolist() == [3, 0, 4]
    assert dataset.num_shards == 3


@pytest.mark.parametrize("indexed", [True, False])
def test_a_folder_without_a_manifest_is_listed(folder, indexed):
    (folder / MANIFEST_NAME).unlink()
    (folder / "notes.txt").write_text("no tar")
    if not indexed:
        for path in folder.glob("*.idx"):
            path.unlink()
    dataset = open_dataset(str(folder))
    assert keys(dataset) == ALL
    assert dataset.counts.tolist() == [3, 0, 4]
    assert indexed == bool(list(folder.glob("*.idx")))  # opening writes nothing


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (lambda folder: folder / "shard-000002.tar", ALL[3:]),
        (lambda folder: str(folder / "shard-000002.tar"), ALL[3:]),
        (lambda folder: "shard-000002.tar", ALL[3:]),
        (lambda folder: ".", ALL),
        (lambda folder: f"../{folder.name}", ALL),
        (lambda folder: f"file://{folder}", ALL),
        (lambda folder: f"file://{folder}/shard-000002.tar", ALL[3:]),
        (lambda folder: [folder / f"shard-{n:06d}.tar" for n in (2, 0)], ALL[3:] + ALL[:3]),
        (lambda folder: f"{folder}/shard-{{000000..000002}}.tar", ALL),
        (lambda folder: f"{folder}/shard-00000{{2,0}}.tar", ALL[3:] + ALL[:3]),
    ],
    ids=range(10),
)
def test_each_way_to_name_tars_opens_them_in_this_order(folder, monkeypatch, source, expected):
    monkeypatch.chdir(folder)
    assert keys(open_dataset(source(folder))) == expected


def test_a_dataset_outlives_a_change_of_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    dataset = open_dataset(".")
    monkeypatch.chdir("/")
    assert dataset[0]["__key__"] == ALL[0]


def test_a_list_of_tars_in_different_folders(tmp_path):
    for name in "a/b", "a/c/d", "e":
        write_shard(tmp_path / name, "x.tar", [(name, captioned(0))])
    tars = [str(tmp_path / name / "x.tar") for name in ("e", "a/c/d", "a/b")]
    dataset = open_dataset(tars)
    assert keys(dataset) == ["e", "a/c/d", "a/b"]
    assert [sample["__url__"] for sample in dataset] == tars


# -- what cannot be opened ----------------------------------------------------------------------


def test_a_missing_folder_and_an_empty_one_are_told_apart(tmp_path):
    with pytest.raises(ManifestError, match=r"absent: no such folder"):
        open_dataset(tmp_path / "absent")
    with pytest.raises(ManifestError, match=r"neither mmstream.json nor tars in it"):
        open_dataset(tmp_path)


def test_a_missing_tar_is_named(folder):
    for source in (folder / "no.tar", [folder / "no.tar"], f"{folder}/{{shard-000000,no}}.tar"):
        with pytest.raises(FileNotFoundError, match=r"/no\.tar: no such tar"):
            open_dataset(source)


def test_a_tar_twice_and_tars_in_two_kinds_of_places_are_config_errors(folder):
    tar = folder / "shard-000000.tar"
    with pytest.raises(ConfigError, match="named twice"):
        open_dataset([tar, tar])
    for tars in (
        [tar, "s3://bucket/x.tar"],
        ["s3://bucket/x.tar", tar],
        ["s3://a/x.tar", "s3://b/x.tar"],
    ):
        with pytest.raises(ConfigError):
            open_dataset(tars)


# -- the manifest -------------------------------------------------------------------------------


def manifest_bytes(**changes) -> bytes:
    shard = {"name": "a.tar", "num_samples": 1, "num_bytes": 2048, **changes.pop("shard", {})}
    return json.dumps({"version": 1, "shards": [shard], **changes}).encode()


def test_a_manifest_reads_back_as_it_was_written():
    shards = (ShardInfo("a.tar", 2, 4096, "ab" * 32), ShardInfo("ü/b.tar", 0, 1024))
    manifest = Manifest(shards, {"txt": 2, "jpg": 1}, {"rows": {"name": "r.jsonl"}}, "s3://b/x")
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert manifest.to_bytes() == manifest.to_bytes()
    assert list(json.loads(manifest.to_bytes())["fields"]) == ["jpg", "txt"]
    assert Manifest.from_bytes(manifest_bytes()).num_samples == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"version": 1}',
        b'{"version": 1, "shards": 3}',
        b'{"version": "1", "shards": []}',
        b'{"version": 1, "shards": [], "source": ' + b'{"a":' * 100_000,
        manifest_bytes(shard={"num_samples": "1"}),
        manifest_bytes(shard={"num_samples": -1}),
        manifest_bytes(shard={"num_samples": 1 << 62}),
        manifest_bytes(shard={"num_bytes": 10**30}),
        manifest_bytes(shard={"name": ""}),
        manifest_bytes(shard={"name": "a\0.tar"}),
        manifest_bytes(shard={"name": None}),
        Manifest((ShardInfo("a.tar", 1, 2048),) * 2).to_bytes(),
    ],
)
def test_a_malformed_manifest_is_a_manifest_error_that_names_it(folder, data):
    (folder / MANIFEST_NAME).write_bytes(data)
    with pytest.raises(ManifestError, match=r"corpus/mmstream\.json: "):
        open_dataset(folder)


@pytest.mark.parametrize(
    "data", [manifest_bytes(version=2), b'{"version": 9}', b'{"version": 2, "shards": "elsewhere"}']
)
def test_a_newer_manifest_says_so_whatever_it_holds(folder, data):
    (folder / MANIFEST_NAME).write_bytes(data)
    with pytest.raises(ManifestError, match="install a newer mmstream"):
        open_dataset(folder)


# -- random access ------------------------------------------------------------------------------


def test_samples_are_dicts_of_bytes_by_number(folder):
    dataset = open_dataset(folder)
    sample = dataset[4]
    assert sample["__url__"] == str(folder / "shard-000002.tar")
    assert sample["__lineage__"][:2] == (2, 1)
    assert dict(field_list(sample)) == {"__key__": "000004", **captioned(4)}
    assert [dataset[number]["__key__"] for number in (-1, -7)] == ["000006", "000000"]
    assert dataset[np.int64(4)] == sample
    assert keys(dataset) == ALL


@pytest.mark.parametrize("item", [7, -8, 1 << 40])
def test_a_number_beyond_the_end_is_an_index_error(folder, item):
    with pytest.raises(IndexError, match=f"sample {item} of 7"):
        open_dataset(folder)[item]


@pytest.mark.parametrize(
    "cut",
    [slice(None), slice(2, 5), slice(None, None, 2), slice(-3, None), slice(9, 20), slice(5, 1)],
)
def test_a_slice_is_a_view_as_of_a_list(folder, cut):
    view = open_dataset(folder)[cut]
    assert len(view) == len(ALL[cut])
    assert keys(view) == ALL[cut]
    assert keys(view[1:]) == ALL[cut][1:]
    for number in range(-len(view), len(view)):
        assert view[number]["__key__"] == ALL[cut][number]
    with pytest.raises(IndexError):
        view[len(view)]


def test_a_view_reads_only_when_asked(folder):
    view = open_dataset(folder)[:5]
    (folder / "shard-000002.tar").unlink()
    assert view[2]["__key__"] == "000002"
    with pytest.raises(ShardError, match=r"shard-000002\.tar: no such shard"):
        view[3]


def test_a_dataset_pickles_without_its_indexes(folder):
    dataset = open_dataset(folder)
    dataset[4]
    copy = pickle.loads(pickle.dumps(dataset))
    size = len(pickle.dumps(copy))
    assert keys(copy) == ALL
    assert copy.manifest == dataset.manifest
    assert keys(pickle.loads(pickle.dumps(dataset[2:5]))) == ALL[2:5]
    assert len(pickle.dumps(copy)) == size  # reading everything adds nothing


def test_a_dataset_without_indexes_pickles_with_those_it_built(folder):
    for path in [*folder.glob("*.idx"), folder / MANIFEST_NAME]:
        path.unlink()
    copy = pickle.loads(pickle.dumps(open_dataset(folder)))
    assert keys(copy) == ALL


def test_a_method_that_moved_says_where_it_is(folder):
    with pytest.raises(AttributeError, match=r"offsets is gone: write dataset\.shards\.offsets$"):
        _ = open_dataset(folder).offsets
    with pytest.raises(AttributeError, match="has no attribute 'ofsets'"):
        _ = open_dataset(folder).ofsets


# -- shards and indexes that do not fit ---------------------------------------------------------


def test_an_index_with_more_samples_than_the_tar_has_blocks_is_refused_without_a_manifest(folder):
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    with (folder / "shard-000000.tar.idx").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ManifestError, match=r"shard-000000\.tar\.idx: .* blocks; .*--overwrite"):
        open_dataset(folder)


@pytest.mark.parametrize(
    "end", [1 << 20, 1 << 50, (1 << 63) - 512, int.from_bytes((512).to_bytes(8), "little")]
)
def test_an_index_that_goes_beyond_its_tar_is_a_shard_error(folder, end):
    (folder / "shard-000000.tar.idx").write_bytes(encode_index([0, 512, 1024, end]))
    with pytest.raises(ShardError, match="its index goes to"):
        open_dataset(folder)[2]


def test_an_index_of_another_tar_is_a_sample_error_with_the_cure(folder):
    (folder / "shard-000000.tar.idx").write_bytes(encode_index([0, 512, 1024, 8192]))
    dataset = open_dataset(folder)
    for number, reason in [(0, "truncated"), (1, "not a tar header"), (2, "")]:
        with pytest.raises(SampleError, match=rf"^shard-000000\.tar\[{number}\].*{reason}"):
            dataset[number]


def test_a_truncated_shard_is_a_shard_error(folder):
    path = folder / "shard-000002.tar"
    path.write_bytes(path.read_bytes()[:6000])
    dataset = open_dataset(folder)
    assert dataset[3]["__key__"] == "000003"
    with pytest.raises(ShardError, match=r"shard-000002\.tar: truncated: 6000 bytes"):
        dataset[6]


def test_a_tar_that_was_replaced_after_indexing_never_gives_a_wrong_sample(tmp_path):
    write_shard(tmp_path, "a.tar", [(f"old{i}", {"txt": b"o" * 600}) for i in range(4)])
    (tmp_path / "a.tar").write_bytes(make_tar([(f"new{i}.txt", b"n" * i * 400) for i in range(8)]))
    dataset, errors = open_dataset(tmp_path), []
    for number in range(len(dataset)):
        try:
            assert dataset[number]["__key__"].startswith("new")
        except SampleError as error:
            errors.append(str(error))
    assert any("the index is not this tar's; run `mmstream index --overwrite`" in e for e in errors)


# -- tars of others -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["compressed.tar", "mpdata.tar", "testgz.tar"])
def test_real_tars_of_webdataset_open_as_they_are(name):
    dataset = open_dataset(FOREIGN / name)
    assert [field_list(sample) for sample in dataset] == read_by_webdataset(
        (FOREIGN / name).read_bytes()
    )


def test_a_gzipped_tar_is_refused_with_the_hint_and_reads_after_a_conversion(tmp_path):
    packed = FOREIGN / "sample.tgz"
    with pytest.raises(ShardError, match="`mmstream convert` writes a plain one"):
        open_dataset(packed)
    convert(packed, tmp_path / "out", progress=False)
    expected = read_by_webdataset(packed.read_bytes())
    assert [field_list(sample) for sample in open_dataset(tmp_path / "out")] == expected


def test_gzipped_tars_beside_plain_ones_are_not_left_out_in_silence(tmp_path, caplog):
    write_corpus(tmp_path, [3])
    (tmp_path / "mmstream.json").unlink()
    (tmp_path / "more.tgz").write_bytes(b"\x1f\x8b")
    assert len(open_dataset(tmp_path)) == 3
    assert "gzipped tars are left out (1)" in caplog.text


def test_tars_that_the_manifest_does_not_name_are_told(tmp_path, caplog):
    write_corpus(tmp_path, [3, 2])
    shutil.copy(tmp_path / "shard-000001.tar", tmp_path / "shard-000002.tar")
    assert len(open_dataset(tmp_path)) == 5
    assert "1 tars are not in mmstream.json and are left out (shard-000002.tar" in caplog.text


@pytest.mark.parametrize(
    "name", ["a{0..1}b", "x.tar", "old.tar.gz", "~no user", "[1]*?", "50% #1", "{", "ö ü", "a\\b"]
)
def test_a_folder_that_exists_opens_whatever_its_name(tmp_path, monkeypatch, name):
    write_corpus(tmp_path / name, [2])
    monkeypatch.chdir(tmp_path)
    for how in (f"{tmp_path}/{name}", tmp_path / name, f"file://{tmp_path}/{name}", name):
        assert len(open_dataset(how)) == 2
    convert([{"text": "a"}], f"{name}/new", progress=False)
    assert len(open_dataset(f"{name}/new")) == 1


def test_urls_of_files_name_paths_as_pathlib_writes_them(tmp_path):
    folder = tmp_path / "50% ö #1%20"
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    root = folder.as_uri()
    convert(f"{root}/*.jsonl", f"{root}/new", media_root=root, progress=False)
    for name in ("new", "new/", "new/shard-000000.tar", "new/shard-{000000..000000}.tar"):
        assert len(open_dataset(f"{root}/{name}")) == 1
    assert (folder / "new/mmstream.json").exists()
    tar = (folder / "new/shard-000000.tar").rename(folder / "50% ü.tar").as_uri()
    assert len(open_dataset(tar)) == 1
    assert convert([tar], f"{root}/again", progress=False).num_samples == 1
