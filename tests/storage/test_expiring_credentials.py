"""Keys that expire while a Loader reads: new ones are fetched, and the batches are the same."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.storage import remote
from tests.helpers.corpora import write_corpus
from tests.helpers.stub_server import refused
from tests.helpers.web_stubs import S3Stub, running

USES_OF_A_KEY = 15
EXPIRED = refused("400 Bad Request", "ExpiredToken", "The provided token has expired.")

KEYS = """
import json, os, pathlib
folder = pathlib.Path({folder!r})
number = len(list(folder.iterdir()))
(folder / str(os.getpid())).touch()
print(json.dumps(dict(Version=1, AccessKeyId=f"KEY{{number}}", SecretAccessKey="S",
                      SessionToken="T", Expiration="2099-01-01T00:00:00Z")))
"""
"""A process that gives other keys at each call. By its word they are valid for decades."""


@pytest.fixture
def corpus(tmp_path) -> Path:
    return Path(write_corpus(tmp_path / "corpus", [60, 60], checksums=True))


@pytest.fixture
def server(corpus, tmp_path, monkeypatch):
    """A server with the corpus. A key is good for so many requests of tars, and then expired."""
    for name in set(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    (tmp_path / "calls").mkdir()
    (tmp_path / "keys.py").write_text(KEYS.format(folder=str(tmp_path / "calls")))
    config = f"[default]\ncredential_process = {sys.executable} -I {tmp_path / 'keys.py'}\n"
    (tmp_path / "config").write_text(config)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    uses = Counter()

    def refuse(request):
        uses[request.access_key] += request.name.endswith(".tar")
        return EXPIRED if uses[request.access_key] > USES_OF_A_KEY else None

    objects = {f"bucket/corpus/{path.name}": path.read_bytes() for path in corpus.iterdir()}
    remote._client_of.cache_clear()
    with running(S3Stub, objects, refuse=refuse, uses=uses) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server
    remote._client_of.cache_clear()


def loader_of(url: str) -> mm.Loader:
    pipeline = mm.Pipeline(
        mm.open_dataset(url), global_batch_size=8, seed=3, window_bytes=1 << 15, decode=None
    )
    return mm.Loader(pipeline)


def content(batch) -> tuple[list[str], list[bytes]]:
    return batch["__key__"], [bytes(text) for text in batch["txt"]]


def test_keys_that_expire_in_mid_run_are_renewed_and_no_batch_differs(server, corpus, caplog):
    own = loader_of(str(corpus))
    expected = [content(batch) for _ in range(2) for batch in own]
    loader = loader_of("s3://bucket/corpus")
    batches = [content(batch) for _ in range(2) for batch in loader]
    loader.close()
    assert batches == expected
    assert loader.stats.bad == {}
    refused_keys = [key for key, num in server.handler.uses.items() if num > USES_OF_A_KEY]
    assert len(refused_keys) >= 2
    assert "KEY" not in caplog.text
