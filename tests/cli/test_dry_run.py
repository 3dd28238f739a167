"""``mmstream convert --dry-run``: what the first rows become, and nothing written."""

from __future__ import annotations

import fsspec
import pytest

from mmstream.converting.convert import dry_run
from tests.helpers.convert_corpus import make_corpus, run, tree, write_rows
from tests.helpers.corpora import jpeg

ROWS = [
    {"id": 1, "image": "a.jpg", "captions": ["one", "two"], "score": 0.5},
    {"text": "plain"},
    {"image": "absent.jpg", "text": "x"},
    {"images": ["a.jpg"], "messages": [{"role": "user", "content": "<image>What?"}]},
]


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    return write_rows(tmp_path / "rows.jsonl", ROWS)


def test_it_shows_format_fields_texts_unread_keys_and_reasons(printed, rows, tmp_path):
    before = tree(tmp_path)
    out = printed("convert", rows, "--dry-run", 10)
    lines = out.splitlines()
    assert lines[0] == "dry run: 4 rows, 1 rejected; nothing was written"
    assert "row 1, format captions, keys that nothing read: score  000000001" in lines
    assert "row 2, format text  000000002" in lines
    assert "row 3  rejected; rows.jsonl row 3" in lines
    assert "  bad: absent.jpg: no such file" in lines
    assert lines[-1].startswith("media paths are relative to --media-root")
    assert "  user: <image 0.jpg> What?" in lines
    assert any(line.startswith("  0.jpg: ") and "JPEG" in line for line in lines)
    assert tree(tmp_path) == before


def test_a_page_has_the_pictures(mmstream, rows, tmp_path):
    page = tmp_path / "page.html"
    code, out, _ = mmstream("convert", rows, tmp_path / "out", "--dry-run", 2, "--html", page)
    assert (code, "dry run: 2 rows, 0 rejected" in out) == (0, True)
    text = page.read_text()
    assert "data:image/" in text
    assert "row 1, format captions, keys that nothing read: score" in text
    assert "row 2, format text" in text
    assert "shard-" not in text  # nothing says yet which shards the rows go to
    assert not (tmp_path / "out").exists()


def test_rows_that_are_all_rejected_are_shown(mmstream, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"foo": 1}, {"text": ""}])
    code, out, _ = mmstream("convert", rows, "--dry-run", 5, "--split", "a=0.5,b=0.5")
    assert (code, out.count("rejected; rows.jsonl row")) == (0, 2)


def test_without_a_dry_run_a_destination_is_needed(mmstream, rows):
    assert mmstream("convert", rows)[0] == 2
    assert mmstream("convert", rows, "out", "--html", "x.html")[0] == 2


def test_what_is_shown_is_what_a_conversion_writes(tmp_path):
    corpus = make_corpus(tmp_path)
    before = fsspec.filesystem("memory").find("/")
    shown = dry_run(corpus, 40)
    assert fsspec.filesystem("memory").find("/") == before
    run(corpus, tmp_path / "out")
    written = (tmp_path / "out").glob("*.tar")
    samples = [sample for row in shown for sample in row.samples]
    assert len(samples) == 38
    assert [row.number for row in shown if row.reject] == [7, 23]
    data = b"".join(path.read_bytes() for path in sorted(written))
    assert all(
        value in data for sample in samples for value in sample.values() if type(value) is bytes
    )
