"""The client of S3: whom it asks with which credentials, and what it makes of each answer."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import time
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from functools import lru_cache
from itertools import count

import botocore.loaders
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from mmstream.errors import ConfigError, StorageError
from mmstream.storage import open_store, patience, remote, s3_client
from mmstream.storage.range_client import range_client
from mmstream.storage.s3_client import S3Client
from mmstream.storage.s3_endpoint import S3Signer, s3_endpoint
from mmstream.storage.store import ObjectStat, RequestError
from tests.helpers.stub_server import ranged, refused, reply, stub_server

DATA = bytes(range(256)) * 4
URL = "s3://bucket/corpus"
cached_loader = lru_cache(botocore.loaders.create_loader)
"""Reads botocore's models once for all tests."""

SECRET = "wJalrXUtnFEMI-secret"


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    """Static keys in the environment, and nothing else. No store answered before."""
    for name in set(os.environ):
        if name.startswith(("AWS_", "FSSPEC_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(botocore.loaders, "create_loader", cached_loader)
    patience._patience.cache_clear()
    return monkeypatch


@pytest.fixture
def keyless(settings):
    """Without the static keys."""
    settings.delenv("AWS_ACCESS_KEY_ID")
    settings.delenv("AWS_SECRET_ACCESS_KEY")
    return settings


def ask(answer, num_reads: int = 1, name: str = "a b/ü.tar", start: int = 3, into=None):
    """Read bytes up to 9 of an object from a stub server.

    Returns:
        The bytes of the last read, what the server said of the object, and the server.
    """

    async def run():
        async with stub_server(answer) as stub:
            os.environ["AWS_ENDPOINT_URL"] = stub.endpoint
            client = range_client(open_store(URL))
            assert isinstance(client, S3Client)
            try:
                for _ in range(num_reads):
                    stream = await client.open(name, start, 9, into)
                    data = b"".join([piece async for piece in stream])
                    await stream.close()
            except OSError as error:
                error.stub = stub
                raise
            finally:
                await client.close()
                del os.environ["AWS_ENDPOINT_URL"]
            return data, stream.stat, stub

    return asyncio.run(asyncio.wait_for(run(), 500))


def with_object(*first, data: bytes = DATA):
    """What answers with the given answers first, and with ranges of an object after them."""
    answers = list(first)
    return lambda request: answers.pop(0) if answers else ranged(request, data)


# -- requests ------------------------------------------------------------------------------------


def test_a_range_is_requested_from_the_endpoint_in_path_style():
    data, stat, stub = ask(with_object(), num_reads=2)
    assert data == DATA[3:9]
    assert stat == ObjectStat(len(DATA), "e1")
    assert [request.target for request in stub.requests] == ["/bucket/corpus/a%20b/%C3%BC.tar"] * 2
    assert stub.requests[0].headers["range"] == "bytes=3-8"
    assert stub.requests[0].access_key == "KEY"
    assert stub.num_connections == 1


@pytest.mark.parametrize("token", [None, "the-token"])
@pytest.mark.parametrize("path", ["/k", "/bucket/a%20b/%C3%BC~-_.tar"])
def test_a_signature_is_that_of_botocore(token, path):
    url, now = f"https://storage.example:9000{path}", 1_790_000_000.0
    signer = S3Signer("KEY", SECRET, token, "eu-west-1")
    own = signer.headers("GET", url, {"range": "bytes=0-8"}, now)
    theirs = AWSRequest("GET", url, headers={"range": "bytes=0-8"})
    theirs.context["timestamp"] = own["x-amz-date"]
    auth = S3SigV4Auth(Credentials("KEY", SECRET, token), "s3", "eu-west-1")
    auth._modify_request_before_signing(theirs)
    signature = auth.signature(auth.string_to_sign(theirs, auth.canonical_request(theirs)), theirs)
    assert own["authorization"].rpartition("=")[2] == signature
    next_day = signer.headers("GET", url, {}, now + 86_400)["authorization"]
    fresh = S3Signer("KEY", SECRET, token, "eu-west-1")
    assert fresh.headers("GET", url, {}, now + 86_400)["authorization"] == next_day


def test_a_profile_names_endpoint_region_and_keys(keyless, tmp_path):
    (tmp_path / "config").write_text(
        "[profile lab]\nregion = eu-north-1\n"
        "aws_access_key_id = LAB\naws_secret_access_key = labsecret\n"
    )
    keyless.setenv("AWS_PROFILE", "lab")
    _, _, stub = ask(with_object())
    assert (stub.requests[0].access_key, stub.requests[0].region) == ("LAB", "eu-north-1")


@pytest.mark.parametrize(
    "variable",
    [("AWS_NO_SIGN_REQUEST", "YES"), ("FSSPEC_S3_ANON", "true")],
    ids=lambda pair: pair[0],
)
def test_an_anonymous_request_is_not_signed(keyless, variable):
    import fsspec.config

    keyless.setenv(*variable)
    keyless.setattr(fsspec.config, "conf", {})
    fsspec.config.set_conf_env(fsspec.config.conf)
    data, _, stub = ask(with_object())
    assert data == DATA[3:9]
    assert "authorization" not in stub.requests[0].headers
    assert remote._client(URL).anon  # reads of everything else


def credential_process(tmp_path, expiration: str = "2099-01-01T00:00:00Z") -> str:
    """A configuration whose process gives a new key at each call, and notes its calls."""
    script = tmp_path / "keys.py"
    calls = tmp_path / "calls"
    script.write_text(
        f"import json, pathlib\ncalls = pathlib.Path({str(calls)!r})\n"
        "number = len(calls.read_text()) if calls.exists() else 0\n"
        "calls.write_text('x' * (number + 1))\n"
        f"print(json.dumps(dict(Version=1, AccessKeyId=f'KEY{{number}}', SessionToken='T',"
        f" SecretAccessKey={SECRET!r}, Expiration={expiration!r})))\n"
    )
    return f"[default]\ncredential_process = {sys.executable} -I {script}\n"


def test_an_expired_token_is_renewed_once_for_all_requests(keyless, tmp_path):
    (tmp_path / "config").write_text(credential_process(tmp_path))

    def answer(request):
        if request.access_key == "KEY0":
            return refused("400 Bad Request", "ExpiredToken", "The provided token has expired.")
        return ranged(request, DATA)

    data, _, stub = ask(answer, num_reads=3)
    assert data == DATA[3:9]
    keys = [request.access_key for request in stub.requests]
    assert keys == ["KEY0", "KEY1", "KEY1", "KEY1"]
    assert stub.requests[0].headers["x-amz-security-token"] == "T"


# -- answers -------------------------------------------------------------------------------------


def test_503_asks_for_fewer_requests_after_a_while():
    with pytest.raises(RequestError, match="503 SlowDown please") as caught:
        ask(with_object(refused("503 Slow Down", "SlowDown", "please", Retry_After="7")))
    assert (caught.value.is_throttled, caught.value.retry_after_s) == (True, 7.0)
    date = formatdate(time.time() + 1000, usegmt=True)
    with pytest.raises(RequestError) as caught:
        ask(with_object(reply("429 Too Many Requests", headers={"Retry-After": date})))
    assert caught.value.is_throttled
    assert 0 < caught.value.retry_after_s <= 1000


HEAD = b"HTTP/1.1 206 Partial\r\nContent-Length: 6\r\nContent-Range: bytes 3-8/9\r\n\r\n"


def part(content_range: str = "") -> bytes:
    """Bytes of the right number, that say of which range they are."""
    headers = {"Content-Range": content_range} if content_range else {}
    return reply("206 Partial", DATA[:6], headers)


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (reply("500 Internal"), RequestError, "^500"),
        (reply("502 Bad Gateway"), RequestError, "^502"),
        (reply("504 Timeout"), RequestError, "^504"),
        (reply("400 Odd"), RequestError, "^400"),
        ([HEAD + b"xy", b""], RequestError, "^ConnectionResetError"),
        ([b""], RequestError, "^ConnectionResetError"),
        ([HEAD[:20], b""], RequestError, "^ConnectionResetError"),
        (part("bytes 4-9/1024"), RequestError, "bytes 3-8 were asked for, bytes 4-9/1024 came"),
        (part("bytes 3-9/1024"), RequestError, "bytes 3-8 were asked for, bytes 3-9/1024 came"),
        (part("lines 3-8/9"), RequestError, "bytes 3-8 were asked for, lines 3-8/9 came"),
        (part(), RequestError, "a range without Content-Range came"),
        (refused("404 Not Found", "NoSuchKey"), FileNotFoundError, r"a b/ü\.tar: no such object"),
        (refused("404 Not Found", "NoSuchBucket"), FileNotFoundError, "no such bucket"),
    ],
)
def test_an_answer_that_is_wrong_passes_but_an_absence_is_final(answer, kind, message):
    with pytest.raises(kind, match=message) as caught:
        ask(with_object(answer))
    assert not getattr(caught.value, "is_throttled", False)
    assert not getattr(caught.value, "retry_after_s", 0.0)


def test_wrong_keys_are_final_and_one_line_without_secrets():
    wrong = refused("403 Forbidden", "InvalidAccessKeyId", "The key\nis unknown.")
    with pytest.raises(StorageError) as caught:
        ask(with_object(*[wrong] * 5))
    assert str(caught.value) == (
        f"{URL}/a b/ü.tar: 403 InvalidAccessKeyId The key\\nis unknown.; check the credentials "
        "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws; AWS_ENDPOINT_URL)"
    )
    assert len(caught.value.stub.requests) == 2  # the second with credentials read anew


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refused("403 Forbidden", "AccessDenied"), "403 AccessDenied"),
        (refused("302 Found", ""), "302; a proxy or a login page"),
        (reply(body=DATA), "does not know ranges"),
    ],
    ids=["wrong keys", "elsewhere", "whole object"],
)
def test_a_store_that_has_answered_may_be_wrong_for_a_while(answer, message):
    numbers = count()
    with pytest.raises(RequestError, match=message):
        ask(lambda request: answer if next(numbers) else ranged(request, DATA), num_reads=2)


def test_missing_credentials_are_named(keyless):
    with pytest.raises(StorageError, match="Unable to locate credentials; check the credentials"):
        ask(with_object())
    keyless.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StorageError, match=r"profile \(nobody\) could not be found; check"):
        ask(with_object())


def test_credentials_that_cannot_be_had_are_told_of(settings, tmp_path):
    settings.delenv("AWS_ACCESS_KEY_ID")
    settings.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/x")
    settings.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "absent"))
    with pytest.raises(StorageError, match=r"No such file .*absent'; check the credentials"):
        ask(with_object())


def test_credentials_are_renewed_before_they_expire(keyless, tmp_path):
    soon = datetime.now(UTC) + timedelta(minutes=5)
    (tmp_path / "config").write_text(credential_process(tmp_path, soon.isoformat()))
    _, _, stub = ask(with_object(), num_reads=2)
    first, second = (request.access_key for request in stub.requests)
    assert first == second
    keyless.setattr(s3_client, "SIGNER_S", 0.0)

    async def read_until_renewed():
        async with stub_server(with_object()) as stub:
            keyless.setenv("AWS_ENDPOINT_URL", stub.endpoint)
            client = S3Client(URL)
            while len({request.access_key for request in stub.requests}) < 2:
                await (await client.open("a", 0, 9)).close()
            await client.close()

    asyncio.run(asyncio.wait_for(read_until_renewed(), 500))


def test_slow_credentials_are_asked_for_once_whoever_gives_up(keyless, tmp_path):
    (tmp_path / "config").write_text(credential_process(tmp_path))

    async def run():
        async with stub_server(with_object()) as stub:
            keyless.setenv("AWS_ENDPOINT_URL", stub.endpoint)
            client = S3Client(URL)
            for _ in range(3):
                given_up = asyncio.create_task(client.open("a", 0, 9))
                await asyncio.sleep(0)
                given_up.cancel()
            await (await client.open("a", 0, 9)).close()
            await client.close()

    asyncio.run(asyncio.wait_for(run(), 500))
    assert (tmp_path / "calls").read_text() == "x"


def test_credentials_that_are_broken_in_mid_run_may_be_right_later(keyless, tmp_path):
    (tmp_path / "config").write_text(credential_process(tmp_path))
    numbers = count()

    def answer(request):
        if next(numbers) == 0:
            return ranged(request, DATA)
        (tmp_path / "keys.py").write_text("print('{')")
        return refused("400 Bad Request", "ExpiredToken", "The provided token has expired.")

    with pytest.raises(RequestError, match="ConfigError: s3://bucket: "):
        ask(answer, num_reads=2)


def test_a_wrong_name_of_a_bucket_is_a_setting():
    with pytest.raises(ConfigError, match=r"s3://b d: .*Invalid bucket name"):
        asyncio.run(S3Client("s3://b d/corpus").open("a", 0, 1))


def test_a_name_that_cannot_be_is_told():
    with pytest.raises(ConfigError, match=r"corpus/a\\udc80: no object in S3 has such a name"):
        ask(with_object(), name="a\udc80")


@pytest.mark.parametrize("prefix", ["", "//", "http://"])
def test_a_proxy_may_be_named_without_a_scheme(settings, prefix):
    async def run():
        async with stub_server(with_object()) as stub:
            settings.setenv("AWS_ENDPOINT_URL", "http://storage.example")
            settings.setenv("HTTP_PROXY", stub.endpoint.replace("http://", prefix))
            client = S3Client(URL)
            stream = await client.open("a", 3, 9)
            data = b"".join([piece async for piece in stream])
            await client.close()
            return data, stub.requests[0].target

    assert asyncio.run(run()) == (DATA[3:9], "http://storage.example/bucket/corpus/a")


@pytest.mark.parametrize("call", ["reader", "store"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_wants_a_password_is_final_and_says_where_to_put_it(settings, scheme, call):
    def answer(request):
        return reply("407 Proxy Authentication Required", b"<html>please log in</html>")

    async def run():
        async with stub_server(answer) as stub:
            settings.setenv("AWS_ENDPOINT_URL", f"{scheme}://storage.example")
            settings.setenv(f"{scheme.upper()}_PROXY", stub.endpoint)
            if call == "reader":
                await S3Client(URL).open("a", 3, 9)
            else:
                await asyncio.to_thread(open_store(URL).read_range, "a", 3, 9)

    message = rf"^{URL}/a: the proxy answers 407; write HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT"
    with pytest.raises(StorageError, match=message):
        asyncio.run(run())


@pytest.mark.parametrize("scheme", ["https", "socks5"])
def test_a_proxy_that_does_not_speak_plain_http_is_a_setting(settings, scheme):
    settings.setenv("HTTPS_PROXY", f"{scheme}://me:{SECRET}@proxy.example:3128")
    message = (
        rf"^HTTPS_PROXY={scheme}://\.\.\.: the reader process speaks plain HTTP to proxies; wri"
    )
    with pytest.raises(ConfigError, match=message) as caught:
        s3_endpoint("bucket", "us-east-1")
    assert SECRET not in str(caught.value)


def test_a_wrong_clock_is_final_and_told_in_seconds():
    date = formatdate(time.time() - 1000, usegmt=True)
    skewed = refused("403 Forbidden", "RequestTimeTooSkewed", Date=date)
    with pytest.raises(
        StorageError, match=r"is 1,\d\d\d s ahead of the server's .*TooSkewed\); set"
    ):
        ask(with_object(skewed))


def test_a_request_that_was_held_up_with_a_right_clock_may_be_sent_again():
    held_up = refused("403 Forbidden", "RequestTimeTooSkewed", Date=formatdate(usegmt=True))
    with pytest.raises(RequestError, match="403 RequestTimeTooSkewed"):
        ask(with_object(held_up))


@pytest.mark.parametrize("says_region", [True, False])
def test_a_bucket_is_followed_to_its_region(says_region):
    region = {"x_amz_bucket_region": "eu-west-3"}

    def answer(request):
        if request.region == "eu-west-3":
            return ranged(request, DATA)
        if request.method == "HEAD":
            return refused("301 Moved", "", **region)
        return refused("301 Moved", "PermanentRedirect", **(region if says_region else {}))

    data, _, stub = ask(answer, num_reads=3)
    assert data == DATA[3:9]
    methods = [request.method for request in stub.requests]
    assert methods == ["GET"] + ["HEAD"] * (not says_region) + ["GET"] * 3
    assert all(
        request.target == "/bucket/" for request in stub.requests if request.method == "HEAD"
    )


def test_a_region_that_nobody_names_is_final():
    with pytest.raises(StorageError, match=r"another region.*set AWS_REGION"):
        ask(lambda request: refused("301 Moved", "PermanentRedirect"))


def test_a_range_past_the_end_says_the_present_object():
    def answer(request):
        if request.method == "HEAD":
            return reply(body=DATA[:2], headers={"ETag": '"e2"'})
        return ranged(request, DATA[:2])

    data, stat, _ = ask(answer)
    assert (data, stat) == (b"", ObjectStat(2, "e2"))


def test_a_server_without_ranges_is_refused():
    with pytest.raises(RequestError, match="does not know ranges") as caught:
        ask(with_object(reply(body=DATA)))
    assert caught.value.may_be_final
    data, stat, _ = ask(with_object(reply(body=DATA[:9])), start=0)
    assert (data, stat) == (DATA[:9], None)


@pytest.mark.parametrize("framing", ["Transfer-Encoding: chunked", "Content-Length: 7"])
def test_bytes_come_into_the_given_memory_whatever_their_framing(framing):
    body = b"7\r\nabcdefg\r\n0\r\n\r\n" if "chunked" in framing else b"abcdefg"
    head = f"HTTP/1.1 206 Partial\r\n{framing}\r\nContent-Range: bytes 3-8/*\r\n\r\n"
    answer = head.encode() + body
    buffer = bytearray(6)
    data, stat, _ = ask(with_object(answer), into=memoryview(buffer))
    assert (data, bytes(buffer), stat) == (b"abcdef", b"abcdef", None)


# -- processes and secrets -----------------------------------------------------------------------


def test_a_client_of_another_process_is_refused():
    client = S3Client(URL)
    reading, writing = os.pipe()
    if not os.fork():
        try:
            asyncio.run(client.open("a", 0, 1))
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.wait()
    told = os.read(reading, 10_000).decode()
    assert told.startswith(f"ConfigError: {URL}: this client belongs to process {os.getpid()} and ")


def test_secrets_are_neither_shown_nor_pickled(settings):
    settings.setenv("AWS_SESSION_TOKEN", "the-token")
    client = S3Client(URL)

    async def open_range():
        async with stub_server(with_object()) as stub:
            settings.setenv("AWS_ENDPOINT_URL", stub.endpoint)
            stream = await client.open("a", 3, 9)
            await client.close()
            return stream

    stream = asyncio.run(open_range())
    link = client._link
    shown = f"{client!r} {stream!r} {link!r} {link.endpoint!r} {link.signer!r}"
    assert SECRET not in shown
    assert "the-token" not in shown
    for value in (client, link.signer):
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(value)


def test_certificates_that_are_not_there_are_named_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:1")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "absent.pem"))
    with pytest.raises(ConfigError, match=r"AWS_CA_BUNDLE: no such file: .*absent\.pem"):
        open_store("s3://bucket/prefix").read("name")
    with pytest.raises(ConfigError, match=r"AWS_CA_BUNDLE: no such file: .*absent\.pem"):
        s3_endpoint("bucket")
