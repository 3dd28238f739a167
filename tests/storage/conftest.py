"""Stores of every kind, for one test each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from mmstream.storage import SharedStore, Store, open_store, remote, retry
from tests.helpers.aws import set_only
from tests.helpers.http_fault_proxy import FaultProxy, fault_proxy


@pytest.fixture(params=["local", "shared", "memory", pytest.param("s3", marks=pytest.mark.s3)])
def store(request, tmp_path) -> Store:
    if request.param == "local":
        return open_store(tmp_path / "root")
    if request.param == "shared":
        return SharedStore(str(tmp_path / "root"))
    if request.param == "memory":
        return open_store(request.getfixturevalue("memory_url"))
    return open_store(f"{request.getfixturevalue('s3')}/{tmp_path.name}")


@pytest.fixture
def memory_url(tmp_path):
    """A URL in memory; what lies under it is gone after the test."""
    url = f"memory://{tmp_path.name}/root"
    yield url
    file_system = fsspec.filesystem("memory")
    for path in file_system.find(f"/{tmp_path.name}"):
        file_system.rm_file(path)


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between tries. The clock goes on by them alone. No store answered before."""
    taken: list[float] = []
    monkeypatch.setattr(retry, "pause", lambda url, seconds: taken.append(seconds))
    start = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: start + sum(taken))
    monkeypatch.setattr(retry, "time", clock)
    retry._health.cache_clear()
    return taken


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the server, which the environment leads to."""
    with fault_proxy(os.environ["AWS_ENDPOINT_URL"]) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield server


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Static keys in the environment, and no other setting of AWS."""
    set_only(monkeypatch, tmp_path)
    yield monkeypatch
    remote._client_of.cache_clear()


@pytest.fixture
def keyless(aws: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The same without keys and region. They may come from files in `tmp_path`."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        aws.delenv(name)
    return aws
