"""Two conversions into one destination: the second is refused, whatever the first is doing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from mmstream.converting import shard
from mmstream.converting.convert import convert
from mmstream.errors import ConfigError, MMStreamError
from mmstream.storage import open_store
from mmstream.storage.write_lock import LOCK_NAME
from tests.helpers.convert_corpus import grouped, make_corpus, run, tree

FORK = multiprocessing.get_context("fork")
OPTIONS = {"samples_per_shard": 8, "progress": False}


@pytest.fixture
def corpus(tmp_path):
    return make_corpus(tmp_path)


def objects(dest):
    """Return {name: bytes} of a destination, its reports and its lock."""
    store = open_store(dest)
    names = [*store.list(), *(f"reports/{n}" for n in open_store(f"{dest}/reports").list())]
    if store.exists(LOCK_NAME):
        names.append(LOCK_NAME)
    return {name: store.read(name) for name in names}


def convert_and_pause(corpus, dest, pipe, options):
    """Convert, and stand still in the middle of the third shard until told to go on."""
    samples, names = shard._samples, []

    def pausing_samples(job, *others):
        names.append(job.name)
        for number, sample in enumerate(samples(job, *others)):
            yield sample
            if len(names) == 3 and number == 4:
                pipe.send("in the middle")
                pipe.poll(500)

    shard._samples = pausing_samples
    try:
        convert(corpus, dest, **grouped(**(OPTIONS | options)))
    except MMStreamError as error:
        pipe.send(str(error))
    else:
        pipe.send("finished")


@pytest.fixture
def paused(corpus, dest):
    """Start a conversion in another process. Yield it when it is in the middle of a shard."""
    processes = []

    def start(**options):
        pipe, other_end = FORK.Pipe()
        process = FORK.Process(target=convert_and_pause, args=(corpus, dest, other_end, options))
        processes.append(process)
        process.start()
        assert pipe.poll(500)
        assert pipe.recv() == "in the middle"
        return process, pipe

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"samples_per_shard": 3}])
def test_a_second_conversion_is_refused_and_changes_nothing(
    corpus, dest, paused, tmp_path, options
):
    process, pipe = paused()
    before = objects(dest)
    message = rf"{dest}: another convert \(pid {process.pid} on host .* is writing here"
    with pytest.raises(ConfigError, match=message):
        run(corpus, dest, **options)
    assert objects(dest) == before
    pipe.send("go on")
    assert pipe.poll(500)
    assert pipe.recv() == "finished"
    run(corpus, tmp_path / "alone")
    assert objects(dest) == tree(tmp_path / "alone")


def test_a_killed_conversion_is_continued_at_once(corpus, dest, paused, tmp_path):
    process, _ = paused()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    report = run(corpus, dest)
    assert report.num_new_bytes < report.num_bytes
    run(corpus, tmp_path / "alone")
    assert objects(dest) == tree(tmp_path / "alone")


@pytest.mark.s3
def test_parts_of_uploads_that_a_killed_conversion_left_are_removed(
    corpus, s3, tmp_path, monkeypatch
):
    dest = f"{s3}/{tmp_path.name}"
    samples = shard._samples

    def stopping_samples(job, *others):
        if job.name == "shard-000002.tar":
            raise KeyboardInterrupt
        yield from samples(job, *others)

    with monkeypatch.context() as patch:
        patch.setattr(shard, "_samples", stopping_samples)
        with pytest.raises(KeyboardInterrupt):
            run(corpus, dest)
    store = open_store(dest)
    assert store.exists("shard-000000.tar.idx")  # finished: it is not written again
    for name in ("shard-000000.tar", "shard-000002.tar", "reports/shard-000001.json", "mine.tar"):
        store._send(store.url_of(name), "create_multipart_upload")
    run(corpus, dest)
    prefix = dest.removeprefix("s3://").partition("/")[2]
    answer = store._send(store.url, "list_multipart_uploads", Prefix=prefix)
    assert [left["Key"] for left in answer["Uploads"]] == [f"{prefix}/mine.tar"]
    store.remove_uploads(r"mine\.tar")


def test_a_conversion_that_lost_its_lock_commits_nothing_more(corpus, dest, paused, tmp_path):
    _, pipe = paused()
    store = open_store(dest)
    store.remove(LOCK_NAME)  # as if another one had taken it over and finished
    run(corpus, dest)
    run(corpus, tmp_path / "alone")
    before = objects(dest)
    assert before == tree(tmp_path / "alone")
    pipe.send("go on")
    assert pipe.poll(500)
    assert "this process had the lock and lost it" in pipe.recv()
    assert objects(dest) == before


def test_each_split_has_a_lock_of_its_own(corpus, dest, paused):
    paused(splits={"train": 0.5, "val": 0.5}, samples_per_shard=6)
    with pytest.raises(ConfigError, match=r"/val: another convert"):
        run(corpus, f"{dest}/val")
    run(corpus, f"{dest}/test")


def start_together(corpus, dest, barrier, results):
    barrier.wait(500)
    try:
        report = convert(corpus, dest, num_workers=1, **OPTIONS)
        results.put(f"{report.num_samples} samples")
    except ConfigError as error:
        results.put(str(error))


def test_of_conversions_that_start_together_one_writes_and_all_others_name_it(
    corpus, dest, tmp_path
):
    run(corpus, tmp_path / "alone")
    barrier, results = FORK.Barrier(3), FORK.Queue()
    processes = [
        FORK.Process(target=start_together, args=(corpus, dest, barrier, results)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=500) for _ in processes]
    for process in processes:
        process.join()
    assert "38 samples" in outcomes
    others = [outcome for outcome in outcomes if outcome != "38 samples"]
    assert all("another convert (pid " in outcome for outcome in others)
    assert objects(dest) == tree(tmp_path / "alone")


def test_a_finished_dataset_in_a_folder_that_may_not_be_written_needs_no_lock(corpus, tmp_path):
    run(corpus, tmp_path / "out")
    before = time.time_ns()
    assert run(corpus, tmp_path / "out").was_finished
    assert (tmp_path / "out").stat().st_mtime_ns < before
