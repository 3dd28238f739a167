"""Folders and tars as rows: pictures, metadata beside them, samples."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import mmstream as mm
from mmstream.converting.draft import RowError
from mmstream.converting.rows import fetch, folders
from mmstream.converting.rows.fetch import InputFile, copy_tars
from mmstream.converting.rows.open import open_rows
from mmstream.dataset.bad_list import write_bad
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.open import open_dataset
from mmstream.dataset.verify import verify
from mmstream.errors import ConfigError, StorageError
from mmstream.storage import open_store
from mmstream.storage.memory import MemoryStore
from tests.helpers.convert_corpus import (
    jsonl,
    keys,
    make_corpus,
    parquet,
    pictures,
    rejects,
    run,
    shards,
    table,
    tree,
    values,
    write_files,
    write_rows,
)
from tests.helpers.corpora import jpeg
from tests.helpers.foreign_tars import write_tar
from tests.helpers.media_files import audio_file


def samples(folder):
    return [
        {k: v for k, v in sample.items() if k not in ("__url__", "__lineage__")}
        for sample in mm.open_dataset(folder)
    ]


def classes(folder):
    return [sample.get("cls") for sample in samples(folder)]


def num_samples(report):
    return {name: split.num_samples for name, split in report.splits.items()}


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    """Leaves a folder where it is, or copies it to a store. Returns the rows to convert."""
    if request.param == "local":
        return str
    root = "memory:/" if request.param == "memory" else request.getfixturevalue("s3")

    def copied(folder):
        store = open_store(f"{root}/{tmp_path.name}/{folder.name}")
        for name, data in tree(folder).items():
            store.write(name, data)
        return store.url

    return copied


everywhere = pytest.mark.parametrize(
    "place", ["local", "memory", pytest.param("s3", marks=pytest.mark.s3)], indirect=True
)

FOLDERS = {
    "folders are classes": (
        ["dog/1.jpg", "cat/ä b.JPG", "cat/deep/a.jpg", "cat/.hidden.jpg", "cat/notes.md"],
        [("cat/deep/a.jpg", 0), ("cat/ä b.JPG", 0), ("dog/1.jpg", 1)],
        *({}, ""),
    ),
    "splits have the same classes": (
        ["train/cat/1.jpg", "train/dog/2.jpg", "val/dog/3.jpg", "train/.hidden/4.jpg"],
        [("train/cat/1.jpg", 0), ("train/dog/2.jpg", 1), ("val/dog/3.jpg", 1)],
        *({"train": 2, "validation": 1}, ""),
    ),
    "one split alone has the layout and the classes of several": (
        ["train/cat/1.jpg", "train/dog/2.jpg"],
        [("train/cat/1.jpg", 0), ("train/dog/2.jpg", 1)],
        *({"train": 2}, "holds the split train only; its data set is DEST/train"),
    ),
    "a split without folders has no classes": (
        ["train/cat/1.jpg", "train/dog/2.jpg", "test/3.jpg"],
        [("train/cat/1.jpg", 0), ("train/dog/2.jpg", 1), ("test/3.jpg", None)],
        *({"train": 2, "test": 1}, ""),
    ),
    "nor has one with files beside its folders": (
        ["train/cat/1.jpg", "test/3.jpg", "test/dog/4.jpg"],
        [("train/cat/1.jpg", 0), ("test/3.jpg", None), ("test/dog/4.jpg", None)],
        {"train": 1, "test": 2},
        "test: media files lie beside the folders (dog), so these are not classes",
    ),
}
"""{what holds: (files, (path, label) of each row, samples of each split, what the log says)}"""


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_media_are_classes_and_splits(tmp_path, place, caplog, name):
    paths, expected, splits, said = FOLDERS[name]
    rows = place(pictures(tmp_path / "in", *paths))
    read = values(rows)
    assert [(row["image"], row.get("label")) for row in read] == expected
    assert all(row["label_name"] in row["image"].split("/") for row in read if "label" in row)
    assert num_samples(run(rows, tmp_path / "out")) == splits
    labels = [str(label).encode() for _, label in expected if label is not None]
    folders = [tmp_path / "out" / split for split in splits] or [tmp_path / "out"]
    assert [c for folder in folders for c in classes(folder) if c is not None] == labels
    assert said in caplog.text if said else "no classes" not in caplog.text


@pytest.mark.slow
def test_pictures_without_classes_have_their_text_or_nothing(tmp_path, place, caplog, monkeypatch):
    monkeypatch.setattr(folders, "MAX_TEXT_BYTES", 20)
    folder = pictures(tmp_path / "in", *(f"{number:03d}.jpg" for number in range(70)))
    write_files(folder, {f"{number:03d}.txt": f"text {number}\n" for number in range(1, 68)})
    write_files(folder, {"068.txt": b"\xff", "069.txt": "x" * 21})
    rows = place(folder)
    assert [str(row) if isinstance(row, RowError) else row for row in values(rows)] == [
        {"image": "000.jpg"},
        *({"image": f"{n:03d}.jpg", "text": f"text {n}"} for n in range(1, 68)),
        "068.txt: not UTF-8; name its encoding with encoding=NAME",
        "069.txt: a text of more than 20 bytes",
    ]
    assert f"{rows}: 1 of 70 media files have no text file beside them" in caplog.text


@pytest.mark.parametrize(
    ("name", "write"), [("csv", table), ("jsonl", jsonl), ("parquet", parquet)]
)
def test_metadata_beside_pictures_describes_them(tmp_path, name, write):
    folder = pictures(tmp_path / "in", "train/1.jpg", "train/2.jpg", "test/3.jpg")
    for split, texts in {"train": ["one", "two"], "test": ["three"]}.items():
        names = sorted(path.name for path in (folder / split).iterdir())
        rows = [{"file_name": n, "text": text} for n, text in zip(names, texts, strict=True)]
        write_files(folder, {f"{split}/metadata.{name}": write(rows)})
    assert num_samples(run(folder, tmp_path / "out")) == {"train": 2, "test": 1}
    assert samples(tmp_path / "out/test")[0]["txt"] == b"three"


@everywhere
def test_a_folder_of_files_of_rows_is_read_whole_and_by_splits(tmp_path, place):
    folder = write_files(tmp_path / "in", {"README.md": "", "dataset_infos.json": "{}"})
    for name, number in (("train-1", 1), ("train-0", 0), ("test-0", 2)):
        write_files(folder, {f"data/{name}.parquet": parquet([{"text": f"t{number}"}])})
    rows = place(folder)
    assert values(rows) == [{"text": "t0"}, {"text": "t1"}, {"text": "t2"}]
    assert num_samples(run(rows, tmp_path / "out")) == {"train": 2, "test": 1}
    rows = place(write_files(folder, {"data/other.jsonl": '{"text": "t"}\n'}))
    with pytest.raises(mm.ConfigError, match=r"is of a split, and .*other\.jsonl is of none"):
        values(rows)


@everywhere
def test_a_folder_that_may_be_read_in_two_ways_names_them(tmp_path, place):
    folder = pictures(tmp_path / "in", "a/1.jpg", "b/2.jpg")
    rows = place(write_files(folder, {"rows.jsonl": '{"image": "a/1.jpg", "text": "t"}\n'}))
    with pytest.raises(mm.ConfigError, match=r"holds files of rows, .* rows\.jsonl, and 2 media"):
        values(rows)
    assert values(rows, rows_as="media")[1] == {"image": "b/2.jpg", "label": 1, "label_name": "b"}
    assert len(values(f"{rows}/rows.jsonl")) == 1
    rows = place(pictures(tmp_path / "other", ".hidden.jpg", "notes.md"))
    with pytest.raises(mm.ConfigError, match="holds no files of rows, no tars and no media files"):
        values(rows)


def test_several_folders_and_files_are_numbered_through(tmp_path):
    rows = [pictures(tmp_path / name, "1.jpg") for name in ("kohya", "hf")]
    write_files(rows[0], {"1.txt": "a cat"})
    write_files(rows[1], {"metadata.csv": "file_name,text\n1.jpg,a dog\n"})
    rows.append(write_rows(tmp_path / "rows.jsonl", [{"image": "hf/1.jpg", "text": "again"}]))
    assert values(rows) == [
        {"image": "kohya/1.jpg", "text": "a cat"},
        {"file_name": "hf/1.jpg", "text": "a dog"},
        {"image": "hf/1.jpg", "text": "again"},
    ]
    assert run(rows, tmp_path / "out").num_samples == 3


def test_media_and_texts_that_are_no_files_are_rejected(tmp_path):
    folder = pictures(tmp_path / "in", "a.jpg", "b.jpg", "c.jpg")
    (folder / "a.txt").symlink_to("absent")
    os.mkfifo(folder / "b.txt")
    (folder / "d.jpg").symlink_to("absent")
    os.mkfifo(folder / "e.jpg")
    (folder / "f.jpg").symlink_to("f.jpg")
    run(folder, tmp_path / "out", limit=6)
    reasons = rejects(tmp_path / "out")
    assert sorted(reasons) == [1, 2, 4, 5, 6]
    for number, reason in {
        1: "a.txt: no file, or a link that leads nowhere",
        2: "b.txt: no file",
        4: "d.jpg",
        5: "e.jpg",
        6: "f.jpg",
    }.items():
        assert reason in reasons[number]


def test_the_counts_beside_tars_are_no_rows(tmp_path, caplog):
    folder = pictures(tmp_path, "a.jpg")
    assert values(write_files(folder, {"sizes.json": '{"0.tar": 100}'})) == [{"image": "a.jpg"}]
    assert not caplog.text  # where no picture has a text, none is missed


def test_classes_of_several_folders_are_numbered_together(tmp_path):
    pictures(tmp_path, "a/cat/1.jpg", "a/dog/2.jpg", "b/bird/3.jpg", "c/4.jpg", "d/ant/5.jpg")
    write_rows(tmp_path / "d/metadata.jsonl", [{"file_name": "ant/5.jpg", "text": "no class"}])
    rows = values([tmp_path / name for name in "abcd"])
    assert [row.get("label") for row in rows] == [1, 2, 0, None, None]
    assert rows[2]["image"] == "b/bird/3.jpg"


def test_a_folder_of_splits_or_tars_is_converted_alone(tmp_path):
    pictures(tmp_path, "a/1.jpg", "b/train/1.jpg", "b/test/2.jpg")
    write_tar(tmp_path / "c/0.tar", [("0.txt", b"a")])
    for other, reason in {
        f"{tmp_path}/b": "b: holds data sets of splits; convert it alone",
        f"{tmp_path}/c": "c: holds tars of samples; convert it alone",
        "https://localhost/rows.jsonl": "local folders and URLs together",
    }.items():
        with pytest.raises(mm.ConfigError, match=reason):
            values([f"{tmp_path}/a", other])


@pytest.mark.parametrize(
    ("name", "rows_as"),
    [
        ("rows.jsonl", "parquet"),
        ("rows.jsonl", "csv"),
        ("rows.jsonl", "media"),
        ("rows.jsonl", "tars"),
        ("rows.jsonl", "transcripts"),
        ("rows.csv", "jsonl"),
        ("rows.csv", "coco"),
        ("rows.parquet", "jsonl"),
        ("0.tar", "json"),
        ("photos", "csv"),
        ("photos", "tars"),
        ("tables", "media"),
        ("tables", "parquet"),
    ],
)
def test_rows_that_are_not_what_was_said_are_refused(tmp_path, name, rows_as):
    rows = [{"text": "t", "id": 1}]
    texts = {"rows.jsonl": jsonl(rows), "rows.csv": table(rows), "rows.parquet": parquet(rows)}
    write_files(pictures(tmp_path, "photos/1.jpg"), {**texts, "tables/rows.jsonl": jsonl(rows)})
    write_tar(tmp_path / "0.tar", [("0.txt", b"a")])
    assert values(tmp_path / name)
    with pytest.raises(mm.ConfigError, match=rf"{name}.*rows_as='{rows_as}'"):
        values(tmp_path / name, rows_as=rows_as)


def test_rows_from_python_are_of_no_kind():
    with pytest.raises(mm.ConfigError, match="rows_as='csv': has no effect on rows from Python"):
        values([{"text": "t"}], rows_as="csv")


@pytest.mark.slow
def test_samples_of_tars_are_written_again_byte_for_byte(tmp_path):
    run(make_corpus(tmp_path), tmp_path / "first")
    run(tmp_path / "first", tmp_path / "second", samples_per_shard=5, num_workers=2)
    assert samples(tmp_path / "second") == samples(tmp_path / "first")
    run(tmp_path / "second", tmp_path / "third")
    run(sorted((tmp_path / "first").glob("*.tar")), tmp_path / "named")
    for name in ("third", "named"):
        assert samples(tmp_path / name) == samples(tmp_path / "first")
    keys = {sample["__key__"] for sample in samples(tmp_path / "first")}
    run(tmp_path / "first", tmp_path / "split", splits={"a": 0.5, "b": 0.5}, shuffle_seed=1)
    split_keys = [s["__key__"] for n in "ab" for s in samples(tmp_path / "split" / n)]
    assert (set(split_keys), len(split_keys)) == (keys, len(keys))
    with pytest.raises(mm.ConfigError, match="lies in"):
        run(tmp_path / "first", tmp_path / "first", overwrite=True)
    dataset = mm.open_dataset(tmp_path / "second")
    assert all(dataset[s["__key__"]]["txt"] == s["txt"] for s in samples(tmp_path / "first"))


def image_sizes(sample):
    return {
        name: Image.open(io.BytesIO(data)).size
        for name, data in sample.items()
        if name.endswith(("jpg", "png", "webp"))
    }


def part(field, **more):
    return {"type": "image", "field": field, **more}


def test_media_of_stored_samples_are_checked_and_changed_where_that_is_asked_for(tmp_path):
    png = io.BytesIO()
    Image.new("RGB", (300, 200)).save(png, "png")
    bbox = {"type": "bbox", "bbox": [0, 0, 9, 9], "unit": "pixels", "field": "0.jpg"}
    content = {
        "messages": [{"role": "user", "content": [part("0.jpg"), bbox, part("0.png")]}],
        "note": {"field": "0.jpg"},
    }
    members = [
        ("a.0.jpg", jpeg(1, (400, 300))),
        ("a.json", json.dumps(content).encode()),
        ("a.0.png", png.getvalue()),
        ("a.cls", b"7"),
        ("b.jpg", jpeg(2, (20, 20))),
        ("c.jpg", b"no image"),
        ("d.jpg", jpeg(3, (100, 80))),
        ("d.json", b"{no json"),
    ]
    write_tar(tmp_path / "in.tar", members)
    media = mm.MediaOptions(max_image_side=100, image_format="webp", min_image_side=30)
    run(tmp_path / "in.tar", tmp_path / "out", media=media, max_rejects=9)
    first, second = samples(tmp_path / "out")
    assert image_sizes(first) == {"0.webp": (100, 75), "0.1.webp": (100, 67)}
    changed = json.loads(first["json"])
    assert changed["messages"][0]["content"] == [
        part("0.webp"),
        {**bbox, "field": "0.webp", "width": 400, "height": 300},
        part("0.1.webp"),
    ]
    assert (changed["note"], first["cls"]) == ({"field": "0.jpg"}, b"7")
    assert list(second) == ["__key__", "webp", "json"]
    assert second["json"] == b"{no json"
    reasons = rejects(tmp_path / "out")
    assert "min_image_side is 30" in reasons[2]
    assert "not an image" in reasons[3]
    table = pq.read_table(tmp_path / "out/shard-000000.parquet").to_pylist()
    assert [row["key"] for row in table] == ["a", "b", "c", "d"]
    assert [medium["original_width"] for medium in table[0]["media"]] == [400, 300]
    with pytest.raises(mm.MMStreamError, match="min_image_side is 3000"):
        run(tmp_path / "in.tar", tmp_path / "none", media=mm.MediaOptions(min_image_side=3000))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("captions", "each"),
        ("columns", {"image": "photo"}),
        ("format", "captions"),
        ("row", dict),
        ("group_spans", True),
    ],
)
def test_options_for_rows_are_refused_for_stored_samples(tmp_path, name, value):
    write_tar(tmp_path / "in.tar", [("a.txt", b"a")])
    with pytest.raises(mm.ConfigError, match=f"^{name}.*: has no effect on tars of samples"):
        run(tmp_path / "in.tar", tmp_path / "out", **{name: value})
    assert not (tmp_path / "out").exists()


@everywhere
def test_samples_of_foreign_tars_keep_their_keys_unless_two_meet_in_a_shard(tmp_path, place):
    for shard in range(2):
        members = [(f"{key}.txt", b"%d" % shard) for key in ("d/0", "1", "2", "d/0-4")]
        write_tar(tmp_path / f"in/{shard}.tar", [("d/0.seg.png", b"x"), *members])
    rows = place(tmp_path / "in")
    run(rows, tmp_path / "out")
    read = samples(tmp_path / "out")
    written = [sample["__key__"] for sample in read]
    assert written == ["d/0", "1", "2", "d/0-4", "d/0-5", "1-6", "2-7", "d/0-4-8"]
    assert [sample["txt"] for sample in read] == [b"0"] * 4 + [b"1"] * 4
    assert list(read[0]) == ["__key__", "seg.png", "txt"]
    assert not list(verify(mm.open_dataset(tmp_path / "out"), progress=False))
    run(rows, tmp_path / "small", samples_per_shard=4)
    with pytest.raises(KeyError, match=r"shard-000000.tar\[1\], shard-000001.tar\[1\]"):
        mm.open_dataset(tmp_path / "small")["1"]


def test_samples_of_the_bad_list_are_left_out_and_the_list_is_part_of_the_plan(tmp_path, caplog):
    run(make_corpus(tmp_path), tmp_path / "in")
    run(tmp_path / "in", tmp_path / "whole")
    assert "bad list" not in caplog.text
    write_bad(mm.open_dataset(tmp_path / "in"), [(0, 1), (0, 2), (2, 0)])
    with pytest.raises(mm.ConfigError, match="rows_sha256 was"):
        run(tmp_path / "in", tmp_path / "whole")
    run(tmp_path / "in", tmp_path / "out")
    bad = [keys(tmp_path / "in")[number] for number in (1, 2, 15)]
    assert keys(tmp_path / "out") == [key for key in keys(tmp_path / "in") if key not in bad]
    assert "in: 3 samples on its bad list are left out" in caplog.messages


def test_tars_that_cannot_be_read_are_rejects_or_clear_errors(tmp_path):
    members = [("0.txt", b"a"), ("1.txt", b"b"), ("1.txt", b"c"), ("2.txt", b"d")]
    write_tar(tmp_path / "in/0.tar", members)
    run(tmp_path / "in", tmp_path / "out")
    assert "this field comes twice" in rejects(tmp_path / "out")[2]
    (tmp_path / "rows.jsonl").write_text('{"text": "t"}\n')
    with pytest.raises(mm.ConfigError, match="this is a tar among other files"):
        values([tmp_path / "rows.jsonl", tmp_path / "in/0.tar"])
    with pytest.raises(ConfigError, match=r"rows\.jsonl: is not a tar, and the first file is;"):
        values([tmp_path / "in/0.tar", tmp_path / "rows.jsonl"])
    (tmp_path / "in/mmstream.unfinished.json").write_text("{}")
    with pytest.raises(mm.errors.ManifestError, match="has not finished"):
        values(tmp_path / "in")


@pytest.mark.parametrize("target", [".", "..", "../dog"])
def test_a_link_back_to_a_folder_that_holds_it_is_an_error(tmp_path, target):
    folder = pictures(tmp_path / "in", "dog/1.jpg", "cat/2.jpg")
    (folder / "cat/back").symlink_to(target)
    if target == "../dog":  # two links that lead to each other
        (folder / "dog/back").symlink_to("../cat")
    with pytest.raises(mm.ConfigError, match=r"back: a link leads back .*; remove the link$"):
        values(folder)


def test_transcripts_of_librispeech_name_the_sound_beside_them(tmp_path, place):
    """https://www.openslr.org/12"""
    for reader in ("84/121123", "85/1"):
        stem = reader.replace("/", "-")
        lines = f"{stem}-0000 GO DO YOU HEAR\n{stem}-0001 YES, HE'S\n"
        sound = {f"{reader}/{stem}-0000.flac": audio_file("flac", seconds=0.1)}
        write_files(tmp_path / "in", {**sound, f"{reader}/{stem}.trans.txt": lines})
    rows = place(tmp_path / "in")
    assert values(rows)[0] == {
        "id": "84-121123-0000",
        "audio": "84/121123/84-121123-0000.flac",
        "text": "GO DO YOU HEAR",
    }
    report = run(rows, tmp_path / "out")
    assert (report.num_samples, report.num_rejects) == (2, 2)


def test_a_data_set_of_lerobot_is_refused_with_the_page_that_reads_it(tmp_path, place):
    folder = pictures(tmp_path / "in", "videos/a.jpg", "b.jpg")
    write_files(folder, {"meta/info.json": '{"codebase_version": "v3.0"}'})
    for rows in (place(folder), [folder, folder / "b.jpg"]):
        with pytest.raises(
            mm.ConfigError, match=r"a data set of LeRobot .* docs/row-formats\.md, under"
        ):
            values(rows)
    assert len(values(place(folder), rows_as="media")) == 2
    (folder / "meta/info.json").unlink()
    (folder / "meta/info.json").mkdir()
    assert len(values(folder)) == 2


# -- folders in an object store


@pytest.mark.s3
def test_an_object_that_is_called_as_a_folder_is_read_too(s3, tmp_path):
    store = open_store(f"{s3}/{tmp_path.name}/in")
    for path in ("a.jpg", "a.jpg/b.jpg"):
        store.write(path, jpeg(0))
    assert [row["image"] for row in values(store.url)] == ["a.jpg", "a.jpg/b.jpg"]


@pytest.mark.s3
def test_a_data_set_in_a_store_is_not_listed(s3, tmp_path, monkeypatch):
    run(pictures(tmp_path / "in", "a.jpg"), tmp_path / "ds")
    store = open_store(f"{s3}/{tmp_path.name}/ds")
    for path in (tmp_path / "ds").glob("*.*"):
        store.write(path.name, path.read_bytes())
    monkeypatch.setattr(type(store), "folders", None)
    monkeypatch.setattr(type(store), "list", None)
    assert len(values(store.url)) == 1


# -- tars that cannot be read at any place: compressed, remote without an index, a stream


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
    with open_rows(rows, mm.RowReading(**options)) as source:
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
    (reject,) = (tmp_path / "out/rejects.jsonl").read_text().splitlines()
    assert json.loads(reject)["file"] == "caf\\udce9.tar"
