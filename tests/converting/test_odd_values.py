"""300 odd values from each source of rows: every row is a sample or a reject, and no other row."""

from __future__ import annotations

import csv
import io
import json
import struct
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mmstream as mm
from tests.helpers.convert_corpus import run, values
from tests.helpers.odd_values import NUM_VALUES, odd_lines, odd_rows, odd_tables, odd_values


def _require_all_rows(rows, dest, num_rows, num_good=NUM_VALUES, **options):
    report = run(rows, dest, max_rejects=1.0, samples_per_shard=5000, **options)
    with (dest / "rejects.jsonl").open() as lines:
        reasons = [json.loads(line)["reason"] for line in lines]
    assert all(reasons)
    assert (report.num_rows, len(reasons)) == (num_rows, report.num_rejects)
    assert report.num_samples + report.num_rejects == num_rows
    texts = [sample.get("txt") for sample in mm.open_dataset(dest)]
    assert sum(text == b"fine" for text in texts) >= num_good


def _write_table(path, delimiter):
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        writer.writerow(["id", "text"])
        for line in odd_lines():
            odd = line.decode("utf-8", "surrogateescape")
            writer.writerows([["good", "fine"], ["odd", odd]])


def _write_tar(path):
    with tarfile.open(path, "w") as tar:
        for number, line in enumerate(odd_lines()):
            for name, data in (("a.txt", b"fine"), ("b.json", line), ("b.txt", line)):
                member = tarfile.TarInfo(f"{number:05}{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def _write_json(path, before, between, behind):
    lines = [b'{"text": "fine"}' + between + line for line in odd_lines()]
    path.write_bytes(before + between.join(lines) + behind)


WRITERS = {
    "jsonl": lambda path: _write_json(path, b"", b"\n", b"\n"),
    "csv": lambda path: _write_table(path, ","),
    "tsv": lambda path: _write_table(path, "\t"),
    "tar": _write_tar,
}


def test_odd_values_of_python_end_no_conversion(tmp_path):
    _require_all_rows(odd_rows(), tmp_path / "out", 2 * NUM_VALUES)


def test_odd_values_of_pandas_end_no_conversion(tmp_path):
    pandas = pytest.importorskip("pandas")
    odd = pandas.Series(odd_values(), dtype=object)
    frame = pandas.DataFrame({"text": "fine", "odd": odd})
    _require_all_rows(frame, tmp_path / "out", NUM_VALUES, 100)


def test_odd_rows_of_a_stream_of_hugging_face_end_no_conversion(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.IterableDataset.from_generator(
        lambda: (row for row in odd_rows() if isinstance(row, dict))
    )
    num_rows = sum(isinstance(row, dict) for row in odd_rows())
    _require_all_rows(rows, tmp_path / "out", num_rows)
    ordered = [{"a": "1", "b": "2"}, {"b": "3", "a": "4"}, {"b": 5, "c": [6]}]
    assert values(datasets.IterableDataset.from_generator(lambda: iter(ordered))) == ordered


@pytest.mark.parametrize("kind", WRITERS)
def test_odd_texts_of_files_end_no_conversion(tmp_path, kind):
    WRITERS[kind](tmp_path / "rows")
    _require_all_rows(tmp_path / "rows", tmp_path / "out", 2 * NUM_VALUES)


@pytest.mark.parametrize("kind", ["parquet", "stream", "feather", "table"])
def test_odd_columns_end_no_conversion(tmp_path, kind):
    files, num_rows = [], 0
    for number, table in enumerate(odd_tables()):
        path = tmp_path / f"{number}.{kind}"
        if kind == "parquet":
            try:
                pq.write_table(table, path)
            except pa.ArrowException:  # Parquet has no such value
                continue
        elif kind != "table":
            new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
            codec = pa.ipc.IpcWriteOptions(compression="zstd" if number % 2 else None)
            with path.open("wb") as file, new(file, table.schema, options=codec) as writer:
                writer.write_table(table)
        files.append(table if kind == "table" else path)
        num_rows += table.num_rows
    assert num_rows >= NUM_VALUES - 12
    rows = iter(files) if kind == "table" else files
    _require_all_rows(rows, tmp_path / "out", num_rows, num_good=0)


def _offsets(*numbers):
    return struct.pack(f"<{len(numbers)}i", *numbers)


@pytest.mark.parametrize("codec", ["stream", "feather", "table"])
@pytest.mark.parametrize(
    "column",
    [
        pa.array(["he", "ll", "o"]),
        pa.array([b"he", b"ll", b"o"]),
        pa.array([{"bytes": b"he"}, {"bytes": b"ll"}, {"bytes": b"o"}]),
        pa.array([[{"content": "he"}], [{"content": "ll"}], [{"content": "o"}]]),
        pa.ListArray.from_arrays(pa.array([0, 2, 4, 5], pa.int32()), pa.array(list("hello"))),
        pa.array(["he", "ll", "o"]).dictionary_encode(),
    ],
    ids=lambda column: str(column.type),
)
@pytest.mark.parametrize("lie", [(0, 4, 2, 5), (0, 2, 4, 9), (-9, 2, 4, 5)])
def test_offsets_that_lead_out_of_an_arrow_file_are_named(tmp_path, codec, column, lie):
    path = tmp_path / "rows.arrow"
    table = pa.table({"text": ["a", "b", "c"], "odd": column})
    new = pa.ipc.new_file if codec == "feather" else pa.ipc.new_stream
    with path.open("wb") as file, new(file, table.schema) as writer:
        writer.write_table(table)
    data = path.read_bytes()
    assert data.count(_offsets(0, 2, 4, 5)) == 1
    path.write_bytes(data.replace(_offsets(0, 2, 4, 5), _offsets(*lie)))
    rows = pa.ipc.open_stream(path.read_bytes()).read_all() if codec == "table" else path
    with pytest.raises(
        mm.ConfigError, match=r"damaged Arrow after row 0 \(.*fetch or write it again"
    ):
        run(rows, tmp_path / "out")


def test_a_text_that_is_not_utf8_in_a_chat_of_a_table_is_one_reject(tmp_path):
    texts = pa.array([b"yes", b"\xff", b"no"])
    texts = pa.Array.from_buffers(pa.string(), 3, texts.buffers())
    turns = pa.StructArray.from_arrays([pa.array(["user"] * 3), texts], ["role", "content"])
    chats = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), turns)
    table = pa.table({"messages": chats})
    with (tmp_path / "a.arrow").open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    pq.write_table(table, tmp_path / "a.parquet")
    for rows in (table, tmp_path / "a.arrow", tmp_path / "a.parquet"):
        first, second, third = values(rows)
        assert first == {"messages": [{"role": "user", "content": "yes"}]}
        assert "UnicodeDecodeError" in str(second)
        assert third == {"messages": [{"role": "user", "content": "no"}]}


TEXTS, NUMBERS = pa.array(["yesyes", "QQQQ", "no"]), pa.array([0, 1, 2], pa.int32())
KINDS = pa.array([0, 0, 0], pa.int8())


@pytest.mark.parametrize(
    "column",
    [
        pa.UnionArray.from_sparse(KINDS, [TEXTS, NUMBERS]),
        pa.UnionArray.from_dense(KINDS, NUMBERS, [TEXTS, NUMBERS]),
        pa.RunEndEncodedArray.from_arrays(pa.array([1, 2, 3], pa.int32()), TEXTS),
    ],
    ids=["sparse union", "dense union", "run ends"],
)
def test_a_text_that_is_not_utf8_in_any_layout_of_arrow_is_one_reject(tmp_path, column):
    table = pa.table({"odd": column})
    with (tmp_path / "a.arrow").open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    path = tmp_path / "a.arrow"
    path.write_bytes(path.read_bytes().replace(b"QQQQ", b"QQ\xff\xff"))
    first, second, third = values(path)
    assert (first, third) == ({"odd": "yesyes"}, {"odd": "no"})
    assert "UnicodeDecodeError" in str(second)


def test_a_row_of_a_table_that_lost_its_chat_is_no_picture_alone(tmp_path):
    chat = [{"role": "user", "content": "?"}]
    table = pa.Table.from_pylist(
        [
            {"image": "a.jpg", "messages": chat, "answer": None, "label": None},
            {"image": "b.jpg", "messages": None, "answer": None},
            {"image": "c.jpg", "label": 3},
        ]
    )
    pq.write_table(table, tmp_path / "a.parquet")
    for rows in (table, tmp_path / "a.parquet"):
        assert values(rows) == [
            {"image": "a.jpg", "messages": chat},
            {"image": "b.jpg", "messages": None, "answer": None},
            {"image": "c.jpg", "label": 3},
        ]


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with (tmp_path / "a.arrow").open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    frame = pytest.importorskip("pandas").DataFrame([["a", "b"]], columns=["text", "text"])
    for rows in (table, frame, tmp_path / "a.parquet", tmp_path / "a.arrow"):
        with pytest.raises(mm.ConfigError, match="two columns are named 'text'; rename one"):
            values(rows)
