"""The rejected rows of a finished dataset are tried again, into extra shards."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import duckdb
import pytest

import mmstream as mm
from mmstream.converting.plan import RETRIED_SHARDS
from mmstream.storage import open_store
from tests.converting.test_kill import convert_and_die, moments_of_death
from tests.helpers.convert_corpus import keys, run, tree, write_files, write_rows
from tests.helpers.corpora import jpeg

ABSENT = (1, 4, 7, 8, 12, 17)
"""Rows from 0 whose images come later. Row 9 has no text and stays a reject."""


@pytest.fixture
def corpus(tmp_path):
    """Twenty rows of which seven are rejected."""
    rows = [{"id": i, "image": f"{i}.jpg", "text": f"row {i}"} for i in range(20)]
    rows[9]["text"] = ""
    path = write_rows(tmp_path / "rows.jsonl", rows)
    arrive(path, *set(range(20)) - set(ABSENT))
    return path


def arrive(corpus, *rows):
    write_files(corpus.parent, {f"{i}.jpg": jpeg(i) for i in rows})


def convert(corpus, dest, **options):
    return run(corpus, dest, samples_per_shard=4, **options)


@pytest.fixture
def retried(corpus, tmp_path):
    """The folder of a conversion whose missing images came before a retry."""
    convert(corpus, tmp_path / "out")
    arrive(corpus, *ABSENT)
    convert(corpus, tmp_path / "out", retry_rejects=True)
    return tmp_path / "out"


def versions(dest):
    return open_store(dest).list() | open_store(f"{dest}/reports").list()


@pytest.mark.slow
def test_what_arrived_goes_into_extra_shards_and_good_ones_are_untouched(corpus, dest):
    convert(corpus, dest)
    before = versions(dest)
    arrive(corpus, *ABSENT)
    report = convert(corpus, dest, retry_rejects=True)
    assert (report.num_rows, report.num_samples, report.num_rejects) == (20, 19, 1)
    assert (report.num_retried, report.num_recovered, report.was_finished) == (7, 6, False)
    after = versions(dest)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"mmstream.json", "rejects.jsonl", "report.json"}
    dataset = mm.open_dataset(dest)
    names = [shard.name for shard in dataset.manifest.shards]
    assert names == [f"shard-{i:06d}.tar" for i in range(7)]
    assert dataset.manifest.source[RETRIED_SHARDS] == [2]
    found = {sample["__key__"]: sample["txt"].decode() for sample in dataset}
    assert list(found)[13:] == [f"{i + 1:09d}" for i in ABSENT]
    assert found == {f"{i + 1:09d}": f"row {i}" for i in range(20) if i != 9}


def test_a_retry_that_gains_nothing_changes_nothing(corpus, tmp_path):
    convert(corpus, tmp_path / "out")
    before = tree(tmp_path / "out")
    report = convert(corpus, tmp_path / "out", retry_rejects=True)
    assert (report.num_samples, report.num_rejects) == (13, 7)
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("check", [False, True])
def test_lost_shards_of_before_and_after_a_retry_are_written_again(corpus, tmp_path, check):
    out = tmp_path / "out"
    convert(corpus, out)
    arrive(corpus, *ABSENT[:4])
    convert(corpus, out, retry_rejects=True)
    arrive(corpus, *ABSENT[4:])
    convert(corpus, out, retry_rejects=True)
    before = tree(out)
    for name in ("shard-000001.tar", "shard-000005.tar.idx", "shard-000007.tar"):
        if check:
            data = bytearray((out / name).read_bytes())
            data[-1] ^= 4
            (out / name).write_bytes(data)
        else:
            (out / name).unlink()
    report = convert(corpus, out, check=check)
    assert (report.num_repaired, report.was_finished) == (3, True)
    assert tree(out) == before


@pytest.mark.slow
def test_killed_anywhere_a_retry_is_repeated_to_the_same_bytes(corpus, tmp_path):
    options = {"samples_per_shard": 4}
    convert(corpus, tmp_path / "before")
    arrive(corpus, *ABSENT)
    shutil.copytree(tmp_path / "before", tmp_path / "whole")
    convert(corpus, tmp_path / "whole", retry_rejects=True)
    old, new = tree(tmp_path / "before"), tree(tmp_path / "whole")
    good = set(old) - {"mmstream.json", "rejects.jsonl", "report.json"}

    def dies(moment):
        out = tmp_path / f"out{moment}"
        shutil.copytree(tmp_path / "before", out)
        return convert_and_die(corpus, out, moment, retry_rejects=True, **options)

    for moment in moments_of_death(dies, 2):  # each write has two
        out = tmp_path / f"out{moment}"
        assert {name: tree(out)[name] for name in good} == {name: old[name] for name in good}
        assert len(mm.open_dataset(out)) in (13, 19)
        if (out / "mmstream.json").read_bytes() == old["mmstream.json"]:
            convert(corpus, out, retry_rejects=True)
        else:  # the kill came behind the commit
            convert(corpus, out)
            (out / ".mmstream.lock").unlink(missing_ok=True)
        assert tree(out) == new
    assert moment == 2 * (2 * 5 + 1 + 1 + 1 + 1 + 1)  # the removal of the lock


@pytest.mark.parametrize(
    "options", [{"splits": {"train": 0.5, "val": 0.5}}, {"shuffle_seed": 1}], ids=["splits", "seed"]
)
def test_each_split_has_its_own_retry_and_shuffled_rows_are_the_right_ones(
    corpus, tmp_path, options
):
    convert(corpus, tmp_path / "out", **options)
    arrive(corpus, *ABSENT)
    report = convert(corpus, tmp_path / "out", retry_rejects=True, **options)
    assert (report.num_samples, report.num_rejects) == (19, 1)
    folders = [tmp_path / "out" / split for split in report.splits] or [tmp_path / "out"]
    found = sorted(key for folder in folders for key in keys(folder))
    assert found == [f"{i + 1:09d}" for i in range(20) if i != 9]
    assert convert(corpus, tmp_path / "out", **options).was_finished


def test_overwrite_removes_extra_shards(corpus, tmp_path, retried):
    convert(corpus, retried, overwrite=True)
    convert(corpus, tmp_path / "fresh")
    assert tree(retried) == tree(tmp_path / "fresh")


def test_only_a_finished_dataset_can_be_retried(corpus, tmp_path):
    with pytest.raises(mm.ConfigError, match="no finished conversion"):
        convert(corpus, tmp_path / "out", retry_rejects=True)
    convert(corpus, tmp_path / "out", shard_range=(0, 1))
    with pytest.raises(mm.ConfigError, match="no finished conversion"):
        convert(corpus, tmp_path / "out", retry_rejects=True)


def test_a_lost_extra_shard_without_the_reports_names_the_cure(corpus, retried):
    (retried / "shard-000005.tar").unlink()
    for report in (retried / "reports").glob("*.rejects.jsonl"):
        report.unlink()
    with pytest.raises(mm.errors.ManifestError, match="bring reports/ back"):
        convert(corpus, retried)


@pytest.mark.parametrize("captions", ["all", "each"])
def test_the_documented_query_gives_the_last_word_on_each_row(corpus, tmp_path, captions):
    convert(corpus, tmp_path / "out", captions=captions)
    for row in ABSENT[:2]:
        arrive(corpus, row)
        convert(corpus, tmp_path / "out", captions=captions, retry_rejects=True)
    page = Path(__file__).parents[2].joinpath("docs/conversion.md").read_text()
    (query,) = re.findall(r"^SELECT .* QUALIFY .*;$", page, re.MULTILINE)
    table = f"({query.rstrip(';').replace('shards/', f'{tmp_path}/out/')})"
    counts = duckdb.sql(f"SELECT status, count(*) FROM {table} GROUP BY status ORDER BY status")
    assert counts.fetchall() == [("rejected", 5), ("success", 15)]
    keys = duckdb.sql(f"SELECT count(DISTINCT (file, row)) FROM {table}").fetchall()
    assert keys == [(20,)]
