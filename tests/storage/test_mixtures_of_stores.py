"""A mixture of sources on S3, on a web server and in a folder: the batches are those of folders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import mmstream as mm
from mmstream.errors import ShardError
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.topology import collate_in_workers
from tests.helpers.web_stubs import WebStub, running
from tests.storage.test_schemes import objects_of

pytestmark = pytest.mark.s3

COUNTS = [20, 12]


@pytest.fixture
def urls(s3, tmp_path) -> Iterator[tuple[list[str], list[str]]]:
    """The folders of three corpora, and where the same corpora lie otherwise."""
    folders = [write_corpus(tmp_path / name, COUNTS) for name in "abc"]
    with running(WebStub, objects_of(folders[1], "b")) as web:
        far = write_corpus(f"{s3}/{tmp_path.name}/a", COUNTS)
        yield folders, [far, f"{web.url}/b", folders[2]]


def loader_of(urls: list[str], **settings: Any) -> mm.Loader:
    sources = {name: (mm.open_dataset(url), 1) for name, url in zip("abc", urls, strict=True)}
    mixture = mm.Mixture(sources, epoch_steps=10)
    pipeline = mm.Pipeline(
        mixture, global_batch_size=8, seed=1, window=16, collate=collate_in_workers
    )
    return mm.Loader(pipeline, **settings)


def content(batch: dict[str, Any]) -> tuple[list[str], list[bytes]]:
    return batch["__key__"], batch["jpg"]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_sources_on_different_stores_change_no_batch(urls, num_workers):
    near, far = urls
    loader = loader_of(far, num_workers=num_workers)
    batches = list(map(content, loader))
    loader.close()
    assert batches == list(map(content, loader_of(near)))


@pytest.mark.slow
def test_a_shard_that_was_replaced_on_s3_is_named_by_its_source(urls):
    _, far = urls
    loader = loader_of(far, on_change="finish_epoch")
    write_corpus(far[0], COUNTS, lambda number: {"jpg": jpeg(number, (80, 60))})
    pattern = rf"^shard-00000[01]\.tar: is not .*: its size was .* put .* back into {far[0]}$"
    with pytest.raises(ShardError, match=pattern):
        list(loader)
    assert loader.state_dict()["step"] == 0
    loader.close()
