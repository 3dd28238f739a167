"""Keys and names that are not UTF-8 or that a terminal would obey, from tar to notebook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.audit import read_lines
from mmstream.dataset.bad_list import write_bad
from mmstream.dataset.index_tars import index_tars
from mmstream.decoding.bad_samples import quarantined_refs
from mmstream.errors import ConfigError
from tests.helpers.bad_corpus import make_pipeline, policy
from tests.helpers.corpora import captioned
from tests.helpers.foreign_tars import make_tar

KEYS = ["\udcff", "a\udce9b", "new\nline", "\x1b[2J", "right\u202eleft", "猫", "0001", "0002"]
BAD = {0, 3}
"""The samples whose json is broken."""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    members = [
        (f"{key}.{field}", b"{" if number in BAD and field == "json" else data)
        for number, key in enumerate(KEYS)
        for field, data in captioned(number).items()
    ]
    (folder / "a.tar").write_bytes(make_tar(members))
    index_tars(folder, progress=False)
    return folder


def assert_plain(text: str) -> None:
    """Every line is printable, and the text can be sent."""
    text.encode()
    for line in text.split("\n"):
        assert line.isprintable()


def test_a_training_with_logged_keys_is_replayed(
    mmstream: Any, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    options = ["--max-steps", 4, "--epochs", 2, "--global-batch-size", 4, "--image-size", 16]
    options += ["--num-workers", 0, "--device", "cpu"]
    assert mmstream("train", corpus, "--out", out, *options, "--log-keys")[0] == 0
    log = out / "metrics-rank0.jsonl"
    assert log.read_bytes().isascii()
    logged = {key for line in read_lines(log) for key in line["keys"]}
    assert logged == {key for number, key in enumerate(KEYS) if number not in BAD}
    code, text, err = mmstream("replay", corpus, "--state", out, "--check", out)
    assert code == 0, text + err
    assert "0 lost, 0 repeated" in text
    records = map(json.loads, (out / "quarantine-rank0.jsonl").read_text().splitlines())
    assert {record["index"] for record in records} == BAD
    dataset = mm.open_dataset(corpus)
    assert quarantined_refs([out / "quarantine-rank0.jsonl"], dataset).tolist() == [[0, 0], [0, 3]]


def test_commands_print_plain_text(mmstream: Any, corpus: Path, tmp_path: Path) -> None:
    code, text, err = mmstream("info", corpus, "--keys", 8)
    assert code == 0
    assert_plain(text + err)
    assert r"keys: \udcff, a\udce9b, new\nline, \x1b[2J, right\u202eleft, 猫, 0001" in text
    code, text, err = mmstream("verify", corpus, "--decode")
    assert code == 1
    assert_plain(text + err)
    assert r"a.tar[0] \udcff.json: " in text
    assert r"a.tar[3] \x1b[2J.json: " in text
    state = tmp_path / "state.json"
    state.write_text(json.dumps(mm.Loader(make_pipeline(corpus, global_batch_size=8)).state_dict()))
    code, text, err = mmstream("replay", corpus, "--state", state, "--keys")
    assert code == 0
    assert_plain(text + err)
    assert len(text.splitlines()) == len(KEYS)


def test_what_a_notebook_shows_can_be_sent(corpus: Path) -> None:
    dataset = mm.open_dataset(corpus)
    pipeline = make_pipeline(corpus, global_batch_size=8, bad_samples=policy())
    batch = next(iter(mm.Loader(pipeline)))
    values = [dataset, dataset[:8], batch, pipeline.take(8), dataset[0], dataset[3]]
    for value in values:
        shown = mm.show(value)
        shown.html.encode()
        assert_plain(repr(shown))


def test_names_of_tars_that_cannot_be_shown_are_refused_where_they_would_be_written(
    corpus: Path,
) -> None:
    (corpus / "a.tar").rename(corpus / "a\udcff.tar")
    with pytest.raises(ConfigError, match=r"a\\udcff\.tar has characters that cannot be shown"):
        index_tars(corpus, progress=False)
    (corpus / "mmstream.json").unlink()
    with pytest.raises(ConfigError, match="rename this shard"):
        write_bad(mm.open_dataset(corpus), [(0, 1)])
    assert len(mm.open_dataset(corpus)) == len(KEYS)
