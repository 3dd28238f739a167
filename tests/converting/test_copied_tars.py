"""Tars as rows that cannot be read at any place: compressed, remote without an index, a stream."""

from __future__ import annotations

import bz2
import gzip
import lzma
import pickle
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmstream.converting.rows import fetch
from mmstream.converting.rows.detect import RowOptions
from mmstream.converting.rows.fetch import InputFile, copy_tars
from mmstream.converting.rows.folders import FolderContent
from mmstream.converting.rows.open import open_rows
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.open import open_dataset
from mmstream.errors import ConfigError, StorageError
from mmstream.storage.memory import MemoryStore
from tests.helpers.convert_corpus import pictures, run, shards, tree, values, write_files
from tests.helpers.corpora import jpeg
from tests.helpers.foreign_tars import write_tar

COMPRESSORS = {
    "gz": gzip.compress,
    "zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


@pytest.fixture
def folder(tmp_path):
    """Two plain tars with five samples each. The first samples have the same key."""
    for shard in range(2):
        members = []
        for number in range(5):
            stem = f"s{shard}/{number}" if number else "first"
            members += [(f"{stem}.jpg", jpeg(shard * 5 + number)), (f"{stem}.txt", b"a text")]
        write_tar(tmp_path / f"plain/{shard}.tar", members)
    return tmp_path / "plain"


@pytest.fixture
def expected(folder, tmp_path):
    run(folder, tmp_path / "expected")
    return shards(tmp_path / "expected")


def require_shards(rows, expected, dest):
    run(rows, dest)
    assert shards(dest) == expected


def packed(folder, target, extension):
    """Compress all tars of a folder into another one."""
    compress = COMPRESSORS[extension]
    files = {f"{name}.{extension}": compress(data) for name, data in tree(folder).items()}
    return write_files(target, files)


def files_of(rows, **options):
    """Return (name of the tar, number, key) of all samples."""
    with open_rows(rows, RowOptions(**options)) as source:
        read = list(source.select(range(source.num_rows)).read())
    return [(row.file, row.number, row.value.key) for row in read]


@pytest.mark.parametrize("extension", COMPRESSORS)
def test_compressed_tars_give_the_shards_of_plain_ones(folder, expected, tmp_path, extension):
    packed(folder, tmp_path / "packed", extension)
    require_shards(tmp_path / "packed", expected, tmp_path / "by-folder")
    names = sorted((tmp_path / "packed").iterdir())
    assert files_of(names)[5] == (f"1.tar.{extension}", 1, "first-6")
    assert files_of(names) == files_of(tmp_path / "packed")


def test_a_compressed_tar_may_stand_among_plain_ones_under_any_name(folder, expected, tmp_path):
    (folder / "1.tar").write_bytes(gzip.compress((folder / "1.tar").read_bytes()))
    require_shards([folder / "0.tar", folder / "1.tar"], expected, tmp_path / "out")
    require_shards(folder, expected, tmp_path / "by-folder")


def test_copies_of_tars_whose_names_differ_by_case_alone_lie_apart(folder, tmp_path):
    files = [InputFile(str(folder / "0.tar"), "a.tar"), InputFile(str(folder / "1.tar"), "A.tar")]
    copies = copy_tars(files, tmp_path / "copies", None)
    assert copies == [str(tmp_path / "copies/tars" / place) for place in ("0/a.tar", "1/A.tar")]


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_tar_may_come_from_standard_input(folder, tmp_path, monkeypatch, compress):
    run(folder / "0.tar", tmp_path / "expected")
    (tmp_path / "stdin").write_bytes(compress((folder / "0.tar").read_bytes()))
    with (tmp_path / "stdin").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        run("-", tmp_path / "out")
    assert shards(tmp_path / "out") == shards(tmp_path / "expected")


def test_remote_tars_without_an_index_are_read_once(folder, expected, tmp_path, memory):
    memory.put(str(folder), "/bucket/tars", recursive=True)
    require_shards("memory://bucket/tars", expected, tmp_path / "by-folder")
    require_shards("memory://bucket/tars/*.tar", expected, tmp_path / "by-pattern")
    packed(folder, tmp_path / "packed", "gz")
    memory.put(str(tmp_path / "packed"), "/bucket/packed", recursive=True)
    require_shards("memory://bucket/packed", expected, tmp_path / "packed-out")


def test_tars_that_can_be_read_where_they_lie_are_not_copied(
    folder, expected, tmp_path, memory, monkeypatch
):
    monkeypatch.setattr(fetch, "download", None)
    index_tars(folder)
    (folder / "mmstream.json").unlink()
    memory.put(str(folder), "/bucket/tars", recursive=True)
    for number, rows in enumerate((folder, f"{folder}/*.tar", "memory://bucket/tars/*.tar")):
        require_shards(rows, expected, tmp_path / f"out-{number}")


def test_no_more_tars_are_copied_than_the_limit_needs(folder, tmp_path):
    packed(folder, tmp_path / "packed", "gz")
    (tmp_path / "packed/1.tar.gz").write_bytes(b"\x1f\x8bdamaged")
    assert len(files_of(tmp_path / "packed", limit=5)) == 5
    with pytest.raises(ConfigError, match=r"1\.tar\.gz: damaged gzip"):
        files_of(tmp_path / "packed", limit=6)


@pytest.mark.parametrize(
    ("name", "stays"),
    [("packed", False), ("plain", True), ("rows.csv", False), ("rows.jsonl", True)],
)
def test_rows_of_a_temporary_copy_can_be_taken_to_another_machine(folder, tmp_path, name, stays):
    packed(folder, tmp_path / "packed", "gz")
    files = {"rows.csv": "id,text\n" + "1,a\n" * 10, "rows.jsonl": '{"text": "a"}\n' * 10}
    write_files(tmp_path, files)
    with open_rows(tmp_path / name) as source:
        rows = source.select(range(3, 8))
        read, detached = list(rows.read()), rows.detached()
        assert (detached is rows) is stays  # these lie where the caller has put them
        detached = pickle.loads(pickle.dumps(detached))
    assert list(detached.read()) == list(detached.detached().read()) == read
    assert len(detached) == 5


def test_a_file_that_is_no_tar_among_tars_is_refused(folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "t"}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl: is no tar, and the first file is one"):
        files_of([folder / "0.tar", tmp_path / "rows.jsonl"])


def test_a_copy_never_takes_the_place_of_a_tar_of_the_caller(folder, tmp_path, monkeypatch, memory):
    data = (folder / "0.tar").read_bytes()
    other = (folder / "1.tar").read_bytes()
    own = {"in/1/x.tar": data, "in/y.tar.download": data}
    write_files(tmp_path, {**own, "x.tar": gzip.compress(other), "in/z.tar": gzip.compress(data)})
    monkeypatch.chdir(tmp_path / "in")
    memory.pipe_file("/bucket/y.tar", other)
    assert len(files_of(["1/x.tar", "../x.tar"])) == 10
    assert len(files_of(["y.tar.download", "memory://bucket/y.tar"])) == 10
    assert len(files_of(["z.tar", "./z.tar"])) == 10
    assert own.items() <= tree(tmp_path).items()


def test_a_compressed_tar_in_a_folder_hides_nothing_that_lies_beside_it(folder, tmp_path, caplog):
    data = gzip.compress((folder / "0.tar").read_bytes())
    files = {"rows.jsonl": '{"text": "t"}\n' * 3, "backup.tar.gz": data}
    write_files(tmp_path / "rows", files)
    assert len(values(tmp_path / "rows")) == 3
    assert "compressed tars are left out (1, such as backup.tar.gz)" in caplog.text
    assert len(files_of(tmp_path / "rows", rows_as="tars")) == 5
    write_files(pictures(tmp_path / "pictures", "cat/1.jpg", "dog/1.jpg"), {"archive.tgz": data})
    assert [row["label_name"] for row in values(tmp_path / "pictures")] == ["cat", "dog"]
    assert "such as archive.tgz" in caplog.text


def test_compressed_tars_beside_tars_that_rows_name_are_left_out_with_a_warning(caplog):
    content = FolderContent(tables=["r"], tars=["0.tar"], packed_tars=["b.tgz"], tarred=["r"])
    assert content.kind("corpus", None) == "tarred"
    assert "compressed tars are left out (1, such as b.tgz)" in caplog.text


def test_a_tar_that_lies_in_a_folder_twice_is_read_once(folder, caplog):
    for name, extension in (("0.tar", "gz"), ("1.tar", "zst")):
        data = COMPRESSORS[extension]((folder / name).read_bytes())
        write_files(folder, {f"{name}.{extension}": data})
    assert [name for name, _, _ in files_of(folder)] == ["0.tar"] * 5 + ["1.tar"] * 5
    assert "left out (2, such as 0.tar.gz)" in caplog.text


@pytest.mark.parametrize("names", [["0.tar", "1.tar.zst"], ["0.tar", "1.TAR"], ["0.tgz"]])
def test_plain_tars_of_a_folder_are_read_whatever_their_endings(folder, tmp_path, names):
    (tmp_path / "in").mkdir()
    for number, name in enumerate(names):
        (folder / f"{number}.tar").rename(tmp_path / "in" / name)
    assert [name for name, _, _ in files_of(tmp_path / "in")] == [
        name for name in names for _ in range(5)
    ]


@pytest.mark.parametrize("extension", COMPRESSORS)
def test_a_compressed_tar_is_known_whose_first_block_is_large(tmp_path, extension):
    noise = random.Random(0).randbytes(1_200_000)
    write_tar(tmp_path / "0.tar", [("a.jpg", noise), ("b.jpg", b"1")])
    path = tmp_path / f"0.tar.{extension}"
    data = (tmp_path / "0.tar").read_bytes()
    if extension == "zst":
        path.write_bytes(pa.Codec("zstd", 19).compress(data, asbytes=True))
    else:
        path.write_bytes(COMPRESSORS[extension](data))
    assert len(files_of(path)) == 2


@pytest.mark.parametrize("name", ["BZh.txt", "BZh91AY&SY.txt"])
def test_a_plain_tar_is_one_whatever_its_first_member_is_called(tmp_path, name):
    write_tar(tmp_path / "0.tar", [(name, b"a text")])
    assert len(files_of(tmp_path / "0.tar")) == 1


def test_remote_tars_in_a_folder_that_cannot_be_listed_are_copied(
    folder, memory, monkeypatch, caplog
):
    def list_nothing(store):
        raise StorageError(f"{store.url}: 403 Forbidden")

    memory.put(str(folder), "/bucket/tars", recursive=True)
    monkeypatch.setattr(MemoryStore, "list", list_nothing)
    assert len(files_of("memory://bucket/tars/0.tar")) == 5
    assert "cannot be listed, so its tars are copied" in caplog.text


def test_names_that_are_not_utf8_have_escapes_in_the_sidecar(tmp_path):
    odd = "caf\udce9"
    members = [(f"{odd}.{odd}.jpg", jpeg(1)), (f"{odd}2.txt", b"a"), (f"{odd}2.txt", b"b")]
    write_tar(tmp_path / f"rows/{odd}.tar", members)
    report = run(tmp_path / "rows", tmp_path / "out", max_rejects=1)
    assert (report.num_samples, report.num_rejects) == (1, 1)
    assert open_dataset(tmp_path / "out")[0]["__key__"] == odd
    sidecar = pq.read_table(tmp_path / "out/shard-000000.parquet").to_pylist()
    assert [row["key"] for row in sidecar] == ["caf\\udce9", "000000002"]
    assert sidecar[0]["media"][0]["field"] == "caf\\udce9.jpg"
    assert {row["file"] for row in sidecar} == {"caf\\udce9.tar"}
