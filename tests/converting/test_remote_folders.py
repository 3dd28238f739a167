"""Folders in an object store as rows: they give the same shards as folders of this machine."""

from __future__ import annotations

import json
from collections import Counter
from urllib.parse import parse_qs, urlsplit

import fsspec
import pytest

import mmstream as mm
from mmstream.converting.draft import RowError
from mmstream.converting.rows import folders
from mmstream.converting.rows.open import open_rows
from mmstream.errors import ConfigError
from mmstream.storage import open_store, remote
from tests.converting.test_lerobot import write_v3, write_v21
from tests.helpers.convert_corpus import pictures, run, shards
from tests.helpers.corpora import jpeg
from tests.helpers.media_files import audio_file
from tests.helpers.web_stubs import S3Stub, running


@pytest.fixture
def bucket():
    """Copies a folder to a store in memory; what lies there is gone after the test."""
    files = fsspec.filesystem("memory")

    def copied(folder):
        files.put(str(folder), f"/bucket/{folder.name}", recursive=True)
        return f"memory://bucket/{folder.name}"

    yield copied
    files.rm("/bucket", recursive=True)


def values(rows):
    with open_rows(rows) as source:
        return [row.value for row in source.select(range(source.num_rows)).read()]


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
    assert rows[:2] == [{"image": "000.jpg"}, {"image": "001.jpg", "text": "text 1"}]
    assert [row["text"] for row in rows[1:68]] == [f"text {number}" for number in range(1, 68)]
    assert [str(row) for row in rows[68:]] == [
        "068.txt: not UTF-8",
        "069.txt: a text of more than 20 bytes",
    ]
    assert all(isinstance(row, RowError) for row in rows[68:])
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
    mixed = pictures(tmp_path / "mixed", "a.jpg")
    (mixed / "rows.jsonl").write_text(json.dumps({"image": "a.jpg", "text": "t"}) + "\n")
    with pytest.raises(ConfigError, match=r"holds files of rows, such as rows\.jsonl, and 1 media"):
        values(bucket(mixed))
    with pytest.raises(ConfigError, match="holds no files of rows, no tars and no media files"):
        values(bucket(pictures(tmp_path / "other", ".hidden.jpg", "notes.md")))


def test_transcripts_of_librispeech_beside_their_sound(tmp_path, bucket):
    folder = tmp_path / "in"
    for reader in ("84/121123", "85/1"):
        (folder / reader).mkdir(parents=True)
        stem = reader.replace("/", "-")
        (folder / reader / f"{stem}-0000.flac").write_bytes(audio_file("flac", seconds=0.1))
        (folder / reader / f"{stem}.trans.txt").write_text(f"{stem}-0000 GO DO YOU HEAR\n")
    assert require_same(folder, bucket(folder), tmp_path) == 2


@pytest.mark.parametrize("write", [write_v3, write_v21])
def test_episodes_of_lerobot(tmp_path, bucket, write):
    folder = write(tmp_path / "in")
    assert require_same(folder, bucket(folder), tmp_path) > 4


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
