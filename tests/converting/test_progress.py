"""The progress bar of a conversion, and the counts that worker processes give it."""

from __future__ import annotations

import io
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from tqdm import tqdm

from mmstream.converting import shard
from mmstream.converting.media.images import unwarned
from mmstream.converting.shard import HashedFile, Progress, ShardReport, live_counts
from tests.helpers.convert_corpus import interrupted, run, tree


@pytest.fixture
def terminal(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(
        shard,
        "tqdm",
        lambda **k: tqdm(**k | {"disable": k["disable"] or False, "file": file}),
    )
    return file


def report(num_rows, num_rejects=0, num_bytes=0, **others):
    return ShardReport(
        "shard-000000.tar", num_rows, 0, num_bytes, None, {}, num_rejects, 0, **others
    )


def test_rows_of_a_shard_in_work_are_shown_before_it_is_done(terminal):
    with Progress(100, True) as bar:
        counts = live_counts(bar.folder)
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
        live_counts(folder)[0] += 1


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_conversion_counts_every_row_and_reject(terminal, corpus, tmp_path, num_workers, whole):
    run(corpus, tmp_path / "out", progress=True, num_workers=num_workers)
    assert re.search("40/40.*2 rejected", terminal.getvalue().rpartition("\r")[2])
    assert tree(tmp_path / "out") == whole


def test_an_interrupted_conversion_goes_on_where_the_bar_was(
    terminal, corpus, tmp_path, monkeypatch
):
    interrupted(monkeypatch, corpus, tmp_path / "out", after=2)
    run(corpus, tmp_path / "out", progress=True)
    assert "40/40" in terminal.getvalue().rpartition("\r")[2]


# -- threads of a conversion: one writes the bytes of a tar, several use Pillow


def test_a_slow_file_bounds_what_is_in_memory(monkeypatch):
    monkeypatch.setattr(shard, "BLOCK_BYTES", 10)
    may_write, written = threading.Event(), []

    class SlowFile(io.RawIOBase):
        def write(self, data):
            assert may_write.wait(timeout=500)
            return len(data)

    def produce():
        for block in range(100):
            hashed.write(bytes(20))
            written.append(block)

    with HashedFile(SlowFile()) as hashed, ThreadPoolExecutor() as pool:
        producer = pool.submit(produce)
        wait([producer], timeout=0.2)
        assert len(written) <= shard.MAX_WAITING
        may_write.set()
        producer.result(500)
        hashed.close()
    assert len(written) == 100


# -- Pillow's warnings are off while any thread works with a picture, and on again afterwards


def test_the_filters_are_back_when_the_last_of_several_threads_is_done():
    before = list(warnings.filters)
    with unwarned, ThreadPoolExecutor() as pool:
        pool.submit(unwarned.__enter__).result()
        pool.submit(unwarned.__exit__, None, None, None).result()
        with warnings.catch_warnings(record=True) as seen:
            warnings.warn("odd metadata", stacklevel=1)
    assert seen == []
    assert list(warnings.filters) == before
