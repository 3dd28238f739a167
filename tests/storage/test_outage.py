"""A real server that goes away for a while. Too long: see test_faults_end_to_end.py."""

from __future__ import annotations

import logging
import re
import threading
import time

import pytest

from tests.helpers.corpora import write_corpus
from tests.helpers.topology import epochs, small_loader

pytestmark = pytest.mark.s3


WARNING = "it is tried again until"


@pytest.fixture
def corpus_url(s3, tmp_path) -> str:
    return write_corpus(f"{s3}/{tmp_path.name}", [40, 40])


@pytest.mark.slow
def test_a_server_that_comes_back_changes_no_batch(corpus_url, proxy, caplog):
    def come_back() -> None:
        while WARNING not in caplog.text:
            time.sleep(0.1)
        time.sleep(0.5)
        proxy.come_back()

    expected = [batch["txt"] for batch in epochs(small_loader(corpus_url))]
    loader, batches = small_loader(corpus_url), []
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
    warning = next(text for text in caplog.messages if WARNING in text)
    found = re.search(r"s3://.*: fails since \d\d:\d\d:\d\d \((\d+) s\): ", warning)
    assert found
    assert int(found[1]) >= 5
