"""Keys that expire while a Loader reads: new ones are fetched, and the batches are the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.aws import write_credential_process
from tests.helpers.corpora import write_corpus
from tests.helpers.stub_server import refused
from tests.helpers.topology import small_loader
from tests.helpers.web_stubs import S3Stub, running

USES_OF_A_KEY = 15
SETTINGS = {"global_batch_size": 8, "window": None, "window_bytes": 1 << 15}
EXPIRED = refused("400 Bad Request", "ExpiredToken", "The provided token has expired.")


@pytest.fixture
def corpus(tmp_path) -> Path:
    return Path(write_corpus(tmp_path / "corpus", [60, 60], checksums=True))


@pytest.fixture
def server(corpus, tmp_path, keyless):
    """A server with the corpus. A key is good for so many requests of tars, and then expired."""
    write_credential_process(tmp_path)
    keyless.setenv("AWS_REGION", "us-east-1")
    uses = Counter()

    def refuse(request):
        uses[request.access_key] += request.name.endswith(".tar")
        return EXPIRED if uses[request.access_key] > USES_OF_A_KEY else None

    objects = {f"bucket/corpus/{path.name}": path.read_bytes() for path in corpus.iterdir()}
    with running(S3Stub, objects, refuse=refuse, uses=uses) as server:
        keyless.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


def content(batch) -> tuple[list[str], list[bytes]]:
    return batch["__key__"], [bytes(text) for text in batch["txt"]]


@pytest.mark.slow
def test_keys_that_expire_in_mid_run_are_renewed_and_no_batch_differs(server, corpus, caplog):
    own = small_loader(str(corpus), **SETTINGS)
    expected = [content(batch) for _ in range(2) for batch in own]
    loader = small_loader("s3://bucket/corpus", **SETTINGS)
    batches = [content(batch) for _ in range(2) for batch in loader]
    loader.close()
    assert batches == expected
    assert loader.stats.bad == {}
    refused_keys = [key for key, num in server.uses.items() if num > USES_OF_A_KEY]
    assert len(refused_keys) >= 2
    assert "KEY" not in caplog.text
