"""The HTTP client hands over exactly the bytes of each answer, however they arrive."""

from __future__ import annotations

import asyncio
import gc
import ssl
from contextlib import asynccontextmanager, suppress
from functools import wraps

import pytest

from mmstream.storage import http_client
from mmstream.storage.http_client import HttpClient, ProtocolError
from tests.helpers.stub_server import StubAnswer, reply, stub_server
from tests.helpers.web_stubs import WebStub, running

DATA = bytes(range(256)) * 5000  # more than a piece


def in_loop(test):
    """Run a test that is a coroutine, but not for ever."""

    @wraps(test)
    def run(*arguments, **named):
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 500))

    return run


@asynccontextmanager
async def talking(answer, **settings):
    """A client, and the stub server that it may ask."""
    async with stub_server(answer) as stub:
        client = HttpClient(**settings)
        try:
            yield client, stub
        finally:
            await client.close()


async def get(client, url, method="GET"):
    """The body of an answer, read to its end."""
    answer = await client.request(method, url, {"x-test": "1"})
    data = b"".join([piece async for piece in answer])
    await answer.close()
    return data


HEAD = reply(body=DATA)[: -len(DATA)]
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*chunks: bytes, trailer: bytes = b"") -> bytes:
    body = b"".join(b"%x;note=1\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return CHUNKED + body + b"0\r\n" + trailer + b"\r\n"


def bytewise(answer: bytes) -> StubAnswer:
    """Single bytes at first, and then the rest."""
    return [step for i in range(90) for step in (answer[i : i + 1], 0.0)] + [answer[90:]]


@pytest.mark.parametrize(
    "answer",
    [
        reply(body=DATA),
        [b"HTTP/1.1 103 Early\r\nLink: <x>\r\n\r\n", reply(body=DATA)],
        [b"HTTP/1.1 103 Early\r\n\r\n" + reply(body=DATA)],
        bytewise(reply(body=DATA)),
        bytewise(chunked(DATA[:7], DATA[7:])),
        chunked(DATA[:1], DATA[1:300_000], DATA[300_000:], trailer=b"X-Sum: 1\r\n"),
        [b"HTTP/1.1 200 OK\r\n\r\n" + DATA[:9], DATA[9:], b""],
        [b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(DATA), DATA, b""],
        reply(body=DATA, headers={f"x-{number}": "v" * 99 for number in range(300)}),
    ],
    ids=[
        "length",
        "early",
        "early in one",
        "bytewise",
        "chunks bytewise",
        "chunks",
        "close",
        "1.0",
        "long head",
    ],
)
@in_loop
async def test_a_body_arrives_whole_in_every_framing_and_twice(answer):
    async with talking(lambda request: answer) as (client, stub):
        for _ in range(2):
            assert await get(client, f"{stub.endpoint}/a?b=c") == DATA


@in_loop
async def test_a_connection_is_used_again_and_others_are_opened_beside_it():
    def answer(request):
        return reply(body=b"x" * 9) if request.method == "GET" else reply(headers={"x": "y"})

    async with talking(answer) as (client, stub):
        url = f"{stub.endpoint}/x"
        for _ in range(3):
            await get(client, url)
        assert stub.num_connections == 1
        await asyncio.gather(*(get(client, url) for _ in range(5)))
        assert await get(client, url, "HEAD") == b""
        assert stub.num_connections <= 5
        assert [request.target for request in stub.requests] == ["/x"] * 9
        headers = stub.requests[0].headers
        assert (headers["x-test"], headers["host"]) == ("1", stub.endpoint.removeprefix("http://"))


@in_loop
async def test_a_kept_connection_that_the_server_closed_costs_no_error():
    def answer(request):
        return [reply(body=b"ok"), b""] if request.connection == 0 else reply(body=b"ok")

    async with talking(answer) as (client, stub):
        assert await get(client, stub.endpoint) == b"ok"
        connections = list(client._connections)
        # The server's end of the connection is on its way as the second request is sent.
        for connection in connections:
            connection.transport.pause_reading()
        await asyncio.sleep(0.05)
        connections[0].transport.resume_reading()
        assert await get(client, stub.endpoint) == b"ok"


@in_loop
async def test_bytes_that_wait_for_their_piece_are_handed_over(monkeypatch):
    monkeypatch.setattr(http_client, "FLUSH_S", 0.01)
    async with talking(lambda request: [HEAD + DATA[:1000], 500.0]) as (client, stub):
        answer = await client.request("GET", stub.endpoint, {})
        assert await anext(aiter(answer)) == DATA[:1000]
        await answer.close()


@in_loop
async def test_a_request_that_is_cancelled_or_closed_early_drops_its_connection():
    def answer(request):
        return [HEAD, 0.05, *[b"x"] * 1000, 500.0] if request.target == "/early" else None

    async with talking(answer) as (client, stub):
        early = await client.request("GET", f"{stub.endpoint}/early", {})
        await early.close()
        request = asyncio.create_task(client.request("GET", stub.endpoint, {}))
        while len(stub.requests) < 2:
            await asyncio.sleep(0.01)
        request.cancel()
        await asyncio.wait([request])
        while stub.num_closed < 2:  # the server sees it
            await asyncio.sleep(0.01)
        assert request.cancelled()


@in_loop
async def test_memory_that_was_given_is_let_go_and_never_written_after_the_close():
    buffer, body = bytearray(len(DATA)), reply(body=DATA)
    async with talking(lambda request: [body[:5000], 0.01, body[5000:]]) as (client, stub):
        answer = await client.request("GET", stub.endpoint, {}, memoryview(buffer))
        await answer.close()
        for _ in range(3):
            buffer[:] = bytes(len(buffer))
            await asyncio.sleep(0.02)
            assert not any(buffer)
        answer = await client.request("GET", stub.endpoint, {}, memoryview(buffer))
        async for piece in answer:
            del piece
        await answer.close()
        assert client._idle
        del answer
        assert buffer == DATA
        buffer.append(0)  # impossible while a connection holds it


@in_loop
async def test_a_broken_answer_hands_over_what_came_and_lets_its_memory_go_at_once():
    buffer, came = bytearray(len(DATA)), 0
    gc.collect()
    gc.disable()
    try:
        async with talking(lambda request: [HEAD, DATA[:700_001], b""]) as (client, stub):
            answer = await client.request("GET", stub.endpoint, {}, memoryview(buffer))
            with suppress(ConnectionError):
                async for piece in answer:
                    came += len(piece)
                    del piece
            await answer.close()
            assert not client._connections
        del answer
        assert came == 700_001
        assert buffer[:came] == DATA[:came]
        buffer.append(0)  # impossible while anything holds it; no garbage collector has run
    finally:
        gc.enable()


@pytest.mark.parametrize("answer", [reply("404 No", DATA[:9]), reply(body=DATA), chunked(DATA)])
@in_loop
async def test_what_is_no_answer_of_that_length_goes_elsewhere(answer):
    buffer = bytearray(len(DATA) - 1)
    async with talking(lambda request: answer) as (client, stub):
        came = await client.request("GET", stub.endpoint, {}, memoryview(buffer))
        assert b"".join([piece async for piece in came]) in (DATA[:9], DATA)
    assert not any(buffer)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"-5\r\n",
        CHUNKED + b"1_0\r\n",
        CHUNKED + b"5;" + b"x" * 9_000,
        CHUNKED + b"0\r\nX: " + b"x" * 9_000,
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
        reply(body=b"x") + b"more",
    ],
    ids=[
        *("ssh", "length", "chunk", "negative chunk", "grouped digits", "endless chunk line"),
        *("endless trailer", "endless head", "too long"),
    ],
)
@in_loop
async def test_what_is_no_http_is_an_error(answer):
    async with talking(lambda request: answer) as (client, stub):
        with pytest.raises(ProtocolError):
            await get(client, stub.endpoint)


@in_loop
async def test_requests_go_through_a_proxy():
    async with talking(lambda request: reply(body=b"ok")) as (client, stub):
        client._proxy = http_client.urlsplit(stub.endpoint.replace("//", "//me:p%40ss@"))
        assert await get(client, "http://storage.example/b/k") == b"ok"
    (request,) = stub.requests
    assert request.target == "http://storage.example/b/k"
    assert request.headers["host"] == "storage.example"
    assert request.headers["proxy-authorization"] == "Basic bWU6cEBzcw=="


@pytest.mark.parametrize("through_proxy", [False, True])
@in_loop
async def test_answers_come_through_tls_and_through_a_tunnel(certificate, through_proxy):
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate)

    async def tunnel(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        port = int(head.split(b" ")[1].rpartition(b":")[2])
        target_reader, target_writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")

        async def copy(source, target):
            while data := await source.read(65536):
                target.write(data)
            target.close()

        await asyncio.gather(copy(reader, target_writer), copy(target_reader, writer))

    proxy = await asyncio.start_server(tunnel, "127.0.0.1", 0)
    proxy_url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    client = HttpClient(
        ssl.create_default_context(cafile=certificate), proxy_url if through_proxy else None
    )
    with running(WebStub, {"x": DATA}, tls=serving) as server:
        assert await get(client, f"{server.url}/x") == DATA
        await client.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            await get(HttpClient(ssl.create_default_context()), f"{server.url}/x")
    proxy.close()
