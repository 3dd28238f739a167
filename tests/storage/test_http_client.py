"""The HTTP client hands over exactly the bytes of each answer, however they arrive."""

from __future__ import annotations

import asyncio
import gc
import ssl

import pytest

from mmstream.storage import http_client
from mmstream.storage.http_client import HttpClient, ProtocolError, ProxyError
from tests.helpers.stub_server import StubAnswer, reply, stub_server

DATA = bytes(range(256)) * 5000  # more than a piece


def talk(answer, calls, **settings):
    """What a coroutine function returns that gets a client and the stub server it may ask."""

    async def run():
        async with stub_server(answer) as stub:
            client = HttpClient(**settings)
            try:
                return await asyncio.wait_for(calls(client, stub), 500)
            finally:
                await client.close()

    return asyncio.run(run())


async def get(client, url, method="GET"):
    """The body of an answer, read to its end."""
    answer = await client.request(method, url, {"x-test": "1"})
    data = b"".join([piece async for piece in answer])
    await answer.close()
    return data


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
def test_a_body_arrives_whole_in_every_framing_and_twice(answer):
    async def twice(client, stub):
        return [await get(client, f"{stub.endpoint}/a?b=c") for _ in range(2)]

    assert talk(lambda request: answer, twice) == [DATA, DATA]


def test_a_connection_is_used_again_and_others_are_opened_beside_it():
    async def several(client, stub):
        url = f"{stub.endpoint}/x"
        for _ in range(3):
            await get(client, url)
        assert stub.num_connections == 1
        await asyncio.gather(*(get(client, url) for _ in range(5)))
        assert await get(client, url, "HEAD") == b""
        return stub

    def answer(request):
        return reply(body=b"x" * 9) if request.method == "GET" else reply(headers={"x": "y"})

    stub = talk(answer, several)
    assert stub.num_connections <= 5
    assert [request.target for request in stub.requests] == ["/x"] * 9
    assert stub.requests[0].headers["x-test"] == "1"
    assert stub.requests[0].headers["host"] == stub.endpoint.removeprefix("http://")


def test_a_kept_connection_that_the_server_closed_costs_no_error():
    async def twice(client, stub):
        assert await get(client, stub.endpoint) == b"ok"
        connections = list(client._connections)
        # The server's end of the connection is on its way as the second request is sent.
        for connection in connections:
            connection.transport.pause_reading()
        await asyncio.sleep(0.05)
        connections[0].transport.resume_reading()
        return await get(client, stub.endpoint)

    def answer(request):
        return [reply(body=b"ok"), b""] if request.connection == 0 else reply(body=b"ok")

    assert talk(answer, twice) == b"ok"


def test_what_came_before_a_connection_broke_is_handed_over():
    async def read(client, stub):
        answer = await client.request("GET", stub.endpoint, {})
        came = bytearray()

        async def read_all():
            async for piece in answer:
                came.extend(piece)

        with pytest.raises(ConnectionError):
            await read_all()
        await answer.close()
        assert not client._connections
        return came

    head = reply(body=DATA)[: -len(DATA)]
    assert talk(lambda request: [head, DATA[:700_001], b""], read) == DATA[:700_001]


def test_bytes_that_wait_for_their_piece_are_handed_over(monkeypatch):
    monkeypatch.setattr(http_client, "FLUSH_S", 0.01)

    async def read(client, stub):
        answer = await client.request("GET", stub.endpoint, {})
        piece = await anext(aiter(answer))
        await answer.close()
        return bytes(piece)

    head = reply(body=DATA)[: -len(DATA)]
    assert talk(lambda request: [head + DATA[:1000], 30.0], read) == DATA[:1000]


def test_a_cancelled_request_drops_its_connection():
    async def cancel(client, stub):
        request = asyncio.create_task(client.request("GET", stub.endpoint, {}))
        while not stub.requests:
            await asyncio.sleep(0.01)
        request.cancel()
        await asyncio.wait([request])
        while not stub.num_closed:  # the server sees it
            await asyncio.sleep(0.01)
        return request.cancelled()

    assert talk(lambda request: None, cancel)


def test_an_answer_that_is_closed_early_drops_its_connection():
    async def close(client, stub):
        answer = await client.request("GET", stub.endpoint, {})
        await answer.close()
        while not stub.num_closed:
            await asyncio.sleep(0.01)
        return answer.status

    head = reply(body=DATA)[: -len(DATA)]
    assert talk(lambda request: [head, 0.05, *[b"x"] * 1000, 60.0], close) == 200


def test_a_read_may_fill_all_memory_that_was_given_and_is_one_piece():
    piece = http_client.PIECE_BYTES
    body = http_client._Body(4 * piece, is_chunked=False, into=memoryview(bytearray(4 * piece)))
    lengths = []
    for num_bytes in (2 * piece + 1, piece - 1, 1, piece - 1):
        assert len(body.free) >= num_bytes
        body.filled(num_bytes)
        lengths.append([len(one) for one in body.pieces])
        body.pieces.clear()
    assert lengths == [[2 * piece + 1], [], [piece], [piece - 1]]
    assert body.is_complete


def test_memory_that_was_given_is_let_go_and_never_written_after_the_close():
    buffer = bytearray(len(DATA))

    async def read_and_drop(client, stub):
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
        data = bytes(buffer)
        buffer.append(0)  # impossible while a connection holds it
        return data

    body = reply(body=DATA)
    assert talk(lambda request: [body[:5000], 0.01, body[5000:]], read_and_drop) == DATA


def test_the_memory_of_a_broken_answer_is_let_go_at_once():
    buffer = bytearray(len(DATA))

    async def read(client, stub):
        answer = await client.request("GET", stub.endpoint, {}, memoryview(buffer))
        try:
            async for piece in answer:
                del piece
        except ConnectionError:
            await answer.close()

    gc.collect()
    gc.disable()
    try:
        talk(lambda request: [reply(body=DATA)[:5000], b""], read)
        buffer.append(0)  # impossible while anything holds it; no garbage collector has run
    finally:
        gc.enable()


@pytest.mark.parametrize("answer", [reply("404 No", DATA[:9]), reply(body=DATA), chunked(DATA)])
def test_what_is_no_answer_of_that_length_goes_elsewhere(answer):
    buffer = bytearray(len(DATA) - 1)

    async def read(client, stub):
        answer = await client.request("GET", stub.endpoint, {}, memoryview(buffer))
        return b"".join([piece async for piece in answer])

    assert talk(lambda request: answer, read) in (DATA[:9], DATA)
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
def test_what_is_no_http_is_an_error(answer):
    with pytest.raises(ProtocolError):
        talk(lambda request: answer, lambda client, stub: get(client, stub.endpoint))


def test_a_server_that_refuses_connections_is_an_error():
    with pytest.raises(OSError):
        talk(None, lambda client, stub: get(client, "http://127.0.0.1:1/x"))


def test_requests_go_through_a_proxy():
    async def ask(client, stub):
        client._proxy = http_client.urlsplit(stub.endpoint.replace("//", "//me:p%40ss@"))
        return await get(client, "http://storage.example/b/k"), stub

    data, stub = talk(lambda request: reply(body=b"ok"), ask)
    assert data == b"ok"
    (request,) = stub.requests
    assert request.target == "http://storage.example/b/k"
    assert request.headers["host"] == "storage.example"
    assert request.headers["proxy-authorization"] == "Basic bWU6cEBzcw=="


@pytest.mark.parametrize("body", [b"", b"<html>this server is not allowed</html>"])
def test_a_proxy_that_refuses_a_tunnel_says_its_status(body):
    async def ask(client, stub):
        client._proxy = http_client.urlsplit(stub.endpoint)
        await get(client, "https://storage.example/b/k")

    with pytest.raises(ProxyError, match=r"^the proxy 127\.0\.0\.1 answers 403$"):
        talk(lambda request: reply("403 Forbidden", body), ask, tls=ssl.create_default_context())


@pytest.mark.parametrize("through_proxy", [False, True])
def test_answers_come_through_tls_and_through_a_tunnel(certificate, through_proxy):
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate)

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply(body=DATA))
        await writer.drain()

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

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=serving)
        proxy = await asyncio.start_server(tunnel, "127.0.0.1", 0)
        proxy_url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        client = HttpClient(
            ssl.create_default_context(cafile=certificate), proxy_url if through_proxy else None
        )
        port = server.sockets[0].getsockname()[1]
        data = await get(client, f"https://localhost:{port}/x")
        await client.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            await get(HttpClient(ssl.create_default_context()), f"https://localhost:{port}/x")
        server.close()
        proxy.close()
        return data

    assert asyncio.run(asyncio.wait_for(run(), 500)) == DATA
