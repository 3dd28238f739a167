"""Which hosts a download may go to, how many requests each gets and when, and outages.

    URL -> scheme, host, port -> DNS -> public addresses
        -> HOSTS (wait for a slot) -> request -> HOSTS (it answered, or not) -> OUTAGE

Addresses: a corpus comes from strangers. A URL in it may name a service of the network in which the
conversion runs, such as ``http://169.254.169.254/``, and so may a redirect or a DNS server. So only
public addresses are used, unless the caller allows the host by its name.

Names: a corpus of the web names a million hosts, many of which are gone. Resolvers give way under
that: 70 % of a run of img2dataset failed for it. So names are looked up a few at a time, never
twice at the same time, and a name that does not exist is remembered too.

Slots: a host that asks for patience gets fewer requests at the same time, and none for as long as
it says. Nor does one get any that has not answered for half a minute. URLs that hang at a healthy
host are tried again when its others are done, at the end of a shard. So only first tries tell that
a host is dead. Otherwise the good URLs of the next shard would be lost.

Outages: a row whose host is gone is a reject. But when the network is down, every row would become
one. So a download without an answer is a reject only after a sign that the network is up: somebody
else answered meanwhile, or a host that answered before can be reached. There is one `Outage` for
servers and one for DNS: servers that are known already answer for a long time after the DNS server
of a machine has died.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urljoin, urlsplit

from mmstream.converting.draft import RowError
from mmstream.errors import ConfigError, StorageError, escaped

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


HostRules = frozenset[tuple[str, int | None]]
"""Hosts that may have addresses which are not public: (host, port), or None for every port."""


def is_allowed(host: str, port: int, allowed: HostRules) -> bool:
    """Tell whether a host is allowed at a port."""
    return not allowed.isdisjoint({(host, None), (host, port)})


def parse_url(url: str, allowed: HostRules, base: str | None = None) -> WebAddress:
    """Take a URL apart, and check all that can be checked without DNS.

    The result is rewritten from its pieces. So the host that was checked is the host that the
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
    if is_allowed(host, port, allowed):
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
        ValueError: It is neither a name nor an address. Numbers like ``2130706433`` and ``0x7f.1``
            are not names: C libraries read them as addresses.
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


# -- slots ----------------------------------------------------------------------------------------

MAX_WAIT_S = 60.0
"""Longest wait that a server can ask for. A longer one would hold up the whole shard."""

MIN_FAILURES = 8
"""A host is dead after the first tries of so many URLs in a row without an answer."""

MIN_SILENCE_S = 30.0
"""And so many seconds since the first of them: a short break costs no rows."""

REST_S = 120.0
"""How long a dead host is left alone."""


@dataclass(eq=False)
class TryFailedError(Exception):
    """One try of a download failed, in a way that may pass."""

    reason: str
    """For the message, if no try succeeds."""
    is_answered: bool = False
    """Whether the server answered at all."""
    is_dns: bool = False
    """Whether it was the DNS server that did not answer."""
    is_throttled: bool = False
    """The server said that it gets too many requests."""
    wait_s: float | None = None
    """What the server asked for by ``Retry-After``, or None."""
    origin: str = ""
    """Host and port of the request."""
    started: float = 0.0
    """When the request was sent, by `time.monotonic`."""


class DeadHostError(Exception):
    """The host has not answered for some time. It gets no request now."""


class Host:
    """One host. Lives in one event loop.

    Args:
        max_requests: Requests at the same time.
        clock: Seconds.

    Attributes:
        num_requests: Requests so far.
    """

    def __init__(self, max_requests: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_requests = 0
        self._max_requests = max_requests
        self._clock = clock
        self._slots = asyncio.Semaphore(max_requests)
        self._num_slots = max_requests
        self._limit = float(max_requests)
        self._resume_at = 0.0
        self._num_failures = 0
        self._silent_since = 0.0
        self._dead_until = 0.0

    @asynccontextmanager
    async def slot(self, *, is_retry: bool = False) -> AsyncIterator[None]:
        """Wait until the host may get a request. Requests come in the order of the calls.

        Args:
            is_retry: Whether the URL was requested before. A host that has been silent for half a
                minute gets no such request, also where it is not dead.

        Raises:
            DeadHostError: The host gets no request for some time.
        """
        self._require_alive(is_retry)
        await self._slots.acquire()
        try:
            while (wait_s := self._resume_at - self._clock()) > 0:
                await asyncio.sleep(wait_s)
            self._require_alive(is_retry)
            self.num_requests += 1
            yield
        finally:
            self._num_slots -= 1
            while self._num_slots < int(self._limit):
                self._num_slots += 1
                self._slots.release()

    def answered(self) -> None:
        """Note that the host answered, with any status."""
        self._num_failures = 0
        self._dead_until = 0.0
        self._limit = min(self._max_requests, self._limit + 1 / self._limit)

    def failed(self, failure: TryFailedError, *, is_retry: bool = False) -> None:
        """Note that a try failed."""
        now = self._clock()
        if failure.is_throttled and self._resume_at <= now:  # once for all requests that ran
            self._limit = max(1.0, self._limit / 2)
        if failure.wait_s is not None:
            self._resume_at = max(self._resume_at, now + min(failure.wait_s, MAX_WAIT_S))
        if failure.is_answered or is_retry:
            return
        if not self._num_failures:
            self._silent_since = now
        self._num_failures += 1
        if self._is_silent():
            self._dead_until = now + REST_S

    def _require_alive(self, is_retry: bool) -> None:
        if self._clock() < self._dead_until or (is_retry and self._is_silent()):
            raise DeadHostError

    def _is_silent(self) -> bool:
        """Whether first tries have had no answer for some time."""
        silence_s = self._clock() - self._silent_since
        return self._num_failures >= MIN_FAILURES and silence_s >= MIN_SILENCE_S


TTL_S = 300.0
"""`getaddrinfo` does not tell how long an answer holds. Most names have minutes to hours."""

MAX_NAMES = 1 << 16

_NO_SUCH_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class DnsCache:
    """Looks names up in threads, and remembers the answers. Lives in one event loop.

    Args:
        look_up: Returns the addresses of a name, or raises socket.gaierror. May block.
        on_answer: Called with a name whose look-up was answered, also if there is no such name.
        num_threads: Look-ups at the same time.
        clock: Seconds.
    """

    def __init__(
        self,
        look_up: Callable[[str], list[str]],
        on_answer: Callable[[str], None],
        num_threads: int = 32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look_up = look_up
        self._on_answer = on_answer
        self._clock = clock
        self._lookups: dict[str, tuple[float, asyncio.Future[tuple[str, ...]]]] = {}
        """{name: when its look-up began, and its addresses}. It may still run."""
        self._threads = ThreadPoolExecutor(num_threads, "mmstream-dns")

    async def addresses(self, host: str) -> tuple[str, ...]:
        """Return the addresses of a name, in the resolver's order of preference.

        Raises:
            RowError: The name does not exist. The message is only the reason.
            TryFailedError: No DNS server answered. That is not remembered.
        """
        started, lookup = self._lookups.pop(host, (-math.inf, None))
        if lookup is None or (lookup.done() and self._clock() - started > TTL_S):
            started, lookup = self._clock(), asyncio.ensure_future(self._lookup(host))
        self._lookups[host] = started, lookup
        if len(self._lookups) > MAX_NAMES:
            del self._lookups[next(iter(self._lookups))]
        try:
            # Shielded: who gives up must not end the look-up of the others. There is no time-out:
            # the C library has one, and the time until a thread is free must not count.
            addresses = await asyncio.shield(lookup)
        except Exception:
            self._lookups.pop(host, None)
            raise
        if not addresses:
            raise RowError("not found in DNS")
        return addresses

    async def answers(self, host: str) -> bool:
        """Tell whether a DNS server answers now, asked for a name that it knew before."""
        try:
            await self._lookup(host)
        except TryFailedError:
            return False
        return True

    def close(self) -> None:
        """Give up the look-ups that run. Does not wait for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _lookup(self, host: str) -> tuple[str, ...]:
        """Return the addresses of a name; none if it does not exist."""
        loop = asyncio.get_running_loop()
        addresses = await loop.run_in_executor(self._threads, self._answer, host)
        self._on_answer(host)
        return addresses

    def _answer(self, host: str) -> tuple[str, ...]:
        """Ask for a name. Runs in a thread."""
        started = self._clock()
        try:
            return tuple(self._look_up(host))
        except UnicodeError:
            return ()
        except socket.gaierror as error:
            if error.errno in _NO_SUCH_NAME:
                return ()
            raise TryFailedError("DNS did not answer", is_dns=True, started=started) from None


def look_up(host: str) -> list[str]:
    """Return the addresses of a name, by the C library: /etc/hosts, then DNS."""
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


FRESH_S = 1.0
"""An older answer shows nothing about the network as it is now."""

NUM_WITNESSES = 3
"""Hosts that answered last. One alone may be the very host that is gone."""


class Outage:
    """Judges downloads that got no answer. Lives in one event loop.

    Args:
        what: Who did not answer, for the message: "server" or "DNS server".
        probe: Returns whether a host that answered before answers now.
        max_unanswered: So many unanswered downloads in a row are an outage. Once a host has
            answered, a host counts once. 0: nothing is an outage.
        clock: Seconds.
    """

    def __init__(
        self,
        what: str,
        probe: Callable[[str], Awaitable[bool]],
        max_unanswered: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._probe = probe
        self._max_unanswered = max_unanswered
        self._clock = clock
        self._witnesses: list[str] = []
        self._answered_at = float("-inf")
        self._num_unanswered = 0
        self._unanswered_hosts: set[str] = set()
        self._probing = asyncio.Lock()

    def answered(self, host: str) -> None:
        """Note that a host answered, in whatever way."""
        self._answered_at = self._clock()
        self._num_unanswered = 0
        self._unanswered_hosts.clear()
        others = [witness for witness in self._witnesses if witness != host]
        self._witnesses = [host, *others][:NUM_WITNESSES]

    async def require_network(self, host: str, reason: str, since: float = 0.0) -> None:
        """Return if it is the host's fault that a download got no answer.

        Args:
            host: Whose download failed.
            reason: Why its last try failed.
            since: When its last request was sent, by the clock. Earlier answers show nothing.

        Raises:
            StorageError: The network is down, as far as this process can know.
        """
        if not self._max_unanswered:
            return
        self._num_unanswered += 1
        self._unanswered_hosts.add(host)
        num, what = self._num_unanswered, "downloads"
        if self._witnesses:
            num, what = len(self._unanswered_hosts), "hosts"
        if num >= self._max_unanswered:
            raise self._error(f"the last {num} {what}", host)
        if not self._witnesses:
            return
        async with self._probing:  # one probe serves all downloads that failed meanwhile
            if self._answered_at >= max(since, self._clock() - FRESH_S):
                return
            for witness in self._witnesses:
                if await self._probe(witness):
                    self._answered_at = self._clock()
                    return
        raise self._error(f"{host} and the hosts that answered before", host, reason)

    def _error(self, hosts: str, host: str, reason: str = "") -> StorageError:
        example = f" ({reason})" if reason else f" (the last one: {host})"
        return StorageError(
            f"downloads: no {self._what} answers for {hosts}{example}; is the network of this "
            "machine down? Finished shards are kept; run the same command again to continue"
        )
