"""The progress bar of a conversion, and the counts that worker processes give it."""

from __future__ import annotations

import io

import pytest
from tqdm import tqdm

from mmstream.converting import progress as progress_module
from mmstream.converting.live_counts import live_counts
from mmstream.converting.progress import Progress
from mmstream.converting.shard import ShardReport
from tests.helpers.convert_corpus import interrupted, make_corpus, run, tree


@pytest.fixture
def terminal(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(
        progress_module,
        "tqdm",
        lambda **k: tqdm(**k | {"disable": k["disable"] or False, "file": file}),
    )
    return file


def report(num_rows, num_rejects=0, num_bytes=0, **others):
    return ShardReport(
        "shard-000000.tar", num_rows, 0, num_bytes, None, {}, num_rejects, 0, **others
    )


def test_rows_of_a_shard_in_work_are_shown_before_it_is_done(terminal):
    with Progress(100, True) as bar, live_counts(bar.folder) as counts:
        for _ in range(37):
            counts[0] += 1
        counts[1] += 2
        bar._show()
        assert bar._bar.n == 37
        assert "2 rejected" in bar._bar.postfix
        bar.finish_shard(report(100, 5, 1000))
        assert bar._bar.n == 100
        assert "5 rejected" in bar._bar.postfix


def test_rows_that_an_earlier_call_wrote_do_not_count_for_the_rate(terminal):
    with Progress(100, True) as bar:
        bar.finish_shard(report(60, reused=True))
        assert (bar._bar.n, bar._bar.initial) == (60, 60)


def test_processes_of_other_machines_count_for_nobody(tmp_path):
    for folder in (None, str(tmp_path / "of another machine")):
        with live_counts(folder) as counts:
            counts[0] += 1


def test_without_a_terminal_nothing_is_counted():
    with Progress(100, False) as bar:
        assert bar.folder is None
        bar.finish_shard(report(100))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_conversion_counts_every_row_and_reject(terminal, tmp_path, num_workers):
    corpus = make_corpus(tmp_path)
    run(corpus, tmp_path / "out", progress=True, num_workers=num_workers)
    last = terminal.getvalue().rpartition("\r")[2]
    assert "40/40" in last
    assert "2 rejected" in last
    run(corpus, tmp_path / "plain")
    assert tree(tmp_path / "out") == tree(tmp_path / "plain")


def test_an_interrupted_conversion_goes_on_where_the_bar_was(terminal, tmp_path, monkeypatch):
    corpus = make_corpus(tmp_path)
    interrupted(monkeypatch, corpus, tmp_path / "out", after=2)
    run(corpus, tmp_path / "out", progress=True)
    assert "40/40" in terminal.getvalue().rpartition("\r")[2]
