"""The tools that compare with other loaders: mmstream's own part of them, on little data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench import compare_grid
from tools.bench import resume as bench_resume
from tools.bench.compare_grid import Cell, Corpus, Tally
from tools.bench.peers import environments


@pytest.mark.slow
def test_all_ranks_stay_in_step_and_show_every_readable_sample_once(tmp_path: Path) -> None:
    cells = [Cell(1, 1, 0, 20), Cell(1, 3, 2, 20), Cell(5, 8, 0, 5), Cell(5, 3, 1, 5)]
    corpora = compare_grid.write_corpora(tmp_path, cells)
    tally = compare_grid.judge("mmstream", cells, corpora, environments.CACHE)
    assert (tally.num_cells, tally.equal, tally.complete, tally.same) == (4, 4, 4, 4)
    assert not tally.errors
    # Real processes with an all-reduce every step get what the ranks got one after another.
    trained = compare_grid.train_cells(
        "mmstream", [Cell(1, 2, 1, 20)], corpora, environments.CACHE, tally.one_rank
    )
    assert (trained.equal, trained.complete, trained.same) == (1, 1, 1)


def tallied(*ranks: list[list[str]], bad: frozenset[str] = frozenset(), **error: object) -> Tally:
    tally = Tally(logs_bad=bool(bad))
    corpus = Corpus("", frozenset("abcd"), bad)
    line = {"ranks": [[(keys, ()) for keys in rank] for rank in ranks], **error}
    tally.add(Cell(1, len(ranks), 0, 0), corpus, line)
    return tally


def test_the_judge_sees_what_is_wrong() -> None:
    good = tallied([["a"], ["b"]], [["c"], ["d"]])
    assert (good.equal, good.complete, good.same, good.failed) == (1, 1, 1, [])
    out_of_step = tallied([["a"], ["b"], ["c"]], [["d"]])
    assert (out_of_step.equal, out_of_step.complete, len(out_of_step.failed)) == (0, 1, 1)
    lost = tallied([["a"], ["b"]], [["c"], []])
    assert (lost.equal, lost.complete, len(lost.failed)) == (1, 0, 1)
    twice = tallied([["a"], ["b"]], [["c"], ["d", "a"]])
    assert (twice.equal, twice.complete) == (1, 0)
    unnamed = tallied([["a"], ["b"]], [["c"], ["d"]], bad=frozenset({"shard-000000.tar[4]"}))
    assert (unnamed.equal, unnamed.complete) == (1, 0)
    broken = tallied([["a"]], error="ValueError: no shard")
    assert (broken.equal, broken.errors) == (0, {"ValueError": 1})


def test_the_same_batches_are_those_of_the_first_cell_of_a_corpus() -> None:
    tally, corpus = Tally(), Corpus("", frozenset("abcd"), frozenset())
    one_rank = {"ranks": [[(["a", "b"], ()), (["c", "d"], ())]]}
    two_ranks = {"ranks": [[(["a"], ()), (["c"], ())], [(["b"], ()), (["d"], ())]]}
    swapped = {"ranks": [[(["a"], ()), (["c"], ())], [(["d"], ()), (["b"], ())]]}
    for answer in (one_rank, two_ranks, swapped):
        tally.add(Cell(1, len(answer["ranks"]), 0, 0), corpus, answer)
    assert (tally.equal, tally.complete, tally.same) == (3, 3, 2)


@pytest.mark.slow
def test_the_resume_benchmark_finds_mmstream_exact_everywhere(tmp_path: Path) -> None:
    names = ["mmstream, fork"]
    measured = bench_resume.measure(tmp_path, names, 640, 1, environments.CACHE)["mmstream, fork"]
    assert sorted(measured.seconds) == sorted(measured.rest) == [0, 1, 5, 9]
    assert measured.exactness() == "3 of 3 | 3 of 3 | same"
    measured.rest[5] = measured.rest[5][1:]  # a batch lost at the resume
    measured.other_workers["batches"][0][0] = "another"
    assert measured.exactness() == "2 of 3 | 2 of 3 | 1 of 320 samples lost, 1 again or too early"


@pytest.mark.parametrize("name", environments.DISTRIBUTIONS)
def test_a_peer_is_pinned_whole_and_never_brings_a_torch_of_its_own(name: str) -> None:
    pins = (environments.PINS / f"{name}.txt").read_text().split()
    assert all(line.count("==") == 1 for line in pins)
    packages = {line.partition("==")[0] for line in pins}
    assert packages >= set(environments.DISTRIBUTIONS[name])
    assert not packages & {"torch", "torchvision", "triton"}
