"""Columns of shards: what sidecars say of each stored sample, and the scalars of its json."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import suppress

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import mmstream as mm
from mmstream.converting.sidecar import SCHEMA
from mmstream.dataset import columns as module
from mmstream.dataset.columns import column_names, read_columns
from mmstream.errors import ConfigError, ShardError
from tests.helpers.convert_corpus import run, write_rows
from tests.helpers.corpora import write_corpus
from tests.helpers.media_files import audio_file, video_file

OF_ROWS = [
    {"image": "turned.jpg", "text": "a", "lang": "zh", "score": 1, "nsfw": False, "tags": ["x"]},
    {"video": "a.mp4", "text": "b", "lang": "en", "score": 0.5, "a.b": 7, "width": 3},
    {"audio": "a.wav", "text": "c", "lang": None, "nsfw": True, "long": "x" * 257},
    {"image": "absent.jpg", "text": "no sample"},
    {"text": "words alone", "lang": "d" * 256, "big": 2**80, "edge": 2**63 - 1},
    {"text": "nothing else"},
]


def turned_jpeg(width, height, orientation=6):
    """Return a JPEG whose EXIF turns it by 90 degrees."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (width, height), (9, 99, 200)).save(file, "JPEG", exif=exif.tobytes())
    return file.getvalue()


def files():
    return {
        "turned.jpg": turned_jpeg(64, 48),
        "a.mp4": video_file("mp4", num_frames=12, fps=10),
        "a.wav": audio_file("wav", seconds=1.5),
    }


@pytest.fixture
def rows(tmp_path):
    for name, data in files().items():
        (tmp_path / name).write_bytes(data)
    return write_rows(tmp_path / "rows.jsonl", OF_ROWS)


@pytest.fixture
def dataset(rows, tmp_path):
    run(rows, tmp_path / "out", samples_per_shard=100)
    return mm.open_dataset(tmp_path / "out")


def column(dataset, name, shard=0):
    return read_columns(dataset, shard, [name])[name].to_pylist()


def rewritten(path, change):
    """Write a sidecar again as a function of its table."""
    pq.write_table(change(pq.read_table(path)), path)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("key", ["000000001", "000000002", "000000003", "000000005", "000000006"]),
        ("index", [0, 1, 2, 3, 4]),
        ("row", [1, 2, 3, 5, 6]),
        ("width", [48, 64, None, None, None]),
        ("height", [64, 48, None, None, None]),
        ("aspect", [48 / 64, 64 / 48, None, None, None]),
        ("duration_s", [None, 1.2, 1.5, None, None]),
        ("num_frames", [None, 12, None, None, None]),
        ("sample_rate", [None, None, 16_000, None, None]),
        ("kind", ["image", "video", "audio", None, None]),
        ("num_media", [1, 1, 1, 0, 0]),
        ("lang", ["zh", "en", None, "d" * 256, None]),
        ("json.lang", ["zh", "en", None, "d" * 256, None]),
        ("json.score", [1.0, 0.5, None, None, None]),
        ("nsfw", [False, None, True, None, None]),
        ("json.a.b", [None, 7, None, None, None]),
        ("json.width", [None, 3, None, None, None]),
        ("json.big", [None] * 5),
        ("json.edge", [None, None, None, 2**63 - 1, None]),
        ("json.long", [None] * 5),
        ("json.tags", [None] * 5),
    ],
)
def test_a_column_has_a_value_for_each_stored_sample(dataset, name, values):
    assert len(dataset) == 5
    assert column(dataset, name) == values


def test_types_are_text_whole_numbers_decimals_and_truths(dataset):
    names = ["key", "lang", "width", "json.edge", "score", "aspect", "duration_s", "nsfw"]
    types = [values.type for values in read_columns(dataset, 0, names).values()]
    expected = [pa.string()] * 2 + [pa.int64()] * 2 + [pa.float64()] * 3 + [pa.bool_()]
    assert types == expected


def test_duckdb_reads_the_scalars(dataset):
    query = f"SELECT key FROM '{dataset.store.url}/*.parquet' WHERE json->>'lang' = 'en'"
    assert duckdb.sql(query).fetchall() == [("000000002",)]


def test_all_names_are_columns_of_the_schema_or_made_of_them(dataset):
    names = column_names(dataset)
    assert {name for name in names if "." not in name} >= {
        field.name for field in SCHEMA if field.name not in ("media", "text_xxh3")
    }
    assert {"json.lang", "json.a.b"} <= set(names)
    assert all(len(values) == 5 for values in read_columns(dataset, 0, names).values())


def test_an_unknown_name_is_an_error_with_the_nearest(dataset):
    with pytest.raises(ConfigError, match=r"langg: no such column; the nearest is json\.lang\b"):
        column(dataset, "langg")
    with pytest.raises(ConfigError, match="the nearest is height"):
        column(dataset, "heigth")


def test_a_key_of_numbers_and_texts_is_an_error_that_says_both(tmp_path):
    rows = [{"text": str(i), "score": score} for i, score in enumerate([1, 2.5, "high", 4])]
    run(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"json\.score is a number in 3 and text in 1 of 4"):
        column(mm.open_dataset(tmp_path / "out"), "score")


def test_odd_json_gives_no_scalars_or_the_last_of_a_key(tmp_path):
    odd = [b'{"a": 1, "a": 2}', b'{"a": NaN, "b": "NaN"}', b"[1]", b'"text"', b"{", b'{"a": 1e999}']
    folder = write_corpus(tmp_path / "tars", [len(odd)], lambda n: {"json": odd[n]})
    run(f"{folder}/*.tar", tmp_path / "out")
    copied = mm.open_dataset(tmp_path / "out")
    assert column(copied, "a") == [2] + [None] * 5
    assert column(copied, "json.b") == [None, "NaN"] + [None] * 4


def test_a_shard_is_read_alone_and_its_samples_may_be_missing(rows, tmp_path):
    run(rows, tmp_path / "out", samples_per_shard=2)
    dataset = mm.open_dataset(tmp_path / "out")
    assert [column(dataset, "num_media", i) for i in range(3)] == [[1, 1], [1], [0, 0]]
    path = tmp_path / "out/shard-000000.parquet"
    rewritten(path, lambda table: table.slice(1))
    assert column(dataset, "lang") == [None, "en"]
    rewritten(path, lambda table: table.slice(0, 0))
    assert column(dataset, "kind") == [None, None]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda table: pa.concat_tables([table, table]), "a sample has several rows"),
        (
            lambda table: table.set_column(
                table.schema.get_field_index("shard"), "shard", pa.array(["other.tar"] * len(table))
            ),
            r"it names other\.tar",
        ),
        (
            lambda table: table.set_column(
                table.schema.get_field_index("index"), "index", pa.array(range(3, 3 + len(table)))
            ),
            "it has sample 8, the shard 5 samples",
        ),
    ],
)
def test_a_sidecar_of_another_shard_is_an_error_with_its_name_and_the_cure(
    dataset, tmp_path, change, fault
):
    rewritten(tmp_path / "out/shard-000000.parquet", change)
    with pytest.raises(ShardError, match=f"shard-000000.parquet: .*{fault}.*--columns"):
        column(dataset, "key")


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_torn_sidecar_is_an_error(dataset, tmp_path, cut):
    path = tmp_path / "out/shard-000000.parquet"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ShardError, match=r"shard-000000\.parquet: damaged .*--columns"):
        column(dataset, "key")


def test_damage_inside_of_a_sidecar_is_an_error_or_changes_no_length(dataset, tmp_path):
    path = tmp_path / "out/shard-000000.parquet"
    data = path.read_bytes()
    for position in range(0, len(data), 37):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x55]) + data[position + 1 :])
        with suppress(ShardError, ConfigError):
            assert len(column(dataset, "json.lang")) == 5


def test_a_shard_without_a_sidecar_names_the_command(tmp_path):
    dataset = mm.open_dataset(write_corpus(tmp_path / "my tars", [3]))
    command = f"`mmstream index '{tmp_path}/my tars' --columns`"
    with pytest.raises(ConfigError, match="no such sidecar; run ") as error:
        column(dataset, "width")
    assert command in str(error.value)


def test_a_sidecar_of_an_older_version_has_all_but_the_scalars(dataset, tmp_path):
    path = tmp_path / "out/shard-000000.parquet"
    rewritten(path, lambda table: table.drop_columns(["json"]))
    assert column(dataset, "width")[0] == 48
    with pytest.raises(
        ConfigError, match=r"has no column json, .* run `mmstream index .*--columns"
    ):
        column(dataset, "lang")


def test_a_table_of_another_program_is_no_sidecar(dataset, tmp_path):
    path = tmp_path / "out/shard-000000.parquet"
    pq.write_table(pa.table({"url": ["u"] * 5, "caption": ["c"] * 5, "width": [1] * 5}), path)
    with pytest.raises(ConfigError, match=r"another program.*--columns --output FOLDER`"):
        column(dataset, "width")


def test_nothing_but_a_read_imports_pyarrow():
    code = "import sys, mmstream.dataset.columns; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_large_sidecar_is_read_in_ranges(dataset, monkeypatch):
    whole = column(dataset, "json")
    monkeypatch.setattr(module, "MAX_BUFFERED_BYTES", 0)
    assert column(dataset, "json") == whole
    assert json.loads(whole[0]) == {"lang": "zh", "score": 1, "nsfw": False}
