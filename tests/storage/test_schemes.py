"""Every scheme beside s3://: a dataset opens there, and an epoch is the same as from a folder."""

from __future__ import annotations

import importlib.util
import time
from contextlib import ExitStack
from email.utils import formatdate
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest

import mmstream as mm
from mmstream.errors import ConfigError, StorageError
from mmstream.storage import Store, open_store, remote
from tests.helpers.web_stubs import AzureStub, GoogleStub, HubStub, Stub, WebStub, running

AZURE_KEY = "c2VjcmV0LWtleS1vZi1henVyZQ=="


def objects_of(folder, prefix):
    return {
        f"{prefix}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


class Scheme(NamedTuple):
    """A server that stands for a store, and how it is found."""

    stub: type[Stub]
    package: str
    objects: str
    """Where the corpus lies among its objects."""
    url: str
    environment: dict[str, str]


SCHEMES = {
    "web": Scheme(WebStub, "aiohttp", "corpus", "{server}/corpus", {}),
    "google": Scheme(
        GoogleStub,
        "gcsfs",
        "bucket/corpus",
        "gs://bucket/corpus",
        {"STORAGE_EMULATOR_HOST": "{server}"},
    ),
    "azure": Scheme(
        AzureStub,
        "adlfs",
        "account/bucket/corpus",
        "az://bucket/corpus",
        {
            "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=http;AccountName=account;"
            f"AccountKey={AZURE_KEY};BlobEndpoint={{server}}/account;"
        },
    ),
    "hub": Scheme(
        HubStub,
        "huggingface_hub",
        "datasets/user/photos/corpus",
        "hf://datasets/user/photos/corpus",
        {"HF_ENDPOINT": "{server}", "HF_TOKEN": "hf_secretsecretsecret", "HF_HUB_OFFLINE": "0"},
    ),
}


@pytest.fixture
def serve(corpus, monkeypatch, pauses):
    """Start a server of one of these kinds with the corpus, whose URL is `server.corpus`."""
    with ExitStack() as stack:

        def start(kind):
            scheme = SCHEMES[kind]
            if importlib.util.find_spec(scheme.package) is None:
                pytest.skip(f"{scheme.package} is not installed")
            objects = objects_of(corpus, scheme.objects)
            server = stack.enter_context(running(scheme.stub, objects))
            for name, value in scheme.environment.items():
                monkeypatch.setenv(name, value.format(server=server.url))
            server.corpus = scheme.url.format(server=server.url)
            return server

        yield start


@pytest.fixture
def web(serve):
    return serve("web")


@pytest.fixture(params=SCHEMES)
def server(serve, request):
    return serve(request.param)


def batches(url):
    pipeline = mm.Pipeline(mm.open_dataset(url), global_batch_size=12, seed=5, window=32)
    loader = mm.Loader(pipeline)
    try:
        return [(batch["__key__"], batch["jpg"], batch["txt"]) for batch in loader]
    finally:
        loader.close()


@pytest.mark.slow
def test_an_epoch_is_the_same_as_from_a_folder(server, corpus):
    assert batches(server.corpus) == batches(corpus)


def test_an_object_reads_as_in_a_folder(server, corpus, pauses):
    remote, local = open_store(server.corpus), open_store(corpus)
    name = "shard-000000.tar"
    assert remote.read(name) == local.read(name)
    assert remote.read_range(name, 100, 1000) == local.read(name)[100:1000]
    assert remote.size(name) == local.size(name)
    assert remote.exists(name)
    assert not remote.exists("absent.tar")
    assert {n: s.size for n, s in remote.list().items()} == {
        n: s.size for n, s in local.list().items()
    }
    assert open_store(f"{server.corpus}/absent").list() == {}
    with pytest.raises(FileNotFoundError, match=r"absent\.tar: no such object"):
        remote.read("absent.tar")
    with pytest.raises(FileNotFoundError, match=r"absent\.tar: no such object"):
        remote.read_range("absent.tar", 0, 5)
    size = local.size(name)
    with pytest.raises(StorageError, match="ends 10 bytes before"):
        remote.read_range(name, size - 5, size + 10)
    with pytest.raises(StorageError, match="ends 15 bytes before"):
        remote.read_range(name, size + 5, size + 15)
    assert pauses == []


@pytest.mark.parametrize("kind", ["google", "azure"])
def test_what_is_written_is_read(kind, serve):
    store: Store = open_store(serve(kind).corpus + "/new")
    store.write("a", b"alpha")
    with store.create("deep/b") as file:
        file.write(b"beta" * 1000)
    assert (store.read("a"), store.read("deep/b")) == (b"alpha", b"beta" * 1000)
    assert store.list().keys() == {"a"}
    store.write("crlf", b"alpha\r")  # gcsfs would lose the last byte
    assert store.read("crlf") == b"alpha\r"
    store.remove("crlf")
    for _ in range(2):
        store.remove("a")
    assert not store.exists("a")


@pytest.mark.parametrize("kind", ["web", "hub"])
def test_what_can_only_be_read_says_so(kind, serve):
    store = open_store(serve(kind).corpus)
    for call in (
        lambda: store.write("a", b"x"),
        lambda: store.remove("a"),
        lambda: store.create("a").__enter__(),
    ):
        with pytest.raises(ConfigError, match=r"can only be read; write to a folder"):
            call()


def test_a_server_without_ranges_is_one_clear_error(corpus, pauses):
    with running(WebStub, objects_of(corpus, "corpus"), has_ranges=False) as server:
        with pytest.raises(StorageError, match="the server does not know ranges"):
            open_store(f"{server.url}/corpus").read_range("shard-000000.tar", 5, 10)
        assert len(server.requests) == 5


@pytest.mark.parametrize("kind", ["page", "forbidden"])
def test_what_a_proxy_says_in_place_of_a_web_server_is_asked_for_again(web, corpus, pauses, kind):
    store, local, answers = open_store(web.corpus), open_store(corpus), 0
    store.read_range("shard-000000.tar", 0, 9)  # it has answered

    def answer(request, name):
        nonlocal answers
        answers += 1
        if answers % 3 == 0:
            WebStub.answer_object(request, name)
        else:
            request.answer(200 if kind == "page" else 502, b"<html>", Content_Type="text/html")

    web.answer_object = answer
    for call in ("read", "size"):
        assert getattr(store, call)("mmstream.json") == getattr(local, call)("mmstream.json")
    assert store.read_range("shard-000000.tar", 9, 99) == local.read("shard-000000.tar")[9:99]
    assert len(pauses) >= 4


@pytest.mark.parametrize(("scheme", "package"), [("gs", "gcsfs"), ("az", "adlfs")])
def test_a_missing_package_is_named(scheme, package, monkeypatch):
    remote._client_of.cache_clear()
    monkeypatch.setattr("fsspec.filesystem", Mock(side_effect=ImportError("no")))
    message = f"{scheme}:// needs another package: pip install {package}"
    with pytest.raises(ConfigError, match=message):
        open_store(f"{scheme}://bucket/x").read("a")


def test_a_web_server_is_asked_again_and_its_refusals_and_replacements_are_named(web, pauses):
    store = open_store(web.corpus)
    expected = store.read("mmstream.json")
    for call in (
        lambda: store.read("mmstream.json"),
        lambda: store.read_range("mmstream.json", 0, len(expected)),
        lambda: store.exists("mmstream.json"),
    ):
        pauses.clear()
        web.statuses_to_come[:] = [503, 429, 500]
        assert call() in (expected, True)
        assert len(pauses) == 3
    pauses.clear()
    answers = [formatdate(time.time() + 100, usegmt=True)]

    def answer_later(request, name):
        if answers:
            request.answer(503, b"", Retry_After=answers.pop())
        else:
            WebStub.answer_object(request, name)

    web.answer_object = answer_later
    assert store.read("mmstream.json") == expected
    [pause] = pauses
    assert 2 < pause <= 100  # without the header, it is less than a second
    web.statuses_to_come[:] = [403]
    with pytest.raises(StorageError, match=r"403.*put it into ~/\.netrc; else .* expired$"):
        store.list()
    known, name = {}, "corpus/shard-000000.tar"
    store.read_ranges([("shard-000000.tar", 0, 9)], known)
    web.objects[name] = web.objects[name][:-1] + b"x"
    (outcome,) = store.read_ranges([("shard-000000.tar", 0, 9)], known)
    assert "was replaced: its version was" in str(outcome)


@pytest.mark.parametrize("status", [405, 501])
def test_requests_that_a_web_server_does_not_know_are_not_sent_again(web, pauses, status):
    store = open_store(web.corpus)
    store.read("mmstream.json")  # it has answered, so passing faults would be waited for
    for call in (store.list, store.folders, lambda: store.read("mmstream.json")):
        num_requests = len(web.requests)
        web.statuses_to_come[:] = [status]
        with pytest.raises(StorageError, match=f"{status}.*does not know this kind of request$"):
            call()
        assert (len(web.requests), pauses) == (num_requests + 1, [])


@pytest.mark.parametrize("url", ["s3:/bucket/x", "gs:/bucket/x", "https:/host/x", "hf:/datasets/x"])
def test_a_url_that_lost_a_slash_is_no_folder(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"with two slashes"):
        mm.open_dataset(url)
    with pytest.raises(ConfigError, match=r"with two slashes"):
        mm.convert([{"text": "a"}], url, progress=False)
    assert not list(tmp_path.iterdir())
