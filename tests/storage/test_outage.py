"""A real server that goes away: for a while, and for too long."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import mmstream as mm
from mmstream.errors import StorageError
from mmstream.storage import open_store
from tests.helpers.corpora import write_corpus
from tests.helpers.topology import collate_in_workers

pytestmark = pytest.mark.s3


WARNING = "it is tried again until"


@pytest.fixture
def corpus_url(s3, tmp_path) -> str:
    return write_corpus(f"{s3}/{tmp_path.name}", [40, 40])


def loader_of(url: str, num_workers: int = 0) -> mm.Loader:
    settings = {"global_batch_size": 4, "seed": 3, "window": 8, "collate": collate_in_workers}
    pipeline = mm.Pipeline(mm.open_dataset(url), **settings)
    return mm.Loader(pipeline, num_workers=num_workers)


def epochs(loader: mm.Loader) -> Iterator[dict[str, Any]]:
    """Yield three epochs: this one and the next may have been read before the server goes."""
    for _ in range(3):
        yield from loader


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_server_that_comes_back_changes_no_batch(corpus_url, proxy, num_workers, caplog):
    def come_back() -> None:
        while num_workers == 0 and WARNING not in caplog.text:
            time.sleep(0.1)
        time.sleep(0.5)
        proxy.come_back()

    expected = [batch["txt"] for batch in epochs(loader_of(corpus_url))]
    loader, batches = loader_of(corpus_url, num_workers), []
    with caplog.at_level(logging.WARNING):
        for batch in epochs(loader):
            batches.append(batch["txt"])
            if len(batches) == 2:
                proxy.go_away()
                thread = threading.Thread(target=come_back, daemon=True)
                thread.start()
    loader.close()
    thread.join()
    assert batches == expected
    if num_workers == 0:  # workers log in their own processes
        warning = next(text for text in caplog.messages if WARNING in text)
        found = re.search(r"s3://.*: fails since \d\d:\d\d:\d\d \((\d+) s\): ", warning)
        assert found
        assert int(found[1]) >= 5


@pytest.mark.slow
def test_a_server_that_stays_away_is_an_error_after_the_patience(corpus_url, proxy, monkeypatch):
    monkeypatch.setenv("MMSTREAM_STORAGE_PATIENCE_S", "2")
    store = open_store(corpus_url)
    store.stat("shard-000000.tar")
    proxy.go_away()
    pattern = r"failed \d+ times in (\d+\.\d) s \(MMSTREAM_STORAGE_PATIENCE_S=2\), last \w+: "
    with pytest.raises(StorageError, match=pattern) as caught:
        store.read("shard-000000.tar")
    found = re.search(pattern, str(caught.value))
    assert found
    assert float(found[1]) >= 2
    with pytest.raises(StorageError, match=r"failed once in \d+\.\d s"):  # the clock runs on
        store.stat("shard-000000.tar")
    proxy.come_back()
    assert store.stat("shard-000000.tar").size
