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
from click.testing import CliRunner
from PIL import Image

import mmstream as mm
from mmstream.cli import cli
from mmstream.converting.sidecar import SCHEMA, write_sidecars
from mmstream.dataset import columns as module
from mmstream.dataset.columns import column_names, read_columns
from mmstream.errors import ConfigError, ShardError
from mmstream.storage import open_store
from tests.helpers.convert_corpus import run, write_rows
from tests.helpers.corpora import jpeg, write_corpus
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
    """Rewrite a sidecar as a function of its table."""
    pq.write_table(change(pq.read_table(path)), path)


def without_json(table):
    """Return a sidecar as it was before there were scalars."""
    return table.drop_columns(["json"])


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
    rewritten(path, without_json)
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


@pytest.mark.parametrize("name", ["aspect", "num_media", "codec"])
def test_columns_of_another_type_are_an_error(dataset, tmp_path, name):
    def change(table):
        for column in ("width", "media"):
            texts = pa.array(["x"] * len(table))
            table = table.set_column(table.schema.get_field_index(column), column, texts)
        return table

    rewritten(tmp_path / "out/shard-000000.parquet", change)
    with pytest.raises((ShardError, ConfigError), match=r"shard-000000"):
        column(dataset, name)


def test_nothing_but_a_read_imports_pyarrow():
    names = "(mm.open_dataset, mm.Pipeline, mm.Loader, mm.PackLimits, select)"
    code = f"import sys, mmstream as mm, mmstream.dataset.select as select; {names}"
    code += "; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_large_sidecar_is_read_in_ranges(dataset, monkeypatch):
    whole = column(dataset, "json")
    monkeypatch.setattr(module, "MAX_BUFFERED_BYTES", 0)
    assert column(dataset, "json") == whole
    assert json.loads(whole[0]) == {"lang": "zh", "score": 1, "nsfw": False}


# -- mmstream index --columns: the same columns of tars that others wrote


def index(*words):
    """Run the command, and return its last line."""
    result = CliRunner().invoke(cli, ["index", *map(str, words), "--columns"])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()[-1]


@pytest.fixture
def tars(tmp_path):
    """The folder of two shards without sidecars: four good samples, and four odd ones."""
    media = files()
    contents = [
        {"jpg": media["turned.jpg"], "json": b'{"lang": "zh", "id": 3, "url": "https://h/a"}'},
        {"left.mp4": media["a.mp4"], "b.jpg": jpeg(1), "txt": b"two media"},
        {"wav": media["a.wav"], "json": b'{"lang": "en"}'},
        {"txt": b"words"},
        {"jpg": b"no picture", "mp4": media["a.mp4"][:100]},
        {"jpg": b"", "txt": b"", "json": b"{"},
        {"flac": jpeg(2)},
        {"json": b'{"lang": null, "score": 0.5}'},
    ]
    return write_corpus(tmp_path / "tars", [4, 4], contents.__getitem__)


def test_tars_of_others_get_the_same_columns(dataset, tmp_path):
    tars = tmp_path / "tars"
    tars.mkdir()
    name = "shard-000000.tar"
    (tars / name).write_bytes((tmp_path / "out" / name).read_bytes())
    assert index(tars) == "columns of 1 tar written"
    names = [name for name in column_names(dataset) if name not in ("file", "row")]
    by_index, by_convert = (
        {name: values.to_pylist() for name, values in read_columns(one, 0, names).items()}
        for one in (mm.open_dataset(tars), dataset)
    )
    assert by_index == by_convert


def test_odd_samples_are_rows_of_nulls(tars):
    assert index(tars) == "columns of 2 tars written"
    dataset = mm.open_dataset(tars)
    good, odd = ({name: column(dataset, name, i) for name in column_names(dataset)} for i in (0, 1))
    assert good["json.lang"] == ["zh", None, "en", None]
    assert good["aspect"] == [48 / 64, 64 / 48, None, None]
    assert good["num_media"] == [1, 2, 1, 0]
    assert (good["id"][0], good["url"][0]) == ("3", "https://h/a")
    assert odd["width"] == [None] * 4
    assert odd["duration_s"] == [None] * 4
    assert odd["json.score"] == [None] * 3 + [0.5]
    assert odd["num_media"] == [2, 1, 1, 0]


def test_a_damaged_sample_is_a_row_and_duplicates_are_found_with_it(tars, tmp_path):
    mm.open_dataset(tars)
    path = tmp_path / "tars/shard-000000.tar"
    data = bytearray(path.read_bytes())
    second = int(mm.open_dataset(tars).shards.offsets(0)[1])
    data[second : second + 100] = b"\xff" * 100
    path.write_bytes(data)
    index(tars)
    dataset = mm.open_dataset(tars)
    assert column(dataset, "status") == ["success", "damaged", "success", "success"]
    assert column(dataset, "num_bytes")[1] is column(dataset, "num_media")[1] is None
    assert column(dataset, "error_message")[1]
    assert mm.find_duplicates(dataset, progress=False).num_pairs["text"] == 0


def test_a_second_call_writes_what_is_missing_and_overwrite_all(tars, tmp_path):
    index(tars)
    first, second = (tmp_path / f"tars/shard-00000{i}.parquet" for i in range(2))
    whole = first.read_bytes()
    first.unlink()
    assert index(tars) == "columns of 1 tar written"
    assert index(tars) == "columns of 0 tars written"
    first.write_bytes(whole[:-9])
    rewritten(second, without_json)
    assert index(tars) == "columns of 2 tars written"
    assert first.read_bytes() == whole
    assert index(tars, "--overwrite") == "columns of 2 tars written"
    assert first.read_bytes() == whole


def test_what_the_tar_does_not_tell_is_kept_of_an_old_sidecar(rows, tmp_path):
    rows.write_bytes(rows.read_bytes().replace(b'"lang": "zh"', b'"license": "cc0"'))
    out, media = tmp_path / "out", mm.MediaOptions(max_image_side=32)
    run(rows, out, samples_per_shard=100, near_duplicates="report", media=media)
    before = pq.read_table(out / "shard-000000.parquet")
    rewritten(out / "shard-000000.parquet", without_json)
    index(out)
    after = pq.read_table(out / "shard-000000.parquet")
    key = [("key", "ascending")]
    assert after.sort_by(key).to_pylist() == before.sort_by(key).to_pylist()
    assert before["original_width"][0].as_py() == 48


def test_columns_lie_beside_an_index_elsewhere(tars, tmp_path):
    pq.write_table(pa.table({"url": ["u"]}), f"{tars}/shard-000000.parquet")
    before = (tmp_path / "tars/shard-000000.parquet").read_bytes()
    result = CliRunner().invoke(cli, ["index", tars, "--columns"])
    assert isinstance(result.exception, ConfigError)
    assert "another program" in str(result.exception)
    index(tars, "--output", tmp_path / "index")
    dataset = mm.open_dataset(tmp_path / "index", allow_foreign_urls=True)
    assert column(dataset, "lang") == ["zh", None, "en", None]
    assert (tmp_path / "tars/shard-000000.parquet").read_bytes() == before


def test_columns_of_a_tar_that_was_replaced_are_an_error(tars, tmp_path):
    index(tars)
    dataset = mm.open_dataset(write_corpus(tmp_path / "tars", [4, 4]))
    with pytest.raises(ShardError, match=r"made of a tar with another index.*--columns"):
        column(dataset, "key")
    assert index(tars) == "columns of 2 tars written"
    assert column(dataset, "json.id") == [0, 1, 2, 3]


@pytest.mark.slow
def test_processes_write_the_same_columns(tars, tmp_path):
    index(tars)
    one = (tmp_path / "tars/shard-000001.parquet").read_bytes()
    dataset = mm.open_dataset(tars)
    assert write_sidecars(dataset, overwrite=True, num_workers=2, progress=False) == 2
    assert (tmp_path / "tars/shard-000001.parquet").read_bytes() == one


@pytest.mark.s3
def test_columns_are_written_to_and_read_from_object_storage(s3, tars):
    url, local = f"{s3}/columns", open_store(tars)
    for name in ("shard-000000.tar", "shard-000001.tar"):
        open_store(url).write(name, local.read(name))
    assert index(url) == "columns of 2 tars written"
    assert column(mm.open_dataset(url), "lang") == ["zh", None, "en", None]
    assert index(url) == "columns of 0 tars written"
