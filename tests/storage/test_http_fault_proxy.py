"""The proxy that storage tests and benchmarks use does what it says, and counts it."""

from __future__ import annotations

import http.client
import os
import random
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler
from threading import Thread
from xml.etree import ElementTree

import pytest

from mmstream.storage import open_store
from tests.helpers.http_fault_proxy import RATES, FaultProxy, Faults, fault_proxy
from tests.helpers.quiet_server import QuietServer

BODY = random.Random(1).randbytes(300_000)


class Handler(BaseHTTPRequestHandler):
    """A server with one object of many names: whole, by range, and in chunks; PUT echoes."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        start, stop = 0, len(BODY)
        self.send_response(206 if "Range" in self.headers else 200)
        if "Range" in self.headers:
            bounds = self.headers["Range"].removeprefix("bytes=").split("-")
            start, stop = int(bounds[0]), int(bounds[1]) + 1
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(BODY)}")
        self.send_header("ETag", '"abc"')
        if self.path == "/b/chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (BODY[:1000], BODY[1000:]):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(BODY[start:stop])

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    with QuietServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with fault_proxy(f"http://127.0.0.1:{server.server_port}") as proxy:
            yield proxy
        server.shutdown()


@pytest.fixture(autouse=True)
def undisturbed(proxy: FaultProxy) -> None:
    proxy.set(Faults())
    proxy.alias({})
    proxy.reset_counts()


def get(proxy: FaultProxy, path: str = "/b/a.tar", timeout: float = 60, **headers: str):
    request = urllib.request.Request(proxy.endpoint + path, headers=headers)
    return urllib.request.urlopen(request, timeout=timeout)


def check_answers(connection: http.client.HTTPConnection) -> None:
    for _ in range(3):
        connection.request("GET", "/b/a.tar")
        assert connection.getresponse().read() == BODY
    connection.request("HEAD", "/b/a.tar")
    answer = connection.getresponse()
    assert answer.read() == b""
    assert answer.headers["Content-Length"] == str(len(BODY))
    connection.request("GET", "/b/a.idx", headers={"Range": "bytes=5-9"})
    answer = connection.getresponse()
    assert answer.status == 206
    assert answer.read() == BODY[5:10]
    connection.request("GET", "/b/chunked")
    assert connection.getresponse().read() == BODY
    connection.request("PUT", "/b/new", body=BODY)
    assert connection.getresponse().read() == BODY


def test_without_faults_every_answer_is_the_servers(proxy) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=500)) as connection:
        check_answers(connection)
    counts = proxy.counts()
    assert counts.num_requests == 7
    assert counts.num_gets == 5
    assert counts.num_bytes == 5 * len(BODY) + 5
    assert counts.num_connections == counts.max_in_flight == 1
    assert counts.gets_by_suffix == {"tar": 3, "idx": 1, "chunked": 1}
    assert counts.bytes_by_suffix["idx"] == 5
    assert counts.faults == dict.fromkeys(RATES, 0)


def test_the_first_byte_comes_after_the_latency_and_the_last_one_by_the_rate(proxy) -> None:
    proxy.set(Faults(latency_s=0.1, bytes_per_s=1e6))
    start = time.monotonic()
    answer = get(proxy)
    assert time.monotonic() - start >= 0.1
    assert answer.read() == BODY
    assert time.monotonic() - start >= 0.1 + 0.3


def test_the_tail_is_slower_by_its_factor(proxy) -> None:
    proxy.set(Faults(latency_s=0.01, tail=1.0))
    start = time.monotonic()
    assert get(proxy).read() == BODY
    assert time.monotonic() - start >= 0.2
    assert proxy.counts().faults["tail"] == 1


@pytest.mark.parametrize("kind", ["reset", "truncate"])
def test_an_answer_breaks_off_after_the_bytes(proxy, kind) -> None:
    proxy.set(Faults(**{kind: 1.0}, after_bytes=1000))
    error = ConnectionResetError if kind == "reset" else http.client.IncompleteRead
    with pytest.raises(error):
        get(proxy).read()
    if kind == "truncate":
        answer = get(proxy)
        assert answer.read(1000) == BODY[:1000]
    proxy.set(Faults())
    assert get(proxy).read() == BODY
    assert proxy.counts().faults[kind] >= 1


@pytest.mark.parametrize(("kind", "least"), [("mute", 0), ("stall", 1000), ("dribble", 1003)])
def test_an_answer_stops_or_nearly_stops(proxy, kind, least) -> None:
    proxy.set(Faults(**{kind: 1.0}, after_bytes=1000, dribble_bytes_per_s=20))
    started, answer = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=500) as connection:
        connection.sendall(b"GET /b/a.tar HTTP/1.1\r\nHost: x\r\n\r\n")
        while least and len(answer.partition(b"\r\n\r\n")[2]) < least:
            answer += connection.recv(1000)
        connection.settimeout(0.2)
        with suppress(TimeoutError):
            answer += connection.recv(1000)
    most = 1010 + 20 * (time.monotonic() - started) if kind == "dribble" else least
    assert least <= len(answer.partition(b"\r\n\r\n")[2]) <= most
    assert proxy.counts().faults[kind] == 1


def test_a_busy_server_says_when_to_come_again(proxy) -> None:
    proxy.set(Faults(busy=1.0, retry_after_s=7))
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(proxy)
    assert caught.value.code == 503
    assert caught.value.headers["Retry-After"] == "7"
    assert b"SlowDown" in caught.value.read()


def test_one_bit_of_an_answer_is_flipped_and_its_length_kept(proxy) -> None:
    proxy.set(Faults(flip=1.0))
    changed = get(proxy).read()
    differing = int.from_bytes(BODY, "big") ^ int.from_bytes(changed, "big")
    assert len(changed) == len(BODY)
    assert differing.bit_count() == 1


def test_an_etag_is_wrong_once_or_an_object_is_replaced_for_good(proxy) -> None:
    proxy.set(Faults(wrong_etag=1.0))
    assert get(proxy).headers["ETag"] == '"cba"'
    proxy.set(Faults(replaced=("/a.tar",), replaced_growth=3))
    answer = get(proxy, Range="bytes=0-9")
    assert answer.headers["ETag"] == '"cba"'
    assert answer.headers["Content-Range"] == f"bytes 0-9/{len(BODY) + 3}"
    assert get(proxy, "/b/b.tar").headers["ETag"] == '"abc"'


def test_faults_are_repeated_with_the_same_seed_and_rate(proxy) -> None:
    def outcomes(seed: int) -> list[str]:
        proxy.set(Faults(wrong_etag=0.3, seed=seed, only="/b/x"))
        proxy.reset_counts()
        return [get(proxy, f"/b/x{number % 50}").headers["ETag"] for number in range(100)]

    first = outcomes(1)
    assert outcomes(1) == first != outcomes(2)
    assert 10 < first.count('"cba"') < 55
    assert first[:50] != first[50:]  # another draw when a range is asked for again
    assert get(proxy, "/b/other").headers["ETag"] == '"abc"'
    assert proxy.counts().faults["wrong_etag"] == outcomes(2).count('"cba"')


def test_an_upload_is_cut_where_it_is_reset(proxy) -> None:
    proxy.set(Faults(reset=1.0, methods=("PUT",)))
    request = urllib.request.Request(proxy.endpoint + "/b/new", BODY * 20, method="PUT")
    with pytest.raises(OSError, match=r"reset|[Bb]roken"):
        urllib.request.urlopen(request, timeout=500)
    assert get(proxy).read() == BODY


def test_a_proxy_that_is_away_refuses_and_comes_back_at_its_port(proxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port)) as old:
        timer = proxy.away_for(0.5)
        with pytest.raises(ConnectionResetError):
            old.recv(1)
    with pytest.raises(urllib.error.URLError, match="refused"):
        get(proxy)
    timer.join()
    assert get(proxy).read() == BODY


def test_held_objects_are_answered_as_by_the_server() -> None:
    answers = []
    with QuietServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with fault_proxy(f"http://127.0.0.1:{server.server_port}") as proxy:
            for num_held in range(2):
                if num_held:
                    proxy.hold()
                for headers in ({}, {"Range": "bytes=5-9"}):
                    with get(proxy, **headers) as answer:
                        kept = {"ETag", "Content-Length", "Content-Range"} & set(answer.headers)
                        values = {name: answer.headers[name] for name in kept}
                        answers.append((answer.status, values, answer.read()))
            proxy.alias({"b/big.tar": "b/a.tar"})
            server.shutdown()
            with get(proxy, "/b/big.tar", Range="bytes=-7") as answer:
                assert answer.read() == BODY[-7:]
            with pytest.raises(urllib.error.HTTPError, match="416"):
                get(proxy, Range="bytes=300000-300001")
    assert answers[:2] == answers[2:]


def test_a_listing_shows_the_other_names_of_held_objects() -> None:
    with QuietServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with fault_proxy(f"http://127.0.0.1:{server.server_port}") as proxy:
            proxy.alias({"b/many/x&1.tar": "b/o", "b/many/2.tar": "b/o", "b/few/3.tar": "b/o"})
            proxy.hold()
            with get(proxy, "/b/?list-type=2&prefix=many%2F") as answer:
                entries = ElementTree.fromstring(answer.read()).findall("{*}Contents")
        server.shutdown()
    listed = [(e.findtext("{*}Key"), e.findtext("{*}Size"), e.findtext("{*}ETag")) for e in entries]
    size = str(len(BODY))
    assert listed == [("many/2.tar", size, '"abc"'), ("many/x&1.tar", size, '"abc"')]


@pytest.mark.s3
def test_a_real_server_is_read_and_written_through_it(s3, monkeypatch) -> None:
    with fault_proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(f"{s3}/proxied")
        data = BODY * 40
        with store.create("a.bin") as file:
            file.write(data)
        assert list(store.list()) == ["a.bin"]
        num_before = proxy.counts().bytes_by_suffix["bin"]  # answers to the parts of the upload
        assert store.read("a.bin") == data
        assert store.read_range("a.bin", 10, 20) == data[10:20]
        assert proxy.counts().bytes_by_suffix["bin"] == num_before + len(data) + 10
