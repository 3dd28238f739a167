"""The rules of downloads, each on its own: robots, retries, DNS, hosts, outages, compression."""

from __future__ import annotations

import asyncio
import gzip
import socket
import zlib
from datetime import UTC, datetime
from ipaddress import ip_address

import pytest

import mmstream as mm
from mmstream.converting.draft import RowError
from mmstream.converting.media.download import decompressed, disallowed_by
from mmstream.converting.media.hosts import (
    REST_S,
    TTL_S,
    DeadHostError,
    DnsCache,
    Host,
    Outage,
    TryFailedError,
    host_rule,
    is_public,
    parse_url,
    shown_url,
)
from mmstream.storage.responses import seconds_until
from mmstream.storage.retry import may_pass
from tests.helpers.virtual_time import in_virtual_time

# -- robots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tags", "directive"),
    [
        ([], None),
        (["all"], None),
        (["noarchive, nosnippet"], None),
        (["noai"], "noai"),
        (["NoAI, NoImageAI"], "noai"),
        (["noarchive,noimageai"], "noimageai"),
        (["noarchive", "noindex"], "noindex"),
        (["noimageindex"], "noimageindex"),
        (["mmstream: noai"], "noai"),
        (["otherbot: noai"], None),
        (["otherbot: noarchive, noai"], None),
        (["otherbot: noarchive", "noai"], "noai"),
        (["otherbot: noai, mmstream: noindex"], "noindex"),
        (["unavailable_after: 25 Jun 2030 15:00:00 PST"], None),
        (["unavailable_after: 25 Jun 2030 15:00:00 PST, noai"], "noai"),
        (["noaim, no ai"], None),
    ],
)
@pytest.mark.parametrize("reservation", [None, "0"])
def test_robots_directives_are_read_as_img2dataset_reads_them(
    tags: list[str], directive: str | None, reservation: str | None
) -> None:
    assert disallowed_by(tags, reservation) == directive


def test_a_reservation_of_rights_forbids_the_use() -> None:
    assert disallowed_by([], "1") == "tdm-reservation"


# -- retries --------------------------------------------------------------------------------------


def test_only_statuses_that_may_pass_are_tried_again() -> None:
    again = [status for status in range(600) if may_pass(status)]
    assert again[:3] == [408, 425, 429]
    assert {500, 502, 503, 504, 522} < set(again)
    assert not {501, 505, 404, 403, 410} & set(again)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("", None),
        ("soon", None),
        ("-5", None),
        ("0", 0),
        ("7", 7),
        ("9" * 5000, 999_999_999),
        ("Sun, 22 Nov 2026 12:00:05 +9999999999999", None),
        ("Sun, 99999999999999999999 Nov 2026 12:00:05 GMT", None),
        ("Sun, 22 Nov 2026 12:00:05 GMT", 5),
        ("Sun, 22 Nov 2026 12:00:05", 5),
        ("Sun, 22 Nov 2026 11:00:00 GMT", 0),
        ("Sun, 22 Nov 2026 13:00:00 GMT", 3600),
    ],
)
def test_retry_after_is_read_as_seconds_or_a_date(header: str, seconds: float | None) -> None:
    assert seconds_until(header, datetime(2026, 11, 22, 12, tzinfo=UTC).timestamp()) == seconds


# -- DNS ------------------------------------------------------------------------------------------


class FakeDns:
    """Answers look-ups from a table, and counts them."""

    def __init__(self, answers: dict[str, list[str] | int]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.answered: list[str] = []

    def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        answer = self.answers[host]
        if isinstance(answer, int):
            raise socket.gaierror(answer, "no")
        return answer

    def cache(self) -> DnsCache:
        return DnsCache(self, self.answered.append, clock=asyncio.get_running_loop().time)


@in_virtual_time
async def test_a_name_is_looked_up_once_until_its_time_is_over() -> None:
    dns = FakeDns({"a": ["1.1.1.1", "1.0.0.1"]})
    cache = dns.cache()
    at_once = await asyncio.gather(*(cache.addresses("a") for _ in range(50)))
    assert {*at_once, await cache.addresses("a")} == {("1.1.1.1", "1.0.0.1")}
    assert dns.asked == ["a"]
    dns.answers["a"] = ["8.8.8.8"]
    await asyncio.sleep(TTL_S + 1)
    assert await cache.addresses("a") == ("8.8.8.8",)


@in_virtual_time
async def test_a_failed_probe_keeps_the_answer_that_still_holds() -> None:
    dns = FakeDns({"a": ["1.1.1.1"]})
    cache = dns.cache()
    assert await cache.addresses("a") == ("1.1.1.1",)
    dns.answers["a"] = socket.EAI_AGAIN
    probe = asyncio.ensure_future(cache.answers("a"))
    await asyncio.sleep(0)
    assert await cache.addresses("a") == ("1.1.1.1",)  # while the probe runs, too
    assert not await probe
    assert await cache.addresses("a") == ("1.1.1.1",)
    await asyncio.sleep(TTL_S + 1)
    with pytest.raises(TryFailedError):
        await cache.addresses("a")


# -- hosts ----------------------------------------------------------------------------------------

SILENT = TryFailedError("timed out")
BUSY = TryFailedError("http 429", is_answered=True, is_throttled=True, wait_s=7.0)


def new_host(max_requests: int = 4) -> Host:
    return Host(max_requests, asyncio.get_running_loop().time)


@in_virtual_time
async def test_a_host_that_asks_for_patience_gets_it() -> None:
    host, clock = new_host(16), asyncio.get_running_loop().time
    host.failed(BUSY)
    started = clock()
    async with host.slot():
        assert clock() - started == pytest.approx(7)


@in_virtual_time
async def test_a_host_that_refuses_more_requests_than_it_can_serve_gets_fewer() -> None:
    host, num_running, num_refused, num_done = new_host(16), 0, 0, 0

    async def request() -> None:
        nonlocal num_running, num_refused, num_done
        async with host.slot():
            num_running += 1
            is_refused = num_running > 4
            num_refused += is_refused
            await asyncio.sleep(0.001 if is_refused else 0.1)
            num_running -= 1
            num_done += not is_refused
            host.answered()
            if is_refused:
                host.failed(TryFailedError("http 429", is_answered=True, is_throttled=True))

    await asyncio.gather(*(request() for _ in range(300)))
    assert num_refused < 75 < num_done


@in_virtual_time
async def test_a_host_is_dead_after_half_a_minute_of_silence() -> None:
    host = new_host()
    for _ in range(20):
        host.failed(SILENT)
    async with host.slot():  # a short break is not a death
        pass
    await asyncio.sleep(31)
    host.failed(SILENT)
    with pytest.raises(DeadHostError):
        async with host.slot():
            pass
    await asyncio.sleep(REST_S + 1)
    async with host.slot():
        host.failed(SILENT)
    with pytest.raises(DeadHostError):
        async with host.slot():
            pass
    await asyncio.sleep(REST_S + 1)
    async with host.slot():
        host.answered()
    async with host.slot():
        pass


@in_virtual_time
async def test_urls_that_hang_at_the_end_of_a_shard_make_no_host_dead() -> None:
    host = new_host()
    host.answered()
    for _ in range(10):  # the others of the shard have come
        host.failed(SILENT)
    await asyncio.sleep(31)
    for _ in range(10):
        host.failed(SILENT, is_retry=True)
    with pytest.raises(DeadHostError):  # nobody waits for each of their tries alone
        async with host.slot(is_retry=True):
            pass
    async with host.slot():  # a good URL of the next shard
        host.answered()
    async with host.slot(is_retry=True):
        pass


@in_virtual_time
async def test_downloads_that_wait_for_a_host_do_not_wait_for_a_dead_one() -> None:
    host, ends = new_host(1), []

    async def request() -> None:
        try:
            async with host.slot():
                await asyncio.sleep(10)
                host.failed(SILENT)
            ends.append("asked")
        except DeadHostError:
            ends.append("left out")

    await asyncio.gather(*(request() for _ in range(20)))
    assert ends == ["asked"] * 8 + ["left out"] * 12


# -- outages --------------------------------------------------------------------------------------


class Network:
    """Hosts that answer a probe."""

    def __init__(self) -> None:
        self.probed: list[str] = []
        self.gone: set[str] = set()

    async def probe(self, host: str) -> bool:
        self.probed.append(host)
        return host not in self.gone

    def outage(self, max_unanswered: int = 10) -> Outage:
        clock = asyncio.get_running_loop().time
        return Outage("server", self.probe, max_unanswered, clock)


@in_virtual_time
async def test_a_dead_host_is_its_own_fault_while_others_answer() -> None:
    network, clock = Network(), asyncio.get_running_loop().time
    outage = network.outage()
    outage.answered("a:80")
    started = clock()
    await asyncio.sleep(1)
    outage.answered("a:80")
    await outage.require_network("dead:80", "timed out", started)
    assert network.probed == []
    await asyncio.sleep(60)
    await outage.require_network("dead:80", "timed out", clock())
    assert network.probed == ["a:80"]


@in_virtual_time
async def test_many_hosts_in_a_row_without_an_answer_are_an_outage() -> None:
    outage = Network().outage(max_unanswered=10)
    outage.answered("a:80")
    for _ in range(100):
        await outage.require_network("dead:80", "timed out")
    for number in range(8):
        await outage.require_network(f"{number}:80", "timed out")
    with pytest.raises(mm.errors.StorageError, match="the last 10 hosts"):
        await outage.require_network("another:80", "timed out")


@in_virtual_time
async def test_a_host_that_answered_last_and_is_gone_is_no_outage_while_another_answers() -> None:
    network, clock = Network(), asyncio.get_running_loop().time
    network.gone.add("a:80")
    outage = network.outage()
    outage.answered("b:80")
    outage.answered("a:80")
    await asyncio.sleep(60)
    await outage.require_network("a:80", "timed out", clock())
    assert network.probed == ["a:80", "b:80"]
    network.gone.add("b:80")
    await asyncio.sleep(60)
    with pytest.raises(mm.errors.StorageError, match="the hosts that answered before"):
        await outage.require_network("a:80", "timed out", clock())


# -- compression ----------------------------------------------------------------------------------


BODY = b"medium" * 100


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (BODY, None),
        (BODY, "identity"),
        (gzip.compress(BODY, mtime=0), "GZIP"),
        (zlib.compress(BODY), "deflate"),
    ],
    ids=["none", "identity", "gzip", "zlib"],
)
def test_compressed_bodies_are_unpacked(body: bytes, encoding: str | None) -> None:
    assert decompressed(body, encoding, 1000) == BODY


@pytest.mark.parametrize(
    ("body", "encoding", "reason"),
    [
        (gzip.compress(bytes(1001), mtime=0), "gzip", "larger than 1,000 bytes when decompressed"),
        (gzip.compress(b"medium", mtime=0)[:-3], "gzip", "its gzip body is damaged"),
        (b"medium", "gzip", "its gzip body is damaged"),
        (
            gzip.compress(b"med", mtime=0) + gzip.compress(b"ium", mtime=0),
            "gzip",
            "its gzip body is damaged",
        ),
        (b"medium", "br", "content-encoding 'br' is not supported"),
        (b"medium", "gzip, gzip", "content-encoding 'gzip, gzip' is not supported"),
    ],
)
def test_bodies_that_cannot_be_unpacked_are_refused(
    body: bytes, encoding: str, reason: str
) -> None:
    with pytest.raises(RowError) as refused:
        decompressed(body, encoding, 1000)
    assert str(refused.value) == reason


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_connections": 0},
        {"num_connections": True},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"idle_timeout_s": float("inf")},
        {"num_tries": 0},
        {"max_bytes": 0},
        {"max_redirects": -1},
        {"allow_hosts": "media.lan"},
        {"allow_hosts": ("http://media.lan/",)},
    ],
)
def test_impossible_options_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(mm.ConfigError, match=next(iter(arguments))):
        mm.DownloadOptions(**arguments)  # type: ignore[arg-type]


# -- addresses: no URL of a corpus leads a download into the network that it runs in


NOBODY = frozenset()


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1",
        "8.8.8.8",
        "93.184.215.14",
        "100.63.255.255",
        "100.128.0.0",
        "172.15.255.255",
        "172.32.0.0",
        "192.0.1.1",
        "198.17.255.255",
        "198.20.0.0",
        "223.255.255.255",
        "2606:4700:4700::1111",
        "2a00:1450:4001:82f::200e",
        "2001:200::1",
    ],
)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.3",
        "10.255.255.255",
        "100.64.0.1",
        "100.100.100.200",  # metadata of Alibaba's cloud
        "127.0.0.1",
        "127.255.255.254",
        "168.63.129.16",  # Azure's server inside each machine
        "169.254.169.254",  # metadata of most clouds
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.192",  # metadata of Oracle's cloud
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.51.100.7",
        "203.0.113.7",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",  # IPv4-compatible
        "::8.8.8.8",
        "::ffff:127.0.0.1",  # IPv4-mapped
        "::ffff:8.8.8.8",
        "::ffff:0:127.0.0.1",  # IPv4-translated
        "64:ff9b::7f00:1",  # NAT64
        "64:ff9b::808:808",
        "64:ff9b:1::1",
        "100::1",
        "2001::1",  # Teredo
        "2001:10::1",
        "2001:db8::1",
        "2002:7f00:1::",  # 6to4 of 127.0.0.1
        "2002:808:808::",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",  # metadata of AWS
        "fe80::1",
        "fe80::1%eth0",
        "2606:4700::1%eth0",
        "fec0::1",
        "ff02::1",
    ],
)
def test_all_other_addresses_are_not(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("http://example.com", "http://example.com/"),
        ("HTTPS://Example.COM:443/A.jpg#top", "https://example.com/A.jpg"),
        ("  http://example.com/a.jpg\n", "http://example.com/a.jpg"),
        ("http://example.com:8080/a b.jpg", "http://example.com:8080/a%20b.jpg"),
        (
            "http://example.com/%7Ea%2Fb.jpg?x=%26&y=a+b",
            "http://example.com/%7Ea%2Fb.jpg?x=%26&y=a+b",
        ),
        ("http://example.com/ü.jpg?q=ü", "http://example.com/%C3%BC.jpg?q=%C3%BC"),
        ("http://bücher.example/a", "http://xn--bcher-kva.example/a"),
        ("http://under_score.example/a", "http://under_score.example/a"),
        ("http://8.8.8.8/a", "http://8.8.8.8/a"),
        ("http://[2606:4700::1111]/a", "http://[2606:4700::1111]/a"),
        ("http://example.com?x=1", "http://example.com/?x=1"),
    ],
)
def test_a_url_is_written_anew_from_its_pieces(url: str, canonical: str) -> None:
    assert str(parse_url(url, NOBODY)) == canonical


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "not a URL"),
        ("photo.jpg", "not a URL"),
        ("http://", "not a URL"),
        ("http:///etc/passwd", "not a URL"),
        ("http://a..b/", "not a URL"),
        ("http://-a.example/", "not a URL"),
        ("http://a b.example/", "not a URL"),
        ("http://a%00b.example/", "not a URL"),
        ("http://" + "a." * 130 + "example/", "not a URL"),
        ("http://example.com:99999/", "not a URL"),
        ("http://example.com:http/", "not a URL"),
        ("http://[::1/", "not a URL"),
        ("http://example.com/\ud800.jpg", "not a URL"),
        ("http://\ud800.example/", "not a URL"),
        ("file:///etc/passwd", "file: is neither http nor https"),
        ("ftp://example.com/a.jpg", "ftp: is neither"),
        ("gopher://127.0.0.1:6379/_FLUSHALL", "gopher: is neither"),
        ("http://user:secret@example.com/", "has a user or password"),
        ("http://example.com@127.0.0.1/", "has a user or password"),
        ("http://example.com\\@127.0.0.1/", "has a user or password"),
        ("http://127.0.0.1/", "private address 127.0.0.1; allow it with --allow-host 127.0.0.1"),
        ("http://169.254.169.254/latest/meta-data/", "private address 169.254.169.254"),
        ("http://[::1]:8080/", "private address ::1"),
        ("http://[::ffff:10.0.0.1]/", "private address ::ffff:a00:1"),
        ("http://１２７.0.0.1/", "private address 127.0.0.1"),
        # What C libraries read as 127.0.0.1:
        ("http://2130706433/", "not a URL"),
        ("http://0x7f000001/", "not a URL"),
        ("http://0x7f.1/", "not a URL"),
        ("http://127.1/", "not a URL"),
        ("http://0177.0.0.1/", "not a URL"),
        ("http://127.0.0.1./", "not a URL"),
        ("http://example.com:22/", "port 22 is not one of HTTP"),
        ("http://example.com:25/", "port 25 is not one of HTTP"),
        ("http://example.com:6667/", "port 6667 is not one of HTTP"),
        ("http://example.com:0/", "port 0 is not one of HTTP"),
    ],
)
def test_urls_that_must_not_be_requested_are_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(RowError) as refused:
        parse_url(url, NOBODY)
    assert str(refused.value).startswith(reason)


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/b.jpg", "https://example.com/b.jpg"),
        ("b.jpg?x", "https://example.com/folder/b.jpg?x"),
        ("//other.example/b.jpg", "https://other.example/b.jpg"),
        ("http://other.example/b.jpg", "http://other.example/b.jpg"),
    ],
)
def test_redirects_may_be_relative(location: str, target: str) -> None:
    assert str(parse_url(location, NOBODY, "https://example.com/folder/a.jpg")) == target


def test_an_allowed_host_may_be_private_and_have_any_port() -> None:
    allowed = frozenset(map(host_rule, ["Media.lan", "127.0.0.1:22", "[::1]:81", "fe80::1"]))
    for url in (
        "http://media.lan:22/",
        "http://MEDIA.lan/",
        "http://127.0.0.1:22/",
        "http://[::1]:81/",
        "http://[fe80::1]:25/",
    ):
        parse_url(url, allowed)
    for url in ("http://127.0.0.1/", "http://127.0.0.1:23/", "http://[::1]/"):
        with pytest.raises(RowError, match="allow it with"):
            parse_url(url, allowed)


@pytest.mark.parametrize(
    "name",
    ["", "http://media.lan", "media.lan/a", "a b", "media.lan:x", "me@media.lan", "10.0.0/8"],
)
def test_an_impossible_allowed_host_is_refused(name: str) -> None:
    with pytest.raises(mm.ConfigError, match="allow_hosts"):
        host_rule(name)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (
            "https://example.com/a.jpg?width=100&page=2",
            "https://example.com/a.jpg?width=100&page=2",
        ),
        ("https://me:secret@example.com/a.jpg", "https://example.com/a.jpg"),
        ("https://me:p@ss@example.com/a@b.jpg", "https://example.com/a@b.jpg"),
        ("//me:secret@example.com/a.jpg", "//example.com/a.jpg"),
        ("/a.jpg?token=secret", "/a.jpg?***"),
        ("https://s3.example/a?X-Amz-Signature=1f2e", "https://s3.example/a?***"),
        ("https://b.example/a?sv=2024&se=2030&sig=ab%2F", "https://b.example/a?***"),
        ("https://c.example/a?access_token=abc", "https://c.example/a?***"),
        ("https://c.example/a?t=" + "f" * 80, "https://c.example/a?***"),
        ("https://c.example/a#access_token=abc", "https://c.example/a"),
    ],
)
def test_a_shown_url_has_no_secrets(url: str, shown: str) -> None:
    assert shown_url(url) == shown
