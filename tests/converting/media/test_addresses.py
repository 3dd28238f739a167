"""No URL of a corpus leads a download into the network that it runs in."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from mmstream.converting.draft import RowError
from mmstream.converting.media.addresses import (
    AllowedHosts,
    host_rule,
    is_public,
    parse_url,
    shown_url,
)
from mmstream.errors import ConfigError

NOBODY = AllowedHosts.from_names(())


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


@pytest.mark.parametrize(
    "location", ["//127.0.0.1/", "http://[::1]/", "file:///x", "//[::1/", "//[x]/"]
)
def test_redirects_are_checked_like_urls(location: str) -> None:
    with pytest.raises(RowError):
        parse_url(location, NOBODY, "https://example.com/folder/a.jpg")


def test_an_allowed_host_may_be_private_and_have_any_port() -> None:
    allowed = AllowedHosts.from_names(["Media.lan", "127.0.0.1:22", "[::1]:81", "fe80::1"])
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
    with pytest.raises(ConfigError, match="allow_hosts"):
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
