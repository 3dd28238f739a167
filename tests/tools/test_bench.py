"""The commands of docs/benchmarks.md, on little data, that their judge can fail, and `compare`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import mmstream as mm
from tests.helpers.paths import ROOT
from tools.bench import __main__ as bench, buckets, compare, equal_steps
from tools.bench.compare import Run, main, print_table
from tools.bench.equal_steps import Cell, Corpus, Delivered, Tally


@pytest.mark.slow
def test_a_table_has_mmstream_and_webdataset_side_by_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size, _, batch_size = bench.decoded.CORPORA["0.2 megapixels"]
    monkeypatch.setattr(bench.decoded, "CORPORA", {"photographs": (size, 0, batch_size)})
    rows = ["--loader", "mmstream", "--loader", "webdataset"]
    bench.main(["decoded", "--samples", "768", "--rounds", "1", *rows])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split()[1] for line in lines] == ["|", "mmstream", "webdataset"]
    for line in lines[1:]:
        figures = [cell.replace(",", "").split()[0] for cell in line.strip("| ").split("|")[1:]]
        assert all(float(figure) > 0 for figure in figures)


@pytest.mark.slow
@pytest.mark.s3
def test_batches_come_from_behind_a_faulty_link(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.storage, "NUM_SHARDS", 16)
    monkeypatch.setattr(bench.storage, "SHARD_SAMPLES", 40)
    bench.main(["storage", "--scenario", "faults", "--seconds", "10", "--rounds", "1"])
    assert "| faults | " in capsys.readouterr().out


@pytest.mark.slow
def test_all_ranks_stay_in_step_and_show_every_readable_sample_once(tmp_path: Path) -> None:
    cells = [Cell(1, 1, 0, 20), Cell(1, 3, 2, 20), Cell(5, 8, 0, 5), Cell(5, 3, 1, 5)]
    corpora = equal_steps.write_corpora(tmp_path, cells)
    tally = equal_steps.judge("mmstream", cells, corpora)
    assert (tally.equal, tally.complete, tally.both, tally.same) == (4, 4, 4, 4)


def tallied(*ranks: list[list[str]], bad: frozenset[str] = frozenset()) -> Tally:
    tally = Tally(logs_bad=bool(bad))
    delivered = [[Delivered(keys) for keys in rank] for rank in ranks]
    tally.add(Cell(1, len(ranks), 0, 0), Corpus("", frozenset("abcd"), bad), delivered)
    return tally


@pytest.mark.parametrize(
    ("tally", "expected"),
    [
        (tallied([["a"], ["b"]], [["c"], ["d"]]), (1, 1, 1)),
        (tallied([["a"], ["b"], ["c"]], [["d"]]), (0, 1, 0)),
        (tallied([["a"], ["b"]], [["c"], []]), (1, 0, 0)),
        (tallied([["a"], ["b"]], [["c"], ["d", "a"]]), (1, 0, 0)),
        (tallied([["a"], ["b"]], [["c"], ["d"]], bad=frozenset({"shard[4]"})), (1, 0, 0)),
    ],
    ids=["good", "out of step", "lost", "twice", "bad and not named"],
)
def test_the_judge_sees_what_is_wrong(tally: Tally, expected: tuple[int, int, int]) -> None:
    assert (tally.equal, tally.complete, tally.both) == expected


# -- two checkouts side by side -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.s3
def test_a_row_is_measured_with_both_checkouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "NUM_PHOTOS", 64)
    # This row reads photographs alone: the corpora of the others are small.
    monkeypatch.setattr(compare, "SIZES", dict.fromkeys(compare.SIZES, (500, 375)))
    monkeypatch.setattr(compare, "with_room", lambda video: video)
    (tmp_path / "mmstream").symlink_to(ROOT / "mmstream")
    main([str(tmp_path), "--rounds", "1", "--seconds", "0.01", "--rows", "raw, local"])
    row = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"\| raw, local \| samples/s \| [\d,.]+ \| [\d,.]+ \| \d+\.\d+ \(", row)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{absent}"], "no folder mmstream/ in it"),
        ([str(ROOT), "--rows", "neither", "nor"], "no row has neither or nor; the rows are deco"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_to_give(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([argument.format(absent=tmp_path) for argument in arguments])
    assert message in capsys.readouterr().err


def test_a_gain_is_above_one_where_this_checkout_is_faster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def runs(*values: float) -> list[Run]:
        return [Run(value, 1.0, 2e6) for value in values]

    table = {
        ("convert", "this"): runs(150, 120, 200),
        ("convert", "other"): runs(100, 100, 100),
        ("first batch, 2 workers", "this"): runs(1, 2, 2),
        ("first batch, 2 workers", "other"): runs(4, 4, 4),
    }
    print_table(["convert", "first batch, 2 workers"], table)
    speed, wait = capsys.readouterr().out.splitlines()[-2:]
    assert "| 150 | 100 | 1.500 (1.20-2.00) |" in speed
    assert "| 2 | 4 | 2.000 (2.00-4.00) |" in wait


def test_the_judge_of_buckets_counts_what_is_lost_repeated_mixed_and_padded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(buckets, "NUM_SAMPLES", 4)
    ranks: list[list[buckets.Drawn]] = [[(0, [0, 1]), (1, [2])], [(0, [0, 1]), (0, [2])]]
    buckets.print_table("lengths", {"a": lambda _: ranks}, [1.0, 3.0, 1.0, 9.0])
    cells = capsys.readouterr().out.splitlines()[-1].split(" | ")
    # 2 steps, one of them of one bucket; 1 of 4 samples never came, 3 twice; 4 of 14 are padding.
    assert cells == ["| a", "2", "50%", "25.0%", "1", "3", "28.6% |"]


def test_buckets_of_mmstream_lose_and_repeat_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(buckets, "NUM_SAMPLES", 1_000)
    numbers = np.arange(1_000) % 3 // 2
    two = mm.Buckets("duration_s", edges=[1, 2])
    sampler = buckets.mmstream(two, numbers, 16, drop_last=False)
    buckets.print_table("lengths", {"mm.Buckets": sampler}, (numbers + 1.0).tolist())
    cells = capsys.readouterr().out.splitlines()[-1].split(" | ")
    assert cells[2:] == ["100%", "0.0%", "0", "0", "0.0% |"]
