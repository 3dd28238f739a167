"""The progress bar of a conversion, and the counts that worker processes give it."""

from __future__ import annotations

import io
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from tqdm import tqdm

from mmstream.converting import engines, shard
from mmstream.converting.media.images import unwarned
from mmstream.converting.shard import HashedFile
from tests.helpers.convert_corpus import interrupted, run, tree


@pytest.fixture
def terminal(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(
        engines,
        "tqdm",
        lambda **k: tqdm(**k | {"disable": k["disable"] or False, "file": file}),
    )
    return file


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
