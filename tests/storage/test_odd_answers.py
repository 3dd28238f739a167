"""Odd answers of a store, of a proxy, or of something else: survived, or an error with a name."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.errors import MMStreamError
from mmstream.storage import open_store, range_client, remote, retry, upload
from mmstream.storage.retry import health_of
from mmstream.storage.transfers import RangeRequest, Transfers
from tests.helpers.aws import set_only
from tests.helpers.corpora import write_corpus
from tests.helpers.odd_answers import FINAL, ODD, UNTOLD, OddStub
from tests.helpers.web_stubs import running

pytestmark = pytest.mark.slow

URL = "s3://bucket/corpus"
SHARD = "shard-000000.tar"
NEW = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """The files of a small corpus with checksums, by key."""
    folder = Path(write_corpus(tmp_path_factory.mktemp("odd"), [8, 8], checksums=True))
    return {f"bucket/corpus/{path.name}": path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A store for all tests of this file: to make the clients of each takes half a second.

    No pauses worth the name, and short parts.
    """
    stub = running(OddStub, {}, num_asked=Counter(), odd=(ODD["nothing"],), num_odd=0)
    with stub as server, pytest.MonkeyPatch.context() as patch:
        set_only(patch, tmp_path_factory.mktemp("aws"))
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        patch.setattr(range_client, "s3_endpoint", lru_cache(range_client.s3_endpoint))
        for module, name, value in [
            (retry, "FIRST_PAUSE_S", 0.001), (retry, "MAX_PAUSE_S", 0.001),
            (upload, "PART_BYTES", 4096),
        ]:  # fmt: skip
            patch.setattr(module, name, value)
        yield server
    remote._client_of.cache_clear()


async def read_by_the_reader(size):
    transfers = Transfers([range_client.range_client(open_store(URL))], [{}])
    try:
        bounds = [(0, 700), (700, 5000), (5000, size)]
        requests = [RangeRequest(0, SHARD, *bound, deadline=0) for bound in bounds]
        return b"".join(await asyncio.gather(*map(transfers.submit, requests)))
    finally:
        await transfers.close()


CALLS = {
    "samples": lambda size: [mm.open_dataset(URL)[7]],
    "reader": lambda size: asyncio.run(read_by_the_reader(size)),
    "whole": lambda size: open_store(URL).read(SHARD, 10**9),
    "list": lambda size: {name: stat.size for name, stat in open_store(URL).list().items()},
    "stat": lambda size: open_store(URL).size(SHARD),
    "write": lambda size: open_store(URL).write("new/small", NEW[:100]),
    "parts": lambda size: open_store(URL).write("new/large", NEW),
    "remove": lambda size: open_store(URL).remove("new/small"),
}


def make_odd(server, objects, kind, num_odd):
    """Have a server answer that many requests of each kind oddly, from now on."""
    server.objects, server.num_asked = dict(objects), Counter()
    server.odd, server.num_odd = (ODD[kind],), num_odd


def outcomes(server, objects, kind, num_odd):
    """What each call returns, or its error."""
    make_odd(server, objects, kind, num_odd)
    found = {}
    for name, call in CALLS.items():
        retry._health.cache_clear()
        if num_odd < 9:  # in the middle of a run
            health_of(URL).has_answered = health_of(URL).has_ranges = True
        try:
            found[name] = call(len(objects[f"bucket/corpus/{SHARD}"]))
        except Exception as error:
            found[name] = error
    return found, {key: data for key, data in server.objects.items() if "/new/" in key}


@pytest.fixture(scope="module")
def expected(server, objects):
    return outcomes(server, objects, "nothing", 0)


def require_named(error, kind):
    text = str(error)
    assert isinstance(error, MMStreamError | FileNotFoundError), repr(error)
    assert text.startswith(URL) or "shard-0" in text, text
    assert len(text.splitlines()) == 1
    assert "secret" not in text
    assert "KeyError" not in text
    assert kind == "shorter" or "overwrite" not in text


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_answer_now_and_then_changes_nothing(kind, server, objects, expected, monkeypatch):
    monkeypatch.setenv("MMSTREAM_STORAGE_PATIENCE_S", "500")
    found, written = outcomes(server, objects, kind, 2)
    for name in found.keys() - UNTOLD.get(kind, set()):
        outcome = found[name]
        if isinstance(outcome, Exception):
            assert kind in FINAL, f"{name}: {outcome!r}"
            require_named(outcome, kind)
        else:
            assert outcome == expected[0][name], name
    if kind not in FINAL:
        assert written == expected[1]


def test_versions_that_always_change_end_no_run_whose_samples_have_checksums(server, objects):
    make_odd(server, objects, "etag changing", 1e9)
    pipeline = mm.Pipeline(mm.open_dataset(URL), global_batch_size=4, seed=1)
    loader = mm.Loader(pipeline)
    keys = [key for _ in range(2) for batch in loader for key in batch["__key__"]]
    loader.close()
    assert sorted(keys) == sorted(2 * [f"{number:06d}" for number in range(16)])


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_answer_that_stays_is_harmless_or_named(
    kind, server, objects, expected, monkeypatch
):
    monkeypatch.setenv("MMSTREAM_STORAGE_PATIENCE_S", "0.05")
    monkeypatch.setattr(retry, "MAX_FIRST_ATTEMPTS", 2)
    found, written = outcomes(server, objects, kind, 1e9)
    for name, outcome in found.items():
        if isinstance(outcome, Exception):
            require_named(outcome, kind)
        elif name not in UNTOLD.get(kind, set()):
            assert outcome == expected[0][name], name
    if not isinstance(found["parts"], Exception):
        assert written == expected[1]
