"""What a run bears and counts: limits, the quarantine file, and what texts lose."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import mmstream as mm
from mmstream.decoding.bad_samples import Stats, append_records, count_samples
from mmstream.errors import BadSampleLimitError, ConfigError
from mmstream.train.tokenizer import byte_tokenizer
from mmstream.types import KINDS, BadSample
from tests.helpers.bad_corpus import (
    bad_json,
    make_pipeline,
    policy,
    truncated_jpeg,
    write_faulty,
    write_tiny,
)
from tests.helpers.corpora import captioned, write_corpus


def record(row: int, kind: str = "DecodeError", substitute=("s.tar", 9)) -> BadSample:
    return BadSample(0, 0, row, "s.tar", row, kind, f"s.tar[{row}] k.jpg: broken", substitute)


def count(stats, limits, marks: str, start: int = 0, rank: int = 0) -> None:
    """Count a batch written as text, a letter a row.

    g good, b bad, f filtered, p padding, e bad and nothing could fill it, s filtered likewise.
    """
    kinds = {"b": "DecodeError", "f": "SkipSample", "e": "DecodeError", "s": "SkipSample"}
    records = [
        record(start + row, kinds[mark], None if mark in "es" else ("s.tar", 9))
        for row, mark in enumerate(marks)
        if mark in kinds
    ]
    valid = [mark in "gbf" for mark in marks]
    sources = [""] * len(valid)
    count_samples(stats, limits, tuple(records), valid, sources, start=start, rank=rank)


@pytest.mark.parametrize(
    ("most", "min_samples", "allowed", "then"),
    [
        (0.25, 8, ["bbbg"], "gggg"),  # 3 of 4: too early to tell
        (0.25, 0, ["gbgg"] * 5, "bbbg"),  # exactly the fraction is allowed
        (0.0, 1, ["gggf"], "gggb"),
    ],
)
def test_the_fraction_is_judged_from_min_samples_on(most, min_samples, allowed, then):
    stats, limits = Stats(), policy(max_fraction=most, min_samples=min_samples)
    for marks in allowed:
        count(stats, limits, marks)
    num_bad, num_rows = stats.num_bad + then.count("b"), stats.num_samples + len(then)
    with pytest.raises(BadSampleLimitError, match=f"^.*{num_bad} of {num_rows} samples are bad"):
        count(stats, limits, then)


@pytest.mark.slow
@given(st.lists(st.text("gbfpes", min_size=1, max_size=8), max_size=12), st.integers(1, 6))
def test_runs_and_counts_are_those_of_the_rows_laid_end_to_end(batches, most):
    rows = "".join(batches).replace("p", "")
    runs = rows.replace("e", "b").replace("g", " ").replace("f", " ").replace("s", " ").split()
    stats, start = Stats(), 0
    too_long = False
    for marks in batches:
        try:
            count(stats, policy(max_consecutive=most), marks, start)
        except BadSampleLimitError:
            too_long = True
        start += 5
    assert too_long == any(len(run) > most for run in runs)
    assert stats.num_samples == len(rows)
    assert stats.num_bad == rows.count("b") + rows.count("e")
    assert stats.num_skipped == rows.count("f") + rows.count("s")
    assert stats.bad == {
        kind: number
        for kind, number in [("DecodeError", stats.num_bad), ("SkipSample", stats.num_skipped)]
        if number
    }


def test_the_quarantine_file_has_a_line_for_each_record(tmp_path):
    folder = tmp_path / "not" / "yet"
    limits = policy(quarantine=str(folder))
    count(Stats(), limits, "gggg", rank=3)
    assert not folder.exists()
    count(Stats(), limits, "gbge", start=4, rank=3)
    count(Stats(), limits, "fggg", start=4, rank=3)
    assert [path.name for path in folder.iterdir()] == ["quarantine-rank3.jsonl"]
    lines = (folder / "quarantine-rank3.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    assert not any("document" in line for line in written)  # only records of packs have it
    assert [{"document": None} | line for line in written] == [
        asdict(record(5)) | {"substitute": ["s.tar", 9]},
        asdict(record(7)) | {"substitute": None},
        asdict(record(4, "SkipSample")) | {"substitute": ["s.tar", 9]},
    ]


def test_reasons_in_any_language_or_none_and_known_stamps_are_written(tmp_path):
    odd = BadSample(0, 0, 0, "s.tar", 1, "DecodeError", "caf\udce9 日本\nline\u2028", None)
    records = [odd, replace(record(2), stamp="6-20-ab")]
    limits = policy(quarantine=str(tmp_path))
    count_samples(Stats(), limits, records, [True] * 3, [""] * 3, start=0, rank=0)
    lines = (tmp_path / "quarantine-rank0.jsonl").read_bytes().splitlines()
    first, second = map(json.loads, lines)
    assert (first["reason"], second["stamp"]) == (odd.reason, "6-20-ab")


def test_a_line_that_a_kill_cut_off_is_removed_before_the_next_record(tmp_path):
    path = tmp_path / "quarantine-rank0.jsonl"
    append_records(path, [record(0), record(1)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    append_records(path, [record(1)])
    assert path.read_bytes() == whole
    path.write_bytes(whole[:20])
    append_records(path, [record(0), record(1)])
    assert path.read_bytes() == whole


def test_a_limit_of_zero_in_a_row_is_no_limit_and_none_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    count(Stats(), policy(max_consecutive=0, quarantine=None), "b" * 50)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    stats = Stats()
    count(stats, policy(quarantine=str(tmp_path / "file")), "bg")
    assert stats.num_bad == 1
    assert "bad samples are in the log only" in caplog.text


def test_the_first_bad_samples_are_warnings_and_a_filter_is_none(caplog):
    caplog.set_level(logging.DEBUG, "mmstream.decoding.bad_samples")
    stats = Stats()
    for _ in range(3):
        count(stats, policy(), "ffffbbbb")
    levels = [entry.levelno for entry in caplog.records]
    assert levels.count(logging.WARNING) == 10
    assert all("DecodeError" in entry.getMessage() for entry in caplog.records)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_limit_holds_its_batch_back_and_the_state_stays_before_it(tmp_path, ahead):
    corpus = write_tiny(tmp_path / "corpus", [48], set(range(12, 18)))
    quarantine = tmp_path / "bad"
    strict = policy(max_consecutive=3, quarantine=str(quarantine))
    pipeline = make_pipeline(corpus, shuffle=False, bad_samples=strict)
    loader = mm.Loader(pipeline)
    stage = mm.to_device(loader, "cpu") if ahead else loader
    seen = []
    with pytest.raises(BadSampleLimitError, match="6 bad samples in a row"):  # noqa: PT012
        for batch in stage:
            seen += batch["__key__"]
    assert len(seen) == 12
    state = stage.state_dict()
    assert (state["epoch"], state["step"]) == (0, 1)
    assert loader.stats.num_steps == 1
    assert len((quarantine / "quarantine-rank0.jsonl").read_text().splitlines()) == 6
    stage.load_state_dict(state)
    with pytest.raises(BadSampleLimitError):  # the same loader does not slip past it
        next(iter(stage))


def test_counters_start_anew_after_a_resume(tmp_path):
    pipeline = make_pipeline(
        write_tiny(tmp_path, [48], {0, 1, 2, 3, 4, 5}),
        shuffle=False,
        global_batch_size=4,
        bad_samples=policy(max_consecutive=5, max_fraction=0.5, min_samples=8),
    )
    loader = mm.Loader(pipeline)
    with pytest.raises(BadSampleLimitError, match="6 bad samples in a row"):
        list(loader)
    other = mm.Loader(pipeline)
    other.load_state_dict(loader.state_dict())
    assert len(list(other)) == 11
    assert other.stats.num_bad == 2


def test_the_default_policy_bears_one_bad_sample_and_says_where(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    corpus = write_faulty(tmp_path / "corpus", [24], {5})
    loader = mm.Loader(make_pipeline(corpus, bad_samples=mm.BadSamplePolicy()))
    assert len(list(loader)) == 2
    (line,) = (tmp_path / "quarantine-rank0.jsonl").read_text().splitlines()
    written = json.loads(line)
    place = written["shard"], written["index"], written["kind"], written["substitute"][0]
    assert place == ("shard-000000.tar", 5, "DecodeError", "shard-000000.tar")
    assert written["reason"].startswith("shard-000000.tar[5] 000005.json: JSON")
    assert "shard-000000.tar[5] 000005.json" in caplog.text


def is_third(sample):
    return int(sample["__key__"]) % 3 == 0


def refused(sample):
    if is_third(sample):
        raise ValueError("not today")
    return sample


@pytest.mark.parametrize(
    ("fault", "settings", "is_damage"),
    [
        (truncated_jpeg, {"decode": mm.Decode(image=mm.ImageDecoder(size=8))}, True),
        (bad_json, {}, True),
        (captioned, {"transforms": (refused,)}, False),
    ],
)
def test_a_limit_advises_a_bad_list_only_where_bytes_may_be_damaged(
    tmp_path, fault, settings, is_damage
):
    corpus = write_faulty(tmp_path / "corpus", [24], set(range(0, 24, 3)), fault)
    strict = policy(max_samples=2, quarantine=str(tmp_path / "logs"))
    with pytest.raises(BadSampleLimitError, match="samples are bad") as raised:
        list(mm.Loader(make_pipeline(corpus, bad_samples=strict, **settings)))
    message = str(raised.value)
    command = "`mmstream verify URL --decode --write-bad` leaves out those whose bytes are damaged"
    assert (command in message) == is_damage
    assert "--quarantine" not in message
    assert "logs/quarantine-rank0.jsonl; " in message
    assert "refuse good bytes, mend those" in message


@pytest.mark.parametrize("is_mixture", [False, True])
def test_lines_about_a_bad_sample_name_its_dataset_and_lead_to_it_alone(
    tmp_path, caplog, is_mixture
):
    train, val = (mm.open_dataset(write_corpus(tmp_path / n, [24])) for n in ("train", "val"))
    settings = {"global_batch_size": 12, "transforms": (refused,), "bad_samples": policy()}
    data = mm.Mixture({"a": (val, 1)}, stop="all") if is_mixture else val
    list(mm.Loader(mm.Pipeline(data, **settings)))
    lines = [r.getMessage() for r in caplog.records if "shard-000000.tar[" in r.getMessage()]
    assert len(lines) > 3  # one of them with the traceback
    for line in lines:
        assert f"of {tmp_path}/val)" in line
        assert val.ref_of(line) == data.ref_of(line)
        with pytest.raises(ConfigError, match=f"line is of {tmp_path}/val, and not of .*train; "):
            train.find(line)


def test_every_error_of_a_sample_is_a_kind_that_metrics_sum_up():
    def names(kind: type) -> set[str]:
        return {kind.__name__}.union(*map(names, kind.__subclasses__()))

    public = {name for name in names(mm.SampleError) if hasattr(mm.errors, name)}
    assert set(KINDS) == public | {"ShardError"}


# -- what texts lose -------------------------------------------------------------------------------

NUM_SAMPLES = 24


@pytest.fixture
def dataset(tmp_path: Path) -> mm.Dataset:
    """Every third text has 60 bytes, and so 62 tokens."""
    write_corpus(tmp_path, [NUM_SAMPLES], lambda n: {"txt": b"a" * (60 if n % 3 == 0 else 5)})
    return mm.open_dataset(tmp_path)


def loader(dataset: mm.Dataset, transforms: tuple[Any, ...] = (), **options: Any) -> mm.Loader:
    pipeline = mm.Pipeline(
        dataset,
        global_batch_size=4,
        decode=mm.Decode(text=mm.TextDecoder(byte_tokenizer(), max_length=16)),
        transforms=transforms,
        bad_samples=mm.BadSamplePolicy(quarantine=None),
        drop_last=False,
    )
    return mm.Loader(pipeline, **options)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_cut_texts_are_counted_and_warned_of_once(
    dataset: mm.Dataset, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    running = loader(dataset, num_workers=num_workers)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for batch in running:
                assert "__text_loss__" not in batch
    running.close()
    assert running.stats.num_cut_texts == 2 * NUM_SAMPLES // 3
    assert running.stats.num_bad == 0
    messages = [line for line in caplog.messages if "text" in line]  # not those of a busy machine
    (message,) = messages
    assert message.startswith("shard-000000.tar[")
    assert ".txt: text of 62 tokens cut to max_length=16; others are only counted" in message


def test_texts_that_fit_are_not_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_corpus(tmp_path, [8], lambda n: {"txt": b"a" * 14})
    running = loader(mm.open_dataset(tmp_path))
    list(running)
    assert running.stats.num_cut_texts == 0
    assert not caplog.records


def test_padding_rows_and_masked_rows_are_not_counted(tmp_path: Path) -> None:
    write_corpus(tmp_path, [5], lambda n: {"txt": b"a" * 60})
    running = loader(mm.open_dataset(tmp_path))
    assert sum(int(batch["__valid__"].sum()) for batch in running) == 5
    assert running.stats.num_cut_texts == 5


def test_a_transform_can_neither_hide_nor_change_what_was_lost(dataset: mm.Dataset) -> None:
    def rebuild(sample: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": sample["input_ids"], "__text_loss__": None}

    running = loader(dataset, (rebuild,))
    list(running)
    assert running.stats.num_cut_texts == NUM_SAMPLES // 3
