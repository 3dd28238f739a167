"""Files of rows in every form, and what happens to rows that cannot be used."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fsspec
import msgspec
import numpy as np
import pytest
from PIL import Image

from mmstream.converting.rows import fetch, records
from mmstream.converting.rows.open import open_rows
from mmstream.dataset.manifest import MANIFEST_NAME, Manifest
from mmstream.dataset.open import open_dataset
from mmstream.errors import ConfigError, ManifestError, MMStreamError, StorageError
from mmstream.storage import MemoryStore, open_store
from tests.helpers.convert_corpus import keys, make_corpus, rejects, run, shards, tree, write_rows
from tests.helpers.corpora import jpeg


@pytest.fixture
def corpus(tmp_path):
    return make_corpus(tmp_path)


def test_every_kind_of_bad_row_is_a_named_reject_and_the_good_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_ROW_BYTES", 5000)
    (tmp_path / "a.jpg").write_bytes(jpeg(1))
    (tmp_path / "page.jpg").write_bytes(b"<html>404</html>")
    Image.new("RGB", (8, 6)).save(tmp_path / "really.jpg", "PNG")
    lines = {
        b'{"image": "a.jpg", "text": "good", "id": 1}': None,
        b"": "empty row",
        b"   ": "empty row",
        b'{"image": "a.jpg", "text": ': "not JSON: Input data was truncated",
        b'{"text": "a"} {}': "not JSON: JSON is malformed: trailing characters (byte 15)",
        b'{"text": "\xff"}': "not UTF-8: invalid start byte (byte 10)",
        b"[1, 2]": "row: expected an object, found a list",
        b'"words"': "row: expected an object, found a string",
        b"[" * 4000: "not JSON: nested too deeply",
        b'{"text": "' + b"x" * 6000 + b'"}': "a line of more than 5000 bytes",
        b'{"text": NaN}': "text: expected a string, found null",
        b'{"image": "none.jpg", "text": "t"}': "none.jpg: no such file",
        b'{"image": "page.jpg", "text": "t"}': (
            "page.jpg: not an image (starts with b'<html>404</h')"
        ),
        b'{"image": "really.jpg", "text": "a png by another name"}': None,
        b'{"image": "a.jpg", "text": "the same id again", "id": 1}': None,
        json.dumps({"images": ["a.jpg"] * 30, "text": "thirty"}).encode(): None,
    }
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))  # the last one has no line end
    report = run(path, tmp_path / "out", samples_per_shard=3)
    expected = {i: why for i, why in enumerate(lines.values(), 1) if why}
    assert rejects(tmp_path / "out") == expected
    assert report.num_samples + report.num_rejects == report.num_rows == len(lines)
    dataset = open_dataset(tmp_path / "out")
    by_key = {dataset[i]["__key__"]: dataset[i] for i in range(len(dataset))}
    assert sorted(by_key) == ["000000001", "000000014", "000000015", "000000016"]
    assert by_key["000000014"]["png"] == (tmp_path / "really.jpg").read_bytes()
    assert by_key["000000016"]["29.jpg"] == jpeg(1)


PEAK = """
import resource, sys
from mmstream.converting.convert import convert
from mmstream.errors import MMStreamError
options = {"samples_per_shard": int(sys.argv[3]), "progress": False}
try:
    convert(sys.argv[1], sys.argv[2], **options)
except MMStreamError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples_per_shard", "first_row"), [(5000, b'{"text": "t"}'), (10_000_000, b"")]
)
def test_the_memory_does_not_grow_with_the_number_of_rejects(
    tmp_path, samples_per_shard, first_row
):
    peaks = {}
    for num_rows in (20_000, 300_000):
        path, out = tmp_path / f"{num_rows}.jsonl.gz", tmp_path / f"out{num_rows}"
        path.write_bytes(gzip.compress(first_row + b"\n" * num_rows))
        command = [sys.executable, "-c", PEAK, path, out, str(samples_per_shard)]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks[num_rows] = int(lines.splitlines()[-1])
        assert first_row or f"none of {num_rows:,} rows became a sample" in lines
        with (out / "rejects.jsonl").open() as file:
            last = json.loads(list(file)[-1])
        key = f"{num_rows:09d}"
        assert last == {
            "file": path.name,
            "row": num_rows,
            "reason": "empty row",
            "key": key,
            "left_out": True,
        }
    # 300,000 rejects as Python objects would take 60 MB.
    assert peaks[300_000] - peaks[20_000] < 40


def test_how_deep_a_row_may_be_nested_does_not_depend_on_the_caller(tmp_path):
    def nested(depth):
        return b'{"text": "t", "x": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    rows = [nested(200), nested(201), nested(950), nested(100_000)]
    rows += [b'{"text": "' + b"[" * 300 + b'"}', b'{"text": "t", "x": [' + b"[]," * 300 + b"0]}"]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(rows))

    def convert_deeper(levels):
        return convert_deeper(levels - 1) if levels else run(path, tmp_path / "deep")

    run(path, tmp_path / "out")
    convert_deeper(300)
    expected = dict.fromkeys((2, 3, 4), "not JSON: nested too deeply")
    assert rejects(tmp_path / "out") == expected
    assert tree(tmp_path / "out") == tree(tmp_path / "deep")


@pytest.mark.parametrize("splits", [None, {"a": 0.5, "b": 0.5}])
def test_rows_of_which_none_becomes_a_sample_leave_the_rejects_and_are_tried_again(
    tmp_path, splits
):
    rows = [{"id": i, "image": "late.jpg", "text": f"t{i}"} for i in range(9)]
    path, out = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out"
    for _ in range(2):
        with pytest.raises(MMStreamError) as caught:
            run(path, out, samples_per_shard=4, splits=splits)
        assert re.search(
            r"none of 9 rows became a sample, so no dataset was written. All reasons are in "
            rf"{out}(/a)?/rejects.jsonl. The first is row \d: late.jpg: no such file. Media paths "
            rf"are relative to {tmp_path}; name another folder with media_root=$",
            str(caught.value),
        )
        folders = [out] if splits is None else [out / name for name in splits]
        assert sorted(number for folder in folders for number in rejects(folder)) == [*range(1, 10)]
        assert {Path(name).name for name in tree(out)} == {"rejects.jsonl"}
        for folder in folders:
            with pytest.raises(ManifestError, match=r"neither mmstream\.json nor tars"):
                open_dataset(folder)
    media = tmp_path / "elsewhere"  # another root is no other conversion either
    media.mkdir()
    (media / "late.jpg").write_bytes(jpeg(0))
    report = run(path, out, samples_per_shard=4, splits=splits, media_root=media)
    assert (report.num_samples, report.was_finished) == (9, False)


def test_an_empty_dataset_of_an_older_version_is_tried_again(tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    path = write_rows(tmp_path / "rows.jsonl", [{"image": "a.jpg", "text": "t"}] * 9)
    out = tmp_path / "out"
    run(path, out)
    manifest = Manifest.from_bytes((out / MANIFEST_NAME).read_bytes())
    (out / MANIFEST_NAME).write_bytes(replace(manifest, shards=(), index_parts=()).to_bytes())
    assert run(path, out).num_samples == 9
    assert run(path, out).was_finished


def test_text_that_is_no_rows_is_told_what_rows_are(tmp_path):
    path = tmp_path / "rows.txt"
    path.write_text("Dear all,\nthese are some words.\nRegards\n")
    with pytest.raises(ConfigError, match=r"plain text, not JSON, .*Rows are JSON objects, one"):
        run(path, tmp_path / "out")


def test_other_reasons_than_media_do_not_point_at_their_folder(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", ["words"])
    with pytest.raises(MMStreamError, match=r"row 1: row: expected an object, found a string$"):
        run(path, tmp_path / "out")


def test_gzip_json_array_bom_and_crlf_give_the_same_shards_as_plain_jsonl(corpus, tmp_path):
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    plain = corpus.read_bytes()
    variants = {
        "rows.jsonl.gz": gzip.compress(plain),
        "unnamed": gzip.compress(plain),
        "rows.json": json.dumps(rows, indent=2).encode(),
        "dense.json": b" \n[" + b",".join(json.dumps(row).encode() for row in rows) + b"]",
        "rows.json.gz": gzip.compress(json.dumps(rows).encode()),
        "bom.jsonl": b"\xef\xbb\xbf" + plain,
        "bom.json": b"\xef\xbb\xbf" + json.dumps(rows).encode(),
        "crlf.jsonl": plain.replace(b"\n", b"\r\n"),
        "short.jsonl": plain.rstrip(b"\n"),
    }
    expected = rows_and_ids(corpus)
    assert [row.value for row in expected[0]] == rows
    for name, data in variants.items():
        (tmp_path / name).write_bytes(data)
        assert rows_and_ids(tmp_path / name) == expected, name
    splits = {"a": 0.5, "b": 0.5}
    for name in ("rows.jsonl", "rows.json.gz", "crlf.jsonl"):
        run(tmp_path / name, tmp_path / f"out-{name}", splits=splits)
        assert shards(tmp_path / f"out-{name}") == shards(tmp_path / "out-rows.jsonl"), name
    assert len(shards(tmp_path / "out-crlf.jsonl")) >= 8


def rows_and_ids(path):
    """Return all rows without the name of their file, and the hashes that decide their splits."""
    with open_rows(path) as source:
        rows = [msgspec.structs.replace(row, file="") for row in source.select(range(40)).read()]
        return rows, source.id_hashes().tolist()


def test_a_jsonl_that_begins_with_a_list_is_still_jsonl(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'[1]\n{"text": "a"}\n')
    run(tmp_path / "rows.jsonl", tmp_path / "out")
    assert rejects(tmp_path / "out") == {1: "row: expected an object, found a list"}
    assert keys(tmp_path / "out") == ["000000002"]


@pytest.mark.parametrize(
    ("end", "num_rows"), [("", 2), ("\n", 2), ("\n\n", 2), ("\r\n\r\n", 2), ("\n\n\n", 4)]
)
def test_one_empty_line_at_the_end_of_a_file_is_no_row(tmp_path, end, num_rows):
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "a"}\n{"text": "b"}' + end.encode())
    report = run(tmp_path / "rows.jsonl", tmp_path / "out")
    assert (report.num_rows, report.num_samples) == (num_rows, 2)


def test_lines_are_found_whatever_the_size_of_a_read(tmp_path, monkeypatch):
    lines = [b'{"text": "%s"}' % (b"x" * n) for n in range(20)]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    for block in (1, 7, 16, 1000):
        monkeypatch.setattr(records, "_BLOCK", block)
        with open_rows(str(tmp_path / "rows.jsonl")) as row_file:
            all_rows = row_file.select(np.arange(row_file.num_rows))
            assert [row.value for row in all_rows.read()] == [json.loads(line) for line in lines]


@pytest.fixture
def memory():
    """fsspec's file system in memory; what lies in its ``/bucket`` is gone after the test."""
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/bucket", recursive=True)


def test_rows_behind_a_url_have_no_media_root_of_their_own(corpus, tmp_path, memory):
    memory.pipe_file("/bucket/rows.jsonl", corpus.read_bytes())
    url = "memory://bucket/rows.jsonl"
    run(url, tmp_path / "out", media_root=tmp_path)
    run(corpus, tmp_path / "local")
    assert tree(tmp_path / "out") == tree(tmp_path / "local")
    with pytest.raises(MMStreamError, match="no media root; remote rows need one to be named"):
        run(url, tmp_path / "alone")
    assert "no media root" in rejects(tmp_path / "alone")[1]


def test_rows_that_cannot_be_read_at_all_are_a_clear_error(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"none\.jsonl: no such file of rows; pass JSONL, JSON, csv"
    ):
        run(tmp_path / "none.jsonl", tmp_path / "out")
    os.mkfifo(tmp_path / "fifo.jsonl")
    with pytest.raises(StorageError, match=r"fifo\.jsonl: a FIFO; a file is needed"):
        run(tmp_path / "fifo.jsonl", tmp_path / "out")
    bad = {
        "empty.jsonl": (b"", "holds no rows"),
        "empty.json": (b"[]", "holds no rows"),
        "bad.json": (b'[{"text": "a"},\n {"text" "b"}]', "not a JSON array .* line 2"),
        "cut.jsonl.gz": (gzip.compress(bytes(range(256)) * 50)[:-20], "damaged gzip"),
    }
    for name, (data, reason) in bad.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=reason):
            run(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_that_change_during_the_conversion_stop_it_and_the_message_says_how_to_go_on(
    corpus, tmp_path
):
    with open_rows(str(corpus)) as row_file:
        all_rows = row_file.select(np.arange(row_file.num_rows))
        with corpus.open("a") as file:
            file.write('{"text": "one more"}\n')
        with pytest.raises(MMStreamError, match=r"changed during .*\(overwrite=True\)") as caught:
            next(all_rows.read())
    assert not isinstance(caught.value, ConfigError)  # shards may lie at the destination by now


def test_remote_rows_that_are_replaced_while_they_are_fetched_are_not_mixed(tmp_path, monkeypatch):
    store = open_store(f"memory://{tmp_path.name}/rows")
    store.write("rows.jsonl", b'{"text": "old"}\n' * 100)
    read_ranges = MemoryStore.read_ranges

    def replaced_after(self, ranges, known=None):
        data = read_ranges(self, ranges, known)
        self.write("rows.jsonl", b'{"text": "new"}\n' * 100)
        return data

    monkeypatch.setattr(fetch, "_BLOCK", 64)
    monkeypatch.setattr(MemoryStore, "read_ranges", replaced_after)
    with pytest.raises(StorageError, match=r"rows\.jsonl: was replaced: its version was "):
        fetch.download(store.url_of("rows.jsonl"), tmp_path / "copy")
