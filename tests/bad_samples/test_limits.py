"""What a run bears: limits, counts and the quarantine file."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mmstream as mm
from mmstream.bad_samples.limits import count_samples
from mmstream.bad_samples.quarantine import KINDS, BadSample, append_records
from mmstream.bad_samples.stats import Stats
from mmstream.errors import BadSampleLimitError, ConfigError
from tests.helpers.bad_corpus import make_pipeline, policy, write_faulty, write_tiny


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


def test_stats_show_what_was_counted_and_no_zeros():
    stats = Stats()
    assert repr(stats) == "Stats()"
    count(stats, policy(max_samples=None, max_fraction=1.0), "ggb")
    assert repr(stats) == (
        "Stats(num_samples=3, num_bad=1, bad=Counter({'DecodeError': 1}), "
        "consecutive=Counter({'': 1}))"
    )


def test_the_fraction_is_judged_from_min_samples_on():
    stats, limits = Stats(), policy(max_fraction=0.25, min_samples=8)
    count(stats, limits, "bbbg")  # 3 of 4: too early to tell
    with pytest.raises(BadSampleLimitError, match=r"3 of 8 samples are bad \(max_fraction=0\.25\)"):
        count(stats, limits, "gggg")


def test_exactly_the_fraction_is_allowed():
    stats, limits = Stats(), policy(max_fraction=0.25, min_samples=0)
    for _ in range(5):
        count(stats, limits, "gbgg")
    assert stats.num_bad == 5
    assert stats.num_samples == 20


def test_a_fraction_of_zero_allows_none():
    stats, limits = Stats(), policy(max_fraction=0.0, min_samples=1)
    count(stats, limits, "gggf")
    with pytest.raises(BadSampleLimitError, match="1 of 8"):
        count(stats, limits, "gggb")


@pytest.mark.parametrize(
    ("batches", "longest"),
    [
        (["gbbg"], 2),
        (["gbb", "bgg"], 3),  # over a batch's edge
        (["gbb", "bbb", "bgg"], 6),
        (["bbg", "bbb"], 3),
        (["gbb", "gbb"], 2),  # a good row between them
        (["gbb", "ggg", "bgg"], 2),
        (["ggb", "gbb"], 2),  # the first bad row is not the batch's first
        (["bfb"], 1),  # a filtered sample was readable
        (["bb", "fb", "bb"], 3),
        (["bbsb"], 2),
        (["bpb"], 2),  # padding is nothing at all
        (["bb", "ppp", "bb"], 4),
        (["bbp", "pbb"], 4),
        (["be", "eb"], 4),
        (["fff", "fff"], 0),
    ],
)
@pytest.mark.parametrize("start", [0, 7])
def test_bad_samples_in_a_row_are_counted_over_batches(batches, longest, start):
    stats, limits = Stats(), policy(max_consecutive=max(1, longest))
    for marks in batches:
        count(stats, limits, marks, start)
    if longest > 1:
        stats, limits = Stats(), policy(max_consecutive=longest - 1)
        with pytest.raises(BadSampleLimitError, match=r"in a row.*the last: s\.tar"):  # noqa: PT012
            for marks in batches:
                count(stats, limits, marks, start)


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


def test_a_limit_of_zero_in_a_row_is_no_limit():
    count(Stats(), policy(max_consecutive=0), "b" * 50)


@pytest.mark.parametrize(
    "limits", [{"max_fraction": 1.5}, {"max_fraction": -1}, {"min_samples": -1},
               {"max_consecutive": -1}]
)  # fmt: skip
def test_impossible_limits_are_refused(limits):
    with pytest.raises(ConfigError):
        mm.BadSamplePolicy(**limits)


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


def test_reasons_in_any_language_or_none_are_written(tmp_path):
    odd = BadSample(0, 0, 0, "s.tar", 1, "DecodeError", "caf\udce9 日本\nline\u2028", None)
    limits = policy(quarantine=str(tmp_path))
    count_samples(Stats(), limits, [odd], [False], [""], start=0, rank=0)
    (line,) = (tmp_path / "quarantine-rank0.jsonl").read_bytes().splitlines()
    assert json.loads(line)["reason"] == odd.reason


def test_each_line_has_the_stamp_of_its_shard_where_it_is_known(tmp_path):
    limits = policy(quarantine=str(tmp_path))
    records = [replace(record(0), stamp="4-10-"), replace(record(2), stamp="6-20-ab")]
    count_samples(Stats(), limits, records, [True] * 3, [""] * 3, start=0, rank=0)
    lines = (tmp_path / "quarantine-rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["stamp"] for line in lines] == ["4-10-", "6-20-ab"]


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


def test_none_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    count(Stats(), policy(quarantine=None), "bb")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    stats = Stats()
    count(stats, policy(quarantine=str(tmp_path / "file")), "bg")
    assert stats.num_bad == 1
    assert "bad samples are in the log only" in caplog.text


def test_the_first_bad_samples_are_warnings_and_a_filter_is_none(caplog):
    caplog.set_level(logging.DEBUG, "mmstream.bad_samples.limits")
    stats = Stats()
    for _ in range(3):
        count(stats, policy(), "ffffbbbb")
    levels = [entry.levelno for entry in caplog.records]
    assert levels.count(logging.WARNING) == 10
    assert all("DecodeError" in entry.getMessage() for entry in caplog.records)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_ranks_counts_add_up_to_the_epochs(tmp_path, size):
    bad = {3, 4, 20, 41}
    pipeline = make_pipeline(write_tiny(tmp_path, [30, 21], bad), drop_last=False)
    loaders = [mm.Loader(pipeline, world=mm.World(rank, size)) for rank in range(size)]
    for loader in loaders:
        assert len(list(loader)) == 5
    stats = [loader.stats for loader in loaders]
    assert [s.num_steps for s in stats] == [5] * size
    assert sum(s.num_samples for s in stats) == 51
    assert sum(s.num_bad for s in stats) == 4
    assert sum(s.bad["DecodeError"] for s in stats) == 4
    assert all(s.num_bytes > 0 and s.num_requests > 0 and s.wait_s > 0 for s in stats)


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
    with pytest.raises(BadSampleLimitError):  # the same loader does not slip past it
        next(iter(stage))
    other = mm.Loader(make_pipeline(corpus, shuffle=False))
    other.load_state_dict(state)
    assert [batch["__lineage__"].step for batch in other] == [1, 2, 3]


def test_counters_start_anew_after_a_resume(tmp_path):
    pipeline = make_pipeline(
        write_tiny(tmp_path, [48], {0, 1, 2, 3, 4, 5}),
        shuffle=False,
        global_batch_size=4,
        bad_samples=policy(max_consecutive=5, max_fraction=0.5, min_samples=8),
    )
    loader = mm.Loader(pipeline)
    next(iter(loader))
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
    assert (written["shard"], written["index"]) == ("shard-000000.tar", 5)
    assert written["kind"] == "DecodeError"
    assert written["reason"].startswith("shard-000000.tar[5] 000005.json: JSON")
    assert written["substitute"][0] == "shard-000000.tar"
    assert "shard-000000.tar[5] 000005.json" in caplog.text


def test_a_limit_names_the_command_that_leaves_the_bad_samples_out(tmp_path):
    strict = policy(max_samples=0, quarantine=str(tmp_path))
    command = "`mmstream verify URL --quarantine .*quarantine-rank3.jsonl"
    with pytest.raises(BadSampleLimitError, match=f"{command}` leaves them out"):
        count(Stats(), strict, "b", rank=3)
    with pytest.raises(BadSampleLimitError, match=f"{command} --source NAME` leaves them out"):
        count_samples(Stats(), strict, (record(0),), [True], ["captions"], start=0, rank=3)
    with pytest.raises(BadSampleLimitError, match="see the log"):
        count(Stats(), replace(strict, quarantine=None), "b")


def test_a_sample_that_the_device_refuses_stops_a_run_that_bears_none():
    with pytest.raises(mm.DecodeError, match=r"s\.tar\[0\] k\.jpg: broken"):
        count(Stats(), policy(action="raise"), "b")
    count(Stats(), policy(action="raise"), "f")  # a filter is no bad sample


def test_every_error_of_a_sample_is_a_kind_that_metrics_sum_up():
    def names(kind: type) -> set[str]:
        return {kind.__name__}.union(*map(names, kind.__subclasses__()))

    public = {name for name in names(mm.SampleError) if hasattr(mm, name)}
    assert set(KINDS) == public | {"ShardError"}
