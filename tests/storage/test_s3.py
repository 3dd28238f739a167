"""The whole path with its shards on a real S3 server: the same bytes, batches and states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import mmstream as mm
from mmstream.dataset.index import index_name
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.manifest import MANIFEST_NAME
from mmstream.storage import open_store
from mmstream.train.checkpoint import Checkpoint, list_checkpoints, load_newest, save_checkpoint
from tests.helpers.corpora import captioned, jpeg, write_corpus, write_shard
from tests.helpers.topology import collate_in_workers

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def remote(s3):
    """The same 97 samples in 5 shards as the fixture `corpus`, on S3."""
    return write_corpus(f"{s3}/corpus", [30, 1, 0, 40, 26])


@pytest.fixture
def prefix(s3, tmp_path):
    """An empty prefix for one test."""
    return f"{s3}/{tmp_path.name}"


def make_pipeline(corpus, **settings):
    settings = {"global_batch_size": 12, "seed": 5, "window": 32, **settings}
    return mm.Pipeline(mm.open_dataset(corpus), **settings)


def batches(pipe, **settings):
    loader = mm.Loader(pipe, **settings)
    try:
        return list(loader)
    finally:
        loader.close()


def keys(batches):
    return [batch["__key__"] for batch in batches]


def content(sample):
    return {name: value for name, value in sample.items() if name not in ("__url__",)}


def test_a_dataset_has_the_same_samples_as_a_local_one(remote, corpus):
    in_s3, local = mm.open_dataset(remote), mm.open_dataset(corpus)
    assert len(in_s3) == len(local) == 97
    for i in (0, 29, 30, 31, 70, 96, -1):
        assert content(in_s3[i]) == content(local[i])
    assert in_s3[31]["__url__"] == f"{remote}/shard-000003.tar"
    assert [s["__key__"] for s in in_s3[28:34]] == [f"{n:06d}" for n in range(28, 34)]
    assert len(mm.open_dataset(f"{remote}/shard-00000{{0..3}}.tar")) == 71
    listed = mm.open_dataset([f"{remote}/shard-000004.tar", f"{remote}/shard-000001.tar"])
    assert (len(listed), listed[26]["__key__"]) == (27, "000030")
    alone = mm.open_dataset(f"{remote}/shard-000001.tar")
    assert [sample["__key__"] for sample in alone] == ["000030"]


def test_plain_tars_open_once_they_are_indexed(prefix, tmp_path):
    for number, name in enumerate(("a.tar", "deep/b.tar")):
        write_shard(prefix, name, [(f"{number}{i}", captioned(i)) for i in range(3)])
        open_store(prefix).remove(index_name(name))
    with pytest.raises(mm.errors.ManifestError, match=f"no index.*`mmstream index {prefix}`"):
        mm.open_dataset(f"{prefix}/a.tar")
    with pytest.raises(mm.errors.ManifestError, match="mmstream index"):
        mm.open_dataset(prefix)

    index_tars(prefix, output=tmp_path / "indexes", progress=False)  # where one may not write
    aside = mm.open_dataset(tmp_path / "indexes", allow_foreign_urls=True)
    assert open_store(prefix).list().keys() == {"a.tar"}
    index_tars(prefix, progress=False)
    beside = mm.open_dataset(prefix)
    for dataset in (aside, beside):
        assert [sample["__key__"] for sample in dataset] == ["00", "01", "02"]
        assert dataset[2]["jpg"] == jpeg(2)


def test_a_loader_makes_the_same_batches_as_from_local_shards(remote, corpus):
    decode = mm.Decode(image=mm.ImageDecoder(size=16))
    local = batches(make_pipeline(corpus, decode=decode))
    in_s3 = batches(make_pipeline(remote, decode=decode))
    assert keys(in_s3) == keys(local)
    for a, b in zip(in_s3, local, strict=True):
        assert torch.equal(a["image"], b["image"])
        assert a["__url__"] == [f"{remote}/{Path(url).name}" for url in b["__url__"]]


@pytest.mark.slow
@pytest.mark.parametrize("multiprocessing_context", ["forkserver", "fork"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*")
def test_workers_make_the_same_batches_as_the_main_process(remote, corpus, multiprocessing_context):
    assert len(mm.open_dataset(remote)[3]["jpg"]) > 100  # this process has a client already
    pipe = make_pipeline(remote, drop_last=False, collate=collate_in_workers)
    loader = mm.Loader(pipe, num_workers=2, multiprocessing_context=multiprocessing_context)
    try:
        first, second = keys(loader), keys(loader)
    finally:
        loader.close()
    assert first == keys(batches(make_pipeline(corpus, drop_last=False)))
    assert first != second


@pytest.mark.slow
def test_a_resumed_run_equals_the_tail(remote, corpus):
    expected = keys(batches(make_pipeline(corpus)))
    loader = mm.Loader(make_pipeline(remote))
    stream = iter(loader)
    seen = [next(stream)["__key__"] for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    other = mm.Loader(make_pipeline(remote, collate=collate_in_workers), num_workers=2)
    other.load_state_dict(state)
    assert seen + keys(other) == expected
    other.close()
    local = mm.Loader(make_pipeline(corpus))  # the state does not say where the shards lie
    local.load_state_dict(state)
    assert seen + keys(local) == expected


@pytest.fixture
def rows(tmp_path):
    """Twenty rows over five images, one of them a reject."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.jpg").write_bytes(jpeg(i))
    lines = [{"id": i, "image": f"{i % 5}.jpg", "text": f"row {i}"} for i in range(20)]
    lines[7]["image"] = "absent.jpg"
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def same_objects(url, folder):
    """Compare a prefix with a local folder, byte for byte; return the names."""
    store = open_store(url)
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    folders = {name.rpartition("/")[0] for name in names}
    listed = {f"{f}/{n}".lstrip("/") for f in folders for n in open_store(store.url_of(f)).list()}
    assert listed == set(names)
    assert {name: store.read(name) for name in names} == names
    return listed


@pytest.mark.slow
def test_convert_writes_the_same_objects_as_to_a_folder(rows, prefix, tmp_path):
    options = {"samples_per_shard": 6, "progress": False}
    mm.convert(rows, tmp_path / "local", num_workers=1, **options)
    report = mm.convert(rows, prefix, num_workers=2, **options)
    assert (report.num_samples, report.num_rejects) == (19, 1)
    names = same_objects(prefix, tmp_path / "local")
    assert {MANIFEST_NAME, "rejects.jsonl", "shard-000003.tar", "shard-000003.tar.idx"} <= names
    again = mm.convert(rows, prefix, **options)  # finished: nothing is done
    assert again.num_samples == 19
    same_objects(prefix, tmp_path / "local")


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_named(s3):
    store = open_store("s3://no-such-bucket/x")
    with pytest.raises(FileNotFoundError, match="s3://no-such-bucket/x/a: no such bucket"):
        store.write("a", b"")
    for call in (mm.open_dataset, index_tars):
        with pytest.raises(FileNotFoundError, match="no-such-bucket/x: no such bucket"):
            call(store.url)


def test_checkpoints_come_back_and_the_oldest_go(prefix):
    store = open_store(f"{prefix}/checkpoints")
    assert load_newest(store) is None
    weights = torch.arange(1000.0)
    for step in (1, 2, 3):
        state = {"model": {"w": weights * step}, "loader": {"epoch": 0, "step": step}}
        save_checkpoint(store, Checkpoint(step, state), keep=2)
    assert list_checkpoints(store) == [2, 3]
    newest = load_newest(store)
    assert newest.num_steps == 3
    assert torch.equal(newest.content["model"]["w"], weights * 3)
    store.write("step-00000003.pt", store.read("step-00000003.pt")[:-200])
    assert load_newest(store).num_steps == 2
