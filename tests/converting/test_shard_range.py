"""Several processes write into one destination: ranges of shards for finalize, or one of two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.dataset.manifest import MANIFEST_NAME
from mmstream.storage import open_store
from mmstream.storage.write_lock import LOCK_NAME, LockedError
from tests.converting.pausing import files, go_on, kill, objects
from tests.helpers.convert_corpus import interrupted, run, tree
from tests.helpers.paths import DOCS

SPLITS = {"train": 0.7, "val": 0.3}

in_a_folder = pytest.mark.parametrize("dest", ["local"], indirect=True)
in_a_bucket = pytest.mark.parametrize(
    "dest", [pytest.param("s3", marks=pytest.mark.s3)], indirect=True
)


@pytest.mark.slow
def test_ranges_at_the_same_time_give_the_bytes_of_one_conversion(corpus, dest, paused, whole):
    pipes = [paused(start + 1, shard_range=(start, start + 2))[1] for start in (0, 2)]
    report = run(corpus, dest, shard_range=(4, 99))
    assert (report.num_rows, report.num_samples, report.was_finished) == (8, 8, False)
    with pytest.raises(mm.errors.ManifestError, match="mmstream convert"):
        mm.open_dataset(dest)
    for pipe in pipes:
        go_on(pipe)
    assert mm.finalize(dest).num_samples == 38
    assert objects(dest) == whole
    assert mm.finalize(dest).was_finished
    assert run(corpus, dest, shard_range=(0, 2)).was_finished


def test_a_living_range_keeps_all_others_out_of_its_shards(corpus, dest, paused):
    process, _ = paused(1, shard_range=(1, 3))
    before = files(dest)
    name = rf"another convert --shard-range \(pid {process.pid} on host .* is writing here"
    for call in (
        lambda: run(corpus, dest, shard_range=(2, 4)),
        lambda: run(corpus, dest, shard_range=(1, 3)),
        lambda: run(corpus, dest),
        lambda: run(corpus, dest, overwrite=True),
        lambda: mm.finalize(dest),
    ):
        with pytest.raises(LockedError, match=name):
            call()
        assert files(dest) == before


def test_a_conversion_of_all_shards_keeps_ranges_out(corpus, dest, paused):
    process, _ = paused(1)
    with pytest.raises(LockedError, match=rf"another convert \(pid {process.pid} "):
        run(corpus, dest, shard_range=(3, 4))


@pytest.mark.slow
@in_a_bucket
def test_a_killed_range_is_repeated_and_its_neighbour_is_not_disturbed(corpus, dest, paused, whole):
    process, _ = paused(1, shard_range=(0, 2))
    _, neighbour = paused(3, shard_range=(2, 5))
    kill(process)
    with pytest.raises(LockedError):
        mm.finalize(dest)
    report = run(corpus, dest, shard_range=(0, 2))
    assert 0 < report.num_new_bytes < report.num_bytes
    go_on(neighbour)
    mm.finalize(dest)
    assert objects(dest) == whole


@pytest.mark.slow
@in_a_folder
def test_finalize_takes_over_the_locks_of_killed_ranges(corpus, dest, paused, whole):
    process, _ = paused(4, shard_range=(1, 5))
    kill(process)
    run(corpus, dest, shard_range=(0, 1))
    with pytest.raises(mm.MMStreamError, match=r"1 of 5 shards are missing or damaged: 4:5; write"):
        mm.finalize(dest)
    run(corpus, dest)  # a whole conversion takes what ranges have written
    assert objects(dest) == whole


@pytest.mark.slow
@in_a_folder
def test_ranges_count_shards_over_all_splits(corpus, dest, tmp_path):
    options = {"splits": SPLITS, "samples_per_shard": 5}
    run(corpus, tmp_path / "alone", **options)
    num_train = len(list((tmp_path / "alone" / "train").glob("*.tar")))
    run(corpus, dest, shard_range=(0, num_train - 1), **options)
    run(corpus, dest, shard_range=(num_train, num_train + 1), **options)
    message = rf"shards are missing or damaged: {num_train - 1}:{num_train}, {num_train + 1}:"
    with pytest.raises(mm.MMStreamError, match=message):
        mm.finalize(dest, splits=["val", "train"])
    run(corpus, dest, shard_range=(num_train - 1, 99), **options)
    assert list(mm.finalize(dest, splits=["val", "train"]).splits) == ["train", "val"]
    for split in SPLITS:
        assert objects(f"{dest}/{split}") == tree(tmp_path / "alone" / split)


@pytest.mark.parametrize("splits", [None, ["train"], ["train", "val", "val"]])
def test_finalize_needs_all_splits(corpus, tmp_path, splits):
    run(corpus, tmp_path / "out", splits=SPLITS, shard_range=(0, 1))
    with pytest.raises(mm.ConfigError, match=r"name all of them with splits=|has \['train"):
        mm.finalize(tmp_path / "out", splits=splits)


def test_a_damaged_shard_is_not_finalized(corpus, tmp_path):
    run(corpus, tmp_path / "out", shard_range=(0, 9))
    (tmp_path / "out" / "shard-000002.tar").write_bytes(b"cut short")
    with pytest.raises(mm.MMStreamError, match=r"1 of 5 .*: 2:3;"):
        mm.finalize(tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()
    run(corpus, tmp_path / "out", shard_range=(2, 3))
    assert mm.finalize(tmp_path / "out").num_samples == 38


def test_a_range_of_rejects_only_is_for_finalize_to_judge(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": ""}\n' * 4)
    assert mm.convert(rows, tmp_path / "out", shard_range=(0, 1), progress=False).num_rejects == 4
    with pytest.raises(mm.MMStreamError, match="none of 4 rows became a sample"):
        mm.finalize(tmp_path / "out")


def test_finalize_finds_the_duplicates_that_the_plan_asks_for(corpus, tmp_path):
    options = {"duplicates": "drop"}
    run(corpus, tmp_path / "alone", **options)
    run(corpus, tmp_path / "out", shard_range=(0, 2), **options)
    run(corpus, tmp_path / "out", shard_range=(2, 9), **options)
    assert mm.finalize(tmp_path / "out").num_pairs
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
def test_the_array_of_the_docs_writes_the_bytes_of_one_process(corpus, tmp_path, whole):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(SBATCH)
    (folder / "sbatch").chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = os.environ | {
        "PATH": path,
        "SHARDS_PER_TASK": "4",
        "CONVERT_OPTIONS": "--samples-per-shard 8",
        "FINALIZE_OPTIONS": "--max-rejects 10%",
    }
    # Five shards: the second task has one of them, and the third none.
    command = ["bash", DOCS / "convert_slurm.sh", corpus, tmp_path / "out", "3"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "out") == whole


# -- two conversions: the second is refused, whatever the first is doing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dest", "options"),
    [
        ("local", {"overwrite": True}),
        ("local", {"samples_per_shard": 3}),
        pytest.param("s3", {}, marks=pytest.mark.s3),
    ],
    indirect=["dest"],
)
def test_a_second_conversion_is_refused_and_changes_nothing(
    corpus, dest, paused, tmp_path, options, whole
):
    process, pipe = paused(2)
    before = files(dest)
    message = rf"{dest}: another convert \(pid {process.pid} on host .* is writing here"
    with pytest.raises(mm.ConfigError, match=message):
        run(corpus, dest, **options)
    assert files(dest) == before
    go_on(pipe)
    assert objects(dest) == whole


@pytest.mark.s3
def test_parts_of_uploads_that_a_killed_conversion_left_are_removed(
    corpus, s3, tmp_path, monkeypatch
):
    dest = f"{s3}/{tmp_path.name}"
    interrupted(monkeypatch, corpus, dest, after=2)
    store = open_store(dest)
    assert store.exists("shard-000000.tar.idx")  # finished: it is not written again
    for name in ("shard-000000.tar", "shard-000002.tar", "reports/shard-000001.json", "mine.tar"):
        store._send(store.url_of(name), "create_multipart_upload")
    run(corpus, dest)
    prefix = dest.removeprefix("s3://").partition("/")[2]
    answer = store._send(store.url, "list_multipart_uploads", Prefix=prefix)
    assert [left["Key"] for left in answer["Uploads"]] == [f"{prefix}/mine.tar"]
    store.remove_uploads(r"mine\.tar")


@pytest.mark.slow
@in_a_bucket
def test_a_conversion_that_lost_its_lock_commits_nothing_more(corpus, dest, paused, whole):
    _, pipe = paused(2)
    store = open_store(dest)
    store.remove(LOCK_NAME)  # as if another one had taken it over and finished
    run(corpus, dest)
    before = objects(dest)
    assert before == whole
    go_on(pipe, "this process had the lock and lost it")
    assert objects(dest) == before


@pytest.mark.slow
@in_a_folder
def test_each_split_has_a_lock_of_its_own(corpus, dest, paused):
    paused(2, splits={"train": 0.5, "val": 0.5}, samples_per_shard=6)
    with pytest.raises(mm.ConfigError, match=r"/val: another convert"):
        run(corpus, f"{dest}/val")
    run(corpus, f"{dest}/test")
