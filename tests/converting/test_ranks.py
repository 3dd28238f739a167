"""All ranks of one job may convert the same rows: one writes, the others get its report."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import mmstream as mm
from mmstream.storage import open_store
from mmstream.storage.write_lock import write_lock
from tests.converting.pausing import FORK, objects
from tests.helpers.convert_corpus import run, tree

ROWS = [{"text": f"row {number}"} for number in range(20)]


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")


class Waiting(logging.Handler):
    """Tells that a rank has said that it waits."""

    def __init__(self):
        super().__init__()
        self.said = threading.Event()

    def emit(self, record):
        if "another process writes there, this rank waits" in record.getMessage():
            self.said.set()


@pytest.fixture
def waiting():
    handler = Waiting()
    logging.getLogger("mmstream").addHandler(handler)
    yield handler.said
    logging.getLogger("mmstream").removeHandler(handler)


def convert(dest, rows=ROWS):
    return mm.convert(iter(rows), dest, samples_per_shard=8, progress=False)


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_rank_waits_for_the_other_one_or_writes_if_that_one_failed(
    tmp_path, waiting, is_finished, monkeypatch
):
    dest = tmp_path / "corpus"
    with ThreadPoolExecutor() as pool, write_lock(open_store(str(dest)), "convert"):
        later = pool.submit(convert, dest)
        assert waiting.wait(500)
        assert not later.done()
        if is_finished:  # as the other rank does it, in a folder that is not there for anyone yet
            convert(tmp_path / "other")
            for path in (tmp_path / "other").rglob("*"):
                if path.is_file():
                    (dest / path.relative_to(tmp_path / "other")).parent.mkdir(exist_ok=True)
                    path.rename(dest / path.relative_to(tmp_path / "other"))
    report = later.result()
    assert (report.num_rows, report.num_samples, report.num_shards) == (20, 20, 3)
    convert(tmp_path / "alone")
    assert tree(dest) == tree(tmp_path / "alone")


@pytest.mark.parametrize("rerun", [mm.Rerun(overwrite=True), mm.Rerun(retry_rejects=True)])
def test_what_others_may_read_already_is_not_replaced(tmp_path, rerun):
    convert(tmp_path / "corpus")
    before = tree(tmp_path / "corpus")
    with pytest.raises(mm.ConfigError, match=r"=True in a job of 2 ranks .*before torchrun"):
        mm.convert(ROWS, tmp_path / "corpus", samples_per_shard=8, rerun=rerun, progress=False)
    assert tree(tmp_path / "corpus") == before


def test_a_range_of_shards_never_waits(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n' * 20)
    dest = tmp_path / "corpus"
    with (
        write_lock(open_store(str(dest)), "convert"),
        pytest.raises(mm.ConfigError, match="another convert"),
    ):
        mm.convert(rows, dest, samples_per_shard=8, shard_range=(0, 1), progress=False)


def convert_as_rank(corpus, dest, results):
    """Convert in a process of its own, and tell when it waits and how it ends."""
    handler = Waiting()
    handler.said.set = lambda: results.put("waits")
    logging.getLogger("mmstream").addHandler(handler)
    results.put(run(corpus, dest).num_samples)


@pytest.mark.parametrize("is_killed", [True, False])
def test_of_two_processes_one_writes_and_the_other_takes_over_if_it_is_killed(
    corpus, dest, whole, paused, is_killed
):
    first, pipe = paused(2)
    results = FORK.Queue()
    second = FORK.Process(target=convert_as_rank, args=(corpus, dest, results))
    second.start()
    assert results.get(timeout=500) == "waits"
    if is_killed:
        first.kill()
    else:
        pipe.send("go on")
    assert results.get(timeout=500) == 38
    second.join()
    assert objects(dest) == whole
