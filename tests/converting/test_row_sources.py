"""Rows from anywhere: what holds them makes no difference to the shards."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import ssl
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import mmstream as mm
from mmstream.converting.draft import RowError
from mmstream.converting.options import RowReading
from mmstream.converting.rows import detect, json_values, records
from mmstream.converting.rows.open import open_rows
from mmstream.converting.rows.options import RowOptions
from mmstream.errors import ConfigError
from mmstream.storage import open_store
from tests.helpers.convert_corpus import rejects, run, shards, values
from tests.helpers.memory import allocations_below
from tests.helpers.web_stubs import HubStub, WebStub, running

ROWS = [
    {"id": f"r{i}", "text": text}
    for i, text in enumerate(
        [
            "plain",
            'with "quotes", commas',
            "two\nlines",
            "tab\there",
            "ÄÖ 漢字 🙂",
            "007",
            "  spaces ",
        ]
        + [f"row {i}" for i in range(33)]
    )
]


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def table(rows, delimiter=","):
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def rejected_rows(folder):
    return [json.loads(line) for line in (folder / "rejects.jsonl").read_bytes().splitlines()]


def zstd(data):
    return pa.Codec("zstd").compress(data, asbytes=True)


def parquet(rows):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=9)
    return file.getvalue()


FORMS = {
    "rows.jsonl": lines(ROWS),
    "dense.json": json.dumps(ROWS).encode(),
    "indented.json": json.dumps(ROWS, indent=2).encode(),
    "stream.json": "\n".join(json.dumps(row, indent=2) for row in ROWS).encode(),
    "rows.csv": table(ROWS),
    "excel.csv": b"\xef\xbb\xbf" + table(ROWS, ";"),
    "rows.tsv": table(ROWS, "\t"),
    "members.jsonl.gz": gzip.compress(lines(ROWS[:9])) + gzip.compress(lines(ROWS[9:])),
    "frames.jsonl.zst": zstd(lines(ROWS[:9])) + zstd(lines(ROWS[9:])),
    "streams.jsonl.bz2": bz2.compress(lines(ROWS[:9])) + bz2.compress(lines(ROWS[9:])),
    "rows.jsonl.xz": lzma.compress(lines(ROWS)),
    "rows.csv.gz": gzip.compress(table(ROWS)),
    "no name": zstd(json.dumps(ROWS, indent=1).encode()),
}


@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle_seed": 3}, {"splits": {"a": 0.5, "b": 0.5}, "shuffle_seed": 3}, {"limit": 11}],
    ids=str,
)
def test_rows_give_the_same_shards_whatever_is_copied_first(tmp_path, options):
    (tmp_path / "plain.jsonl").write_bytes(lines(ROWS))
    run(tmp_path / "plain.jsonl", tmp_path / "expected", **options)
    expected = shards(tmp_path / "expected")
    assert len(expected) >= 6
    for name in ("dense.json", "rows.csv", "members.jsonl.gz"):  # lines, a spool, unpacked lines
        (tmp_path / name).write_bytes(FORMS[name])
        run(tmp_path / name, tmp_path / f"out-{name}", **options)
        assert shards(tmp_path / f"out-{name}") == expected, name


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_the_same_in_every_form(tmp_path, form):
    (tmp_path / form).write_bytes(FORMS[form])
    assert values(tmp_path / form) == ROWS


COMPRESSORS = {
    "gz": gzip.compress,
    "zst": zstd,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}
"""{extension: how a file of it is made}"""


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("form", ["rows.jsonl", "indented.json", "rows.csv", "rows.tsv"])
def test_text_files_may_be_compressed_in_any_way(tmp_path, form, compressor):
    path = tmp_path / f"{form}.{compressor}"
    path.write_bytes(COMPRESSORS[compressor](FORMS[form]))
    assert values(path) == ROWS


@pytest.mark.parametrize("codec", ["snappy", "gzip", "brotli", "zstd", "lz4", "none"])
def test_parquet_may_be_compressed_in_any_way(tmp_path, codec):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", compression=codec)
    assert values(tmp_path / "rows.parquet") == ROWS


@pytest.mark.parametrize("codec", ["lz4", "zstd", "uncompressed"])
def test_feather_files_may_be_compressed_in_any_way(tmp_path, codec):
    feather.write_feather(pa.Table.from_pylist(ROWS), tmp_path / "a.feather", compression=codec)
    assert values(tmp_path / "a.feather") == ROWS
    assert values(tmp_path) == ROWS  # the file is found in its folder


def test_files_are_joined_without_losing_a_row_and_each_may_be_of_another_kind(tmp_path):
    (tmp_path / "1.jsonl").write_bytes(lines(ROWS[:5]).rstrip(b"\n"))
    (tmp_path / "2.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(ROWS[5:10]) + b"{bad\n")
    (tmp_path / "3.csv").write_bytes(table(ROWS[10:20]))
    (tmp_path / "4.json").write_bytes(json.dumps(ROWS[20:]).encode())
    files = [tmp_path / name for name in ("1.jsonl", "2.jsonl", "3.csv", "4.json")]
    all_rows = values(files)
    assert isinstance(all_rows.pop(10), RowError)
    assert all_rows == ROWS
    run(files, tmp_path / "out")
    rejected = rejected_rows(tmp_path / "out")
    assert [(reject["file"], reject["row"]) for reject in rejected] == [("2.jsonl", 6)]
    run(f"{tmp_path}/[1-4].*", tmp_path / "pattern")
    assert shards(tmp_path / "pattern") == shards(tmp_path / "out")
    assert values(files, limit=12)[-1] == ROWS[10]


def test_files_with_one_name_are_told_apart(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part.jsonl").write_bytes(b"[]\n" + lines(ROWS[:3]))
    run(f"{tmp_path}/*/part.jsonl", tmp_path / "out")
    rejected = rejected_rows(tmp_path / "out")
    assert [reject["file"] for reject in rejected] == ["x/part.jsonl", "y/part.jsonl"]
    with pytest.raises(ConfigError, match="named twice"):
        run([tmp_path / "x/part.jsonl"] * 2, tmp_path / "twice")
    with pytest.raises(FileNotFoundError, match="no file fits this pattern"):
        run(f"{tmp_path}/*.parquet", tmp_path / "none")


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_json_values_are_the_same_whatever_the_size_of_a_read(tmp_path, monkeypatch, block):
    monkeypatch.setattr(json_values, "_BLOCK", block)
    rows = [{"a": '\\"}],[{', "b": [[], {}, "\\"]}, [1, [2]], "x,y", 3, None, {}, {"\\\\": "\\\\"}]
    for text in (json.dumps(rows), json.dumps(rows, indent=3), f" \n{json.dumps(rows)}\n \n"):
        (tmp_path / "rows.json").write_text(text)
        assert [json.loads(v) for v in json_values.iter_values(tmp_path / "rows.json")] == rows
    objects = [row for row in rows if isinstance(row, dict)]
    for joint in ("", "\n", " \n\n "):
        (tmp_path / "rows.json").write_text(joint.join(json.dumps(o, indent=1) for o in objects))
        assert [json.loads(v) for v in json_values.iter_values(tmp_path / "rows.json")] == objects


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"a": 1}\n{"a": 2}]', "line 2"),
        ('[{"a": 1},\n\n {"a": }]', "line 3"),
        ('[{"a": 1},\n]', "line 2"),
        ('[{"a": 1},\n {"a": "2', "line 2"),
        ('[{"a": 1}', "line 1"),
        ('\n[{"a": 1}] ,', "follows the array"),
        ('{\n"a": 1\n}\n{\n"a" 2\n}', "line 5"),
        ('{\n"a": 1\n}\nx {\n"a": 2\n}', "line 4"),
    ],
)
def test_damaged_json_is_an_error_that_names_the_line(tmp_path, text, reason):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ConfigError, match=f"not a JSON array of rows: .*{reason}"):
        values(tmp_path / "rows.json")


def test_cells_of_a_table_are_text_or_lists_and_empty_ones_are_absent(tmp_path):
    (tmp_path / "rows.csv").write_text(
        ",id,text,tags,spans,note\n"
        '0,007,"a ""b""\nc","[1, 2]","[[\'0:01\', \'0:02\']]",\n'
        "1,42,[laughs],{},{not json},x\n"
    )
    assert values(tmp_path / "rows.csv") == [
        {"id": "007", "text": 'a "b"\nc', "tags": [1, 2], "spans": [["0:01", "0:02"]]},
        {"id": "42", "text": "[laughs]", "tags": {}, "spans": "{not json}", "note": "x"},
    ]


def test_damaged_records_of_a_table_are_rejects_and_an_open_quote_is_an_error(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('id,text\n1,good\n2\n3,"da"maged\n4,too,many\n\n5,good\n')
    run(path, tmp_path / "out", rows_as="csv")
    reasons = rejects(tmp_path / "out")
    assert reasons[2] == "1 cells, but 2 columns"
    assert reasons[3].startswith("damaged quotes")
    assert reasons[4] == "3 cells, but 2 columns"
    assert list(reasons) == [2, 3, 4]
    path.write_text('id,text\n1,good\n2,"never closed\n3,good\n')
    with pytest.raises(ConfigError, match="opened in line 3 and never closed"):
        run(path, tmp_path / "other")
    path.write_bytes("id,text\n1,Käse\n2,b\n".encode("latin1"))
    with pytest.raises(ConfigError, match=r"not UTF-8 .*iconv -f latin1"):
        run(path, tmp_path / "other")
    path.write_text("id,text,text\n1,a,b\n2,a,b\n")
    with pytest.raises(ConfigError, match="two columns are named 'text'"):
        run(path, tmp_path / "other")


def test_published_tables_without_names_of_columns_are_known(tmp_path):
    (tmp_path / "cc3m.tsv").write_text(
        'a "quoted" cat\thttps://example.com/1.jpg\n"open\thttps://example.com/2\n'
    )
    assert values(tmp_path / "cc3m.tsv") == [
        {"caption": 'a "quoted" cat', "url": "https://example.com/1.jpg"},
        {"caption": '"open', "url": "https://example.com/2"},
    ]
    (tmp_path / "flickr.token").write_text("1.jpg#0\tA cat .\n1.jpg#1\tA small cat .\n")
    assert values(tmp_path / "flickr.token") == [
        {"image": "1.jpg", "caption": "A cat ."},
        {"image": "1.jpg", "caption": "A small cat ."},
    ]
    (tmp_path / "other.csv").write_text("1,a.jpg,x\n2,b.jpg,y\n")
    with pytest.raises(ConfigError, match="put a line in front"):
        values(tmp_path / "other.csv")


def test_a_table_that_may_be_two_kinds_names_the_choices(tmp_path):
    path = tmp_path / "rows.txt"
    path.write_text("a,b;c\n1,2;3\n4,5;6\n")
    with pytest.raises(ConfigError, match=r"may be csv and csv with ;; choose one with rows_as="):
        values(path)
    assert values(path, rows_as="csv") == [{"a": "1", "b;c": "2;3"}, {"a": "4", "b;c": "5;6"}]


WRONG = {
    b"\x89PNG\r\n\x1a\n\0\0": "this is an image",
    b"<!DOCTYPE html><html>login</html>": "this is an HTML page",
    b"\n<html>": "this is an HTML page",
    b"<?xml version='1.0'?><Error>": "this is XML",
    b"%PDF-1.7": "this is a PDF",
    b"PK\x03\x04....[Content_Types].xml": "this is Excel; save it as csv",
    b"PK\x03\x04....a.jpg": "this is a zip archive; unpack it",
    b"PK\x03\x04....archive/data.pkl": "this is a file of torch.save; save its rows as JSONL",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:": "Git LFS pointer",
    b"\x80\x04\x95\0\0": "this is a pickle",
    b"\xff\xfea\0": "is UTF-16; save it as UTF-8",
    b"\x01\x00\x00\x00binary": "a binary file of an unknown kind",
    b"just some words": "plain text, not JSON, and no table",
    b"\x28\xb5\x2f\xfd\x00\x00": "damaged zstd",
    b"BZh91AY&SY": "damaged bzip2",
    b"": "holds no rows",
    b"[]": "holds no rows",
    b"a,b\n": "plain text",
}


@pytest.mark.parametrize("content", WRONG, ids=lambda content: WRONG[content])
def test_a_file_that_is_no_rows_is_told_what_it_is(tmp_path, content):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=WRONG[content]):
        values(tmp_path / "rows.jsonl")


def test_a_row_of_nuls_is_one_bad_row_among_good_ones(tmp_path):
    rows = b'{"text": "good"}\n' * 3 + b"\xef\xbb\xbf\0\0\n"
    (tmp_path / "rows.jsonl").write_bytes(rows)
    report = mm.convert(tmp_path / "rows.jsonl", tmp_path / "shards", progress=False)
    assert (report.num_samples, report.num_rejects) == (3, 1)


def test_coco_annotations_are_joined_by_their_image(tmp_path):
    images = [
        {"id": 7, "file_name": "a.jpg", "width": 4},
        {"id": 3, "file_name": "b.jpg", "width": 5},
        {"id": 9, "file_name": "c.jpg"},
    ]
    boxes = [
        {"id": 1, "image_id": 3, "category_id": 2, "bbox": [1, 2, 3, 4]},
        {"id": 2, "image_id": 3, "category_id": 1, "bbox": [0, 0, 1, 1]},
    ]
    captions = [{"id": 5, "image_id": i, "caption": f"caption {i}"} for i in (3, 7, 3)]
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    coco = {"info": {}, "images": images, "annotations": captions + boxes, "categories": categories}
    expected = [
        {"id": 7, "image": "a.jpg", "width": 4, "captions": ["caption 7"]},
        {
            "id": 3,
            "image": "b.jpg",
            "width": 5,
            "captions": ["caption 3", "caption 3"],
            "objects": [
                {"category": "dog", "id": 1, "category_id": 2, "bbox": [1, 2, 3, 4]},
                {"category": "cat", "id": 2, "category_id": 1, "bbox": [0, 0, 1, 1]},
            ],
        },
        {"id": 9, "image": "c.jpg"},
    ]
    for indent in (None, 2):
        (tmp_path / "captions.json").write_text(json.dumps(coco, indent=indent))
        assert values(tmp_path / "captions.json") == expected
    coco["annotations"][0]["image_id"] = 8
    (tmp_path / "captions.json").write_text(json.dumps(coco))
    with pytest.raises(ConfigError, match="image_id 8, which no image has"):
        values(tmp_path / "captions.json")


def test_a_row_of_jsonl_with_the_keys_of_coco_is_a_row(tmp_path):
    row = {"images": ["a.jpg"], "annotations": ["x"], "text": "t"}
    for rows in ([row], [row, row]):
        (tmp_path / "rows.jsonl").write_bytes(lines(rows))
        assert values(tmp_path / "rows.jsonl") == rows


def test_rows_may_come_from_standard_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data in (lines(ROWS), gzip.compress(table(ROWS))):
        read, write = os.pipe()
        os.write(write, data)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(pipe))
            assert values("-") == ROWS


def test_rows_of_one_group_go_to_one_split(tmp_path, caplog):
    rows = [{"id": i, "speaker": f"s{i % 9}", "text": f"t{i}"} for i in range(90)]
    del rows[5]["speaker"]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    splits = {"a": 0.5, "b": 0.5}
    run(tmp_path / "rows.jsonl", tmp_path / "out", splits=splits, split_by="speaker")
    assert "1 of 90 rows lack this key" in caplog.text
    speakers = {}
    with open_rows(tmp_path / "rows.jsonl") as source:
        hashes = source.id_hashes("speaker")
        assert (hashes != source.id_hashes()).sum() == 89
    for row, value in zip(rows, hashes.tolist(), strict=True):
        speakers.setdefault(row.get("speaker"), set()).add(value)
    assert all(len(group) == 1 for group in speakers.values())
    with pytest.raises(ConfigError, match="split_by='nobody': no row has this key"):
        run(tmp_path / "rows.jsonl", tmp_path / "other", splits=splits, split_by="nobody")


def test_consecutive_rows_about_one_medium_are_grouped(tmp_path):
    rows = [
        {"video": "a.mp4", "start": 0, "caption": "x"},
        {"video": "a.mp4", "start": 4, "caption": "y"},
        {"video": "b.mp4", "start": 0, "caption": "z"},
        {"text": "alone"},
        {"video": "a.mp4", "start": 9, "caption": "w"},
    ]
    expected = [
        {
            "video": "a.mp4",
            "segments": [{"start": 0, "caption": "x"}, {"start": 4, "caption": "y"}],
        },
        *rows[2:],
    ]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    assert values(tmp_path / "rows.jsonl", group_spans=True) == expected
    with open_rows(tmp_path / "rows.jsonl", RowOptions(group_spans=True)) as source:
        read = list(source.select(range(source.num_rows)).read())
    assert [(row.index, row.number) for row in read] == [(0, 1), (1, 3), (2, 4), (3, 5)]


def test_the_rows_of_a_temporary_copy_can_be_taken_to_another_machine(tmp_path):
    (tmp_path / "rows.csv").write_bytes(table(ROWS))
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS))
    for name, stays in (("rows.csv", False), ("rows.jsonl", True)):
        with open_rows(tmp_path / name) as source:
            rows = source.select(range(3, 9))
            detached = rows.detached()
            expected = list(rows.read())
        assert list(detached.read()) == expected
        assert (detached is rows) is stays
        assert len(detached) == 6


def test_a_limit_reads_no_further(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_BLOCK", 64)
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS))
    (tmp_path / "bad.json").write_text('[{"text": "a"}, {"text": "b"}, broken')
    with open_rows(tmp_path / "rows.jsonl", RowOptions(limit=3)) as source:
        first = source.sha256
    with (tmp_path / "rows.jsonl").open("ab") as file:
        file.write(b"more\n")
    with open_rows(tmp_path / "rows.jsonl", RowOptions(limit=3)) as source:
        assert (source.sha256, source.num_rows) == (first, 3)
    assert values(tmp_path / "bad.json", limit=2) == [{"text": "a"}, {"text": "b"}]
    with pytest.raises(ConfigError, match="limit=0"):
        RowReading(limit=0)


def test_arrow_files_and_saved_data_sets_are_read(tmp_path):
    table = pa.Table.from_pylist([{"text": f"t{i}", "id": None} for i in range(70)])
    for split in ("train", "test"):
        (tmp_path / "saved" / split).mkdir(parents=True)
        (tmp_path / "saved" / split / "state.json").write_text("{}")
        path = tmp_path / "saved" / split / "data-00000-of-00001.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (tmp_path / "saved/dataset_dict.json").write_text("{}")
    expected = [{"text": f"t{i}"} for i in range(70)]
    assert values(path) == expected
    assert values(path, rows_as="arrow") == expected
    splits = run(tmp_path / "saved", tmp_path / "out").splits
    assert {name: split.num_samples for name, split in splits.items()} == {"train": 70, "test": 70}
    feather = pa.OSFile(str(tmp_path / "a.feather"), "wb")
    with feather, pa.ipc.new_file(feather, table.schema) as writer:
        writer.write_table(table)
    assert values(tmp_path / "a.feather") == expected
    (tmp_path / "cut.arrow").write_bytes(path.read_bytes()[:600])
    with pytest.raises(ConfigError, match=r"cut\.arrow: damaged Arrow behind row 0"):
        values(tmp_path / "cut.arrow")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ('{"text": "a"},', "a comma stands behind the value"),
        ("{'text': 'a'}", "a dict of Python"),
        ('{"text": None}', "a dict of Python"),
    ],
)
def test_usual_mistakes_in_lines_have_a_hint(tmp_path, line, hint):
    (tmp_path / "rows.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
    assert hint in str(values(tmp_path / "rows.jsonl")[1])


def test_a_list_as_python_writes_it_has_a_hint(tmp_path):
    (tmp_path / "rows.json").write_text("[{'text': 'a'},\n{'text': 'b'}]")
    with pytest.raises(ConfigError, match="this looks like Python's lists"):
        values(tmp_path / "rows.json")


@pytest.mark.parametrize("name", ["image", "frame"])
def test_pixels_of_numpy_are_rejects_that_say_what_to_pass(name):
    row = {name: np.zeros((4, 4, 3), np.uint8), "text": "t"}
    assert "pass PIL.Image.fromarray(array)" in str(values([row])[0])


def test_rows_of_a_server_without_ranges_are_read_whole(tmp_path):
    objects = {"rows.jsonl": b'{"text": "t"}\n' * 9000}
    with running(WebStub, objects, has_ranges=False) as server:
        assert len(values(f"{server.url}/rows.jsonl")) == 9000


REMOTE = {name: FORMS[name] for name in ("rows.jsonl", "members.jsonl.gz", "rows.csv")}
REMOTE["rows.parquet"] = parquet(ROWS)


def test_rows_come_from_an_https_server_that_is_trusted_and_from_no_other(tmp_path, certificate):
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate)
    with running(WebStub, dict(REMOTE), tls=serving) as server:
        with pytest.raises(ConfigError, match="certificate verify failed"):
            values(f"{server.url}/rows.jsonl")
        urls = [f"{server.url}/{name}" for name in REMOTE]
        command = [sys.executable, "-m", "mmstream", "convert", *urls, tmp_path / "remote"]
        trusting = os.environ | {"SSL_CERT_FILE": str(certificate)}  # read at the first import
        subprocess.run(command, env=trusting, check=True, capture_output=True)
    paths = [tmp_path / name for name in REMOTE]
    for path in paths:
        path.write_bytes(REMOTE[path.name])
    run(paths, tmp_path / "local", samples_per_shard=5000)
    assert shards(tmp_path / "remote") == shards(tmp_path / "local")


def test_rows_come_from_the_hub_of_hugging_face_by_name_by_pattern_and_by_folder(monkeypatch):
    pytest.importorskip("huggingface_hub")
    parts = {"train-0.parquet": parquet(ROWS[:20]), "train-1.parquet": parquet(ROWS[20:])}
    files = {"notes/rows.jsonl.zst": zstd(lines(ROWS))}
    files |= {f"data/{name}": data for name, data in parts.items()}
    objects = {f"datasets/user/words/{name}": data for name, data in files.items()}
    with running(HubStub, objects) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecret")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        for name in ("notes/rows.jsonl.zst", "data/train-*.parquet", "data", "data/"):
            assert values(f"hf://datasets/user/words/{name}") == ROWS, name


@pytest.mark.s3
def test_rows_come_from_a_real_s3_server_by_name_by_pattern_and_by_folder(s3, tmp_path):
    folder = f"{s3}/{tmp_path.name}"
    store = open_store(folder)
    for name, data in REMOTE.items():
        store.write(name, data)
        assert values(f"{folder}/{name}") == ROWS
    assert values([f"{folder}/rows.jsonl", f"{folder}/*.gz"]) == ROWS * 2
    run([f"{folder}/rows.jsonl", f"{folder}/*.gz"], tmp_path / "remote")
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS) * 2)
    run(tmp_path / "rows.jsonl", tmp_path / "local")
    assert shards(tmp_path / "remote") == shards(tmp_path / "local")
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl: no such object"):
        values(f"{folder}/none.jsonl")


def test_an_array_of_one_line_takes_the_memory_of_a_block_however_long_it_is(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "a row of some words " * 20}] * 40_000))
    assert path.stat().st_size > 16e6
    with allocations_below(8 << 20):
        assert detect.text_kind(path, "rows.json") == ("json", "")
        json_values.write_lines(path, tmp_path / "lines", None)
    assert (tmp_path / "lines").read_bytes().count(b"\n") == 40_000


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[1]\n[2]\n", "jsonl"),
        ("\n \n[1]\n\n[2]", "jsonl"),
        ("[1, 2]\n \n", "json"),
        ("[1,\n2]", "json"),
        ("[" + "1," * 70_000 + "1]\n[2]", "jsonl"),
        ("[" + "1," * 70_000 + "1]\n\n", "json"),
        ("\ufeff" + '{"a": 1}', "jsonl"),
        ('{"a":\n1}\n{"a": 2}', "json"),
    ],
    ids=["two", "blank", "one", "broken", "long-two", "long-one", "object", "pretty"],
)
def test_lists_of_one_line_are_rows_only_where_others_follow(tmp_path, text, kind):
    (tmp_path / "rows").write_text(text, encoding="utf-8")
    assert detect.text_kind(tmp_path / "rows", "rows") == (kind, "")


@pytest.mark.parametrize("form", ["jsonl", "json", "object", "python"])
def test_nan_and_infinity_are_null_as_in_rows_from_python(tmp_path, form):
    rows = [
        {"id": "1", "text": 'NaN "\\ Infinity', "scores": [float("nan"), 1, -float("inf")]},
        {"id": "2", "text": "y", "scores": [float("inf"), 2, 3]},
    ]
    written = {
        "jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "json": json.dumps(rows),
        "object": json.dumps({"data": rows}, indent=1),
    }
    source = rows
    if form != "python":
        source = tmp_path / "rows"
        source.write_text(written[form])
    assert values(source) == [
        {"id": "1", "text": 'NaN "\\ Infinity', "scores": [None, 1, None]},
        {"id": "2", "text": "y", "scores": [None, 2, 3]},
    ]


@pytest.mark.parametrize("line", [b'{"a": NaNa}', b'{"a": NaN', b'{"a": nan}', b'{"a": "NaN}'])
def test_what_is_no_json_without_nan_stays_a_reject(line):
    assert "not JSON" in str(records.parse_row(line))


def test_a_split_by_id_is_the_same_for_rows_with_nan(tmp_path):
    (tmp_path / "a").write_text('{"id": 5, "score": NaN}\n')
    (tmp_path / "b").write_text('{"id": 5, "score": 1}\n')
    hashes = []
    for name in "ab":
        with open_rows(tmp_path / name) as source:
            hashes.append(source.id_hashes().tolist())
    assert hashes[0] == hashes[1]


def test_lines_of_plain_text_are_rows_where_the_caller_says_so(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"\xef\xbb\xbfBAC01 one two\r\n\n{not json}, a\nna\xefve\nlast \xc3\xa9")
    rows = values(path, rows_as="lines")
    assert [str(row) if isinstance(row, RowError) else row for row in rows] == [
        {"text": "BAC01 one two"},
        {"text": "{not json}, a"},
        "not UTF-8: invalid continuation byte (byte 2)",
        {"text": "last \u00e9"},
    ]
    with pytest.raises(ConfigError, match="for a row of each line, as its text, rows_as='lines'"):
        values(path)
    (tmp_path / "binary").write_bytes(b"\x80\x05 a pickle")
    with pytest.raises(ConfigError, match="this is a pickle"):
        values(tmp_path / "binary", rows_as="lines")
