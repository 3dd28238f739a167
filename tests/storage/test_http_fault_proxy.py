"""The proxy that storage tests and benchmarks use does what it says, and counts it."""

from __future__ import annotations

import http.client
import random
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from tests.helpers.http_fault_proxy import RATES, FaultProxy, Faults, fault_proxy
from tests.helpers.wait import wait_until
from tests.helpers.web_stubs import S3Stub, running

BODY = random.Random(1).randbytes(300_000)


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    objects = {"b/a.tar": BODY, "b/a.idx": BODY}
    with running(S3Stub, objects) as server, fault_proxy(server.url) as proxy:
        yield proxy


def get(proxy: FaultProxy, path: str = "/b/a.tar", **headers: str):
    return urllib.request.urlopen(urllib.request.Request(proxy.endpoint + path, headers=headers))


def test_without_faults_every_answer_is_the_servers(proxy) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", proxy.port)) as connection:

        def ask(method: str, path: str, **options) -> tuple[int, bytes]:
            connection.request(method, path, **options)
            answer = connection.getresponse()
            return answer.status, answer.read()

        assert [ask("GET", "/b/a.tar") for _ in range(3)] == [(200, BODY)] * 3
        assert ask("HEAD", "/b/a.tar") == (200, b"")
        assert ask("GET", "/b/a.idx", headers={"Range": "bytes=5-9"}) == (206, BODY[5:10])
        assert ask("PUT", "/b/new", body=BODY) == (200, b"")
        assert ask("GET", "/b/new") == (200, BODY)
    wait_until(lambda: proxy.counts().num_in_flight == 0)  # and the last one is counted
    counts = proxy.counts()
    assert (counts.num_requests, counts.num_gets, counts.num_connections) == (7, 5, 1)
    assert counts.bytes_by_suffix == {"tar": 3 * len(BODY), "idx": 5, "new": len(BODY)}
    assert counts.faults == dict.fromkeys(RATES, 0)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("reset", ConnectionResetError),
        ("truncate", http.client.IncompleteRead),
        ("busy", urllib.error.HTTPError),
    ],
)
def test_an_answer_breaks_off_or_is_refused(proxy, kind, error) -> None:
    proxy.set(Faults(**{kind: 1.0}, after_bytes=1000))
    with pytest.raises(error):
        get(proxy).read()
    assert proxy.counts().faults[kind] >= 1
    proxy.set(Faults())
    assert get(proxy).read() == BODY


@pytest.mark.parametrize(("kind", "least"), [("mute", 0), ("stall", 1000), ("dribble", 1003)])
def test_an_answer_stops_or_nearly_stops(proxy, kind, least) -> None:
    proxy.set(Faults(**{kind: 1.0}, after_bytes=1000, dribble_bytes_per_s=20))
    answer = b""
    with socket.create_connection(("127.0.0.1", proxy.port)) as connection:
        connection.sendall(b"GET /b/a.tar HTTP/1.1\r\nHost: x\r\n\r\n")
        while least and len(answer.partition(b"\r\n\r\n")[2]) < least:
            answer += connection.recv(1000)
        connection.settimeout(0.2)
        with suppress(TimeoutError):
            answer += connection.recv(1000)
    most = len(BODY) - 1 if kind == "dribble" else least
    assert least <= len(answer.partition(b"\r\n\r\n")[2]) <= most
    assert proxy.counts().faults[kind] == 1


def test_one_bit_of_an_answer_or_its_etag_is_another(proxy) -> None:
    right = get(proxy).headers["ETag"]
    proxy.set(Faults(flip=1.0))
    changed = get(proxy).read()
    assert (int.from_bytes(BODY, "big") ^ int.from_bytes(changed, "big")).bit_count() == 1
    proxy.set(Faults(wrong_etag=1.0))
    assert get(proxy).headers["ETag"] != right
    proxy.set(Faults(replaced=("/a.tar",), replaced_growth=3))
    answer = get(proxy, Range="bytes=0-9")
    assert answer.headers["ETag"] != right
    assert answer.headers["Content-Range"] == f"bytes 0-9/{len(BODY) + 3}"
    assert get(proxy, "/b/a.idx").headers["ETag"] == right
