"""Which URLs and addresses a download may go to. No input or output.

    URL -> ADDRESSES (scheme, host, port) -> hosts (name -> addresses) -> ADDRESSES (public?)

A corpus comes from strangers. A URL in it may name a service of the network in which the
conversion runs, such as ``http://169.254.169.254/``, and so may a redirect or a DNS server. So only
public addresses are used, unless the caller allows the host by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urljoin, urlsplit

from mmstream.converting.draft import RowError
from mmstream.errors import ConfigError, escaped

_PORTS = {"http": 80, "https": 443}

_BAD_PORTS = frozenset(
    {1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, 6679, 6697, 10080}
    | set(range(6665, 6670))
)
"""Ports above 1,023 of services other than HTTP. Browsers refuse them too."""

_NOT_PUBLIC_4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # "this network"; Linux connects 0.0.0.0 to itself
        "10.0.0.0/8",
        "100.64.0.0/10",  # behind a provider's NAT; Alibaba's metadata server
        "127.0.0.0/8",
        "168.63.129.16/32",  # a server inside every Azure machine
        "169.254.0.0/16",  # link-local; the metadata servers of clouds
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocol assignments; Oracle's metadata server
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved; broadcast
    )
)
"""From IANA's registry of special addresses. The table of `ipaddress` differs between versions."""

_PUBLIC_6 = IPv6Network("2000::/3")
"""All other IPv6 addresses are local, multicast, reserved, or hold an IPv4 address."""

_NOT_PUBLIC_6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments; Teredo holds an IPv4 address
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4 holds an IPv4 address
        "3fff::/20",  # documentation
    )
)

_SECRET = re.compile(
    r"sig|token|secret|key|pass|pwd|auth|credential|policy|expires|^x-|^(se|sp|sv|sr|st|oh|oe)$",
    re.IGNORECASE,
)
"""Names of query parameters whose URL is taken for a signed one."""

_HOST = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\.?")

_IPAddress = IPv4Address | IPv6Address


class WebAddress(NamedTuple):
    """A URL that was taken apart and checked."""

    scheme: str
    """``http`` or ``https``."""
    host: str
    """In lower case and ASCII. An IPv6 address has no brackets."""
    port: int
    target: str
    """Path and query, quoted."""

    @property
    def ip(self) -> _IPAddress | None:
        """The address, where the host is one."""
        try:
            return ip_address(self.host)
        except ValueError:
            return None

    @property
    def origin(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"

    def __str__(self) -> str:
        """Return the URL, in a form that every parser reads alike."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.target}"


@dataclass(frozen=True)
class AllowedHosts:
    """Hosts that may have addresses which are not public.

    Args:
        rules: From `host_rule`: (host, port), or (host, None) for every port.
    """

    rules: frozenset[tuple[str, int | None]]

    @classmethod
    def from_names(cls, names: Iterable[str]) -> AllowedHosts:
        """Return the hosts that a caller named by ``NAME`` or ``NAME:PORT``."""
        return cls(frozenset(host_rule(name) for name in names))

    def has(self, host: str, port: int) -> bool:
        """Tell whether a host is allowed at a port."""
        return not self.rules.isdisjoint({(host, None), (host, port)})


def parse_url(url: str, allowed: AllowedHosts, base: str | None = None) -> WebAddress:
    """Take a URL apart, and check all that can be checked without DNS.

    The result is written anew from its pieces. So the host that was checked is the host that the
    HTTP client sees, whatever the URL holds.

    Args:
        url: As the row or a redirect gives it.
        allowed: Hosts that may have any port and a private address.
        base: The URL that a redirect came from. Redirects may be relative.

    Raises:
        RowError: The URL is not one of http or https, has a user or password, an impossible host
            or port, or an address that is not public. The message is only the reason.
    """
    try:
        pieces = urlsplit(url.strip() if base is None else urljoin(base, url.strip()))
        scheme = pieces.scheme.lower()
        if scheme and scheme not in _PORTS:
            raise RowError(f"{escaped(scheme)}: is neither http nor https")
        if "@" in pieces.netloc or "\\" in pieces.netloc:
            raise RowError("has a user or password in it; they are not sent")
        port = pieces.port
        host = _host(pieces.hostname or "")
        target = quote(pieces.path or "/", safe="/%:@!$&'()*+,;=~-._")
        if pieces.query:
            target += "?" + quote(pieces.query, safe="/%:@!$&'()*+,;=~-._?[]{}|")
    except ValueError:  # a lone surrogate too
        scheme = ""
    if not scheme:
        raise RowError("not a URL")
    port = _PORTS[scheme] if port is None else port
    address = WebAddress(scheme, host, port, target)
    if allowed.has(host, port):
        return address
    if (port < 1024 and port not in _PORTS.values()) or port in _BAD_PORTS:
        raise RowError(f"port {port} is not one of HTTP; allow it with --allow-host {host}:{port}")
    if address.ip is not None and not is_public(address.ip):
        raise RowError(private_address(address.host, host))
    return address


def is_public(address: _IPAddress) -> bool:
    """Tell whether an address is one of the public internet.

    Addresses that hold another one (IPv4-mapped, 6to4, NAT64, Teredo) are not public, whatever they
    hold: a gateway would pass them on to it.

    Examples:
        >>> is_public(ip_address("93.184.215.14")), is_public(ip_address("::ffff:93.184.215.14"))
        (True, False)
    """
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    return (
        address.scope_id is None
        and address in _PUBLIC_6
        and not any(address in network for network in _NOT_PUBLIC_6)
    )


def private_address(address: str, host: str) -> str:
    """Return the reason for a host with an address that is not public."""
    return f"private address {escaped(address)}; allow it with --allow-host {escaped(host)}"


def host_rule(name: str) -> tuple[str, int | None]:
    """Return (host, port) of ``NAME`` or ``NAME:PORT``; the port is None where there is none.

    Raises:
        ConfigError: It is neither.

    Examples:
        >>> host_rule("Media.lan"), host_rule("[::1]:8080")
        (('media.lan', None), ('::1', 8080))
    """
    hint = f"allow_hosts: {escaped(name)!r} is not NAME or NAME:PORT, such as media.lan:8080"
    if re.search(r"[/@\s\\?#]", name):
        raise ConfigError(hint)
    bare = f"[{name}]" if name.count(":") > 1 and not name.startswith("[") else name
    try:
        pieces = urlsplit(f"//{bare}")
        return _host(pieces.hostname or ""), pieces.port
    except ValueError:
        raise ConfigError(hint) from None


def shown_url(url: str) -> str:
    """Return a URL for a message: without a user, and without a query that looks like a signature.

    Examples:
        >>> shown_url("https://me:secret@cdn.example/a.jpg?w=100")
        'https://cdn.example/a.jpg?w=100'
        >>> shown_url("https://s3.example/a.jpg?X-Amz-Signature=1f2e3d")
        'https://s3.example/a.jpg?***'
    """
    base, question_mark, query = url.partition("#")[0].partition("?")
    base = re.sub(r"^([^/]*//)[^/]*@", r"\1", base)
    pairs = parse_qsl(query, keep_blank_values=True)
    if any(_SECRET.search(name) or len(value) > 64 for name, value in pairs) or ";" in query:
        query = "***"
    return escaped(base + question_mark + query)


def _host(host: str) -> str:
    """Return a host in the form that is compared and connected to.

    Raises:
        ValueError: It is no name and no address. Numbers such as ``2130706433`` and ``0x7f.1`` are
            no names: C libraries read them as addresses.
    """
    if ":" in host:
        return str(IPv6Address(host))
    if not host.isascii():
        host = host.encode("idna").decode("ascii")
    host = host.lower()
    last_label = host.rstrip(".").rpartition(".")[2]
    if re.fullmatch(r"\d+|0x[0-9a-f]*", last_label):
        return str(IPv4Address(host))
    if len(host) > 253 or not _HOST.fullmatch(host):
        raise ValueError(host)
    return host
