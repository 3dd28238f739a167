"""All ranks of one job may convert the same rows: one writes, the others get its report."""

from __future__ import annotations

import logging

import pytest

import mmstream as mm
from mmstream.storage import open_store, write_lock
from tests.converting.pausing import FORK, objects
from tests.helpers.convert_corpus import run, tree, write_rows

ROWS = [{"text": f"row {number}"} for number in range(20)]


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.parametrize("rerun", [mm.Rerun(overwrite=True), mm.Rerun(retry_rejects=True)])
def test_what_others_may_read_already_is_not_replaced(tmp_path, rerun):
    run(ROWS, tmp_path / "corpus")
    before = tree(tmp_path / "corpus")
    with pytest.raises(mm.ConfigError, match=r"=True in a job of 2 ranks .*before torchrun"):
        run(ROWS, tmp_path / "corpus", rerun=rerun)
    assert tree(tmp_path / "corpus") == before


@pytest.mark.slow
def test_a_range_of_shards_never_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(write_lock, "HEARTBEAT_S", 0.05)
    rows, dest = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "corpus"
    with (
        write_lock.write_lock(open_store(dest), "convert"),
        pytest.raises(mm.ConfigError, match="another convert"),
    ):
        run(rows, dest, shard_range=(0, 1))


def convert_as_rank(corpus, dest, results):
    """Convert in a process of its own, and tell when it waits and how it ends."""

    def emit(record):
        if "another process writes there, this rank waits" in record.getMessage():
            results.put("waits")

    handler = logging.Handler()
    handler.emit = emit
    logging.getLogger("mmstream").addHandler(handler)
    results.put(run(corpus, dest).num_samples)


@pytest.mark.parametrize(
    ("dest", "is_killed"),
    [("local", False), pytest.param("s3", True, marks=pytest.mark.s3)],
    indirect=["dest"],
)
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
