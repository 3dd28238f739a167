"""A Loader behind a server that fails in every way: the same batches as from a local disk.

The paths are the same in each run, so the proxy draws the same faults for the same ranges.
"""

from __future__ import annotations

from typing import Any

import pytest

from mmstream.errors import StorageError
from tests.helpers.corpora import write_corpus
from tests.helpers.http_fault_proxy import Faults
from tests.helpers.topology import batches_around, collate_in_workers, epochs, small_loader

pytestmark = pytest.mark.s3

COUNTS = [400, 400]
SETTINGS: dict[str, Any] = {
    "global_batch_size": 8,
    "window": 16,
    "collate": collate_in_workers,
}

FIVE_PERCENT = Faults(
    latency_s=0.002,
    reset=0.01,
    truncate=0.01,
    busy=0.01,
    flip=0.0075,
    wrong_etag=0.005,
    mute=0.004,
    stall=0.0035,
    retry_after_s=0,
    only=r"\.tar$",
)


@pytest.fixture(scope="module")
def corpora(s3, tmp_path_factory) -> tuple[str, str]:
    """The same corpus on a local disk and on the server."""
    bucket = s3.removeprefix("s3://").partition("/")[0]
    folder = tmp_path_factory.mktemp("local")
    local = write_corpus(folder, COUNTS, checksums=True)
    return local, write_corpus(f"s3://{bucket}/end-to-end", COUNTS, checksums=True)


def content(batch: dict[str, Any]) -> tuple[list[str], list[bytes], list[bytes]]:
    return batch["__key__"], batch["jpg"], batch["txt"]


def test_five_percent_of_faults_of_every_kind_change_no_batch(corpora, proxy):
    local, remote = corpora
    expected = [content(batch) for batch in small_loader(local, **SETTINGS)]
    proxy.set(FIVE_PERCENT)
    loader = small_loader(remote, **SETTINGS)
    assert [content(batch) for batch in loader] == expected
    loader.close()
    counts, stats = proxy.counts(), loader.stats
    assert stats.num_bad == 0
    # The proxy also counts what was read ahead for the next epoch.
    assert 0 < stats.num_wrong_reads <= counts.faults["flip"]
    assert stats.transfers.num_retries > 0
    assert 0 < stats.transfers.num_throttled <= counts.faults["busy"]
    # A request that was given up before it had a connection never came to the proxy.
    num_given_up = stats.transfers.num_stalls
    assert num_given_up > 0
    assert stats.transfers.num_requests - num_given_up <= counts.gets_by_suffix["tar"]


@pytest.mark.slow
def test_a_server_that_is_gone_ends_the_run_with_one_error_and_the_state_resumes(
    corpora, proxy, monkeypatch
):
    local, remote = corpora
    expected = [content(batch) for batch in epochs(small_loader(local, **SETTINGS))]
    monkeypatch.setenv("MMSTREAM_STORAGE_PATIENCE_S", "1")
    loader, batches = small_loader(remote, **SETTINGS), []
    with pytest.raises(StorageError) as caught:
        batches.extend(map(content, batches_around(epochs(loader), proxy.go_away)))
    state = loader.state_dict()
    loader.close()
    message = str(caught.value)
    for words in ("s3://", "failed ", "times in ", f"the state is at step {state['step']}"):
        assert words in message
    proxy.come_back()
    monkeypatch.delenv("MMSTREAM_STORAGE_PATIENCE_S")
    resumed = small_loader(remote, **SETTINGS)
    resumed.load_state_dict(state)
    while len(batches) < len(expected):
        batches += map(content, resumed)
    assert batches == expected
    resumed.close()
