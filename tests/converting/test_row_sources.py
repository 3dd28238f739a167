"""Rows from anywhere: what holds them makes no difference to the shards."""

from __future__ import annotations

import bz2
import datetime
import decimal
import gzip
import io
import json
import lzma
import os
import re
import ssl
import time
import uuid
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from PIL import Image

import mmstream as mm
from mmstream.converting.draft import RowError
from mmstream.converting.rows import records, tables
from mmstream.converting.rows.arrow import ParquetSource, iter_arrow
from mmstream.converting.rows.open import open_rows
from mmstream.storage import open_store, retry
from tests.helpers.convert_corpus import (
    jsonl,
    parquet,
    pictures,
    run,
    shards,
    table,
    values,
    write_files,
    write_rows,
)
from tests.helpers.corpora import jpeg
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


def refusal(rows, **options):
    """Return why rows are not read at all."""
    with pytest.raises(mm.ConfigError) as caught:
        values(rows, **options)
    return str(caught.value)


def rejected_rows(folder):
    return [json.loads(line) for line in (folder / "rejects.jsonl").read_bytes().splitlines()]


def zstd(data):
    return pa.Codec("zstd").compress(data, asbytes=True)


FORMS = {
    "rows.jsonl": jsonl(ROWS),
    "bom.jsonl": b"\xef\xbb\xbf" + jsonl(ROWS),
    "crlf.jsonl": jsonl(ROWS).replace(b"\n", b"\r\n"),
    "short.jsonl": jsonl(ROWS).rstrip(b"\n"),
    "dense.json": json.dumps(ROWS).encode(),
    "bom.json": b"\xef\xbb\xbf" + json.dumps(ROWS).encode(),
    "spaced.json": b" \n[" + b",".join(json.dumps(row).encode() for row in ROWS) + b"]",
    "indented.json": json.dumps(ROWS, indent=2).encode(),
    "stream.json": "\n".join(json.dumps(row, indent=2) for row in ROWS).encode(),
    "rows.csv": table(ROWS),
    "excel.csv": b"\xef\xbb\xbf" + table(ROWS, ";"),
    "rows.tsv": table(ROWS, "\t"),
    "members.jsonl.gz": gzip.compress(jsonl(ROWS[:9])) + gzip.compress(jsonl(ROWS[9:])),
    "frames.jsonl.zst": zstd(jsonl(ROWS[:9])) + zstd(jsonl(ROWS[9:])),
    "streams.jsonl.bz2": bz2.compress(jsonl(ROWS[:9])) + bz2.compress(jsonl(ROWS[9:])),
    "rows.jsonl.xz": lzma.compress(jsonl(ROWS)),
    "padded streams.jsonl.xz": bytes(8).join(
        map(lzma.compress, (jsonl(ROWS[:9]), b"", jsonl(ROWS[9:])))
    ),
    "padded streams.jsonl.bz2": bytes(3).join(
        map(bz2.compress, (jsonl(ROWS[:9]), jsonl(ROWS[9:])))
    ),
    "rows.csv.gz": gzip.compress(table(ROWS)),
    "rows.tsv.xz": lzma.compress(table(ROWS, "\t")),
    "indented.json.bz2": bz2.compress(json.dumps(ROWS, indent=2).encode()),
    **{
        f"{codec}.parquet": parquet(ROWS, codec)
        for codec in ("snappy", "gzip", "brotli", "zstd", "lz4", "none")
    },
    "no name": zstd(json.dumps(ROWS, indent=1).encode()),
    "unnamed lines": gzip.compress(jsonl(ROWS)),
}
"""Each compression holds lines, and each kind of text is compressed once."""


def values_and_ids(path):
    """Return all rows, and the hashes that decide their splits."""
    with open_rows(path) as source:
        read = [row.value for row in source.select(range(source.num_rows)).read()]
        return read, source.id_hashes().tolist()


@pytest.mark.parametrize("form", FORMS)
def test_rows_and_their_splits_are_the_same_in_every_form(tmp_path, form):
    (tmp_path / form).write_bytes(FORMS[form])
    read, ids = values_and_ids(tmp_path / form)
    assert read == ROWS
    assert ids == values_and_ids(write_rows(tmp_path / "plain.jsonl", ROWS))[1]


def test_files_are_joined_without_losing_a_row_and_each_may_be_of_another_kind(tmp_path):
    contents = {
        "1.jsonl": jsonl(ROWS[:5]).rstrip(b"\n"),
        "2.jsonl": b"\xef\xbb\xbf" + jsonl(ROWS[5:10]) + b"{bad\n",
        "3.csv": table(ROWS[10:20]),
        "4.json": json.dumps(ROWS[20:]),
    }
    files = [write_files(tmp_path, contents) / name for name in contents]
    all_rows = values(files)
    assert isinstance(all_rows.pop(10), RowError)
    assert all_rows == ROWS
    run(files, tmp_path / "out")
    rejected = rejected_rows(tmp_path / "out")
    assert [(reject["file"], reject["row"]) for reject in rejected] == [("2.jsonl", 6)]
    run(f"{tmp_path}/[1-4].*", tmp_path / "pattern")
    assert shards(tmp_path / "pattern") == shards(tmp_path / "out")
    assert values(files, limit=12)[-1] == ROWS[10]


def test_a_file_whose_bytes_cannot_be_read_is_named(tmp_path):
    with pytest.raises(mm.errors.StorageError, match=r"^/proc/self/mem: cannot be read"):
        run("/proc/self/mem", tmp_path / "out")


def test_files_with_one_name_are_told_apart(tmp_path):
    part = b"[]\n" + jsonl(ROWS[:3])
    write_files(tmp_path, {"x/part.jsonl": part, "y/part.jsonl": part})
    run(f"{tmp_path}/*/part.jsonl", tmp_path / "out")
    rejected = rejected_rows(tmp_path / "out")
    assert [reject["file"] for reject in rejected] == ["x/part.jsonl", "y/part.jsonl"]
    assert "named twice" in refusal([tmp_path / "x/part.jsonl"] * 2)
    with pytest.raises(FileNotFoundError, match="no file fits this pattern"):
        run(f"{tmp_path}/*.parquet", tmp_path / "none")


def test_json_values_are_split_at_their_ends(tmp_path):
    rows = [{"a": '\\"}],[{', "b": [[], {}, "\\"]}, [1, [2]], "x,y", 3, None, {}, {"\\\\": "\\"}]
    for last in (4, float("nan")):  # msgspec knows no NaN
        for text in (json.dumps([*rows, last]), json.dumps([*rows, last], indent=3)):
            (tmp_path / "rows.json").write_text(f" \n{text}\n \n")
            found = [json.loads(v) for v in tables.iter_values(tmp_path / "rows.json")]
            assert repr(found) == repr([*rows, last])
    objects = [row for row in rows if isinstance(row, dict)]
    for joint in ("", "\n", " \n\n "):
        (tmp_path / "rows.json").write_text(joint.join(json.dumps(o, indent=1) for o in objects))
        assert [json.loads(v) for v in tables.iter_values(tmp_path / "rows.json")] == objects


def test_a_number_of_thousands_of_digits_stops_no_array(tmp_path):
    (tmp_path / "rows.json").write_text(f'[{{"a": NaN}}, {{"b": {"1" * 5000}}}]')
    assert len(list(tables.iter_values(tmp_path / "rows.json"))) == 2


def test_a_first_line_that_is_damaged_does_not_take_the_memory_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "iter_values", None)  # which reads the whole file
    (tmp_path / "rows.jsonl").write_text('{"text": "a"\n{"text": "b"}\n')
    assert values(tmp_path / "rows.jsonl")[1:] == [{"text": "b"}]


def test_an_array_that_memory_could_not_hold_is_refused_with_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_WHOLE_BYTES", 10)
    (tmp_path / "rows.json").write_text('[{"text": "a"}]')
    assert "write one object per line" in refusal(tmp_path / "rows.json")


@pytest.mark.parametrize("delimiter", [",", "\t"], ids=["csv", "tsv"])
def test_tables_are_known_whatever_the_length_of_their_first_cells(tmp_path, delimiter):
    cells = ["A" * 100_000, "B" * 1_500_000, 'a "b"\nc' * 20_000, "a\u2028b\x85c\x0bd"]
    rows = [{"index": str(i), "image": cell, "more": "x"} for i, cell in enumerate(cells)]
    (tmp_path / "rows").write_bytes(table(rows, delimiter))
    assert values(tmp_path / "rows") == rows


NAN_ROWS = [
    {"id": "1", "text": 'NaN "\\ Infinity', "scores": [float("nan"), 1, -float("inf")]},
    {"id": "2", "text": "y", "scores": [float("inf"), 2, 3]},
]
NULL_ROWS = [
    {"id": "1", "text": 'NaN "\\ Infinity', "scores": [None, 1, None]},
    {"id": "2", "text": "y", "scores": [None, 2, 3]},
]
COCO_ROW = {"images": ["a.jpg"], "annotations": ["x"], "text": "t"}
NO_JSON = '{"a": NaNa}\n{"a": NaN\n{"a": nan}\n{"a": "NaN}\n'
LONG_LIST = [1] * 70_001
CONTENTS = {
    "cells of a table are text or lists, and empty ones are absent": (
        ",id,text,tags,spans,note\n"
        '0,007,"a ""b""\nc","[1, 2]","[[\'0:01\', \'0:02\']]",\n'
        "1,42,[laughs],{},{not json},x\n",
        {},
        [
            {"id": "007", "text": 'a "b"\nc', "tags": [1, 2], "spans": [["0:01", "0:02"]]},
            {"id": "42", "text": "[laughs]", "tags": {}, "spans": "{not json}", "note": "x"},
        ],
    ),
    "damaged records of a table are rejects": (
        'id,text\n1,good\n2\n3,"da"maged\n4,too,many\n\n5,good\n',
        {"rows_as": "csv"},
        [
            *({"id": "1", "text": "good"}, "1 cells, but 2 columns", "damaged quotes"),
            *("3 cells, but 2 columns", {"id": "5", "text": "good"}),
        ],
    ),
    "a table that may be two kinds is that of the caller": (
        "a,b;c\n1,2;3\n4,5;6\n",
        {"rows_as": "csv"},
        [{"a": "1", "b;c": "2;3"}, {"a": "4", "b;c": "5;6"}],
    ),
    "CC3M has no names of columns": (
        'a "quoted" cat\thttps://example.com/1.jpg\n"open\thttps://example.com/2\n',
        {},
        [
            {"caption": 'a "quoted" cat', "url": "https://example.com/1.jpg"},
            {"caption": '"open', "url": "https://example.com/2"},
        ],
    ),
    "Flickr has no names of columns": (
        "1.jpg#0\tA cat .\n1.jpg#1\tA small cat .\n",
        {},
        [{"image": "1.jpg", "caption": text} for text in ("A cat .", "A small cat .")],
    ),
    "a row with the keys of COCO": (json.dumps(COCO_ROW), {}, [COCO_ROW]),
    "rows with the keys of COCO": (f"{json.dumps(COCO_ROW)}\n" * 2, {}, [COCO_ROW] * 2),
    "a comma behind a line": ('{"text": "a"},\n[]', {}, ["trailing characters", []]),
    "dicts of Python": (
        "{\"a\": 1}\n{'text': 'a'}\n{\"text\": None}\n",
        {},
        [{"a": 1}, "not JSON", "not JSON"],
    ),
    "no JSON, with NaN or without": (f"[]\n{NO_JSON}", {}, [[], *["not JSON"] * 4]),
    "NaN in lines": ("".join(f"{json.dumps(row)}\n" for row in NAN_ROWS), {}, NULL_ROWS),
    "NaN in an array": (json.dumps(NAN_ROWS), {}, NULL_ROWS),
    "NaN inside an object": (json.dumps({"data": NAN_ROWS}, indent=1), {}, NULL_ROWS),
    "half an emoji, and byte order marks": (
        '\ufeff{"a": "\\ud83d \\ud83d\\ude00"}\n',
        {},
        [{"a": "\ufffd \U0001f600"}],
    ),
    "two lists": ("[1]\n[2]\n", {}, [[1], [2]]),
    "two lists among blank lines": ("\n \n[1]\n\n[2]", {}, 5),
    "one list": ("[1, 2]\n \n", {}, [1, 2]),
    "a list of two lines": ("[1,\n2]", {}, [1, 2]),
    "a long list and another one": (f"{json.dumps(LONG_LIST)}\n[2]", {}, [LONG_LIST, [2]]),
    "a long list alone": (f"{json.dumps(LONG_LIST)}\n\n", {}, LONG_LIST),
    "objects of several lines": ('{"a":\n1}\n{"a": 2}', {}, [{"a": 1}, {"a": 2}]),
    "lines of text": (
        b"\xef\xbb\xbfBAC01 one two\r\n\n{not json}, a\nna\xefve\nlast \xc3\xa9",
        {"rows_as": "lines"},
        [
            *({"text": "BAC01 one two"}, {"text": "{not json}, a"}),
            *("not UTF-8: invalid continuation byte (byte 2)", {"text": "last \u00e9"}),
        ],
    ),
    "a sentence of no video": (
        '{"videos": [{"video_id": 1}], "sentences": [{"video_id": 2, "caption": "x"}]}',
        {},
        [{"video": "1.mp4", "video_id": 1}, "sentences: video_id 2: no video has this id"],
    ),
    "lines of transcripts end as lines of files do": ("84-1-1 A\u2028TEXT\x85B\n84-1-2 C\n", {}, 2),
    "a transcript without a text, far from the beginning": (
        "84-1-0000 GO\n" * 6000 + "84-1-0001\n",
        {},
        [*[{"id": "84-1-0000", "audio": "84-1-0000.flac", "text": "GO"}] * 6000, "expected an id"],
    ),
    "LJSpeech": ("utt_001|Hello|hello\nutt_002|hello| \n", {"rows_as": "transcripts"}, 2),
}
"""{what holds: (content of a file, options, its rows, parts of reasons, or their number)}"""


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_of_any_content_has_the_rows_that_it_means(tmp_path, name):
    content, options, expected = CONTENTS[name]
    read = values(write_files(tmp_path, {"rows": content}) / "rows", **options)
    if isinstance(expected, int):
        assert len(read) == expected
        return
    for row, wanted in zip(read, expected, strict=True):
        assert wanted in str(row) if isinstance(row, RowError) else wanted == row


WRONG = [
    ("a", b"\x89PNG\r\n\x1a\n\0\0", "this is an image"),
    ("a", b"<!DOCTYPE html><html>login</html>", "this is an HTML page"),
    ("a", b"\n<html>", "this is an HTML page"),
    ("a", b"<?xml version='1.0'?><Error>", "this is XML"),
    ("a", b"%PDF-1.7", "this is a PDF"),
    ("a", b"PK\x03\x04....[Content_Types].xml", "this is Excel; save it as csv"),
    ("a", b"PK\x03\x04....a.jpg", "this is a zip archive; unpack it"),
    ("a", b"PK\x03\x04....archive/data.pkl", "a file of torch.save; save its rows as JSONL"),
    ("a", b"version https://git-lfs.github.com/spec/v1\noid sha256:", "Git LFS pointer"),
    ("a", b"\x80\x04\x95\0\0", "this is a pickle"),
    ("a", b"\xff\xfea\0", "is not UTF-8; say encoding='utf-16'"),
    ("a.jsonl.xz", lzma.compress(b"{}\n") + b"x" + lzma.compress(b"{}\n"), "damaged xz"),
    ("a.jsonl.bz2", bz2.compress(b"{}\n") + b"BZh9 " + bz2.compress(b"{}\n"), "damaged bzip2"),
    ("a.jsonl.bz2", bz2.compress(b"{}\n") + bz2.compress(b"{}\n")[:-5], "damaged bzip2"),
    ("a", b"\x01\x00\x00\x00binary", "a binary file of an unknown kind"),
    ("a", b"just some words", "plain text, not JSON, and no table"),
    ("rows.txt", b"Dear all,\nthese are words.\nRegards\n", "plain text, .*Rows are JSON objects"),
    ("a", b"\x28\xb5\x2f\xfd\x00\x00", "damaged zstd"),
    ("a", b"BZh91AY&SY", "damaged bzip2"),
    ("cut.jsonl.gz", gzip.compress(bytes(range(256)) * 50)[:-20], "damaged gzip"),
    ("a", b"", "holds no rows"),
    ("a", b"[]", "holds no rows"),
    ("a", b"a,b\n", "plain text"),
    ("a.json", b'[{"a": 1}\n{"a": 2}]', "not a JSON array of rows: .*line 2"),
    ("a.json", b'[{"a": 1},\n\n {"a": }]', "not a JSON array of rows: .*line 3"),
    ("a.json", b'[{"a": 1},\n]', "not a JSON array of rows: .*line 2"),
    ("a.json", b'[{"a": 1},\n {"a": "2', "not a JSON array of rows: .*line 2"),
    ("a.json", b'[{"a": 1}', "not a JSON array of rows: .*line 1"),
    ("a.json", b'\n[{"a": 1}] ,', "not a JSON array of rows: .*follows the array"),
    ("a.json", b'[{"a":\nNaN}]\n[2]', "not a JSON array of rows: .*follows the array, line 3"),
    ("a.json", b'{\n"a": 1\n}\n{\n"a" 2\n}', "not a JSON array of rows: .*line 5"),
    ("a.json", b'{\n"a": 1\n}\nx {\n"a": 2\n}', "not a JSON array of rows: .*line 4"),
    ("a.csv", b'id,text\n1,good\n2,"never\n3,good\n', "opened in line 3 and never closed"),
    ("a.csv", b"id,text,text\n1,a,b\n2,a,b\n", "two columns are named 'text'"),
    ("a.csv", b"1,a.jpg,x\n2,b.jpg,y\n", "put a line in front"),
    ("rows.txt", b"a,b;c\n1,2;3\n4,5;6\n", "may be csv and csv with ;; choose one with rows_as="),
    ("rows.txt", b"utt_001|spk1|hello|en\n", "no table"),
    ("rows.txt", b"utt_001|hello\n", "rows_as='lines'"),
    ("rows.txt", b"utt_001|hello| \n", "no table"),
]


@pytest.mark.parametrize(("name", "content", "reason"), WRONG)
def test_a_file_that_is_no_rows_is_told_what_it_is_and_where(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    assert re.search(reason, refusal(tmp_path / name))


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
    odd = {"id": ["x"], "file_name": "c.jpg"}
    odd_box = {"image_id": ["x"], "category_id": {"y": 1}, "bbox": []}
    (tmp_path / "odd.json").write_text(
        json.dumps({**coco, "images": [odd], "annotations": [odd_box]})
    )
    assert values(tmp_path / "odd.json") == [
        {"id": ["x"], "image": "c.jpg", "objects": [{"category_id": {"y": 1}, "bbox": []}]}
    ]
    coco["annotations"][0]["image_id"] = 8
    (tmp_path / "captions.json").write_text(json.dumps(coco))
    assert "image_id 8, which no image has" in refusal(tmp_path / "captions.json")


def test_rows_may_come_from_standard_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data in (jsonl(ROWS), gzip.compress(table(ROWS))):
        read, write = os.pipe()
        os.write(write, data)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(pipe))
            assert values("-") == ROWS


def test_rows_of_one_group_go_to_one_split(tmp_path, caplog):
    rows = [{"id": i, "speaker": f"s{i % 9}", "text": f"t{i}"} for i in range(90)]
    del rows[5]["speaker"]
    path, splits = write_rows(tmp_path / "rows.jsonl", rows), {"a": 0.5, "b": 0.5}
    run(path, tmp_path / "out", splits=splits, split_by="speaker")
    assert "1 of 90 rows lack this key" in caplog.text
    with open_rows(path) as source:
        hashes = source.id_hashes("speaker")
        assert (hashes != source.id_hashes()).sum() == 89
    groups = {(row.get("speaker"), value) for row, value in zip(rows, hashes.tolist(), strict=True)}
    assert len(groups) == 9 + 1  # one for each speaker, and one for the row without
    with pytest.raises(mm.ConfigError, match="split_by='nobody': no row has this key"):
        run(path, tmp_path / "other", splits=splits, split_by="nobody")


@pytest.mark.parametrize("key", ["speaker", "id", "image_id"])
def test_a_whole_number_is_one_group_also_as_a_float(tmp_path, key):
    rows = [{key: value, "text": "t"} for value in (3, 3.0, "3", 1 << 60, float(1 << 60))]
    rows += [{key: 2.5, "text": "t"}, {key: 1e300, "text": "t"}]
    with open_rows(write_rows(tmp_path / "rows.jsonl", rows)) as source:
        hashes = source.id_hashes("speaker" if key == "speaker" else None).tolist()
    assert len({*hashes[:3]}) == len({*hashes[3:5]}) == 1
    assert len({*hashes}) == 4


def test_consecutive_rows_about_one_medium_are_grouped(tmp_path):
    rows = [
        {"video": "a.mp4", "start": 0, "caption": "x"},
        {"video": "a.mp4", "start": 4, "caption": "y"},
        {"video": "b.mp4", "start": 0, "caption": "z"},
        {"text": "alone"},
        {"video": "a.mp4", "start": 9, "caption": "w"},
        *({"YoutubeID": "x", "Start_timestamp": "0:01", "Caption": text} for text in "ab"),
        *({"audio_filepath": "x.wav", "offset": i, "text": "a"} for i in range(2)),
    ]
    expected = [
        {
            "video": "a.mp4",
            "segments": [{"start": 0, "caption": "x"}, {"start": 4, "caption": "y"}],
        },
        *rows[2:5],
        {
            "YoutubeID": "x",
            "segments": [{"Start_timestamp": "0:01", "Caption": text} for text in "ab"],
        },
        {"audio_filepath": "x.wav", "segments": [{"offset": i, "text": "a"} for i in range(2)]},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with open_rows(path, mm.RowReading(group_spans=True)) as source:
        read = list(source.select(range(source.num_rows)).read())
    assert [row.value for row in read] == expected
    assert [row.number for row in read] == [1, 3, 4, 5, 6, 8]


def test_a_limit_reads_no_further(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_BLOCK", 64)
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    run(path, tmp_path / "out", limit=3)
    path.write_bytes(path.read_bytes() + b"more\n")
    assert run(path, tmp_path / "out", limit=3).was_finished
    (tmp_path / "bad.json").write_text('[{"text": "a"}, {"text": "b"}, broken')
    assert values(tmp_path / "bad.json", limit=2) == [{"text": "a"}, {"text": "b"}]
    with pytest.raises(mm.ConfigError, match="limit=0"):
        mm.RowReading(limit=0)


def test_arrow_files_and_saved_data_sets_are_read(tmp_path):
    rows = pa.Table.from_pylist([{"text": f"t{i}", "id": None} for i in range(70)])
    expected = [{"text": f"t{i}"} for i in range(70)]
    (tmp_path / "in").mkdir()
    for codec in ("lz4", "zstd", "uncompressed"):
        feather.write_feather(rows, tmp_path / "in" / f"{codec}.feather", compression=codec)
    assert values(tmp_path / "in") == expected * 3
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, rows.schema) as writer:
        writer.write_table(rows)
    files = {"state.json": "{}", "data-00000-of-00001.arrow": stream.getvalue()}
    for split in ("train", "test"):
        write_files(tmp_path / "saved" / split, files)
    path = write_files(tmp_path / "saved", {"dataset_dict.json": "{}"}) / "test" / list(files)[1]
    assert values(path) == values(path, rows_as="arrow") == expected
    splits = run(tmp_path / "saved", tmp_path / "out").splits
    assert {name: split.num_samples for name, split in splits.items()} == {"train": 70, "test": 70}
    (tmp_path / "cut.arrow").write_bytes(stream.getvalue()[:600])
    assert "cut.arrow: damaged Arrow after row 0" in refusal(tmp_path / "cut.arrow")


@pytest.mark.parametrize(
    ("make", "num_left", "reason"),
    [
        (pa.ipc.new_stream, 1 << 20, "damaged Arrow after row 2"),
        (pa.ipc.new_stream, 0, "changed its size while it was read"),
        (pa.ipc.new_file, 1 << 20, "damaged Arrow after row 2"),
    ],
)
def test_an_arrow_file_that_is_shortened_while_it_is_read_is_refused(
    tmp_path, make, num_left, reason
):
    """A map of it would end the process."""
    path = tmp_path / "a.arrow"
    batch = pa.record_batch({"data": [bytes(1 << 20)] * 2})
    with pa.OSFile(str(path), "wb") as file, make(file, batch.schema) as writer:
        writer.write_batch(batch)
        behind_first = file.tell()
        writer.write_batch(batch)
    rows = iter_arrow(path, path.name)
    next(rows)
    os.truncate(path, behind_first + num_left)
    with pytest.raises(mm.ConfigError, match=reason):
        list(rows)


@pytest.mark.parametrize("name", ["image", "frame"])
def test_pixels_of_numpy_are_rejects_that_say_what_to_pass(name):
    row = {name: np.zeros((4, 4, 3), np.uint8), "text": "t"}
    assert "pass PIL.Image.fromarray(array)" in str(values([row])[0])


@pytest.mark.slow
def test_rows_of_a_server_without_ranges_are_read_whole(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.01)
    objects = {"rows.jsonl": b'{"text": "t"}\n' * 9000}
    with running(WebStub, objects, has_ranges=False) as server:
        assert len(values(f"{server.url}/rows.jsonl")) == 9000


REMOTE = {name: FORMS[name] for name in ("rows.jsonl", "members.jsonl.gz", "rows.csv")}
REMOTE["rows.parquet"] = parquet(ROWS)


def test_rows_come_from_no_https_server_that_is_not_trusted(certificate):
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate)
    with (
        running(WebStub, dict(REMOTE), tls=serving) as server,
        pytest.raises(mm.ConfigError, match="certificate verify failed"),
    ):
        values(f"{server.url}/rows.jsonl")


def test_rows_come_from_the_hub_of_hugging_face_by_name_by_pattern_and_by_folder(monkeypatch):
    pytest.importorskip("huggingface_hub")
    parts = {"train-0.parquet": parquet(ROWS[:20]), "train-1.parquet": parquet(ROWS[20:])}
    files = {"notes/rows.jsonl.zst": zstd(jsonl(ROWS))}
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
    for name, data in REMOTE.items():
        open_store(folder).write(name, data)
        assert values(f"{folder}/{name}") == ROWS
    assert values([f"{folder}/rows.jsonl", f"{folder}/*.gz"]) == ROWS * 2
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl: no such object"):
        values(f"{folder}/none.jsonl")


def test_a_split_by_id_is_the_same_for_rows_with_nan(tmp_path):
    (tmp_path / "a").write_text('{"id": 5, "score": NaN}\n')
    (tmp_path / "b").write_text('{"id": 5, "score": 1}\n')
    assert values_and_ids(tmp_path / "a")[1] == values_and_ids(tmp_path / "b")[1]


CHINESE = "今天天气很好，我们一起去公园看花。他说的话是对的"
TEXTS = {
    "gb18030": CHINESE,
    "shift_jis": "今日は天気がいいので、公園に行って花を見ました",
    "cp1252": "Il était une fois à l’été un garçon très doué",
    "utf-16": CHINESE,
}


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        *(("a.csv", encoding) for encoding in TEXTS),
        *(("a.jsonl", "gb18030"), ("a.jsonl", "utf-16"), ("a.json", "cp1252")),
        *(("a.json", "utf-16"), ("a.txt", "shift_jis"), ("1.jpg", "gb18030"), ("1.jpg", "utf-16")),
    ],
)
def test_texts_in_other_encodings_are_said_and_read_where_the_caller_names_it(
    tmp_path, caplog, name, encoding
):
    text = TEXTS[encoding]
    path, options = tmp_path / name, {"rows_as": "lines"} if name == "a.txt" else {}
    written = {
        "a.csv": f"id,text\n1,{text}\n2,plain\n",
        "a.jsonl": f'{{"id": "1", "text": "{text}"}}\n{{"id": "2", "text": "plain"}}\n',
        "a.json": f'[{{"id": "1", "text": "{text}"}},\n{{"id": "2", "text": "plain"}}]',
        "a.txt": f"{text}\nplain\n",
    }
    if name == "1.jpg":
        path = pictures(tmp_path / "in", "1.jpg", "2.jpg")
        write_files(path, {"1.txt": text.encode(encoding), "2.txt": "plain".encode(encoding)})
    else:
        path.write_bytes(written[name].encode(encoding))
    rows = values(path, encoding=encoding, **options)
    assert [row["text"] for row in rows] == [text, "plain"]
    assert not caplog.messages
    if encoding == "utf-16" and name != "1.jpg":
        assert "say encoding='utf-16'" in refusal(path)
        return
    first, second = values(path, **options)
    assert isinstance(first, RowError)
    told = str(first) if name == "1.jpg" else "".join(caplog.messages)
    assert "encoding with encoding=NAME" in told
    assert encoding == "utf-16" or second["text"] == "plain"


def test_an_encoding_is_a_setting_of_the_conversion(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(f"id,text\n1,{CHINESE}\n2,\xe9\n".encode("gb18030") + b"3,\xff\n")
    report = run(path, tmp_path / "out", encoding="GB18030")
    assert (report.num_samples, report.num_rejects) == (2, 1)
    assert run(path, tmp_path / "out", encoding="gb18030_2000").num_new_bytes == 0
    with pytest.raises(mm.ConfigError, match="encoding was 'gb18030' and is now 'gbk'"):
        run(path, tmp_path / "out", encoding="gbk")
    (tmp_path / "a.parquet").write_bytes(parquet([{"text": "a"}]))
    for rows in (tmp_path / "a.parquet", [{"text": "a"}], tmp_path / "out"):
        with pytest.raises(mm.ConfigError, match=r"encoding='big5'.* no effect"):
            run(rows, tmp_path / "other", encoding="big5")
    for encoding in ("hex", "rot13", "nope", "", "a\0", 5, "undefined"):
        with pytest.raises(mm.ConfigError, match="is not an encoding of texts that Python knows"):
            mm.RowReading(encoding=encoding)
    path.write_text('{"text": "a"}', encoding="utf-16")
    for encoding in ("utf-8", "ascii", "utf-16-be", "utf-32"):
        with pytest.raises(mm.MMStreamError):
            run(path, tmp_path / "other", encoding=encoding)


AUDIO = {"aid": "P1", "path": "a.opus", "segments": [{"begin_time": 0, "end_time": 2, "text": "x"}]}
CLIP = {"duration": 3, "timestamps": [[0, 1]], "sentences": ["x"]}


@pytest.mark.parametrize(("indent", "encoding"), [(None, "utf-8"), (1, "utf-8-sig")])
@pytest.mark.parametrize(
    ("value", "rows"),
    [
        # https://github.com/SpeechColab/GigaSpeech
        ({"dataset": "GigaSpeech", "audios": [AUDIO, AUDIO]}, [AUDIO, AUDIO]),
        # https://cs.stanford.edu/people/ranjaykrishna/densevid
        ({"v_1": CLIP}, [{"video_id": "v_1", "id": "v_1", **CLIP}]),
        # https://www.microsoft.com/en-us/research/publication/msr-vtt
        (
            {
                "info": {},
                "videos": [{"video_id": "v0", "url": "https://host/0"}, {"video_id": "v1"}],
                "sentences": [
                    {"video_id": "v0", "caption": "x", "sen_id": 0},
                    {"video_id": "v0", "caption": "y", "sen_id": 1},
                ],
            },
            [
                {
                    "video": "v0.mp4",
                    "video_id": "v0",
                    "url": "https://host/0",
                    "captions": ["x", "y"],
                },
                {"video": "v1.mp4", "video_id": "v1"},
            ],
        ),
        # http://youcook2.eecs.umich.edu and http://activity-net.org
        (
            {
                "version": "1",
                "taxonomy": [{"nodeName": "x"}],
                "database": {
                    "v0": {
                        "video_url": "https://www.youtube.com/watch?v=v0",
                        "annotations": [{"segment": [1, 2], "sentence": "x"}],
                    },
                    "v1": {"annotations": [{"segment": [1, 2], "label": "y"}]},
                },
            },
            [
                {
                    "video_id": "v0",
                    "id": "v0",
                    "url": "https://www.youtube.com/watch?v=v0",
                    "annotations": [{"segment": [1, 2], "sentence": "x"}],
                },
                {
                    "video_id": "v1",
                    "id": "v1",
                    "annotations": [{"segment": [1, 2], "label": "y"}],
                },
            ],
        ),
        # https://www.cs.rice.edu/~vo9/sbucaptions
        (
            {"image_urls": ["https://h/1.jpg", "https://h/2.jpg"], "captions": ["x", "y"]},
            [
                {"image_urls": "https://h/1.jpg", "captions": "x"},
                {"image_urls": "https://h/2.jpg", "captions": "y"},
            ],
        ),
        # what `DataFrame.to_json` writes
        (
            {"image": {"0": "a.jpg", "7": "b.jpg"}, "text": {"0": "x", "7": None}},
            [{"image": "a.jpg", "text": "x"}, {"image": "b.jpg", "text": None}],
        ),
        # one document, and no columns
        (
            {"images": ["a.jpg", None], "texts": [None, "x"]},
            [{"images": ["a.jpg", None], "texts": [None, "x"]}],
        ),
        ({"images": ["a.jpg"], "captions": ["x"]}, [{"images": ["a.jpg"], "captions": ["x"]}]),
        (
            {"image": ["a.jpg", "b.jpg"], "captions": ["x", "y", "z"]},
            [{"image": ["a.jpg", "b.jpg"], "captions": ["x", "y", "z"]}],
        ),
        ({"data": [{"image": "a.jpg", "text": "x"}]}, [{"image": "a.jpg", "text": "x"}]),
        (
            {"a": {"file": "a.jpg", "words": "x"}, "b": {"file": "b.jpg", "words": "y"}},
            [
                {"id": "a", "file": "a.jpg", "words": "x"},
                {"id": "b", "file": "b.jpg", "words": "y"},
            ],
        ),
        (
            {"a.jpg": ["x", "y"], "b.PNG": "z", "c.mp4": 5},
            [
                {"image": "a.jpg", "captions": ["x", "y"]},
                {"image": "b.PNG", "captions": "z"},
                {"video": "c.mp4", "captions": 5},
            ],
        ),
        ({"a.jpg": 1, "b.jpg": 2}, [{"a.jpg": 1, "b.jpg": 2}]),
        ({"a": {"x": 1}, "b": {"y": 2}}, [{"a": {"x": 1}, "b": {"y": 2}}]),
        ({"text": "one row"}, [{"text": "one row"}]),
        # a conversation alone in its file is one row
        (
            {"messages": [{"role": "user", "content": "hi"}]},
            [{"messages": [{"role": "user", "content": "hi"}]}],
        ),
        # each entry of a video has its sentences; those without a caption are left out
        (
            {
                "videos": [{"video_id": "v0", "start": 0}, {"video_id": "v0", "start": 9}],
                "sentences": [
                    {"video_id": "v0", "caption": caption} for caption in ("x", None, "y")
                ],
            },
            [
                {"video": "v0.mp4", "video_id": "v0", "start": start, "captions": ["x", "y"]}
                for start in (0, 9)
            ],
        ),
        ({"a": 1, "b": [2]}, [{"a": 1, "b": [2]}]),
    ],
)
def test_rows_inside_an_object_are_rows(tmp_path, value, rows, indent, encoding):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(value, indent=indent), encoding=encoding)
    assert values(path) == rows


def test_a_long_line_that_is_no_transcript_takes_no_time():
    started = time.process_time()
    assert not tables.is_transcripts(b"a_1|x|" + b"t" * 60_000 + b"|y\n")
    assert time.process_time() - started < 2


def test_transcripts_of_ljspeech_name_the_sound_in_the_folder_wavs(tmp_path):
    """https://keithito.com/LJ-Speech-Dataset; a quote is part of the text"""
    lines = 'LJ001-0001|In "1440, he|In "fourteen forty, he\nLJ001-0002||x\n'
    write_files(tmp_path, {"metadata.csv": lines, "wavs/LJ001-0001.wav": b"RIFF"})
    for rows in (tmp_path / "metadata.csv", tmp_path):
        assert values(rows)[0] == {
            "id": "LJ001-0001",
            "audio": "wavs/LJ001-0001.wav",
            "text": 'In "fourteen forty, he',
            "raw_text": 'In "1440, he',
        }


# -- Parquet and Python: tables, iterables, data sets of Hugging Face


TABLE = [{"id": f"r{i}", "text": f"row {i}", "n": i} for i in range(40)]


@pytest.fixture
def expected(tmp_path):
    """The shards of the rows in a file of lines."""
    run(write_rows(tmp_path / "plain.jsonl", TABLE), tmp_path / "plain")
    return shards(tmp_path / "plain")


def test_several_parquet_files_and_iterables_give_the_same_shards(tmp_path, expected):
    files = {"0.parquet": TABLE[:13], "1.parquet": TABLE[13:30], "2.parquet": TABLE[30:]}
    write_files(tmp_path, {name: parquet(rows) for name, rows in files.items()})
    with open_rows(f"{tmp_path}/*.parquet") as source:
        assert isinstance(source, ParquetSource)
        rows = list(source.select([39, 12, 13, 14, 2]).read())
    assert [row.value for row in rows] == [TABLE[i] for i in (39, 12, 13, 14, 2)]
    assert [(row.file, row.number, row.index) for row in rows[:3]] == [
        *(("2.parquet", 10, 39), ("0.parquet", 13, 12), ("1.parquet", 1, 13)),
    ]
    sources = {
        "files": f"{tmp_path}/*.parquet",
        "list": TABLE,
        "generator": iter(TABLE),
        "table": pa.Table.from_pylist(TABLE),
        "batches": iter(pa.Table.from_pylist(TABLE).to_batches(max_chunksize=9)),
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


def test_rows_of_tables_and_of_lines_have_the_same_splits(tmp_path):
    rows = [{"id": i, "text": "t", "speaker": f"s{i % 3}"} for i in range(9)]
    texts = [{"text": f"t{i}"} for i in range(9)]
    files = {"a.parquet": parquet(rows), "a.jsonl": jsonl(rows), "b.parquet": parquet(texts)}
    write_files(tmp_path, files)
    for key in (None, "speaker"):
        with (
            open_rows(tmp_path / "a.parquet") as table,
            open_rows(tmp_path / "a.jsonl") as lines,
        ):
            assert (table.id_hashes(key) == lines.id_hashes(key)).all()
    with open_rows(tmp_path / "b.parquet") as table:
        assert len(set(table.id_hashes().tolist())) == 9


def test_damaged_parquet_is_a_clear_error(tmp_path):
    path, data = tmp_path / "rows.parquet", bytearray(parquet(TABLE, "zstd"))
    path.write_bytes(data[:-30])
    with pytest.raises(mm.ConfigError, match=r"rows\.parquet: damaged Parquet"):
        run(path, tmp_path / "out")
    data[8:60] = bytes(52)
    path.write_bytes(data)
    with pytest.raises(mm.MMStreamError, match=r"rows\.parquet: row group 0 is damaged"):
        run(path, tmp_path / "out", samples_per_shard=40)


def test_parquet_that_changes_during_the_conversion_stops_it(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(parquet(TABLE))
    with open_rows(path) as source:
        rows = source.select(range(5))
        path.write_bytes(parquet(TABLE[:-1]))
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
        ("a: a set is not a JSON value, bytes or picture", RowError),
        ("b: an integer of more than 64 bits", RowError),
        ("row: the key 1 is not text", RowError),
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
    parts = {"train": TABLE[:30], "test": TABLE[30:]}
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
    frame = pandas.DataFrame(TABLE, index=[str(row["id"]) for row in TABLE])
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
