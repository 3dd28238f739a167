"""A whole conversion: counts, bytes, order, splits, its progress, and readers of the result."""

from __future__ import annotations

import hashlib
import io
import json
import re

import pytest
from tqdm import tqdm

import mmstream as mm
from mmstream.converting import convert as convert_module
from mmstream.dataset.manifest import MARKER_NAME
from mmstream.dataset.shard_indexes import README_NAME
from mmstream.tar.samples import iter_members
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.convert_corpus import (
    after_files,
    keys,
    rejects,
    run,
    tree,
    write_rows,
    write_rows_of_a_slow_shard,
)
from tests.helpers.corpora import jpeg


def test_every_row_is_a_sample_or_a_reject(corpus, tmp_path):
    report = run(corpus, tmp_path / "out")
    assert (report.num_rows, report.num_samples, report.num_rejects) == (40, 38, 2)
    counts = [info.num_samples for info in mm.open_dataset(tmp_path / "out").manifest.shards]
    assert counts == [7, 8, 7, 8, 8]  # eight rows each, whatever was rejected
    assert rejects(tmp_path / "out") == {
        7: "images/absent.jpg: no such file",
        23: "text is empty",
    }
    expected = [f"{i:09d}" for i in range(1, 41) if i not in (7, 23)]
    assert keys(tmp_path / "out") == expected
    sample = mm.open_dataset(tmp_path / "out")[0]
    assert (sample["jpg"], sample["txt"]) == (jpeg(0), b"row 0")
    assert json.loads(sample["json"])["id"] == "r0"


@pytest.mark.slow
def test_the_bytes_are_the_same_on_every_run_and_for_every_number_of_workers(corpus, tmp_path):
    for workers in (0, 1, 3):
        run(corpus, tmp_path / f"out{workers}", num_workers=workers, shuffle_seed=4)
    first = tree(tmp_path / "out0")
    assert len(first) == 5 * 5 + 5 + 2  # rejects of two shards too
    for workers in (1, 3):
        assert tree(tmp_path / f"out{workers}") == first


@pytest.mark.slow
def test_a_slow_shard_holds_one_worker_and_the_others_go_on(tmp_path):
    rows = write_rows_of_a_slow_shard(tmp_path, tmp_path / "out")
    report = run(rows, tmp_path / "out", samples_per_shard=2, row=after_files, num_workers=2)
    assert (report.num_samples, report.num_shards) == (8, 4)


def test_the_bytes_of_a_shard_are_golden(tmp_path):
    """If this fails, the format has changed: raise CONVERTER_VERSION too."""
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff" + bytes(range(200)))
    rows = [
        {"id": 1, "image": "a.jpg", "captions": ["one", "zwei \u00e4"], "score": 0.5},
        {"input": "Picture 1:<img>a.jpg</img>\nwhat?", "output": "that"},
        {"text": "plain"},
    ]
    unchecked = mm.MediaOptions(check="none")
    run(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out", media=unchecked)
    data = (tmp_path / "out" / "shard-000000.tar").read_bytes()
    names = [m.name for m in iter_members(lambda a, b: data[a:b], len(data))]
    assert names == [
        *("000000001.jpg", "000000001.txt", "000000001.json"),
        *("000000002.0.jpg", "000000002.json"),
        "000000003.txt",
    ]
    assert hashlib.sha256(data).hexdigest() == GOLDEN
    assert (tmp_path / "out" / "shard-000000.tar.crc32c").read_bytes().hex() == GOLDEN_CHECKSUMS


GOLDEN_CHECKSUMS = "45fa84b2b49225c620604c3cccd20b7d"
GOLDEN = "879eee0766990f2b7419207e9db41bf61ab3a7ed3eeedc1fe74d584cc248d695"


def test_no_output_names_a_folder_of_this_machine(tmp_path, out):
    for name, data in tree(out).items():
        assert str(tmp_path).encode() not in data, name
    assert MARKER_NAME not in tree(out)


def test_a_shuffle_seed_permutes_the_rows_and_loses_none(corpus, tmp_path):
    for seed in (None, 1, 2):
        run(corpus, tmp_path / f"out{seed}", shuffle_seed=seed)
    orders = [keys(tmp_path / f"out{seed}") for seed in (None, 1, 2)]
    assert sorted(orders[1]) == sorted(orders[2]) == orders[0]
    assert orders[1] != orders[0]
    assert orders[1] != orders[2]
    assert orders[1][:5] == SHUFFLED  # the permutation is part of the format
    assert rejects(tmp_path / "out1") == rejects(tmp_path / "outNone")


SHUFFLED = ["000000001", "000000017", "000000002", "000000035", "000000039"]


def split_of(folder):
    return {key: name for name in ("train", "val") for key in keys(folder / name)}


def test_splits_are_datasets_that_share_the_rows_out_and_stay_when_rows_are_added(tmp_path):
    rows = [{"id": i, "text": f"row {i}"} for i in range(300)]
    splits = {"train": 0.8, "val": 0.2}
    first = write_rows(tmp_path / "a.jsonl", rows[:200])
    report = run(first, tmp_path / "a", splits=splits, samples_per_shard=50)
    assert report.num_samples == 200
    assert {name: split.num_samples for name, split in report.splits.items()} == {
        "train": len(keys(tmp_path / "a" / "train")),
        "val": len(keys(tmp_path / "a" / "val")),
    }
    assert 20 <= report.splits["val"].num_samples <= 60
    second = write_rows(tmp_path / "b.jsonl", rows)
    run(second, tmp_path / "b", splits=splits, samples_per_shard=50)
    before, after = split_of(tmp_path / "a"), split_of(tmp_path / "b")
    assert len(after) == 300
    assert before == {key: after[key] for key in before}


def test_splits_are_not_written_under_a_dataset_without_splits(tmp_path):
    rows = write_rows(tmp_path / "r.jsonl", [{"id": i, "text": f"row {i}"} for i in range(20)])
    run(rows, tmp_path / "o")
    before = keys(tmp_path / "o")
    with pytest.raises(mm.ConfigError, match="holds a dataset without splits"):
        run(rows, tmp_path / "o", splits={"train": 0.5, "val": 0.5})
    assert keys(tmp_path / "o") == before
    assert not (tmp_path / "o" / "train").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"samples_per_shard": 0}, "samples_per_shard=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"format": "coco"}, "format='coco': must be one of captions, llava"),
        ({"captions": "some"}, "captions='some'"),
        ({"splits": {"a": 0.5, "b": 0.4}}, "sum to 0.9"),
        ({"splits": {}}, "splits is empty"),
        ({"splits": {"../a": 1.0}}, "cannot name a folder"),
        ({"splits": {"a": 1.5, "b": -0.5}}, "a=1.5 is not a fraction above 0"),
        ({"media_root": "/nowhere"}, "no such folder"),
        ({"shard_range": (3, 3)}, "first shard"),
        ({"shard_range": (-1, 3)}, "first shard"),
        ({"shard_range": (0, 3), "overwrite": True}, "other ranges"),
        ({"shard_range": (0, 3), "retry_rejects": True}, "retry_rejects"),
        ({"engine": "spark"}, "give 'processes' or 'ray'"),
    ],
)
def test_a_callers_mistake_is_a_config_error_before_the_destination_exists(
    corpus, tmp_path, options, reason
):
    with pytest.raises(mm.ConfigError, match=reason):
        run(corpus, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


# -- readers of Hugging Face take the tars of a folder for its data, and nothing else


@pytest.fixture
def texts(tmp_path):
    rows = [{"text": f"text {n}"} for n in range(5)]
    mm.convert(rows, tmp_path / "corpus", samples_per_shard=2, progress=False)
    return tmp_path / "corpus"


@pytest.mark.parametrize("kind", ["converted", "baked"])
def test_load_dataset_reads_the_samples_of_a_folder(texts, tmp_path, monkeypatch, kind):
    folder, datasets = texts, pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    if kind == "baked":
        decode = mm.Decode(text=mm.TextDecoder(byte_tokenizer(), max_length=8))
        pipeline = mm.Pipeline(mm.open_dataset(folder), global_batch_size=2, decode=decode)
        mm.bake(pipeline, tmp_path / "baked", progress=False)
        folder = tmp_path / "baked"
    loaded = datasets.load_dataset(str(folder), split="train", streaming=True)
    assert [row["__key__"] for row in loaded] == [s["__key__"] for s in mm.open_dataset(folder)]


def test_a_readme_that_is_there_stays(texts, tmp_path):
    written = (texts / README_NAME).read_text()
    (texts / README_NAME).write_text("mine")
    rows = [{"text": "a"}]
    mm.convert(rows, texts, rerun=mm.Rerun(overwrite=True), progress=False)
    assert (texts / README_NAME).read_text() == "mine"
    mm.convert(rows, tmp_path / "new", progress=False)
    assert (tmp_path / "new" / README_NAME).read_text() == written
    assert mm.convert(tmp_path / "new", tmp_path / "again", progress=False).num_samples == 1


# -- the progress bar


@pytest.fixture
def terminal(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(
        convert_module,
        "tqdm",
        lambda **k: tqdm(**k | {"disable": k["disable"] or False, "file": file}),
    )
    return file


@pytest.mark.slow
def test_a_conversion_counts_every_row_and_reject(terminal, corpus, tmp_path, whole):
    run(corpus, tmp_path / "out", progress=True, num_workers=2)
    assert re.search("40/40.*2 rejected", terminal.getvalue().rpartition("\r")[2])
    assert tree(tmp_path / "out") == whole
