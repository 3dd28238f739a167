"""The same stream through stock webdataset stages."""

from dataclasses import replace

import pytest
import webdataset as wds
from torch.utils.data import DataLoader

import mmstream as mm
from mmstream.errors import SampleError
from tests.helpers.corpora import write_corpus
from tests.helpers.stores import far


def make_pipeline(corpus, **settings):
    settings = {"global_batch_size": 12, "seed": 5, "window": 16, **settings}
    return mm.Pipeline(mm.open_dataset(corpus), **settings)


def test_stock_stages_see_the_raw_samples_of_the_order(corpus):
    pipeline = make_pipeline(corpus)
    stream = pipeline.as_webdataset()
    stream.append(wds.decode("pil"))
    stream.append(wds.to_tuple("__key__", "jpg", "json"))
    rows = list(stream)
    batches = list(mm.Loader(pipeline))
    assert [key for key, _, _ in rows] == [key for batch in batches for key in batch["__key__"]]
    assert rows[0][1].size == (40, 30)
    assert [row["id"] for _, _, row in rows] == [int(key) for key, _, _ in rows]


@pytest.mark.slow
def test_workers_and_ranks_share_an_epoch_with_nothing_twice(corpus):
    pipeline = make_pipeline(corpus, drop_last=False)
    keys = []
    for rank in range(2):
        stream = pipeline.as_webdataset(world=mm.World(rank, 2))
        loader = DataLoader(
            stream, batch_size=None, num_workers=2, multiprocessing_context="forkserver"
        )
        keys += [sample["__key__"] for sample in loader]
    assert sorted(keys) == [f"{n:06d}" for n in range(97)]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_windows_of_an_object_store_give_the_samples_of_a_folder(corpus, num_ranks):
    pipeline = make_pipeline(corpus, drop_last=False)
    remote = replace(pipeline, dataset=far(pipeline.dataset))
    for rank in range(num_ranks):
        world = mm.World(rank, num_ranks)
        assert list(remote.as_webdataset(1, world)) == list(pipeline.as_webdataset(1, world))


def test_epochs_differ(corpus):
    pipeline = make_pipeline(corpus)
    first, second = ([s["__key__"] for s in pipeline.as_webdataset(epoch)] for epoch in (0, 1))
    assert first != second


def test_a_sample_that_cannot_be_read_is_raised(tmp_path):
    corpus = write_corpus(tmp_path, [4])
    tar = tmp_path / "shard-000000.tar"
    tar.write_bytes(tar.read_bytes().replace(b"000002.txt", b"000002.jpg", 1))
    pipeline = make_pipeline(corpus, global_batch_size=4)
    with pytest.raises(SampleError, match=r"damaged|twice"):
        list(pipeline.as_webdataset())


@pytest.mark.parametrize("splitter", [wds.split_by_node, wds.split_by_worker])
def test_a_stage_that_would_split_the_samples_again_is_refused(corpus, splitter):
    pipeline = mm.Pipeline(mm.open_dataset(corpus), global_batch_size=8)
    stages = wds.DataPipeline(pipeline.as_webdataset(), wds.shuffle(10), splitter, list)
    with pytest.raises(mm.ConfigError, match=f"wds.{splitter.__name__} after it would split"):
        next(iter(stages))
