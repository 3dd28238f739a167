"""Folders as rows: pictures, metadata beside them, tars of samples."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from urllib.parse import parse_qs, urlsplit

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import mmstream as mm
from mmstream.converting.draft import RowError
from mmstream.converting.options import MediaOptions
from mmstream.converting.rows import folders
from mmstream.converting.rows.open import open_rows
from mmstream.dataset.bad_list import write_bad
from mmstream.dataset.open import open_dataset
from mmstream.dataset.verify import verify
from mmstream.errors import ConfigError, ManifestError, MMStreamError
from mmstream.storage import open_store, remote
from tests.helpers.convert_corpus import make_corpus, pictures, rejects, run, shards, values
from tests.helpers.corpora import jpeg
from tests.helpers.foreign_tars import write_tar
from tests.helpers.media_files import audio_file
from tests.helpers.web_stubs import S3Stub, running


def samples(folder):
    return [
        {k: v for k, v in sample.items() if k not in ("__url__", "__lineage__")}
        for sample in open_dataset(folder)
    ]


def classes(folder):
    return [sample["cls"] for sample in samples(folder)]


def num_samples(report):
    return {name: split.num_samples for name, split in report.splits.items()}


def test_folders_of_classes_become_labelled_pictures(tmp_path):
    folder = pictures(tmp_path / "in", "dog/1.jpg", "cat/b.JPG", "cat/a.jpg", "cat/.hidden.jpg")
    (folder / "cat/notes.md").touch()
    run(folder, tmp_path / "out")
    assert values(folder) == [
        {"image": "cat/a.jpg", "label": 0, "label_name": "cat"},
        {"image": "cat/b.JPG", "label": 0, "label_name": "cat"},
        {"image": "dog/1.jpg", "label": 1, "label_name": "dog"},
    ]
    assert classes(tmp_path / "out") == [b"0", b"0", b"1"]


def test_folders_of_splits_become_data_sets_with_the_same_classes(tmp_path):
    folder = pictures(tmp_path / "in", "train/cat/1.jpg", "train/dog/2.jpg", "val/dog/3.jpg")
    assert num_samples(run(folder, tmp_path / "out")) == {"train": 2, "validation": 1}
    run(folder / "train", tmp_path / "train")
    assert classes(tmp_path / "out/validation") == [b"1"]
    assert classes(tmp_path / "train") == [b"0", b"1"]


def test_one_split_alone_has_the_layout_and_the_classes_of_several(tmp_path, caplog):
    folder = pictures(tmp_path / "in", "train/cat/1.jpg", "train/dog/2.jpg")
    assert num_samples(run(folder, tmp_path / "out")) == {"train": 2}
    assert classes(tmp_path / "out/train") == [b"0", b"1"]
    assert "holds the split train only; its data set is DEST/train" in caplog.text


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["cat/deep/1.jpg"], [0]),
        (["train/cat/1.jpg", "train/dog/2.jpg", "test/3.jpg"], [0, 1, None]),
        (
            ["train/cat/1.jpg", "train/dog/2.jpg", "test/3.jpg", "test/dog/4.jpg"],
            [0, 1, None, None],
        ),
    ],
)
def test_a_split_has_classes_if_all_of_its_files_lie_in_folders(tmp_path, caplog, paths, labels):
    folder = pictures(tmp_path / "in", *paths)
    assert [row.get("label") for row in values(folder)] == labels
    said = "test: media files lie beside the folders (dog), so these are no classes"
    assert (said in caplog.text) == ("test/dog/4.jpg" in paths)


def test_pictures_without_a_text_among_others_are_counted_in_the_log(tmp_path, caplog):
    folder = pictures(tmp_path / "in", "1.jpg", "2.jpg", "3.jpg")
    values(folder)
    assert not caplog.text
    (folder / "2.txt").write_text("a cat")
    values(folder)
    assert "2 of 3 media files have no text file beside them" in caplog.text


def test_pictures_without_classes_have_their_text_or_nothing(tmp_path):
    folder = pictures(tmp_path / "in", "1.jpg", "more/2.jpg", "3.jpg")
    (folder / "1.txt").write_text("a cat\n")
    (folder / "3.txt").write_bytes(b"\xff")
    first, damaged, second = values(folder)
    assert [first, second] == [{"image": "1.jpg", "text": "a cat"}, {"image": "more/2.jpg"}]
    assert isinstance(damaged, RowError)
    assert str(damaged).startswith("3.txt: not UTF-8; name its encoding")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_metadata_beside_pictures_describes_them(tmp_path, kind):
    folder = pictures(tmp_path / "in", "train/1.jpg", "train/2.jpg", "test/3.jpg")
    for split, rows in {
        "train": [{"file_name": "1.jpg", "text": "one"}, {"file_name": "2.jpg", "text": "two"}],
        "test": [{"file_name": "3.jpg", "text": "three"}],
    }.items():
        path = folder / split / f"metadata.{kind}"
        if kind == "csv":
            lines = [f"{row['file_name']},{row['text']}\n" for row in rows]
            path.write_text("file_name,text\n" + "".join(lines))
        elif kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), path)
    assert num_samples(run(folder, tmp_path / "out")) == {"train": 2, "test": 1}
    assert samples(tmp_path / "out/test")[0]["txt"] == b"three"


def test_a_folder_of_files_of_rows_is_read_whole_and_by_splits(tmp_path):
    folder = tmp_path / "in"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").touch()
    (folder / "dataset_infos.json").write_text("{}")
    for name, number in (("train-1", 1), ("train-0", 0), ("test-0", 2)):
        path = folder / "data" / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist([{"text": f"t{number}"}]), path)
    assert values(folder) == [{"text": "t0"}, {"text": "t1"}, {"text": "t2"}]
    assert set(run(folder, tmp_path / "out").splits) == {"train", "test"}
    (folder / "data" / "other.jsonl").write_text('{"text": "t"}\n')
    with pytest.raises(ConfigError, match=r"is of a split, and .*other\.jsonl is of none"):
        run(folder, tmp_path / "other")


def test_a_folder_that_may_be_read_in_two_ways_names_them(tmp_path):
    folder = pictures(tmp_path / "in", "a/1.jpg", "b/2.jpg")
    (folder / "rows.jsonl").write_text('{"image": "a/1.jpg", "text": "t"}\n')
    with pytest.raises(ConfigError, match=r"holds files of rows, such as rows\.jsonl, and 2 media"):
        values(folder)
    assert values(folder, rows_as="media")[1] == {"image": "b/2.jpg", "label": 1, "label_name": "b"}
    assert len(values(folder / "rows.jsonl")) == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no files of rows, no tars and no media files"):
        values(tmp_path / "empty")


def test_several_folders_and_files_are_numbered_through(tmp_path):
    folders = [pictures(tmp_path / name, "1.jpg") for name in ("kohya", "hf")]
    (folders[0] / "1.txt").write_text("a cat")
    (folders[1] / "metadata.csv").write_text("file_name,text\n1.jpg,a dog\n")
    (tmp_path / "rows.jsonl").write_text('{"image": "hf/1.jpg", "text": "again"}\n')
    rows = [*folders, tmp_path / "rows.jsonl"]
    assert values(rows) == [
        {"image": "kohya/1.jpg", "text": "a cat"},
        {"file_name": "hf/1.jpg", "text": "a dog"},
        {"image": "hf/1.jpg", "text": "again"},
    ]
    assert run(rows, tmp_path / "out").num_samples == 3


def test_standard_input_may_come_with_a_folder(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/rows.jsonl").write_text('{"text": "of the folder"}\n')
    (tmp_path / "stdin").write_text('{"text": "of the stream"}\n')
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "stdin").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert [row["text"] for row in values(["-", "in"])] == ["of the stream", "of the folder"]


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


def test_the_counts_beside_tars_are_no_rows(tmp_path):
    folder = pictures(tmp_path / "in", "a.jpg")
    (folder / "sizes.json").write_text('{"0.tar": 100}')
    assert values(folder) == [{"image": "a.jpg"}]


def test_classes_of_several_folders_are_numbered_together(tmp_path):
    pictures(tmp_path, "a/cat/1.jpg", "a/dog/2.jpg", "b/bird/3.jpg", "c/4.jpg")
    rows = values([tmp_path / name for name in "abc"])
    assert [row.get("label") for row in rows] == [1, 2, 0, None]
    assert rows[2]["image"] == "b/bird/3.jpg"


def test_a_folder_of_splits_or_tars_is_converted_alone(tmp_path):
    pictures(tmp_path, "a/1.jpg", "b/train/1.jpg", "b/test/2.jpg")
    (tmp_path / "c").mkdir()
    write_tar(tmp_path / "c/0.tar", [("0.txt", b"a")])
    for other, reason in {
        f"{tmp_path}/b": "b: holds data sets of splits; convert it alone",
        f"{tmp_path}/c": "c: holds tars of samples; convert it alone",
        "https://localhost/rows.jsonl": "local folders and URLs together",
    }.items():
        with pytest.raises(ConfigError, match=reason):
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
    (tmp_path / "rows.jsonl").write_text('{"text": "t", "id": 1}\n')
    (tmp_path / "rows.csv").write_text("text,id\nt,1\n")
    pq.write_table(pa.Table.from_pylist([{"text": "t"}]), tmp_path / "rows.parquet")
    write_tar(tmp_path / "0.tar", [("0.txt", b"a")])
    pictures(tmp_path, "photos/1.jpg")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/rows.jsonl").write_text('{"text": "t"}\n')
    assert values(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"{name}.*rows_as='{rows_as}'"):
        values(tmp_path / name, rows_as=rows_as)


def test_rows_from_python_are_of_no_kind():
    with pytest.raises(ConfigError, match="rows_as='csv': has no effect on rows from Python"):
        values([{"text": "t"}], rows_as="csv")


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
    with pytest.raises(ConfigError, match="lies in"):
        run(tmp_path / "first", tmp_path / "first", overwrite=True)


def test_samples_of_foreign_tars_keep_their_keys_unless_two_meet(tmp_path):
    (tmp_path / "in").mkdir()
    for shard in range(3):
        write_tar(tmp_path / f"in/{shard}.tar", [("d/0.txt", b"%d" % shard), ("d/0.seg.png", b"x")])
    run(tmp_path / "in", tmp_path / "out")
    read = samples(tmp_path / "out")
    assert [sample["__key__"] for sample in read] == ["d/0", "d/0-2", "d/0-3"]
    assert [sample["txt"] for sample in read] == [b"0", b"1", b"2"]
    assert list(read[0]) == ["__key__", "txt", "seg.png"]


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
    media = MediaOptions(max_image_side=100, image_format="webp", min_image_side=30)
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
    with pytest.raises(MMStreamError, match="min_image_side is 3000"):
        run(tmp_path / "in.tar", tmp_path / "none", media=MediaOptions(min_image_side=3000))


def test_images_of_stored_samples_that_need_no_change_keep_their_names(tmp_path):
    write_tar(tmp_path / "in.tar", [("a.left.jpeg", jpeg(1, (50, 40))), ("a.json", b'{"x": 1.0}')])
    run(tmp_path / "in.tar", tmp_path / "out", media=MediaOptions(max_image_side=100))
    [sample] = samples(tmp_path / "out")
    assert (sample["left.jpeg"], sample["json"]) == (jpeg(1, (50, 40)), b'{"x": 1.0}')


def test_duplicates_among_stored_samples_are_found(tmp_path):
    members = [("a.jpg", jpeg(1)), ("b.left.jpg", jpeg(1)), ("c.jpg", jpeg(2))]
    write_tar(tmp_path / "in.tar", members)
    assert run(tmp_path / "in.tar", tmp_path / "out", duplicates="report").num_pairs["media"] == 1
    assert json.loads((tmp_path / "out/report.json").read_bytes())["media"]["jpg"]["num_files"] == 3


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
    with pytest.raises(ConfigError, match=f"^{name}.*: has no effect on tars of samples"):
        run(tmp_path / "in.tar", tmp_path / "out", **{name: value})
    assert not (tmp_path / "out").exists()


def test_keys_of_foreign_tars_that_meet_in_a_shard_are_told_apart(tmp_path):
    for shard in range(2):
        members = [(f"{key}.txt", b"%d" % shard) for key in ("0", "1", "2", "0-4")]
        write_tar(tmp_path / f"{shard}.tar", members)
    run(sorted(tmp_path.glob("*.tar")), tmp_path / "out")
    written = [sample["__key__"] for sample in samples(tmp_path / "out")]
    assert written == ["0", "1", "2", "0-4", "0-5", "1-6", "2-7", "0-4-8"]
    assert not list(verify(open_dataset(tmp_path / "out"), progress=False))
    run(sorted(tmp_path.glob("*.tar")), tmp_path / "small", samples_per_shard=4)
    with pytest.raises(KeyError, match=r"shard-000000.tar\[1\], shard-000001.tar\[1\]"):
        open_dataset(tmp_path / "small")["1"]


def test_samples_of_the_bad_list_are_left_out_and_the_list_is_part_of_the_plan(tmp_path):
    run(make_corpus(tmp_path), tmp_path / "in")
    with open_rows(tmp_path / "in") as source:
        before, whole = source.sha256, [row.value.key for row in source.select(range(38)).read()]
    dataset = open_dataset(tmp_path / "in")
    write_bad(dataset, [(0, 1), (0, 2), (2, 0)])
    bad = {1, 2, int(dataset.counts[:2].sum())}
    with open_rows(tmp_path / "in") as source:
        left = [row.value.key for row in source.select(range(source.num_rows)).read()]
        assert source.sha256 != before
    assert left == [key for i, key in enumerate(whole) if i not in bad]


def test_samples_that_the_bad_list_leaves_out_are_counted(tmp_path, caplog):
    write_tar(tmp_path / "in.tar", [(f"{i}.txt", b"a") for i in range(5)])
    run(tmp_path / "in.tar", tmp_path / "first")
    assert "bad list" not in caplog.text
    write_bad(open_dataset(tmp_path / "first"), [(0, 1), (0, 3)])
    assert run(tmp_path / "first", tmp_path / "second").num_samples == 3
    assert "first: 2 samples on its bad list are left out" in caplog.messages


def test_tars_that_cannot_be_read_are_rejects_or_clear_errors(tmp_path):
    (tmp_path / "in").mkdir()
    members = [("0.txt", b"a"), ("1.txt", b"b"), ("1.txt", b"c"), ("2.txt", b"d")]
    write_tar(tmp_path / "in/0.tar", members)
    run(tmp_path / "in", tmp_path / "out")
    assert "this field comes twice" in rejects(tmp_path / "out")[2]
    (tmp_path / "rows.jsonl").write_text('{"text": "t"}\n')
    with pytest.raises(ConfigError, match="this is a tar among other files"):
        values([tmp_path / "rows.jsonl", tmp_path / "in/0.tar"])
    (tmp_path / "in/mmstream.unfinished.json").write_text("{}")
    with pytest.raises(ManifestError, match="has not finished"):
        values(tmp_path / "in")


def test_samples_are_found_by_the_keys_that_they_kept(tmp_path):
    run(make_corpus(tmp_path), tmp_path / "first", shuffle_seed=5)
    run(tmp_path / "first", tmp_path / "second", samples_per_shard=5)
    dataset = open_dataset(tmp_path / "second")
    for sample in samples(tmp_path / "first"):
        assert dataset[sample["__key__"]]["txt"] == sample["txt"]


@pytest.mark.parametrize("target", [".", "..", "../dog"])
def test_a_link_back_to_a_folder_that_holds_it_is_an_error(tmp_path, target):
    folder = pictures(tmp_path / "in", "dog/1.jpg", "cat/2.jpg")
    (folder / "cat/back").symlink_to(target)
    if target == "../dog":  # two links that lead to each other
        (folder / "dog/back").symlink_to("../cat")
    with pytest.raises(ConfigError, match=r"back: a link leads back .*; remove the link$"):
        values(folder)


# -- folders in an object store: they give the same shards as folders of this machine


@pytest.fixture
def bucket():
    """Copies a folder to a store in memory; what lies there is gone after the test."""
    files = fsspec.filesystem("memory")

    def copied(folder):
        files.put(str(folder), f"/bucket/{folder.name}", recursive=True)
        return f"memory://bucket/{folder.name}"

    yield copied
    files.rm("/bucket", recursive=True)


def require_same(folder, url, tmp_path, **options):
    """Convert a folder and its copy, and compare their shards. Return the number of samples."""
    first = run(folder, tmp_path / "local", **options)
    run(url, tmp_path / "remote", **options)
    assert shards(tmp_path / "remote") == shards(tmp_path / "local")
    return first.num_samples


def test_pictures_in_folders_of_classes_and_splits(tmp_path, bucket):
    paths = ["train/cat/1.jpg", "train/dog/2.jpg", "val/dog/3.jpg", "train/.hidden/4.jpg"]
    folder = pictures(tmp_path / "in", *paths)
    assert require_same(folder, bucket(folder), tmp_path) == 3
    assert {path.name for path in (tmp_path / "remote").iterdir()} >= {"train", "validation"}


def test_pictures_with_texts_beside_them(tmp_path, bucket, caplog, monkeypatch):
    monkeypatch.setattr(folders, "MAX_TEXT_BYTES", 20)
    folder = pictures(tmp_path / "in", *(f"{number:03d}.jpg" for number in range(70)))
    for number in range(1, 70):
        (folder / f"{number:03d}.txt").write_text(f"text {number}\n")
    (folder / "068.txt").write_bytes(b"\xff")
    (folder / "069.txt").write_text("x" * 21)
    url = bucket(folder)
    rows = values(url)
    assert rows[:68] == [
        {"image": "000.jpg"},
        *({"image": f"{n:03d}.jpg", "text": f"text {n}"} for n in range(1, 68)),
    ]
    assert [(type(row), str(row)) for row in rows[68:]] == [
        (RowError, "068.txt: not UTF-8; name its encoding with encoding=NAME"),
        (RowError, "069.txt: a text of more than 20 bytes"),
    ]
    assert f"{url}: 1 of 70 media files have no text file" in caplog.text
    assert [str(row) for row in values(folder)] == [str(row) for row in rows]


def test_metadata_beside_pictures(tmp_path, bucket):
    folder = pictures(tmp_path / "in", "train/a.jpg", "train/b.jpg")
    (folder / "train/metadata.csv").write_text("file_name,text\na.jpg,one\nb.jpg,two\n")
    assert require_same(folder, bucket(folder), tmp_path) == 2


def test_rows_beside_their_media_and_other_files(tmp_path, bucket):
    folder = tmp_path / "in"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("# words")
    for split in ("train", "test"):
        (folder / f"data/{split}.jsonl").write_text('{"text": "t"}\n' * 3)
    assert require_same(folder, bucket(folder), tmp_path) == 6
    pictures(tmp_path, "mixed/a.jpg", "other/.hidden.jpg", "other/notes.md")
    (tmp_path / "mixed/rows.jsonl").write_text('{"image": "a.jpg", "text": "t"}\n')
    for name, reason in {
        "mixed": r"holds files of rows, such as rows\.jsonl, and 1 media",
        "other": "holds no files of rows, no tars and no media files",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            values(bucket(tmp_path / name))


def test_transcripts_of_librispeech_beside_their_sound(tmp_path, bucket):
    folder = tmp_path / "in"
    for reader in ("84/121123", "85/1"):
        (folder / reader).mkdir(parents=True)
        stem = reader.replace("/", "-")
        (folder / reader / f"{stem}-0000.flac").write_bytes(audio_file("flac", seconds=0.1))
        (folder / reader / f"{stem}.trans.txt").write_text(f"{stem}-0000 GO DO YOU HEAR\n")
    assert require_same(folder, bucket(folder), tmp_path) == 2


def test_a_data_set_of_lerobot_is_refused_with_the_page_that_reads_it(tmp_path, bucket):
    folder = pictures(tmp_path / "in", "videos/a.jpg", "b.jpg")
    (folder / "meta").mkdir()
    (folder / "meta/info.json").write_text('{"codebase_version": "v3.0"}')
    page = r"in: a data set of LeRobot .* docs/row-formats\.md, under LeRobot$"
    for rows in (folder, bucket(folder), [folder, folder / "b.jpg"]):
        with pytest.raises(ConfigError, match=page):
            values(rows)
    assert len(values(folder, rows_as="media")) == 2
    (folder / "meta/info.json").unlink()
    (folder / "meta/info.json").mkdir()
    assert len(values(folder)) == 2


def test_each_folder_of_a_bucket_is_listed_once(tmp_path, monkeypatch):
    """But the root, which is asked first whether it is a folder at all."""
    folder = pictures(tmp_path / "in", "cat/1.jpg", "cat/2.jpg", "dog/3.jpg")
    (folder / "cat/1.txt").write_text("a cat")
    objects = {
        f"bucket/{path.relative_to(tmp_path)}": path.read_bytes() for path in folder.rglob("*.*")
    }
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    remote._client_of.cache_clear()
    with running(S3Stub, objects) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        run("s3://bucket/in", tmp_path / "remote")
        lists = Counter(
            parse_qs(urlsplit(target).query)["prefix"][0]
            for target in server.requests
            if "list-type=2" in target
        )
    remote._client_of.cache_clear()
    assert lists == {"in/": 2, "in/cat/": 1, "in/dog/": 1}
    run(folder, tmp_path / "local")
    assert shards(tmp_path / "remote") == shards(tmp_path / "local")


def test_media_of_a_folder_in_a_store_lie_in_it(tmp_path, bucket):
    folder = pictures(tmp_path / "in", "a.jpg")
    (folder / "metadata.jsonl").write_text('{"file_name": "../secret.jpg", "text": "t"}\n')
    with pytest.raises(mm.MMStreamError, match="lies outside the media root"):
        run(bucket(folder), tmp_path / "out")


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


@pytest.mark.s3
def test_pictures_and_tars_on_a_real_s3_server(s3, tmp_path):
    folder = pictures(tmp_path / "in", "cat/1.jpg", "cat/ä b.jpg", "dog/2.jpg")
    (folder / "cat/1.txt").write_text("a cat")
    store = open_store(f"{s3}/{tmp_path.name}/in")
    for path in sorted(folder.rglob("*.*")):
        store.write(path.relative_to(folder).as_posix(), path.read_bytes())
    assert require_same(folder, store.url, tmp_path) == 3
    tar = tmp_path / "local/shard-000000.tar"
    tars = open_store(f"{s3}/{tmp_path.name}/tars")
    tars.write("0.tar", tar.read_bytes())
    run(tar, tmp_path / "local-tar")
    run(tars.url, tmp_path / "remote-tar")
    assert shards(tmp_path / "remote-tar") == shards(tmp_path / "local-tar")
