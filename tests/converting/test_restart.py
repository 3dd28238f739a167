"""A conversion whose destination holds nothing, a part of it, all of it, or something else."""

from __future__ import annotations

import os
import shutil

import pytest

import mmstream as mm
from mmstream.converting import shard
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME
from tests.helpers.convert_corpus import interrupted, objects, run, tree, write_files
from tests.helpers.corpora import jpeg


def test_a_restart_writes_only_what_is_missing(corpus, tmp_path, monkeypatch, whole):
    interrupted(monkeypatch, corpus, tmp_path / "out", after=3)
    with pytest.raises(mm.errors.ManifestError, match="run the same `mmstream convert` again"):
        mm.open_dataset(tmp_path / "out")
    assert not list(tmp_path.rglob(".*.tmp"))
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.tar*")}
    assert len(before) == 9
    report = run(corpus, tmp_path / "out")
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert tree(tmp_path / "out") == whole
    assert 0 < report.num_new_bytes < report.num_bytes
    assert report.num_samples == 38


@pytest.mark.parametrize(
    ("state", "suffix", "how"),
    [
        *(("finished", "", "absent"), ("finished", "", "short")),
        *(("finished", ".idx", "short"), ("finished", ".crc32c", "absent")),
        *(("unfinished", "", "absent"), ("unfinished", "", "short")),
        *(("unfinished", ".idx", "absent"), ("unfinished", ".crc32c", "short")),
    ],
)
def test_the_same_call_writes_missing_and_cut_shards_again(
    corpus, tmp_path, monkeypatch, caplog, state, suffix, how, whole
):
    if state == "finished":
        run(corpus, tmp_path / "out")
    else:
        interrupted(monkeypatch, corpus, tmp_path / "out", after=4)
    path = tmp_path / "out" / f"shard-000002.tar{suffix}"
    rest = path.read_bytes()[:-8]
    path.unlink()
    if how == "short":
        path.write_bytes(rest)
    report = run(corpus, tmp_path / "out")
    assert tree(tmp_path / "out") == whole
    assert (report.num_repaired, report.was_finished) == (1, state == "finished")
    assert 0 < report.num_new_bytes < report.num_bytes
    assert report.num_samples == 38
    name = tmp_path / "out" / "shard-000002.tar"
    assert f"{name}: was missing or damaged; written again" in caplog.text
    assert run(corpus, tmp_path / "out").num_repaired == 0


@pytest.mark.parametrize(
    ("state", "suffix", "num_workers"),
    [
        *(("finished", suffix, 1) for suffix in ("", ".idx", ".crc32c")),
        ("unfinished", ".crc32c", 1),
        pytest.param("unfinished", "", 2, marks=pytest.mark.slow),
    ],
)
def test_check_also_finds_shards_with_other_bytes(
    corpus, tmp_path, monkeypatch, state, suffix, num_workers
):
    options = {"samples_per_shard": 20}
    run(corpus, tmp_path / "whole", **options)
    if state == "finished":
        run(corpus, tmp_path / "out", **options)
    else:
        interrupted(monkeypatch, corpus, tmp_path / "out", after=1, **options)
    path = tmp_path / "out" / f"shard-000000.tar{suffix}"
    data = path.read_bytes()
    path.write_bytes(data[:50] + bytes([data[50] ^ 4]) + data[51:])
    damaged = tree(tmp_path / "out")
    if state == "finished":
        assert run(corpus, tmp_path / "out", **options).num_repaired == 0
        assert tree(tmp_path / "out") == damaged
    report = run(corpus, tmp_path / "out", check=True, num_workers=num_workers, **options)
    assert report.num_repaired == 1
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    report = run(corpus, tmp_path / "out", check=True, **options)
    assert (report.num_repaired, report.was_finished, report.num_new_bytes) == (0, True, 0)


def test_rejects_of_an_unfinished_conversion_are_written_again_when_they_are_missing(
    corpus, tmp_path, monkeypatch, whole
):
    interrupted(monkeypatch, corpus, tmp_path / "out", after=4)
    (tmp_path / "out" / "reports" / "shard-000000.rejects.jsonl").unlink()
    (tmp_path / "out" / "reports" / "shard-000001.json").write_bytes(b"{}")
    assert run(corpus, tmp_path / "out").num_samples == 38
    assert tree(tmp_path / "out") == whole


def test_rejects_that_are_samples_now_leave_nothing_behind(corpus, tmp_path, monkeypatch):
    image = tmp_path / "images" / "absent.jpg"
    interrupted(monkeypatch, corpus, tmp_path / "out", after=2)
    (tmp_path / "out" / "reports" / "shard-000000.json").unlink()  # the rejects wait for it
    image.write_bytes(jpeg(1))
    run(corpus, tmp_path / "out")
    run(corpus, tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_damaged_shard_whose_media_have_changed_is_named_and_stays(corpus, tmp_path, out):
    os.truncate(out / "shard-000000.tar", 100)
    before = tree(out)
    for image in (tmp_path / "images").iterdir():
        image.unlink()
    with pytest.raises(
        mm.MMStreamError, match=r"shard-000000\.tar: is damaged, and its rows give oth"
    ):
        run(corpus, out)
    assert tree(out) == before


def test_a_shard_that_another_program_cut_is_not_committed(corpus, tmp_path, monkeypatch):
    real = shard.encode_index

    def cut(offsets):
        os.truncate(tmp_path / "out" / "shard-000000.tar", 100)
        return real(offsets)

    monkeypatch.setattr(shard, "encode_index", cut)
    with pytest.raises(
        mm.errors.StorageError, match=r"shard-000000\.tar: has another size than what"
    ):
        run(corpus, tmp_path / "out")
    assert not list((tmp_path / "out" / "reports").iterdir())


def test_a_finished_conversion_is_left_alone(corpus, out):
    before = {p: p.stat().st_mtime_ns for p in (out, *out.rglob("*"))}
    again = run(corpus, out)
    assert (again.num_samples, again.num_new_bytes, again.was_finished) == (38, 0, True)
    assert {p: p.stat().st_mtime_ns for p in (out, *out.rglob("*"))} == before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"samples_per_shard": 9}, "samples_per_shard was 8 and is now 9"),
        ({"shuffle_seed": 3}, "shuffle_seed was not set and is now 3"),
        ({"captions": "each"}, "captions was 'all' and is now 'each'"),
        ({"limit": 10}, r"settings: limit was not set and is now 10\. Name"),  # and nothing else
    ],
)
def test_another_plan_is_refused_in_a_finished_and_an_unfinished_destination(
    corpus, tmp_path, monkeypatch, options, reason
):
    run(corpus, tmp_path / "done")
    interrupted(monkeypatch, corpus, tmp_path / "part", after=1)
    for name in ("done", "part"):
        before = tree(tmp_path / name)
        with pytest.raises(mm.ConfigError, match=f"{reason}.*overwrite"):
            run(corpus, tmp_path / name, **options)
        assert tree(tmp_path / name) == before


def test_other_rows_and_other_media_are_another_plan(corpus, tmp_path, monkeypatch):
    interrupted(monkeypatch, corpus, tmp_path / "out", after=1)
    with pytest.raises(mm.ConfigError, match=r"has the media root .*overwrite=True"):
        run(corpus, tmp_path / "out", media_root=tmp_path / "images")
    with corpus.open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(
        mm.ConfigError, match=r"rows_sha256 was .* rows_total was 40 and is now 41\. Name"
    ):
        run(corpus, tmp_path / "out")


def test_overwrite_replaces_everything_but_foreign_files(corpus, tmp_path, monkeypatch):
    run(corpus, tmp_path / "fresh", samples_per_shard=20)
    interrupted(monkeypatch, corpus, tmp_path / "part", after=2)
    run(corpus, tmp_path / "done", samples_per_shard=3)
    for name in ("part", "done"):
        (tmp_path / name / "photo.jpg").write_text("mine")
        run(corpus, tmp_path / name, samples_per_shard=20, overwrite=True)
        files = tree(tmp_path / name)
        assert files.pop("photo.jpg") == b"mine"
        assert files == tree(tmp_path / "fresh")


def test_a_destination_that_is_a_file_is_refused(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(mm.ConfigError, match="is a file, not a folder"):
        run(corpus, tmp_path / "file")


def test_a_conversion_without_its_manifest_says_what_to_do(corpus, out):
    files = tree(out)
    (out / "mmstream.json").unlink()
    with pytest.raises(mm.ConfigError, match=r"its mmstream\.json is gone: .*overwrite=True"):
        run(corpus, out)
    index_tars(out, progress=False)
    with pytest.raises(mm.ConfigError, match=r"manifest is of `mmstream index`.*overwrite=True"):
        run(corpus, out)
    run(corpus, out, overwrite=True)
    assert tree(out) == files


def test_one_destination_in_the_way_stops_all_splits_before_any_is_written(corpus, tmp_path):
    write_files(tmp_path, {"out/val/a.tar": b"someone's"})
    with pytest.raises(mm.ConfigError, match=r"a\.tar"):
        run(corpus, tmp_path / "out", splits={"train": 0.5, "val": 0.5})
    assert not (tmp_path / "out" / "train").exists()


def test_several_processes_cannot_write_to_the_memory_of_this_one(corpus, memory):
    with pytest.raises(mm.ConfigError, match=r"only this process has .* num_workers=1"):
        run(corpus, "memory://bucket/out", num_workers=2)
    memory.mkdir("/bucket")
    assert memory.find("/bucket") == []


def test_a_destination_without_folders_gets_the_same_objects(corpus, memory, monkeypatch, out):
    expected = tree(out)
    interrupted(monkeypatch, corpus, "memory://bucket/out", after=2)
    with pytest.raises(mm.errors.ManifestError, match="mmstream convert"):
        mm.open_dataset("memory://bucket/out")
    assert run(corpus, "memory://bucket/out").num_new_bytes > 0
    assert objects("memory://bucket/out") == expected
    report = run(corpus, "memory://bucket/out", samples_per_shard=20, overwrite=True)
    assert report.num_shards == 2
    assert len(memory.find("/bucket/out")) == 2 * 6 + 5


REPLACED = [
    *("rejects.jsonl", "shard-000000.tar.idx", "shard-000123.tar", "shard-000000.tar.crc32c"),
    *(MANIFEST_NAME, MARKER_NAME, "mmstream.bad.json", "mmstream.index.0123456789ab"),
    *("reports/shard-000000.json", "reports/shard-000000.rejects.jsonl"),
]


@pytest.mark.parametrize(
    ("name", "overwrite", "put"),
    [
        *((name, False, shutil.copy) for name in REPLACED),
        *((REPLACED[0], True, put) for put in (shutil.copy, os.link, os.symlink)),
    ],
)
def test_rows_that_the_conversion_would_replace_are_refused_before_anything_is_removed(
    corpus, tmp_path, name, overwrite, put
):
    out = tmp_path / "out"
    run(corpus, out, samples_per_shard=40)
    path = out / name
    path.unlink(missing_ok=True)
    put(corpus, path)
    before = tree(out)
    by_link = tmp_path / "linked"
    by_link.symlink_to(out)
    for rows in (path, by_link / name, f"file://{path}"):
        with pytest.raises(mm.ConfigError, match=r"would replace or remove; move the rows"):
            run(rows, out, samples_per_shard=40, overwrite=overwrite)
        assert tree(out) == before
    with pytest.raises(mm.ConfigError, match=rf"^{path}: lies in {out}"):
        run(path, tmp_path, splits={"out": 1.0}, overwrite=overwrite)
    assert tree(out) == before


def test_rows_in_the_destination_under_another_name_are_left_alone(corpus, tmp_path):
    rows = corpus.rename(corpus.with_name("shards.jsonl"))
    content = rows.read_bytes()
    for options in ({}, {"samples_per_shard": 5}):
        run(rows, tmp_path, overwrite=True, **options)
    assert rows.read_bytes() == content


def test_rows_in_a_prefix_that_the_conversion_would_replace_are_refused(corpus, memory, tmp_path):
    url = "memory://bucket/out/rejects.jsonl"
    memory.pipe_file("/bucket/out/rejects.jsonl", corpus.read_bytes())
    with pytest.raises(mm.ConfigError, match=rf"^{url}: lies in .* convert would replace"):
        run(url, "memory://bucket/out", media_root=tmp_path)
    assert memory.cat_file("/bucket/out/rejects.jsonl") == corpus.read_bytes()


@pytest.mark.parametrize("damage", ["lost", "short", "other bytes"])
def test_a_lost_part_of_the_index_is_written_again(corpus, damage, out):
    expected = tree(out)
    (path,) = out.glob("mmstream.index.*")
    data = path.read_bytes()
    path.unlink()
    if damage != "lost":
        path.write_bytes(data[:-1] if damage == "short" else data[:-1] + b"?")
    assert run(corpus, out, check=damage == "other bytes").was_finished
    assert tree(out) == expected


@pytest.mark.parametrize(
    "name", ["shard-000000.tar", "photo.jpg", "rows.csv", "shard-000000.zip", "data.parquet"]
)
def test_a_destination_that_holds_files_of_others_is_refused_by_name(corpus, tmp_path, name):
    write_files(tmp_path / "out", {name: b"precious"})
    with pytest.raises(mm.ConfigError, match=f"holds {name}, which no conversion wrote; name"):
        run(corpus, tmp_path / "out")
    assert tree(tmp_path / "out") == {name: b"precious"}


def test_a_folder_of_media_whose_name_is_no_utf_8_is_refused_in_one_line(corpus, tmp_path):
    folder = tmp_path / os.fsdecode(b"m\xe9dia")
    folder.mkdir()
    with pytest.raises(mm.ConfigError, match=r"not UTF-8 .*m\\udce9dia.*; rename that"):
        run(corpus, tmp_path / "out", media_root=folder)
    run(corpus, folder / "out")
    assert len(mm.open_dataset(folder / "out")) == 38


def test_a_destination_may_hold_files_about_the_dataset(corpus, tmp_path):
    names = ("README.md", "LICENSE", "citation.cff", ".gitattributes")
    write_files(tmp_path / "out", dict.fromkeys(names, b"about"))
    assert run(corpus, tmp_path / "out").num_samples == 38
