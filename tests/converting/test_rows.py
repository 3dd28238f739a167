"""Files of rows in every form, and what happens to rows that cannot be used."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mmstream as mm
from mmstream.converting.rows import fetch, records
from mmstream.converting.rows.open import open_rows
from mmstream.storage import MemoryStore, open_store
from tests.helpers.convert_corpus import rejects, run, tree, values, write_rows
from tests.helpers.corpora import jpeg
from tools.prove.messy_rows import DAMAGES, problems, write_messy_corpus


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
    dataset = mm.open_dataset(tmp_path / "out")
    by_key = {dataset[i]["__key__"]: dataset[i] for i in range(len(dataset))}
    assert sorted(by_key) == ["000000001", "000000014", "000000015", "000000016"]
    assert by_key["000000014"]["png"] == (tmp_path / "really.jpg").read_bytes()
    assert by_key["000000016"]["29.jpg"] == jpeg(1)


PEAK = """
import resource, sys
from mmstream.converting.convert import convert
from mmstream.errors import MMStreamError
options = {"samples_per_shard": int(sys.argv[1]), "progress": False}
for rows, out in zip(sys.argv[2::2], sys.argv[3::2]):
    try:
        convert(rows, out, **options)
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
    command = [sys.executable, "-c", PEAK, str(samples_per_shard)]
    counts = (60_000, 200_000)
    for num_rows in counts:
        path = tmp_path / f"{num_rows}.jsonl.gz"
        path.write_bytes(gzip.compress(first_row + b"\n" * num_rows))
        command += [path, tmp_path / f"out{num_rows}"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for num_rows in counts:
        assert first_row or f"none of {num_rows:,} rows became a sample" in printed
        last = (tmp_path / f"out{num_rows}/rejects.jsonl").read_text().splitlines()[-1]
        assert json.loads(last) == {
            "file": f"{num_rows}.jsonl.gz",
            "row": num_rows,
            "reason": "empty row",
            "key": f"{num_rows:09d}",
            "left_out": True,
        }
    peaks = [int(line) for line in printed.splitlines() if line.isdigit()]
    assert peaks[1] - peaks[0] < 28  # 140,000 rejects as Python objects take 28 MB more


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
        with pytest.raises(mm.MMStreamError) as caught:
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
            with pytest.raises(mm.errors.ManifestError, match=r"neither mmstream\.json nor tars"):
                mm.open_dataset(folder)
    media = tmp_path / "elsewhere"  # another root is no other conversion either
    media.mkdir()
    (media / "late.jpg").write_bytes(jpeg(0))
    report = run(path, out, samples_per_shard=4, splits=splits, media_root=media)
    assert (report.num_samples, report.was_finished) == (9, False)


@pytest.mark.parametrize(
    ("end", "num_rows"), [("", 2), ("\n", 2), ("\n\n", 2), ("\r\n\r\n", 2), ("\n\n\n", 4)]
)
def test_one_empty_line_at_the_end_of_a_file_is_no_row(tmp_path, end, num_rows):
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "a"}\n{"text": "b"}' + end.encode())
    report = run(tmp_path / "rows.jsonl", tmp_path / "out")
    assert (report.num_rows, report.num_samples) == (num_rows, 2)


def test_lines_are_found_whatever_the_size_of_a_read(tmp_path, monkeypatch):
    rows = [{"text": "x" * n} for n in range(20)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    for block in (1, 7, 16, 1000):
        monkeypatch.setattr(records, "_BLOCK", block)
        assert values(path) == rows


def test_rows_behind_a_url_have_no_media_root_of_their_own(corpus, tmp_path, memory):
    memory.pipe_file("/bucket/rows.jsonl", corpus.read_bytes())
    url = "memory://bucket/rows.jsonl"
    run(url, tmp_path / "out", media_root=tmp_path)
    run(corpus, tmp_path / "local")
    assert tree(tmp_path / "out") == tree(tmp_path / "local")
    with pytest.raises(mm.MMStreamError, match="no media root; remote rows need one to be named"):
        run(url, tmp_path / "alone")
    assert "no media root" in rejects(tmp_path / "alone")[1]


def test_rows_that_cannot_be_read_at_all_are_a_clear_error(tmp_path):
    os.mkfifo(tmp_path / "fifo.jsonl")
    (tmp_path / "empty.json").write_bytes(b"[]")
    for name, error, reason in (
        ("none.jsonl", FileNotFoundError, "no such file of rows; pass JSONL, JSON, csv"),
        ("fifo.jsonl", mm.errors.StorageError, "a FIFO; a file is needed"),
        ("empty.json", mm.ConfigError, "holds no rows"),
    ):
        with pytest.raises(error, match=f"{name}: .*{reason}"):
            run(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_that_change_during_the_conversion_stop_it_and_the_message_says_how_to_go_on(
    corpus, tmp_path
):
    with open_rows(str(corpus)) as row_file:
        all_rows = row_file.select(np.arange(row_file.num_rows))
        with corpus.open("a") as file:
            file.write('{"text": "one more"}\n')
        with pytest.raises(mm.MMStreamError, match=r"changed during.*\(overwrite=True") as caught:
            next(all_rows.read())
    assert not isinstance(caught.value, mm.ConfigError)  # shards may lie at the destination by now


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
    with pytest.raises(
        mm.errors.StorageError, match=r"rows\.jsonl: was replaced: its version was "
    ):
        fetch.download(store.url_of("rows.jsonl"), tmp_path / "copy")


# -- a messy corpus, as `python -m tools.prove.messy_rows` makes it, but smaller


def test_every_row_is_a_sample_or_a_reject_with_the_right_reason(tmp_path):
    rows, damages = write_messy_corpus(tmp_path, 200, seed=1)
    assert {damage.name for damage in damages.values()} == {damage.name for damage in DAMAGES}
    report = run(rows, tmp_path / "out", media_root=tmp_path / "media")
    assert problems(tmp_path / "out", 200, damages) == []
    assert report.has_more_rejects_than(0.01)
    assert sum(kind.num_rows for kind in report.reject_kinds) == report.num_rejects == len(damages)
    run(rows, tmp_path / "again", media_root=tmp_path / "media", num_workers=2)
    assert tree(tmp_path / "again") == tree(tmp_path / "out")
