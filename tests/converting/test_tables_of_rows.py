"""Rows in Parquet and from Python: tables, iterables, data sets of Hugging Face."""

from __future__ import annotations

import datetime
import decimal
import io
import re
import uuid
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import mmstream as mm
from mmstream.converting.draft import RowError
from mmstream.converting.rows.arrow import ParquetSource
from mmstream.converting.rows.open import open_rows
from tests.helpers.convert_corpus import (
    jsonl,
    parquet,
    run,
    shards,
    values,
    write_files,
    write_rows,
)
from tests.helpers.corpora import jpeg

ROWS = [{"id": f"r{i}", "text": f"row {i}", "n": i} for i in range(40)]


@pytest.fixture
def expected(tmp_path):
    """The shards of the rows in a file of lines."""
    run(write_rows(tmp_path / "plain.jsonl", ROWS), tmp_path / "plain")
    return shards(tmp_path / "plain")


def test_several_parquet_files_and_iterables_give_the_same_shards(tmp_path, expected):
    files = {"0.parquet": ROWS[:13], "1.parquet": ROWS[13:30], "2.parquet": ROWS[30:]}
    write_files(tmp_path, {name: parquet(rows) for name, rows in files.items()})
    with open_rows(f"{tmp_path}/*.parquet") as source:
        assert isinstance(source, ParquetSource)
        rows = list(source.select([39, 12, 13, 14, 2]).read())
    assert [row.value for row in rows] == [ROWS[i] for i in (39, 12, 13, 14, 2)]
    assert [(row.file, row.number, row.index) for row in rows[:3]] == [
        *(("2.parquet", 10, 39), ("0.parquet", 13, 12), ("1.parquet", 1, 13)),
    ]
    sources = {
        "files": f"{tmp_path}/*.parquet",
        "list": ROWS,
        "generator": iter(ROWS),
        "table": pa.Table.from_pylist(ROWS),
        "batches": iter(pa.Table.from_pylist(ROWS).to_batches(max_chunksize=9)),
    }
    for name, rows in sources.items():
        run(rows, tmp_path / name)
        assert shards(tmp_path / name) == expected, name


def test_a_null_in_a_table_is_an_absent_key_and_a_null_in_a_list_stays(tmp_path):
    table = pa.table(
        {
            "text": ["a", None],
            "parts": [[{"type": "text", "url": None}], None],
            "images": [[None, "x"], []],
            "when": [datetime.datetime(2020, 1, 2), None],
            "score": [float("nan"), 0.5],
            "bytes": [b"\xff", None],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    assert (
        values(tmp_path / "rows.parquet")
        == values(table)
        == [
            {
                "text": "a",
                "parts": [{"type": "text"}],
                "images": [None, "x"],
                "when": "2020-01-02T00:00:00",
                "bytes": b"\xff",
            },
            {"images": [], "score": 0.5},
        ]
    )


def test_only_the_columns_of_ids_are_read_for_splits(tmp_path, monkeypatch):
    rows = [{"id": i, "text": "t", "speaker": f"s{i % 3}"} for i in range(9)]
    texts = [{"text": f"t{i}"} for i in range(9)]
    files = {"a.parquet": parquet(rows), "a.jsonl": jsonl(rows), "b.parquet": parquet(texts)}
    write_files(tmp_path, files)
    read = []
    iter_batches = pq.ParquetFile.iter_batches

    def counted(self, *args, columns=None, **kwargs):
        read.append(columns)
        return iter_batches(self, *args, columns=columns, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    for key in (None, "speaker"):
        with (
            open_rows(tmp_path / "a.parquet") as table,
            open_rows(tmp_path / "a.jsonl") as lines,
        ):
            assert (table.id_hashes(key) == lines.id_hashes(key)).all()
    assert read == [["id"], ["speaker", "id"]]
    with open_rows(tmp_path / "b.parquet") as table:
        assert len(set(table.id_hashes().tolist())) == 9


def test_damaged_parquet_is_a_clear_error(tmp_path):
    path, data = tmp_path / "rows.parquet", bytearray(parquet(ROWS, "zstd"))
    path.write_bytes(data[:-30])
    with pytest.raises(mm.ConfigError, match=r"rows\.parquet: damaged Parquet"):
        run(path, tmp_path / "out")
    data[8:60] = bytes(52)
    path.write_bytes(data)
    with pytest.raises(mm.MMStreamError, match=r"rows\.parquet: row group 0 is damaged"):
        run(path, tmp_path / "out", samples_per_shard=40)


def test_parquet_that_changes_during_the_conversion_stops_it(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(parquet(ROWS))
    with open_rows(path) as source:
        rows = source.select(range(5))
        path.write_bytes(parquet(ROWS[:-1]))
        with pytest.raises(mm.MMStreamError, match="was replaced"):
            next(rows.read())


def test_values_of_python_become_json_or_a_reject_that_names_the_key(tmp_path):
    number = uuid.UUID(int=5)
    rows = [
        {"a": np.float32(0.5), "b": np.arange(3), "c": (1, 2), "d": number, "e": Path("x/y.jpg")},
        {"a": float("inf"), "b": datetime.date(2020, 1, 2), "c": decimal.Decimal("1.5"), "d": None},
        {"a": {1, 2}},
        {"a": [{"b": 2**70}]},
        {1: "a"},
        "words",
        {"a": bytearray(b"x"), "b": np.array([[1.0, np.nan]])},
    ]
    assert [(str(row), RowError) if isinstance(row, RowError) else row for row in values(rows)] == [
        {"a": 0.5, "b": [0, 1, 2], "c": [1, 2], "d": str(number), "e": "x/y.jpg"},
        {"a": None, "b": "2020-01-02", "c": 1.5, "d": None},
        ("a: a set is no JSON value, bytes or picture", RowError),
        ("b: an integer of more than 64 bits", RowError),
        ("row: the key 1 is no text", RowError),
        "words",
        {"a": b"x", "b": [[1.0, None]]},
    ]


def test_pictures_of_pillow_keep_the_bytes_of_their_file_until_they_are_loaded(tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg(1))
    untouched, loaded = Image.open(tmp_path / "a.jpg"), Image.open(tmp_path / "a.jpg")
    loaded.load()
    drawn = Image.new("RGBA", (3, 2), (1, 2, 3, 4))
    rows = [{"image": image, "text": "t"} for image in (untouched, loaded, drawn)]
    rows += [{"image": Image.new("CMYK", (3, 2)), "text": "t"}, {"image": jpeg(1), "text": "t"}]
    read = values(rows)
    assert read[0]["image"] == {"bytes": jpeg(1), "path": "a.jpg"}
    for row, image in zip(read[1:3], (loaded, drawn), strict=True):
        decoded = Image.open(io.BytesIO(row["image"]["bytes"]))
        assert decoded.format == "PNG"
        assert decoded.tobytes() == image.tobytes()
    assert re.match("image: a picture in mode CMYK, which PNG cannot hold", str(read[3]))
    run(rows[:3] + rows[4:], tmp_path / "out")
    dataset = mm.open_dataset(tmp_path / "out")
    assert [sample.get("jpg") for sample in dataset] == [jpeg(1), None, None, jpeg(1)]
    untouched.close()


def test_splits_of_a_dict_of_data_sets_become_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets")
    parts = {"train": ROWS[:30], "test": ROWS[30:]}
    splits = {name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}
    run(splits, tmp_path / "out", shuffle_seed=1)
    for name, rows in parts.items():
        texts = [sample["txt"].decode() for sample in mm.open_dataset(tmp_path / "out" / name)]
        assert sorted(texts) == sorted(row["text"] for row in rows)
    for rows, options, reason in (
        (splits, {"splits": {"a": 1.0}}, "has the splits train, test already"),
        ({"text": ["a", "b"]}, {}, "rows: a dict; pass an iterable of dicts"),
        (5, {}, "rows: of type int; pass a path"),
    ):
        with pytest.raises(mm.ConfigError, match=reason):
            run(rows, tmp_path / "other", **options)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", ["kept", "mapped", "streamed", "shuffled"])
def test_a_data_set_of_hugging_face_is_read_as_it_is_stored(tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    rows = [
        {"id": f"r{i}", "image": {"bytes": jpeg(i), "path": f"{i}.jpg"}, "text": f"row {i}"}
        for i in range(40)
    ]
    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "image": datasets.Image(),
            "text": datasets.Value("string"),
        }
    )
    dataset = datasets.Dataset.from_list(rows, features=features)
    expected = rows
    if kind == "mapped":
        dataset = dataset.map(lambda row: {"text": row["text"].upper()}, remove_columns=["id"])
        expected = [{"image": row["image"], "text": row["text"].upper()} for row in rows]
    elif kind == "streamed":
        dataset = dataset.to_iterable_dataset(num_shards=3)
    elif kind == "shuffled":
        dataset = dataset.shuffle(seed=1)
        expected = [rows[int(name[1:])] for name in dataset["id"]]
    assert values(dataset) == expected
    assert values(dataset, limit=7) == expected[:7]


def test_a_data_frame_of_pandas_gives_the_same_shards(tmp_path, expected):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS, index=[str(row["id"]) for row in ROWS])
    run(frame, tmp_path / "frame")
    assert shards(tmp_path / "frame") == expected
    frame = pandas.DataFrame(
        {
            "text": ["a", None],
            "n": pandas.array([1, None], dtype="Int64"),
            "score": [0.5, float("nan")],
            "when": pandas.to_datetime(["2020-01-02", None]),
            "kind": pandas.Categorical(["x", None]),
            "image": [b"\xff", None],
        }
    )
    first = {"text": "a", "n": 1, "score": 0.5, "when": "2020-01-02T00:00:00", "kind": "x"}
    assert values(frame) == [{**first, "image": b"\xff"}, {}]


def test_an_endless_iterable_is_read_up_to_the_limit(tmp_path):
    for was_finished in (False, True):
        rows = ({"text": f"t{number}"} for number in count())
        report = run(rows, tmp_path / "out", limit=7)
        assert (report.num_samples, report.was_finished) == (7, was_finished)
