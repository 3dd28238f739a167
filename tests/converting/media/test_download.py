"""Downloads from a server on loopback that fails in every way: no lost row, no forged request."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from urllib.parse import quote

import pytest

import mmstream as mm
from mmstream.converting.convert import ConvertReport
from mmstream.converting.draft import RowError
from mmstream.converting.media import download as download_module, hosts
from mmstream.converting.media.download import CheckedResolver, Downloader, WebClient
from mmstream.converting.media.hosts import DnsCache, WebAddress
from tests.helpers import download_faults
from tests.helpers.convert_corpus import run, shards, write_rows
from tests.helpers.download_faults import MEDIA
from tests.helpers.media_server import MediaServer
from tests.helpers.wait import wait_until

PHOTO = random.Random(0).randbytes(3000)


@pytest.fixture
def server() -> Iterator[MediaServer]:
    with MediaServer({"a.jpg": PHOTO}) as server:
        yield server


def options(*servers: MediaServer, **changes: object) -> mm.DownloadOptions:
    values = {
        "allow_hosts": tuple(server.host for server in servers),
        "timeout_s": 120,
        "idle_timeout_s": 120,
        "max_bytes": 1 << 20,
        **changes,
    }
    return mm.DownloadOptions(**values)  # type: ignore[arg-type]


def outcome(future: Future[bytes]) -> str:
    """Return "ok", or why a download failed, without its URL."""
    try:
        return "ok" if future.result(500) == PHOTO else "other bytes"
    except RowError as error:
        return str(error).partition(": ")[2]


def download(
    server: MediaServer, *faults: str, times: int = 1 << 30, **changes: object
) -> list[str]:
    """Return what becomes of one download per fault; they run at the same time."""
    with Downloader(options(server, **changes)) as downloader:
        urls = [server.url("a.jpg", quote(fault, safe="~"), times) for fault in faults]
        futures = [downloader.start(url) for url in urls]
        return [outcome(future) for future in futures]


@pytest.mark.slow
def test_answers_that_do_not_come_in_time_are_asked_for_again(
    server: MediaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine good answers come too late as well, so there are many tries."""
    monkeypatch.setattr(hosts, "MAX_WAIT_S", 0.5)
    limits = {"timeout_s": 2, "idle_timeout_s": 0.5, "num_tries": 100}
    assert download(server, "silence", "dribble", times=1, **limits) == ["ok"] * 2


def test_failures_that_stay_are_named(server: MediaServer) -> None:
    reasons = {
        "status~404": "http 404",
        "status~410": "http 410",
        "status~503": "http 503",
        "status~302": "http 302",
        "reset": "cut off: 1,500 of 3,000 bytes",
        "cut": "cut off: 1,500 of 3,000 bytes",
        "close": "closed the connection without an answer",
        "noise": "its answer is not HTTP",
        "huge": "larger than 1,048,576 bytes",
        "endless": "larger than 1,048,576 bytes",
        "bomb": "larger than 1,048,576 bytes when decompressed",
        "header~X-Robots-Tag: noai": "says noai; take it all the same with --ignore-robots",
        "header~TDM-Reservation: 1": "says tdm-reservation; take it all the same with "
        "--ignore-robots",
        "header~Content-Encoding: br": "content-encoding 'br' is not supported",
    }
    assert download(server, *reasons, num_tries=2) == list(reasons.values())


@pytest.mark.parametrize(
    ("fault", "limit", "reason"),
    [
        ("silence", "idle_timeout_s", "no byte for 0.5 s"),
        ("dribble", "timeout_s", "timed out after 0.5 s"),
    ],
)
def test_answers_that_come_too_late_are_named(
    server: MediaServer, fault: str, limit: str, reason: str
) -> None:
    assert download(server, fault, num_tries=2, **{limit: 0.5}) == [reason]


def test_a_body_longer_than_it_says_is_never_taken_whole(server: MediaServer) -> None:
    [reason] = download(server, "short", num_tries=1)
    assert reason in ("its answer is not HTTP", "other bytes")


def test_a_large_body_may_take_longer_than_the_timeout(
    server: MediaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        download_module, "BYTES_PER_SECOND", 1
    )  # the dribble sends up to 50 a second
    server.media["a.jpg"] = PHOTO[:75]
    with Downloader(options(server, timeout_s=1, num_tries=1)) as downloader:
        assert downloader.start(server.url("a.jpg", "dribble")).result(500) == PHOTO[:75]


def test_redirects_are_followed_but_not_for_ever(server: MediaServer) -> None:
    there = [f"redirect~{base}/a.jpg" for base in ("", f"http://{server.host}")]
    gone = "redirect~/gone.jpg"
    assert download(server, *there, gone, "loop", max_redirects=3) == [
        "ok",
        "ok",
        "redirects to /gone.jpg: http 404",
        "more than 3 redirects",
    ]
    assert sum("fault=loop" in request.target for request in server.requests) == 4


FORGED = [
    "http://127.0.0.1:{secret}/",
    "http://localhost:{secret}/",
    "http://evil.example:{secret}/",
    "http://[::1]:{secret}/",
    "http://[::ffff:127.0.0.1]:{secret}/",
    "http://2130706433:{secret}/",
    "http://0x7f.1:{secret}/",
    "http://127.1:{secret}/",
    "http://0:{secret}/",
    "http://me@127.0.0.1:{secret}/",
    "//127.0.0.1:{secret}/",
    "gopher://127.0.0.1:{secret}/_GET",
    "file:///etc/passwd",
]


def test_no_url_and_no_redirect_reaches_a_private_server(server: MediaServer) -> None:
    """The server of secrets counts connections; there must be none."""
    with MediaServer({"": b"secret"}) as secret:
        urls = [url.format(secret=secret.port) for url in FORGED]
        with Downloader(options(server), look_up=lambda host: ["127.0.0.1"]) as downloader:
            direct = [downloader.start(url) for url in urls]
            redirected = [
                downloader.start(server.url("a.jpg", quote(f"redirect~{url}", safe="~")))
                for url in urls
            ]
            reasons = [outcome(future) for future in (*direct, *redirected)]
        assert secret.num_connections == 0
    for reason in reasons:
        assert any(
            words in reason
            for words in ("private address", "not a URL", "is neither http", "has a user")
        )


def test_public_addresses_of_a_name_are_used_and_the_others_are_not() -> None:
    async def resolve() -> list[str]:
        cache = DnsCache(lambda host: ["10.0.0.1", "8.8.8.8", "::1"], lambda host: None)
        resolver = CheckedResolver(cache, frozenset())
        assert not resolver.may_connect("10.0.0.1", 80)
        return [result["host"] for result in await resolver.resolve("mixed.example", 80)]

    assert asyncio.run(resolve()) == ["8.8.8.8"]


def test_a_connection_is_refused_whatever_the_resolver_says(server: MediaServer) -> None:
    class Lying(CheckedResolver):
        async def addresses(self, host: str, port: int) -> list[str]:
            return ["127.0.0.1"]

    async def get() -> None:
        cache = DnsCache(lambda host: [], lambda host: None)
        client = WebClient(mm.DownloadOptions(), Lying(cache, frozenset()))
        try:
            address = WebAddress("http", "evil.example", server.port, "/a.jpg")
            await client.get(address, 10_000, keep_connection=False)
        finally:
            await client.close()

    with pytest.raises(RowError, match=r"private address 127\.0\.0\.1"):
        asyncio.run(get())
    assert server.num_connections == 0


def test_nothing_of_the_environment_is_sent(
    server: MediaServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No proxy, no password of ~/.netrc, no cookie that an answer set."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server.headers["Set-Cookie"] = "visitor=1"
    assert download(server, "", times=1) == ["ok"]
    assert download(server, "redirect~/a.jpg") == ["ok"]
    names = {name for request in server.requests for name in request.headers}
    assert names == {"host", "user-agent", "accept", "accept-encoding", "connection"}
    assert server.requests[0].headers["user-agent"].startswith("mmstream")


def test_messages_have_no_secrets(server: MediaServer) -> None:
    with Downloader(options(server)) as downloader:
        futures = [
            downloader.start(f"http://{server.host}/none?X-Amz-Signature=s3cret"),
            downloader.start("http://me:s3cret@example.com/"),
            downloader.start(
                server.url("a.jpg", quote("redirect~http://10.0.0.1/?token=s3cret", safe="~"))
            ),
        ]
        messages = [str(future.exception(500)) for future in futures]
    assert messages[0] == f"http://{server.host}/none?***: http 404"
    assert messages[1] == "http://example.com/: has a user or password in it; they are not sent"
    assert messages[2].endswith(
        "redirects to http://10.0.0.1/?***: private address 10.0.0.1; "
        "allow it with --allow-host 10.0.0.1"
    )


def test_requests_are_bounded_over_all_hosts_and_for_each_one() -> None:
    with MediaServer({"a.jpg": PHOTO}) as one, MediaServer({"a.jpg": PHOTO}) as two:
        servers = (one, two)
        allowed = options(one, two, num_connections=6, num_connections_per_host=4)
        with Downloader(allowed, num_processes=2) as downloader:  # a half of them each
            futures = [
                downloader.start(f"{server.url('a.jpg', 'hold')}&n={number}")
                for server in servers
                for number in range(8)
            ]
            wait_until(lambda: one.num_open >= 2)
            for server in servers:
                server.may_answer.set()
            assert [outcome(future) for future in futures] == ["ok"] * 16
        assert max(one.max_open, two.max_open) == 2


def test_connections_are_kept(server: MediaServer) -> None:
    with Downloader(options(server, num_connections=2)) as downloader:
        futures = [downloader.start(server.url("a.jpg")) for _ in range(100)]
        assert {outcome(future) for future in futures} == {"ok"}
    assert server.num_connections <= 4


def test_names_that_do_not_exist_are_rows_without_media(server: MediaServer) -> None:
    def look_up(host: str) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    with Downloader(options(server, max_unanswered=5), look_up=look_up) as downloader:
        futures = [downloader.start(f"http://{n}.example/") for n in range(50)]
        assert {outcome(future) for future in futures} == {"not found in DNS"}


def test_leaving_ends_all_downloads_and_the_thread(server: MediaServer) -> None:
    threads = set(threading.enumerate())
    with Downloader(options(server)) as downloader:
        future = downloader.start(server.url("a.jpg", "silence"))
        wait_until(lambda: server.num_open)
    assert future.cancelled()  # else it would have waited for an answer, or for its time limit
    assert set(threading.enumerate()) <= threads


def test_a_dns_server_that_dies_in_mid_run_rejects_nothing(server: MediaServer) -> None:
    """Kept connections and remembered names answer on, and are not a sign that DNS is up."""
    dead = threading.Event()

    def look_up(host: str) -> list[str]:
        if dead.is_set():
            raise socket.gaierror(socket.EAI_AGAIN, "no")
        return ["127.0.0.1"]

    urls = [f"http://h{number}.lan:{server.port}/a.jpg" for number in range(60)]
    allowed = tuple(f"h{number}.lan:{server.port}" for number in range(60))
    changed = options(server, allow_hosts=allowed, num_tries=2)
    with Downloader(changed, look_up=look_up) as downloader:
        assert {outcome(downloader.start(url)) for url in urls[:30]} == {"ok"}
        dead.set()
        futures = [downloader.start(url) for url in urls]
        errors = [future.exception(500) for future in futures]
        assert errors[:30] == [None] * 30
        assert {type(error) for error in errors[30:]} == {mm.errors.StorageError}
        dead.clear()
        assert {outcome(downloader.start(url)) for url in urls} == {"ok"}


# -- conversions: what becomes of each row, and when nobody answers any more


NAMES = list(MEDIA)


def rows_of(folder: Path, urls: list[str]) -> Path:
    rows = [{"image": url, "text": f"photo {number}"} for number, url in enumerate(urls)]
    return write_rows(folder / "rows.jsonl", rows)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MediaServer]]:
    """A server of media, and one that nobody may reach. No server is waited for."""
    monkeypatch.setattr(hosts, "MAX_WAIT_S", 0.02)
    with MediaServer({**MEDIA, **download_faults.OTHERS}) as server, MediaServer(MEDIA) as private:
        yield [server, private]


def test_every_row_with_a_url_is_a_sample_or_a_named_reject(
    tmp_path: Path, servers: list[MediaServer]
) -> None:
    server, private = servers
    faults = download_faults.write_faulty_rows(tmp_path / "rows.jsonl", server, private)
    assert set(faults.values()) == set(download_faults.FAULTS)
    allowed = options(server)
    run(tmp_path / "rows.jsonl", tmp_path / "out", samples_per_shard=5000, downloads=allowed)
    assert download_faults.problems(tmp_path / "out", faults) == []
    assert private.num_connections == 0


def test_a_conversion_whose_server_dies_stops_and_goes_on_later(tmp_path: Path) -> None:
    with MediaServer(MEDIA) as server:
        urls = [f"{server.url(NAMES[number % 8])}?n={number}" for number in range(40)]
        urls[7] = server.url("none.jpg")
        urls[25] = server.url(NAMES[0], "stop")
        rows = rows_of(tmp_path, urls)
        one_try = options(server, num_connections=1, num_tries=1)

        def convert(dest: str) -> ConvertReport:
            return run(rows, tmp_path / dest, samples_per_shard=10, downloads=one_try)

        with pytest.raises(mm.errors.StorageError, match="run the same command again to continue"):
            convert("shards")
        server.revive()
        assert not (tmp_path / "shards" / "mmstream.json").exists()
        report = convert("shards")
        assert convert("quiet").num_rejects == report.num_rejects == 1
    assert len(shards(tmp_path / "quiet")) >= 12
    assert shards(tmp_path / "shards") == shards(tmp_path / "quiet")


def test_downloads_have_options_of_the_command_line(
    tmp_path: Path, mmstream: Callable[..., tuple[int, str, str]]
) -> None:
    with MediaServer(MEDIA, {"X-Robots-Tag": "noai"}) as server:
        rows = rows_of(tmp_path, [server.url(name) for name in NAMES])
        words = ["--num-connections", 2, "--ignore-robots", "--allow-host", server.host]
        code, out, _ = mmstream("convert", rows, tmp_path / "shards", *words, "--num-workers", 1)
        assert code == 0
        assert server.max_open <= 2
    assert "8 rows -> 8 samples" in out
