"""The client of S3: whom it asks with which credentials, and what it makes of each answer."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from itertools import count

import pytest

from mmstream.errors import ConfigError, StorageError
from mmstream.storage import open_store, range_client as clients, remote
from mmstream.storage.range_client import S3Client, range_client
from mmstream.storage.s3_endpoint import s3_endpoint
from mmstream.storage.store import ObjectStat, RequestError
from tests.helpers.aws import SECRET, TOKEN, write_credential_process
from tests.helpers.stub_server import ranged, refused, reply, stub_server

DATA = bytes(range(256)) * 4
URL = "s3://bucket/corpus"

pytestmark = pytest.mark.usefixtures("aws")


@asynccontextmanager
async def talking(answer, setting: str = "AWS_ENDPOINT_URL"):
    """A client, and the stub server that a variable of the environment leads to."""
    async with stub_server(answer) as stub:
        os.environ[setting] = stub.endpoint
        client = range_client(open_store(URL))
        assert isinstance(client, S3Client)
        try:
            yield client, stub
        finally:
            await client.close()
            del os.environ[setting]


async def read(client, name: str = "a", start: int = 3, into=None):
    """The bytes up to 9, and what the server said of the object."""
    stream = await client.open(name, start, 9, into)
    data = b"".join([piece async for piece in stream])
    await stream.close()
    return data, stream.stat


def in_loop(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 500))


def ask(answer, num_reads: int = 1, name: str = "a b/ü.tar", **options):
    """Read an object from a stub server; return what the last read gave, and the server."""

    async def run():
        async with talking(answer) as (client, stub):
            for _ in range(num_reads):
                data, stat = await read(client, name, **options)
            return data, stat, stub

    return in_loop(run())


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


def test_an_expired_token_is_renewed_once_for_all_requests(keyless, tmp_path):
    calls = write_credential_process(tmp_path)

    def answer(request):
        if request.access_key == "KEY0":
            return refused("400 Bad Request", "ExpiredToken", "The provided token has expired.")
        return ranged(request, DATA)

    async def read_side_by_side():
        async with talking(answer) as (client, stub):
            first = await asyncio.gather(*(read(client) for _ in range(9)))
            return [*first, await read(client)], stub.requests

    reads, requests = in_loop(read_side_by_side())
    assert [data for data, _ in reads] == [DATA[3:9]] * 10
    assert [request.access_key for request in requests].count("KEY1") == 10
    assert len(list(calls.iterdir())) == 2  # KEY0, KEY1
    assert requests[0].headers["x-amz-security-token"] == "T"


# -- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_date", [False, True])
def test_a_server_may_ask_for_fewer_requests_after_a_while(as_date):
    wait = formatdate(time.time() + 1000, usegmt=True) if as_date else "7"
    with pytest.raises(RequestError, match="503 SlowDown please") as caught:
        ask(with_object(refused("503 Slow Down", "SlowDown", "please", Retry_After=wait)))
    assert caught.value.is_throttled
    assert 0 < caught.value.retry_after_s <= (1000 if as_date else 7)


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


def test_a_request_that_was_held_up_passes_where_the_clock_is_right():
    answer = refused("403 Forbidden", "RequestTimeTooSkewed", Date=formatdate(usegmt=True))
    with pytest.raises(RequestError, match="403 RequestTimeTooSkewed"):
        ask(with_object(answer))


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


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "Unable to locate credentials; check the credentials"),
        ({"AWS_PROFILE": "nobody"}, r"profile \(nobody\) could not be found; check"),
        (
            {"AWS_ROLE_ARN": "arn:aws:iam::1:role/x", "AWS_WEB_IDENTITY_TOKEN_FILE": "/absent/x"},
            r"No such file .*absent/x'; check the credentials",
        ),
    ],
)
def test_credentials_that_are_missing_or_cannot_be_had_are_told_of(keyless, variables, message):
    for name, value in variables.items():
        keyless.setenv(name, value)
    with pytest.raises(StorageError, match=message):
        ask(with_object())


@pytest.mark.slow
def test_credentials_are_renewed_before_they_expire(keyless, tmp_path):
    soon = datetime.now(UTC) + timedelta(minutes=5)
    write_credential_process(tmp_path, soon.isoformat())
    _, _, stub = ask(with_object(), num_reads=2)
    first, second = (request.access_key for request in stub.requests)
    assert first == second
    keyless.setattr(clients, "SIGNER_S", 0.0)

    async def read_until_renewed():
        async with talking(with_object()) as (client, stub):
            while len({request.access_key for request in stub.requests}) < 2:
                await read(client)

    in_loop(read_until_renewed())


def test_slow_credentials_are_asked_for_once_whoever_gives_up(keyless, tmp_path):
    calls = write_credential_process(tmp_path)

    async def run():
        async with talking(with_object()) as (client, _):
            for _ in range(3):
                given_up = asyncio.create_task(read(client))
                await asyncio.sleep(0)
                given_up.cancel()
            await read(client)

    in_loop(run())
    assert len(list(calls.iterdir())) == 1


def test_names_that_cannot_be_are_settings():
    with pytest.raises(ConfigError, match=r"s3://b d: .*Invalid bucket name"):
        asyncio.run(S3Client("s3://b d/corpus").open("a", 0, 1))
    with pytest.raises(ConfigError, match=r"corpus/a\\udc80: no object in S3 has such a name"):
        ask(with_object(), name="a\udc80")


@pytest.mark.parametrize("prefix", ["", "//", "http://"])
def test_a_proxy_may_be_named_without_a_scheme(aws, prefix):
    async def run():
        async with talking(with_object(), "HTTP_PROXY") as (client, stub):
            aws.setenv("AWS_ENDPOINT_URL", "http://storage.example")
            os.environ["HTTP_PROXY"] = stub.endpoint.replace("http://", prefix)
            return (await read(client))[0], stub.requests[0].target

    assert in_loop(run()) == (DATA[3:9], "http://storage.example/bucket/corpus/a")


@pytest.mark.parametrize("call", ["reader", "store"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_wants_a_password_is_final_and_says_where_to_put_it(aws, scheme, call):
    answer = reply("407 Proxy Authentication Required", b"<html>please log in</html>")

    async def run():
        async with talking(lambda request: answer, f"{scheme.upper()}_PROXY") as (client, _):
            aws.setenv("AWS_ENDPOINT_URL", f"{scheme}://storage.example")
            if call == "reader":
                await read(client)
            else:
                await asyncio.to_thread(open_store(URL).read_range, "a", 3, 9)

    message = rf"^{URL}/a: the proxy answers 407; write HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT"
    with pytest.raises(StorageError, match=message):
        in_loop(run())


@pytest.mark.parametrize("scheme", ["https", "socks5"])
def test_a_proxy_that_does_not_speak_plain_http_is_a_setting(aws, scheme):
    aws.setenv("HTTPS_PROXY", f"{scheme}://me:{SECRET}@proxy.example:3128")
    message = (
        rf"^HTTPS_PROXY={scheme}://\.\.\.: the reader process speaks plain HTTP to proxies; wri"
    )
    with pytest.raises(ConfigError, match=message) as caught:
        s3_endpoint("bucket", "us-east-1")
    assert SECRET not in str(caught.value)


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


def test_a_server_without_ranges_is_refused():
    with pytest.raises(RequestError, match="does not know ranges") as caught:
        ask(with_object(reply(body=DATA)))
    assert caught.value.may_be_final
    data, stat, _ = ask(with_object(reply(body=DATA[:9])), start=0)
    assert (data, stat) == (DATA[:9], None)


@pytest.mark.parametrize("framing", ["Transfer-Encoding: chunked", "Content-Length: 7"])
def test_bytes_come_whatever_their_framing_and_no_more_than_were_asked_for(framing):
    body = b"7\r\nabcdefg\r\n0\r\n\r\n" if "chunked" in framing else b"abcdefg"
    head = f"HTTP/1.1 206 Partial\r\n{framing}\r\nContent-Range: bytes 3-8/*\r\n\r\n"
    answer = head.encode() + body
    data, stat, _ = ask(with_object(answer), into=memoryview(bytearray(6)))
    assert (data, stat) == (b"abcdef", None)


# -- processes and secrets -----------------------------------------------------------------------


def test_secrets_are_neither_shown_nor_pickled(aws):
    aws.setenv("AWS_SESSION_TOKEN", TOKEN)

    async def shown_and_held():
        async with talking(with_object()) as (client, _):
            stream = await client.open("a", 3, 9)
            link = client._link
            values = client, stream, link, link.endpoint, link.signer
            return " ".join(map(repr, values)), client

    shown, held = in_loop(shown_and_held())
    assert SECRET not in shown
    assert TOKEN not in shown
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(held)


def test_certificates_that_are_not_there_are_named_at_once(aws, tmp_path):
    aws.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:1")
    aws.setenv("AWS_CA_BUNDLE", str(tmp_path / "absent.pem"))
    with pytest.raises(ConfigError, match=r"AWS_CA_BUNDLE: no such file: .*absent\.pem"):
        open_store("s3://bucket/prefix").read("name")
    with pytest.raises(ConfigError, match=r"AWS_CA_BUNDLE: no such file: .*absent\.pem"):
        s3_endpoint("bucket")
