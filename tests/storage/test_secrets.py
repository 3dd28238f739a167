"""Keys, passwords, tokens and signatures appear nowhere: not in logs, errors, values or files."""

from __future__ import annotations

import logging
import os
import pickle
import traceback
from types import SimpleNamespace

import pytest
from aiohttp import ClientResponseError
from multidict import CIMultiDict

import mmstream as mm
from mmstream.errors import ConfigError
from mmstream.storage import open_store
from mmstream.storage.responses import plain_error, without_secrets
from tests.helpers.corpora import captioned, write_shard
from tests.helpers.web_stubs import WebStub, running
from tests.storage import test_schemes

serve = test_schemes.serve

PASSWORD = "open-sesame"
SIGNATURE = "1f2e3d4c5b6a"


def text_of(error):
    return "".join(traceback.format_exception(error)) + repr(error)


@pytest.mark.s3
@pytest.mark.slow
def test_a_run_on_s3_shows_no_key(s3, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "")  # none, so that the server takes the key
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    url = f"{s3}/{tmp_path.name}"
    samples = [(f"{i}", captioned(i)) for i in range(8)]
    samples[3][1]["jpg"] = b"no image"
    write_shard(url, "shard-000000.tar", samples)
    with caplog.at_level(logging.DEBUG, logger="mmstream"):
        pipeline = mm.Pipeline(
            mm.open_dataset(f"{url}/shard-000000.tar"),
            global_batch_size=4,
            decode=mm.Decode(image=mm.ImageDecoder(size=16)),
            bad_samples=mm.BadSamplePolicy(quarantine=str(tmp_path)),
        )
        loader = mm.Loader(pipeline)
        list(loader)
        state = loader.state_dict()
        loader.close()
    [record] = [path.read_text() for path in tmp_path.glob("quarantine*")]
    dataset = pipeline.dataset
    shown = [repr(value) for value in (dataset.store, dataset, pipeline, loader, state)]
    pickled = [pickle.dumps(value) for value in (dataset.store, dataset, pipeline)]
    assert "no image" in record or "jpg" in record
    for text in (*shown, record, caplog.text, *map(repr, pickled)):
        assert secret not in text


URLS = [
    f"http://user:{PASSWORD}@host/corpus",
    f"https://{PASSWORD}@host/corpus",
    f"s3://AKIA:{PASSWORD}@bucket/corpus",
    f"https://host/a.tar?X-Amz-Signature={SIGNATURE}",
    f"https://host/{{a,b}}.tar?X-Amz-Signature={SIGNATURE}",
    f"https://user:{PASSWORD}@host/{{a.tar",
    f"s3://AKIA:pass/{PASSWORD}@bucket/corpus",
    f"gs://AKIA:{PASSWORD}/word@bucket/corpus",
    f"az://AKIA:{PASSWORD}/word",
    f"https://user:pass/{PASSWORD}@host/corpus",
    f"https://user:/{PASSWORD}@host/corpus",
    f"https://user:pass@{PASSWORD}/word@host/corpus",
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    "call",
    [
        mm.open_dataset,
        lambda url: mm.open_dataset([url, "s3://other/a.tar"]),
        open_store,
        lambda url: mm.convert(url, "shards"),
        lambda url: mm.convert("rows.jsonl", url),
        lambda url: mm.convert("rows.jsonl", "shards", media_root=url),
    ],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url, call, caplog):
    with pytest.raises(ConfigError, match=r"://(.*\?)?\*\*\*: a URL ") as raised:
        call(url)
    for secret in (PASSWORD, SIGNATURE):
        assert secret not in text_of(raised.value) + caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1]:8080/me@home/corpus",
        "http://[::1]/me@home/corpus",
        "https://host:8080/me@home/corpus",
        "https://host/a:b@c/corpus",
        "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/mine/a@b",
        "s3://bucket/a:b@c/corpus",
        "abfss://container@account.dfs.core.windows.net/corpus",
    ],
)
def test_a_url_that_only_looks_like_one_with_a_secret_is_taken(url):
    assert open_store(url).url == url


def test_a_password_of_netrc_opens_a_web_server(corpus, tmp_path, monkeypatch):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login user password password\n")
    netrc.chmod(0o600)
    objects = test_schemes.objects_of(corpus, "corpus")
    with running(WebStub, objects, needs_password=True) as server:
        monkeypatch.setenv("NETRC", os.devnull)
        with pytest.raises(OSError, match=r"401.*; if the host needs a password"):
            open_store(f"{server.url}/corpus").stat("mmstream.json")
    with running(WebStub, objects, needs_password=True) as server:
        monkeypatch.setenv("NETRC", str(netrc))
        assert open_store(f"{server.url}/corpus").stat("mmstream.json").size


class SigningStub(WebStub):
    """Sends the reader on to a signed URL, as hubs do, which does not work."""

    def get(self):
        if "X-Amz-Signature" in self.query:
            self.answer(self.refusal, b"")
        else:
            self.answer(302, b"", Location=f"/{self.name}?X-Amz-Signature={SIGNATURE}")

    head = get


@pytest.mark.parametrize("refusal", [403, 404, 500])
def test_a_signed_url_that_a_server_sends_on_to_is_not_shown(refusal, pauses, caplog):
    with running(SigningStub, {}, refusal=refusal) as server:
        store = open_store(f"{server.url}/corpus")
        calls = (
            lambda: store.read("a"),
            lambda: store.read_range("a", 0, 9),
            lambda: store.stat("a"),
        )
        for call in calls:
            with pytest.raises(OSError) as raised:
                call()
            assert SIGNATURE not in text_of(raised.value) + caplog.text
        assert any(SIGNATURE in request for request in server.requests)


@pytest.mark.parametrize(
    ("kind", "status"), [("google", 403), ("azure", 403), ("hub", 403), ("hub", 500)]
)
def test_a_cloud_that_refuses_or_fails_shows_no_token(kind, status, serve, monkeypatch, caplog):
    server = serve(kind)
    monkeypatch.setenv("MMSTREAM_STORAGE_PATIENCE_S", "0")
    server.statuses_to_come[:] = [status] * 100
    with pytest.raises(OSError) as raised:
        open_store(server.corpus).read_range("shard-000000.tar", 0, 9)
    if status == 403:
        variable = {"google": "GOOGLE_APP", "azure": "AZURE_STORAGE_CONN", "hub": "HF_TOKEN"}[kind]
        assert f"check the credentials ({variable}" in str(raised.value)
    for secret in (test_schemes.AZURE_KEY, "hf_secretsecretsecret"):
        assert secret not in text_of(raised.value) + caplog.text


def test_texts_lose_their_secrets_and_keep_the_rest():
    signed = f"GET https://host/a.tar?X-Amz-Signature={SIGNATURE}&x=1 403; see http://host/b"
    assert without_secrets(signed) == "GET https://host/a.tar?*** 403; see http://host/b"
    assert without_secrets(f"Authorization: Bearer {'t' * 20}") == "Authorization: Bearer ***"
    assert without_secrets(f"url='ftp://u:{PASSWORD}@host/a'") == "url='ftp://***@host/a'"


def test_errors_of_clients_keep_how_long_to_wait():
    headers = CIMultiDict({"Retry-After": "7"})
    of_aiohttp = ClientResponseError(SimpleNamespace(real_url="x"), (), status=503, headers=headers)
    of_azure = OSError("busy")
    of_azure.response = SimpleNamespace(status_code=503, headers=headers)
    of_google = OSError("busy")
    of_google.code = 503
    waits = [plain_error(error).retry_after_s for error in (of_aiohttp, of_azure, of_google)]
    assert waits == [7, 7, 0]
