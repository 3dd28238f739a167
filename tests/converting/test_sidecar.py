"""What lies beside a shard: the sidecar for DuckDB, pandas and img2dataset's users."""

from __future__ import annotations

import hashlib
import json

import duckdb
import pytest

import mmstream as mm
from mmstream.converting import sidecar as module
from mmstream.converting.sidecar import content_hash, text_of
from mmstream.dataset import columns
from mmstream.dataset.columns import open_sidecar
from mmstream.storage import open_store
from tests.helpers.convert_corpus import pictures, run, tree, write_rows
from tests.helpers.corpora import jpeg


def table(folder):
    """Return the rows of all sidecars, as a user of DuckDB gets them."""
    query = duckdb.sql(f"SELECT * FROM '{folder}/*.parquet' ORDER BY key")
    return [dict(zip(query.columns, row, strict=True)) for row in query.fetchall()]


def test_each_sample_and_each_reject_has_a_row_in_duckdb(out):
    rows = table(out)
    assert [row["row"] for row in rows] == list(range(1, 41))
    assert {row["file"] for row in rows} == {"rows.jsonl"}
    rejected = {row["row"]: row["error_message"] for row in rows if row["status"] == "rejected"}
    lines = (out / "rejects.jsonl").read_bytes().splitlines()
    assert rejected == {line["row"]: line["reason"] for line in map(json.loads, lines)}
    assert len(rejected) == 2


def test_the_row_of_a_sample_says_what_the_tar_holds(out):
    dataset = mm.open_dataset(out)
    samples = [row for row in table(out) if row["status"] == "success"]
    assert len(samples) == len(dataset)
    for row in samples:
        sample = dataset.find(f"{row['shard']}[{row['index']}]")
        fields = {name: data for name, data in sample.items() if name[:2] != "__"}
        (medium,) = row["media"]
        expected = {
            "key": sample["__key__"],
            "num_bytes": sum(map(len, fields.values())),
            "sha256": hashlib.sha256(sample["jpg"]).hexdigest(),
            "caption": sample["txt"].decode(),
            "text_xxh3": content_hash(text_of(fields)),
            "id": json.loads(sample["json"])["id"],
        }
        assert expected.items() <= row.items()
        size, xxh3 = len(sample["jpg"]), content_hash(sample["jpg"])
        expected = {"field": "jpg", "kind": "image", "num_bytes": size, "xxh3": xxh3}
        assert expected.items() <= medium.items()


OF_ROWS = [
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
]
"""(keys of a row, a column of the sidecar, its value)"""


def test_licence_url_and_id_come_from_the_row(tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    rows = [{"image": "a.jpg", "text": "a cat", **row} for row, _, _ in OF_ROWS]
    run(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out", samples_per_shard=100)
    for found, (row, column, value) in zip(table(tmp_path / "out"), OF_ROWS, strict=True):
        assert found[column] == value, row


def test_samples_with_several_media_or_none_have_a_list(tmp_path):
    pictures(tmp_path, "0.jpg", "1.jpg")
    turns = [
        {"role": "user", "content": "<image><image>what?"},
        {"role": "assistant", "content": "a"},
    ]
    rows = [{"messages": turns, "images": ["0.jpg", "1.jpg"]}, {"text": "only words"}]
    run(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out")
    several, none = table(tmp_path / "out")
    assert [medium["field"] for medium in several["media"]] == ["0.jpg", "1.jpg"]
    assert none["media"] == []
    assert [row["num_text_bytes"] for row in (several, none)] == [
        len("what?\na"),
        len("only words"),
    ]


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
    with pytest.raises(mm.ConfigError, match="sidecar was False and is now True"):
        run(corpus, tmp_path / "out")


def test_a_lost_sidecar_is_written_again_and_a_changed_one_with_check(corpus, out):
    before = tree(out)
    (out / "shard-000001.parquet").unlink()
    assert run(corpus, out).num_repaired == 1
    assert tree(out) == before
    changed = bytearray(before["shard-000002.parquet"])
    changed[100] ^= 1
    (out / "shard-000002.parquet").write_bytes(changed)
    assert run(corpus, out, check=True).num_repaired == 1
    assert tree(out) == before


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


def test_a_large_sidecar_is_read_in_ranges(monkeypatch, out):
    store = open_store(str(out))
    whole = open_sidecar(store, "shard-000000.tar").read()
    monkeypatch.setattr(columns, "MAX_BUFFERED_BYTES", 0)
    assert open_sidecar(store, "shard-000000.tar").read() == whole
