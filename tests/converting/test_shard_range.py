"""Several processes write ranges of shards into one destination; finalize makes a dataset."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mmstream.cli import cli
from mmstream.converting import shard
from mmstream.converting.convert import convert
from mmstream.converting.finalize import finalize
from mmstream.dataset.manifest import MANIFEST_NAME
from mmstream.dataset.open import open_dataset
from mmstream.errors import ConfigError, ManifestError, MMStreamError
from mmstream.storage import open_store
from mmstream.storage.write_lock import LockedError, write_lock
from tests.helpers.convert_corpus import make_corpus, objects, run, tree
from tests.helpers.paths import DOCS

FORK = multiprocessing.get_context("fork")
SPLITS = {"train": 0.7, "val": 0.3}


@pytest.fixture
def corpus(tmp_path):
    return make_corpus(tmp_path)


def in_process(corpus, dest, shard_range, pause_at, pipe):
    """Write a range, and stand still in a shard until the pipe says to go on."""
    samples = shard._samples

    def pausing_samples(job, *others):
        for number, sample in enumerate(samples(job, *others)):
            yield sample
            if job.name == f"shard-{pause_at:06d}.tar" and number == 2:
                pipe.send("in the middle")
                pipe.poll(500)

    shard._samples = pausing_samples
    try:
        run(corpus, dest, shard_range=shard_range)
    except MMStreamError as error:
        pipe.send(str(error))
    else:
        pipe.send("finished")


@pytest.fixture
def paused(corpus, dest):
    """Start a range in another process. Yield it when it is in the middle of a shard."""
    processes = []

    def start(shard_range, pause_at):
        pipe, other_end = FORK.Pipe()
        arguments = (corpus, dest, shard_range, pause_at, other_end)
        process = FORK.Process(target=in_process, args=arguments)
        processes.append(process)
        process.start()
        assert pipe.poll(500)
        assert pipe.recv() == "in the middle"
        return process, pipe

    yield start
    for process in processes:
        process.kill()
        process.join()


def test_ranges_at_the_same_time_give_the_bytes_of_one_conversion(corpus, dest, paused, tmp_path):
    pipes = [paused((start, start + 2), start + 1)[1] for start in (0, 2)]
    report = run(corpus, dest, shard_range=(4, 99))
    assert (report.num_rows, report.num_samples, report.was_finished) == (8, 8, False)
    with pytest.raises(ManifestError, match="mmstream convert"):
        open_dataset(dest)
    for pipe in pipes:
        pipe.send("go on")
        assert pipe.poll(500)
        assert pipe.recv() == "finished"
    assert finalize(dest).num_samples == 38
    run(corpus, tmp_path / "alone")
    assert objects(dest) == tree(tmp_path / "alone")
    assert finalize(dest).was_finished
    assert run(corpus, dest, shard_range=(0, 2)).was_finished


def test_a_living_range_keeps_all_others_out_of_its_shards(corpus, dest, paused):
    process, _ = paused((1, 3), 1)
    before = objects(dest)
    name = rf"another convert --shard-range \(pid {process.pid} on host .* is writing here"
    for call in (
        lambda: run(corpus, dest, shard_range=(2, 4)),
        lambda: run(corpus, dest, shard_range=(1, 3)),
        lambda: run(corpus, dest),
        lambda: run(corpus, dest, overwrite=True),
        lambda: finalize(dest),
    ):
        with pytest.raises(LockedError, match=name):
            call()
        assert objects(dest) == before


def test_a_conversion_of_all_shards_keeps_ranges_out(corpus, dest, paused):
    process, _ = paused(None, 1)
    with pytest.raises(LockedError, match=rf"another convert \(pid {process.pid} "):
        run(corpus, dest, shard_range=(3, 4))


def test_a_killed_range_is_repeated_and_its_neighbour_is_not_disturbed(
    corpus, dest, paused, tmp_path
):
    process, _ = paused((0, 2), 1)
    _, neighbour = paused((2, 5), 3)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(LockedError):
        finalize(dest)
    report = run(corpus, dest, shard_range=(0, 2))
    assert 0 < report.num_new_bytes < report.num_bytes
    neighbour.send("go on")
    assert neighbour.poll(500)
    assert neighbour.recv() == "finished"
    finalize(dest)
    run(corpus, tmp_path / "alone")
    assert objects(dest) == tree(tmp_path / "alone")


def test_finalize_takes_over_the_locks_of_killed_ranges(corpus, dest, paused, tmp_path):
    process, _ = paused((1, 5), 4)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    run(corpus, dest, shard_range=(0, 1))
    with pytest.raises(MMStreamError, match=r"1 of 5 shards are missing or damaged: 4:5; write"):
        finalize(dest)
    run(corpus, dest)  # a whole conversion takes what ranges have written
    run(corpus, tmp_path / "alone")
    assert objects(dest) == tree(tmp_path / "alone")


def test_ranges_count_shards_over_all_splits(corpus, dest, tmp_path):
    options = {"splits": SPLITS, "samples_per_shard": 5}
    run(corpus, tmp_path / "alone", **options)
    num_train = len(list((tmp_path / "alone" / "train").glob("*.tar")))
    run(corpus, dest, shard_range=(0, num_train - 1), **options)
    run(corpus, dest, shard_range=(num_train, num_train + 1), **options)
    message = rf"shards are missing or damaged: {num_train - 1}:{num_train}, {num_train + 1}:"
    with pytest.raises(MMStreamError, match=message):
        finalize(dest, splits=["val", "train"])
    run(corpus, dest, shard_range=(num_train - 1, 99), **options)
    report = finalize(dest, splits=["val", "train"])
    assert list(report.splits) == ["train", "val"]
    for split in SPLITS:
        assert objects(f"{dest}/{split}") == tree(tmp_path / "alone" / split)


@pytest.mark.parametrize("splits", [None, ["train"], ["train", "val", "val"]])
def test_finalize_needs_all_splits(corpus, tmp_path, splits):
    run(corpus, tmp_path / "out", splits=SPLITS, shard_range=(0, 1))
    with pytest.raises(ConfigError, match=r"name all of them with splits=|conversion has \['train"):
        finalize(tmp_path / "out", splits=splits)


def test_tasks_with_different_plans_are_refused(corpus, tmp_path):
    run(corpus, tmp_path / "out", shard_range=(0, 1))
    with pytest.raises(ConfigError, match=r"samples_per_shard was 8 and is now 9"):
        run(corpus, tmp_path / "out", shard_range=(1, 2), samples_per_shard=9)


def test_a_damaged_shard_is_not_finalized(corpus, tmp_path):
    run(corpus, tmp_path / "out", shard_range=(0, 9))
    (tmp_path / "out" / "shard-000002.tar").write_bytes(b"cut short")
    with pytest.raises(MMStreamError, match=r"1 of 5 .*: 2:3;"):
        finalize(tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()
    run(corpus, tmp_path / "out", shard_range=(2, 3))
    assert finalize(tmp_path / "out").num_samples == 38


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_range": (3, 3)}, "first shard"),
        ({"shard_range": (-1, 3)}, "first shard"),
        ({"shard_range": (0, 3), "overwrite": True}, "other ranges"),
        ({"shard_range": (0, 3), "retry_rejects": True}, "retry_rejects"),
        ({"engine": "spark"}, "processes, ray"),
    ],
)
def test_impossible_calls_are_refused(corpus, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        run(corpus, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_range_of_rejects_only_is_for_finalize_to_judge(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": ""}\n' * 4)
    assert convert(rows, tmp_path / "out", shard_range=(0, 1), progress=False).num_rejects == 4
    with pytest.raises(MMStreamError, match="none of 4 rows became a sample"):
        finalize(tmp_path / "out")


def test_the_command_line_writes_ranges_and_finalizes(corpus, tmp_path, capsys):
    dest = str(tmp_path / "out")
    convert_range = ["convert", str(corpus), dest, "--samples-per-shard", "8", "--shard-range"]
    for text in ("0:3", "3:9"):
        cli.main([*convert_range, text], standalone_mode=False)
    assert f"when all shards are written, run: mmstream finalize {dest}" in capsys.readouterr().out
    cli.main(["finalize", dest, "--max-rejects", "2"], standalone_mode=False)
    assert "40 rows -> 38 samples in 5 shards, 2 rejected" in capsys.readouterr().out


def test_the_lock_of_a_dead_conversion_does_not_stop_a_range(corpus, tmp_path):
    store = open_store(tmp_path / "out")
    pid = os.fork()
    if pid == 0:
        with write_lock(store, "convert"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert run(corpus, tmp_path / "out", shard_range=(0, 1)).num_rows == 8


@pytest.mark.parametrize("duplicates", ["report", "drop"])
def test_finalize_finds_the_duplicates_that_the_plan_asks_for(corpus, tmp_path, duplicates):
    options = {"duplicates": duplicates}
    run(corpus, tmp_path / "alone", **options)
    run(corpus, tmp_path / "out", shard_range=(0, 2), **options)
    run(corpus, tmp_path / "out", shard_range=(2, 9), **options)
    assert finalize(tmp_path / "out").num_pairs
    assert tree(tmp_path / "out") == tree(tmp_path / "alone")


SBATCH = """#!/bin/bash
# A stand-in for sbatch: the job runs here and now, each task of an array after the other.
array=0-0
while [ $# -gt 0 ]; do
    case $1 in
        --array=*) array=${1#--array=} ;;
        --dependency=afterok:*) [ "${1#--dependency=afterok:}" = 42 ] || exit 3 ;;
        --wrap) command=$2; shift ;;
    esac
    shift
done
for task in $(seq "${array%-*}" "${array#*-}"); do
    SLURM_ARRAY_TASK_ID=$task bash -c "$command" >&2 || exit 1
done
echo 42
"""


@pytest.mark.slow
def test_the_array_of_the_docs_writes_the_bytes_of_one_process(corpus, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(SBATCH)
    (folder / "sbatch").chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = os.environ | {
        "PATH": path,
        "SHARDS_PER_TASK": "2",
        "CONVERT_OPTIONS": "--samples-per-shard 8",
        "FINALIZE_OPTIONS": "--max-rejects 10%",
    }
    # Five shards: the third task has one of them, and the fourth none.
    command = ["bash", DOCS / "convert_slurm.sh", corpus, tmp_path / "out", "4"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run(corpus, tmp_path / "alone")
    assert tree(tmp_path / "out") == tree(tmp_path / "alone")
