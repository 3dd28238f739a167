"""Rows that are added to a finished dataset, as shards after the last one."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import mmstream as mm
from mmstream.converting.plan import MAX_ROWS_PER_SAMPLE, KnownRows, plan_append
from mmstream.dataset.bad_list import take_down
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.manifest import Manifest
from mmstream.dataset.verify import verify
from mmstream.storage import open_store
from tests.converting.test_kill import convert_and_die, moments_of_death
from tests.helpers.convert_corpus import (
    jsonl,
    keys,
    objects,
    pictures,
    rejects,
    run,
    tree,
    write_files,
    write_rows,
)
from tests.helpers.corpora import jpeg

COMMIT = {"mmstream.json", "rejects.jsonl", "report.json"}
"""What an append replaces. All other files of before stay."""


def rows_of(numbers):
    return [{"id": i, "image": f"{i % 3}.jpg", "text": f"row {i}"} for i in numbers]


@pytest.fixture
def week(tmp_path):
    """Write rows of these numbers to a file of this name, beside three pictures."""
    pictures(tmp_path, "0.jpg", "1.jpg", "2.jpg")
    return lambda name, numbers: write_rows(tmp_path / f"{name}.jsonl", rows_of(numbers))


def convert(rows, dest, **options):
    return run(rows, dest, samples_per_shard=4, **options)


def texts(dest):
    return [sample["txt"].decode() for sample in mm.open_dataset(dest)]


def source_of(dest):
    return Manifest.read(open_store(str(dest))).source


def test_new_rows_become_shards_at_the_end_and_the_others_are_untouched(week, dest):
    convert(week("one", range(10)), dest)
    before = objects(dest)
    report = convert(week("two", range(10, 17)), dest, append=True)
    assert (report.num_rows, report.num_samples, report.num_rejects) == (7, 7, 0)
    assert (report.num_shards, report.was_finished) == (2, False)
    convert(week("three", range(17, 18)), dest, append=True)
    after = objects(dest)
    assert {name for name in before if after[name] != before[name]} <= COMMIT
    assert texts(dest) == [f"row {i}" for i in range(18)]
    dataset = mm.open_dataset(dest)
    assert [shard.name for shard in dataset.manifest.shards] == [
        f"shard-{i:06d}.tar" for i in range(6)
    ]
    assert [sample["__key__"] for sample in dataset] == [f"{i + 1:09d}" for i in range(18)]
    assert dataset["000000017"]["txt"] == b"row 16"
    assert not [*verify(dataset)]
    assert len(dataset.where("id = '16' or id = '3'")) == 2
    assert json.loads(after["report.json"])["num_rows"] == 18


@pytest.mark.slow
def test_an_append_has_the_same_bytes_with_workers_and_shuffled(week, tmp_path):
    one, two = week("one", range(10)), week("two", range(7, 27))
    for name, num_workers in (("a", 1), ("b", 2)):
        convert(one, tmp_path / name, shuffle_seed=3)
        convert(two, tmp_path / name, shuffle_seed=3, append=True, num_workers=num_workers)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert sorted(texts(tmp_path / "a")) == sorted(f"row {i}" for i in range(27))
    assert source_of(tmp_path / "a")["appended"][0]["starts"] != [0, 4, 8, 12, 16]


@pytest.mark.parametrize("again", ["two", "one"])
def test_rows_that_are_there_are_rejects_and_the_second_time_changes_nothing(
    week, tmp_path, caplog, again
):
    files = {"one": week("one", range(10)), "two": week("two", range(6, 13))}
    out = tmp_path / "out"
    convert(files["one"], out)
    report = convert(files["two"], out, append=True)
    assert (report.num_samples, report.num_rejects, report.num_left_out) == (3, 4, 4)
    assert set(rejects(out).values()) == {"is in the dataset already, by its id"}
    assert keys(out)[-3:] == ["000000015", "000000016", "000000017"]
    before = tree(out)
    report = convert(files[again], out, append=True)
    assert (report.num_samples, report.num_rejects) == (0, {"one": 10, "two": 7}[again])
    assert not report.has_more_rejects_than(0)
    assert "became a new sample, so the dataset stays as it is" in caplog.text
    assert tree(out) == before
    assert convert(files["one"], out).was_finished
    assert convert(files["one"], out).num_rows == 17


def test_rows_without_ids_are_known_where_the_same_ones_come_again(week, tmp_path, caplog):
    one, two, three = (
        write_rows(tmp_path / f"{name}.jsonl", [{"text": f"{name} {i}"} for i in range(5)])
        for name in ("one", "two", "three")
    )
    out = tmp_path / "out"
    convert(one, out)
    assert convert(two, out, append=True).num_samples == 5
    assert "5 of 5 rows have no id" in caplog.text
    for file in (one, two):
        report = convert(file, out, append=True)
        assert (report.num_samples, report.num_left_out) == (0, 5)
        assert report.reject_kinds[0].kind == "is in the dataset already, by its key"
    assert convert(three, out, append=True, captions="all").num_samples == 5


def test_each_caption_of_a_row_is_known_by_its_row(tmp_path):
    rows = [{"captions": ["a cat", f"cat {i}"], "image": "0.jpg"} for i in range(5)]
    file = write_rows(pictures(tmp_path, "0.jpg") / "rows.jsonl", rows)
    convert(file, tmp_path / "out", captions="each")
    assert convert(file, tmp_path / "out", captions="each", append=True).num_left_out == 5


def test_samples_of_tars_are_known_by_their_keys(week, tmp_path):
    run(week("a", range(5)), tmp_path / "a", samples_per_shard=5)
    run(week("b", range(8)), tmp_path / "b", samples_per_shard=8)
    for name in "ab":
        write_files(
            tmp_path / f"{name}s", {"x.tar": (tmp_path / name / "shard-000000.tar").read_bytes()}
        )
    convert(tmp_path / "as", tmp_path / "out")
    report = convert(tmp_path / "bs", tmp_path / "out", append=True)
    assert (report.num_samples, report.num_left_out) == (3, 5)
    assert keys(tmp_path / "out") == [f"{i + 1:09d}" for i in range(8)]


def test_rejected_rows_of_before_are_tried_again_by_an_append(week, tmp_path):
    rows = [{"id": i, "image": f"late{i}.jpg", "text": "x"} for i in (70, 71)]
    one, out = week("one", range(3)), tmp_path / "out"
    one.write_bytes(one.read_bytes() + jsonl(rows))
    assert convert(one, out).num_rejects == 2
    convert(week("two", range(3, 5)), out, append=True)
    write_files(tmp_path, {"late70.jpg": jpeg(70)})
    with pytest.raises(mm.ConfigError, match=r"rows were appended since.*append=True"):
        convert(one, out, retry_rejects=True)
    report = convert(one, out, append=True)
    assert (report.num_samples, report.num_rejects, report.num_left_out) == (1, 4, 3)
    assert keys(out)[-1] == "000000011"  # the fourth row of 5, behind 5 + 2 rows
    assert not [*verify(mm.open_dataset(out))]


def test_rows_may_be_appended_after_a_retry(week, tmp_path):
    one, out = week("one", range(6)), tmp_path / "out"
    (tmp_path / "2.jpg").rename(tmp_path / "away")
    convert(one, out)
    (tmp_path / "away").rename(tmp_path / "2.jpg")
    convert(one, out, retry_rejects=True)
    convert(week("two", range(6, 9)), out, append=True)
    assert keys(out) == [f"{i + 1:09d}" for i in (0, 1, 3, 4, 2, 5, 6, 7, 8)]
    assert mm.open_dataset(out)["000000009"]["txt"] == b"row 8"
    assert rejects(out) == {}
    assert convert(one, out).was_finished


# -- options and destinations ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples_per_shard": 3}, "samples_per_shard was 4 and is now 3. Append with the"),
        ({"shuffle_seed": 1}, "shuffle_seed was not set and is now 1"),
        ({"captions": "each"}, "captions was 'all' and is now 'each'"),
        (
            {"media": mm.MediaOptions(check="full")},
            r"media was \{\} and is now \{'check': 'full'\}",
        ),
        ({"duplicates": "report"}, "duplicates was not set and is now 'report'"),
        ({"sidecar": False}, "sidecar was True and is now False"),
        ({"format": "captions"}, "format was not set and is now 'captions'"),
    ],
)
def test_other_options_than_those_of_the_dataset_are_refused(week, tmp_path, options, message):
    convert(week("one", range(5)), tmp_path / "out")
    before = tree(tmp_path / "out")
    with pytest.raises(mm.ConfigError, match=message):
        run(
            week("two", [6]), tmp_path / "out", **{"samples_per_shard": 4, "append": True} | options
        )
    assert tree(tmp_path / "out") == before
    assert convert(week("two", range(5, 9)), tmp_path / "out", append=True, limit=1).num_rows == 1


def test_impossible_combinations_are_refused(week, tmp_path, monkeypatch):
    convert(week("one", range(5)), tmp_path / "out")
    for others in ({"overwrite": True}, {"retry_rejects": True}, {"shard_range": (0, 1)}):
        with pytest.raises(mm.ConfigError, match="append=True adds"):
            convert(week("two", [6]), tmp_path / "out", append=True, **others)
    with pytest.raises(mm.ConfigError, match=r"rerun=mm.Rerun\(append=True\) adds rows"):
        convert(week("two", [6]), tmp_path / "out")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(mm.ConfigError, match="append=True in a job of 2 ranks"):
        convert(week("two", [6]), tmp_path / "out", append=True)


def test_a_folder_without_a_finished_conversion_is_refused(week, tmp_path):
    one, out = week("one", range(5)), tmp_path / "out"
    with pytest.raises(mm.ConfigError, match="no finished dataset to append to"):
        convert(one, out, append=True)
    convert(one, out, shard_range=(0, 1))
    with pytest.raises(mm.ConfigError, match="an unfinished conversion: complete it"):
        convert(one, out, append=True)
    convert(one, tmp_path / "whole", sidecar=False)
    with pytest.raises(mm.ConfigError, match="has no sidecars"):
        convert(week("two", [6]), tmp_path / "whole", append=True, sidecar=False)


def test_tars_of_others_are_refused(week, tmp_path):
    one, two, out = week("one", range(5)), week("two", [6]), tmp_path / "out"
    convert(one, out)
    tar = (out / "shard-000000.tar").read_bytes()
    write_files(tmp_path, {"tars/a.tar": tar, "out/a.tar": tar})
    with pytest.raises(mm.ConfigError, match="no finished dataset"):
        convert(two, tmp_path / "tars", append=True)
    index_tars(str(tmp_path / "tars"))
    with pytest.raises(mm.ConfigError, match=r"no conversion wrote this dataset.*mixture"):
        convert(two, tmp_path / "tars", append=True)
    with pytest.raises(mm.ConfigError, match=r"holds a\.tar, which is not of this dataset"):
        convert(two, out, append=True)


def test_a_lost_sidecar_is_an_error_that_names_the_cure(week, tmp_path):
    one, out = week("one", range(5)), tmp_path / "out"
    convert(one, out)
    (out / "shard-000001.parquet").unlink()
    with pytest.raises(mm.ConfigError, match=r"shard-000001.parquet: no such .* mends it"):
        convert(week("two", [6]), out, append=True)
    convert(one, out)
    assert convert(week("two", [6]), out, append=True).num_samples == 1


# -- splits, duplicates ----------------------------------------------------------------------------


def test_each_split_grows_and_ids_stay_in_their_splits(week, tmp_path):
    splits = {"train": 0.6, "val": 0.4}
    out = tmp_path / "out"
    convert(week("one", range(40)), out, splits=splits)
    report = convert(week("two", range(30, 80)), out, splits=splits, append=True)
    assert (report.num_samples, report.num_left_out) == (40, 10)
    assert all(split.num_samples for split in report.splits.values())
    convert(week("all", range(80)), tmp_path / "at once", splits=splits)
    for split in splits:
        assert sorted(texts(out / split)) == sorted(texts(tmp_path / "at once" / split))
    with pytest.raises(mm.ConfigError, match=r"no finished dataset.*splits"):
        convert(week("three", [90]), out, append=True)


def test_a_split_by_media_cannot_grow(week, tmp_path):
    options = {"splits": {"a": 0.5, "b": 0.5}, "by_media": True}
    convert(week("one", range(9)), tmp_path / "out", **options)
    with pytest.raises(mm.ConfigError, match="split_by_media: a new row may connect"):
        convert(week("two", [10]), tmp_path / "out", append=True, **options)


def test_a_picture_of_another_split_is_warned_of(week, tmp_path, caplog):
    options = {"splits": {"train": 0.5, "val": 0.5}}
    one = write_rows(tmp_path / "a.jsonl", [{"id": i, "text": f"{i}"} for i in range(9)])
    convert(one, tmp_path / "out", **options)
    convert(week("two", range(20, 40)), tmp_path / "out", append=True, **options)
    assert "leak: 11 media files" in caplog.text


# -- what was taken down ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_new_file", [True, False])
def test_what_was_taken_down_does_not_come_back(week, tmp_path, is_new_file):
    out = tmp_path / "out"
    one = convert(week("one", range(10)), out) and week("one", range(10))
    take_down(mm.open_dataset(out), [(0, 2), (1, 1)], "request 17")
    before = tree(out)
    file = week("two", [2, 5, 6]) if is_new_file else one
    report = convert(file, out, append=True)
    kinds = {group.kind: group.num_rows for group in report.reject_kinds}
    assert kinds["was taken down from the dataset (request *), by its id"] == 2
    assert report.num_samples == 0
    assert tree(out) == before
    convert(week("three", [2, 50]), out, append=True)
    assert [sample["txt"] for sample in mm.open_dataset(out)][-1] == b"row 50"
    assert len([*mm.open_dataset(out)]) == 9


# -- kills, and several writers --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("splits", "step"), [(None, 1), ({"train": 0.5, "val": 0.5}, 3)])
def test_killed_anywhere_an_append_is_completed_to_the_same_bytes(week, tmp_path, splits, step):
    options = {"samples_per_shard": 2} | ({"splits": splits} if splits else {})
    one, two = week("one", range(4)), week("two", range(3, 7))
    two.write_bytes(two.read_bytes() + b"no row\n")
    run(one, tmp_path / "before", **options)
    shutil.copytree(tmp_path / "before", tmp_path / "whole")
    run(two, tmp_path / "whole", append=True, **options)
    old, new = tree(tmp_path / "before"), tree(tmp_path / "whole")
    good = {name for name in old if Path(name).name not in COMMIT}
    folders = list(splits or [""])

    def dies(moment):
        shutil.copytree(tmp_path / "before", tmp_path / f"out{moment}")
        return convert_and_die(two, tmp_path / f"out{moment}", moment, append=True, **options)

    for moment in moments_of_death(dies, step):
        out = tmp_path / f"out{moment}"
        now = tree(out)
        assert {name: now[name] for name in good} == {name: old[name] for name in good}
        for folder in folders:
            name = f"{folder}/mmstream.json".lstrip("/")
            assert now[name] in (old[name], new[name])
            assert not [*verify(mm.open_dataset(out / folder))]
        run(two, out, append=True, **options)
        assert tree(out) == new
    assert moment > 30


@contextmanager
def failing_at(moment, kind):
    """End with a KeyboardInterrupt at a moment: before an object appears, or after one is gone."""
    create, write, remove, left = kind.create, kind.write, kind.remove, [moment]

    def tick():
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt

    @contextmanager
    def failing_create(self, name):
        with create(self, name) as file:
            yield file
            tick()

    def failing_write(self, name, data):
        tick()
        write(self, name, data)

    def failing_remove(self, name):
        remove(self, name)
        tick()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "create", failing_create)
        patch.setattr(kind, "write", failing_write)
        patch.setattr(kind, "remove", failing_remove)
        yield


@pytest.mark.slow
def test_interrupted_anywhere_an_append_to_an_object_store_is_completed(week, memory):
    one, two, dest = week("one", range(4)), week("two", range(3, 8)), "memory://bucket/{}"
    convert(one, dest.format("before"))
    memory.copy("/bucket/before", "/bucket/whole", recursive=True)
    convert(two, dest.format("whole"), append=True)
    new = objects(dest.format("whole"))

    def dies(moment):
        out = dest.format(f"out{moment}")
        memory.copy("/bucket/before", f"/bucket/out{moment}", recursive=True)
        with failing_at(moment, type(open_store(out))):
            try:
                convert(two, out, append=True)
            except KeyboardInterrupt:
                return True
        return False

    for moment in moments_of_death(dies):
        out = dest.format(f"out{moment}")
        assert len(mm.open_dataset(out)) in (4, 8)
        convert(two, out, append=True)
        assert objects(out) == new
    assert moment > 15


def test_another_append_writes_what_a_killed_one_left_anew(week, tmp_path):
    one, two, three = week("one", range(5)), week("two", range(20, 40)), week("three", range(7, 13))
    convert(one, tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "killed")
    assert convert_and_die(two, tmp_path / "killed", 40, append=True, samples_per_shard=4)
    assert len([*(tmp_path / "killed").glob("*.tar")]) > 4
    for out in ("plain", "killed"):
        convert(three, tmp_path / out, append=True)
    assert tree(tmp_path / "plain") == tree(tmp_path / "killed")


def test_a_retry_writes_what_a_killed_append_left_anew(week, tmp_path):
    one, two = week("one", range(6)), week("two", range(20, 40))
    (tmp_path / "2.jpg").rename(tmp_path / "away")
    convert(one, tmp_path / "plain")
    (tmp_path / "away").rename(tmp_path / "2.jpg")
    shutil.copytree(tmp_path / "plain", tmp_path / "killed")
    assert convert_and_die(two, tmp_path / "killed", 25, append=True, samples_per_shard=4)
    for out in ("plain", "killed"):
        convert(one, tmp_path / out, retry_rejects=True)
    assert tree(tmp_path / "plain") == tree(tmp_path / "killed")


@pytest.mark.parametrize("check", [False, True])
def test_lost_shards_of_an_append_are_written_again_by_its_command(week, tmp_path, caplog, check):
    one, two, out = week("one", range(5)), week("two", range(3, 12)), tmp_path / "out"
    convert(one, out)
    convert(two, out, append=True)
    convert(week("three", range(30, 33)), out, append=True)
    before = tree(out)
    for name in ("shard-000002.tar", "shard-000003.tar.idx", "shard-000003.parquet"):
        if check:
            data = bytearray((out / name).read_bytes())
            data[-9] ^= 4
            (out / name).write_bytes(data)
        else:
            (out / name).unlink()
    assert convert(one, out, check=check).num_repaired == 0
    assert check or "2 shards of other rows are missing" in caplog.text
    report = convert(two, out, append=True, check=check)
    assert (report.num_repaired, report.was_finished) == (2, True)
    assert tree(out) == before


# -- how shards are cut ----------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(0, 300))
def test_shards_end_with_their_last_new_row(is_known, per_shard, num_more):
    is_known = [*is_known, *[True] * num_more]
    manifest = Manifest((), source={"rows_total": 7, "num_rows": 7, "samples_per_shard": per_shard})
    plan = {"rows": "a", "rows_sha256": "b", "rows_total": 99, "num_rows": len(is_known)}
    known = KnownRows(np.array(is_known, np.uint16), ("why",))
    rows = np.arange(len(is_known))
    append = plan_append(manifest, {**plan, "samples_per_shard": per_shard}, rows, known)
    shards = [*append.shards(rows).values()]
    assert np.concatenate([rows[:0], *shards]).tolist() == rows.tolist()
    num_new = [sum(not is_known[row] for row in shard) for shard in shards]
    assert max(num_new, default=0) <= per_shard
    assert max(map(len, shards), default=0) <= MAX_ROWS_PER_SAMPLE * per_shard
    if len(rows) <= MAX_ROWS_PER_SAMPLE * per_shard:
        assert all(count == per_shard for count in num_new[:-1])
    refused = [key for shard in shards for key in known.refused(shard, append.first_row)]
    assert refused == [f"{7 + row + 1:09d}" for row in rows if is_known[row]]


# -- the command -----------------------------------------------------------------------------------


def test_the_command_appends_and_says_what_is_there_already(week, tmp_path, mmstream):
    out = tmp_path / "out"
    assert mmstream("convert", week("one", range(5)), out)[0] == 0
    two = week("two", range(4, 7))
    code, printed, _ = mmstream("convert", two, out, "--append")
    assert (code, len(mm.open_dataset(out))) == (0, 7)
    assert "3 rows -> 2 samples in 1 shard, 1 rejected (1 of them" in printed
    assert "1 row: row 1: is in the dataset already, by its id" in printed
    code, printed, _ = mmstream("convert", two, out, "--append")
    assert (code, len(mm.open_dataset(out))) == (0, 7)
    assert "no row was added" in printed
    assert "rejects.jsonl" not in printed
    assert mmstream("convert", two, out, "--append", "--overwrite")[0] == 2
