"""The sidecar of a shard: what DuckDB, pandas and img2dataset's users find in it."""

from __future__ import annotations

import hashlib
import json

import duckdb
import pandas as pd
import pytest

from mmstream.converting import sidecar as module
from mmstream.converting.quality.hashes import content_hash, text_of
from mmstream.converting.sidecar import SCHEMA, SidecarWriter, open_sidecar, sidecar_name
from mmstream.dataset.open import open_dataset
from mmstream.errors import ConfigError
from mmstream.storage import open_store
from tests.helpers.convert_corpus import interrupted, make_corpus, run, tree, write_rows
from tests.helpers.corpora import jpeg


@pytest.fixture
def corpus(tmp_path):
    return make_corpus(tmp_path)


def table(folder):
    """Return the rows of all sidecars, as a user of DuckDB gets them."""
    query = duckdb.sql(f"SELECT * FROM '{folder}/*.parquet' ORDER BY key")
    return [dict(zip(query.columns, row, strict=True)) for row in query.fetchall()]


def test_each_sample_and_each_reject_has_a_row_in_duckdb(corpus, tmp_path):
    run(corpus, tmp_path / "out")
    rows = table(tmp_path / "out")
    assert [row["row"] for row in rows] == list(range(1, 41))
    assert {row["file"] for row in rows} == {"rows.jsonl"}
    rejected = {row["row"]: row["error_message"] for row in rows if row["status"] == "rejected"}
    lines = (tmp_path / "out" / "rejects.jsonl").read_bytes().splitlines()
    assert rejected == {line["row"]: line["reason"] for line in map(json.loads, lines)}
    assert len(rejected) == 2


def test_pandas_opens_a_folder_of_sidecars(corpus, tmp_path):
    run(corpus, tmp_path / "out")
    frame = pd.concat(map(pd.read_parquet, sorted((tmp_path / "out").glob("*.parquet"))))
    assert frame["row"].tolist() == list(range(1, 41))
    assert frame["status"].value_counts().to_dict() == {"success": 38, "rejected": 2}
    assert frame.query("status == 'rejected'")["index"].isna().all()
    first = frame.iloc[0]
    assert [medium["field"] for medium in first["media"]] == ["jpg"]
    assert len(first["text_xxh3"]) == 16


def test_the_row_of_a_sample_says_what_the_tar_holds(corpus, tmp_path):
    run(corpus, tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    samples = [row for row in table(tmp_path / "out") if row["status"] == "success"]
    assert len(samples) == len(dataset)
    for row in samples:
        sample = dataset.find(f"{row['shard']}[{row['index']}]")
        assert sample["__key__"] == row["key"]
        fields = {name: data for name, data in sample.items() if name[:2] != "__"}
        assert row["num_bytes"] == sum(map(len, fields.values()))
        assert row["sha256"] == hashlib.sha256(sample["jpg"]).hexdigest()
        assert row["caption"] == sample["txt"].decode()
        assert row["text_xxh3"] == content_hash(text_of(fields))
        assert row["id"] == json.loads(sample["json"])["id"]
        (medium,) = row["media"]
        assert medium["field"] == "jpg"
        assert medium["kind"] == "image"
        assert medium["num_bytes"] == len(sample["jpg"])
        assert medium["xxh3"] == content_hash(sample["jpg"])


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        ({"license": "CC-BY-4.0"}, "license", "CC-BY-4.0"),
        ({"LICENSE": "cc0"}, "license", "cc0"),
        ({"licence": 4}, "license", "4"),
        ({"license": None}, "license", None),
        ({"URL": "https://host/a.jpg?w=3"}, "url", "https://host/a.jpg?w=3"),
        ({"source": "https://host/a.jpg"}, "url", "https://host/a.jpg"),
        ({"source": "flickr"}, "url", None),
        ({"url": "https://me:secret@host/a.jpg"}, "url", "https://***@host/a.jpg"),
        (
            {"url": "https://h/a?X-Amz-Signature=1/f&v=2"},
            "url",
            "https://h/a?X-Amz-Signature=***&v=2",
        ),
        ({"uid": 17}, "id", "17"),
    ],
)
def test_licence_url_and_id_come_from_the_row(tmp_path, row, column, value):
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    rows = write_rows(tmp_path / "rows.jsonl", [{"image": "a.jpg", "text": "a cat", **row}])
    run(rows, tmp_path / "out")
    assert table(tmp_path / "out")[0][column] == value


def test_samples_with_several_media_or_none_have_a_list(tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(i))
    turns = [
        {"role": "user", "content": "<image><image>what?"},
        {"role": "assistant", "content": "a"},
    ]
    rows = [{"messages": turns, "images": ["0.jpg", "1.jpg"]}, {"text": "only words"}]
    run(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out")
    several, none = table(tmp_path / "out")
    assert [medium["field"] for medium in several["media"]] == ["0.jpg", "1.jpg"]
    assert several["num_text_bytes"] == len("what?\na")
    assert none["media"] == []
    assert none["num_text_bytes"] == len("only words")


def test_a_row_with_several_captions_has_a_row_for_each_of_its_samples(tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    rows = write_rows(tmp_path / "rows.jsonl", [{"image": "a.jpg", "captions": ["a", "b"]}])
    run(rows, tmp_path / "out", captions="each")
    assert [(row["row"], row["caption"]) for row in table(tmp_path / "out")] == [(1, "a"), (1, "b")]


def test_the_split_is_a_column_over_all_splits(corpus, tmp_path):
    run(corpus, tmp_path / "out", splits={"train": 0.5, "val": 0.5})
    rows = duckdb.sql(f"SELECT split, count(*) FROM '{tmp_path}/out/*/*.parquet' GROUP BY split")
    counts = dict(rows.fetchall())
    assert set(counts) == {"train", "val"}
    assert sum(counts.values()) == 40


def test_a_shard_of_rejects_alone_has_a_sidecar_and_no_tar(tmp_path):
    rows = [{"image": "absent.jpg", "text": "a"}] * 2 + [{"text": "good"}] * 2
    run(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out", samples_per_shard=2)
    assert not (tmp_path / "out/shard-000000.tar").exists()
    assert [row["status"] for row in table(tmp_path / "out")] == ["rejected"] * 2 + ["success"] * 2
    (tmp_path / "out/shard-000000.parquet").unlink()
    run(tmp_path / "rows.jsonl", tmp_path / "out", samples_per_shard=2)
    assert (tmp_path / "out/shard-000000.parquet").exists()


def test_without_sidecars_there_are_none_and_it_is_another_conversion(corpus, tmp_path):
    run(corpus, tmp_path / "out", sidecar=False)
    assert not list((tmp_path / "out").glob("*.parquet"))
    with pytest.raises(ConfigError, match="sidecar was False and is now True"):
        run(corpus, tmp_path / "out")


def test_an_interrupted_conversion_gives_the_same_sidecars(corpus, tmp_path, monkeypatch):
    run(corpus, tmp_path / "whole")
    interrupted(monkeypatch, corpus, tmp_path / "out", after=2)
    run(corpus, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_overwriting_with_fewer_shards_leaves_no_old_sidecar(corpus, tmp_path):
    run(corpus, tmp_path / "out", samples_per_shard=4)
    run(corpus, tmp_path / "out", samples_per_shard=20, overwrite=True)
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 2


def test_a_lost_sidecar_is_written_again_and_a_changed_one_with_check(corpus, tmp_path):
    run(corpus, tmp_path / "out")
    before = tree(tmp_path / "out")
    (tmp_path / "out/shard-000001.parquet").unlink()
    assert run(corpus, tmp_path / "out").num_repaired == 1
    assert tree(tmp_path / "out") == before
    changed = bytearray(before["shard-000002.parquet"])
    changed[100] ^= 1
    (tmp_path / "out/shard-000002.parquet").write_bytes(changed)
    assert run(corpus, tmp_path / "out", check=True).num_repaired == 1
    assert tree(tmp_path / "out") == before


def test_no_row_becomes_a_sample_and_no_sidecar_stays(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"image": "absent.jpg", "text": "a"}])
    with pytest.raises(Exception, match="none of 1 rows became a sample"):
        run(rows, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_row_groups_are_bounded_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_GROUP_BYTES", 10 * module.ROW_BYTES)
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    rows = [{"text": f"row {i}"} for i in range(25)]
    rows[3]["license"] = "x" * 5000
    rows += [{"image": "a.jpg", "text": "a cat"}] * 3
    run(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out", samples_per_shard=100)
    parquet = open_sidecar(open_store(str(tmp_path / "out")), "shard-000000.tar")
    groups = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
    assert groups == [4, 10, 10, 3, 1]  # a row with a medium takes as much as six others


def test_a_large_sidecar_is_read_in_ranges(corpus, tmp_path, monkeypatch):
    run(corpus, tmp_path / "out")
    store = open_store(str(tmp_path / "out"))
    whole = open_sidecar(store, "shard-000000.tar").read()
    monkeypatch.setattr(module, "MAX_BUFFERED_BYTES", 0)
    assert open_sidecar(store, "shard-000000.tar").read() == whole


def test_a_failed_shard_leaves_no_sidecar(tmp_path):
    store = open_store(str(tmp_path))
    with pytest.raises(KeyboardInterrupt), SidecarWriter(store, "shard-000000.tar"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_all_sidecars_have_the_same_columns(corpus, tmp_path):
    run(corpus, tmp_path / "out")
    store = open_store(str(tmp_path / "out"))
    assert sidecar_name("shard-000000.tar") == "shard-000000.parquet"
    for i in range(5):
        schema = open_sidecar(store, f"shard-{i:06d}.tar").schema_arrow
        assert schema.names == SCHEMA.names
