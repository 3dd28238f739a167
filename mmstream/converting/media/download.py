"""Downloads of media: one event loop in one thread of a worker process.

    load -> DOWNLOAD (URL -> bytes)
              addresses.py   may the URL be requested?
              hosts.py       its host's addresses; when does it get a request? is the network down?
              web_client.py  one request

Redirects are followed here and not by the HTTP client, so that each hop is checked like a new URL.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from types import TracebackType

from mmstream.converting.draft import RowError
from mmstream.converting.media.addresses import AllowedHosts, WebAddress, parse_url, shown_url
from mmstream.converting.media.hosts import (
    DeadHostError,
    DnsCache,
    Host,
    Hosts,
    Outage,
    TryFailedError,
    look_up,
)
from mmstream.converting.media.web_client import (
    CONNECT_TIMEOUT_S,
    CheckedResolver,
    Partial,
    Redirect,
    WebClient,
)
from mmstream.converting.options import DownloadOptions
from mmstream.errors import StorageError
from mmstream.storage.patience import backoff_s

logger = logging.getLogger(__name__)

NUM_LOOKUPS = 64
"""Names that are looked up at the same time, by all processes. Resolvers give way under more."""

_NUMBER = re.compile(r"\d[\d.,]*")


class Downloader:
    """Downloads media, many at a time. A context manager; its thread ends with it.

    Keep it for all shards of a process: it remembers connections, names in DNS and bad hosts.

    Args:
        options: Limits.
        num_processes: Processes of this machine that download at the same time. They share the
            connections of `options` evenly.
        look_up: Returns the addresses of a host's name. For tests.

    Attributes:
        counts: Numbers of downloads, requests, redirects, failed tries and bytes, and of failures
            by their reason.
    """

    def __init__(
        self,
        options: DownloadOptions,
        num_processes: int = 1,
        *,
        look_up: Callable[[str], list[str]] = look_up,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._options = options
        self._num_connections = max(1, options.num_connections // num_processes)
        self._num_lookups = max(8, NUM_LOOKUPS // num_processes)
        self._hosts = Hosts(max(1, options.num_connections_per_host // num_processes))
        self._allowed = AllowedHosts.from_names(options.allow_hosts)
        self._look_up = look_up
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="mmstream-downloads", daemon=True
        )

    def __enter__(self) -> Downloader:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        logger.info("downloads: %s", dict(sorted(self.counts.items())))

    def start(self, url: str, max_bytes: int | None = None) -> Future[bytes]:
        """Start to download a URL. Return at once.

        Downloads start in the order of the calls, as far as their hosts allow it. The number of
        calls is not bounded: the caller bounds what it holds.

        Args:
            url: An http or https URL.
            max_bytes: A lower limit than that of the options.

        Returns:
            A future. Its result is the bytes. It raises a RowError that names the URL (without
            secrets) and the reason, or a StorageError when the network is down: that is not the
            row's fault, so the conversion must stop. Reasons hold no number of tries and no time
            but that of the options, so the same answers give the same rejects.
        """
        limit = min(self._options.max_bytes, max_bytes or self._options.max_bytes)
        return asyncio.run_coroutine_threadsafe(self._download(url, limit), self._loop)

    async def _open(self) -> None:
        max_unanswered = self._options.max_unanswered
        self._slots = asyncio.Semaphore(self._num_connections)
        self._dns = DnsCache(
            self._look_up, lambda host: self._dns_outage.answered(host), self._num_lookups
        )
        self._dns_outage = Outage("DNS server", self._dns.answers, max_unanswered)
        self._server_outage = Outage("server", self._can_connect, max_unanswered)
        self._resolver = CheckedResolver(self._dns, self._allowed)
        self._client = WebClient(self._options, self._resolver)

    async def _close(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()
        self._dns.close()

    async def _download(self, url: str, max_bytes: int) -> bytes:
        """Return the bytes of a URL; the errors are those of `start`."""
        self.counts["downloads"] += 1
        try:
            data = await self._try_often(url, max_bytes)
        except RowError as error:
            self.counts[f"failed: {_NUMBER.sub('N', str(error).partition(';')[0])[:80]}"] += 1
            raise RowError(f"{shown_url(url)}: {error}") from None
        self.counts["bytes"] += len(data)
        return data

    async def _try_often(self, url: str, max_bytes: int) -> bytes:
        partial = Partial()
        for num_tries in range(1, self._options.num_tries + 1):
            try:
                return await self._follow(url, max_bytes, partial, is_retry=num_tries > 1)
            except TryFailedError as error:
                failure = error
            self.counts["failed tries"] += 1
            if num_tries < self._options.num_tries:
                await asyncio.sleep(backoff_s(num_tries))
        if not failure.is_answered:
            outage = self._dns_outage if failure.is_dns else self._server_outage
            await outage.require_network(failure.origin, failure.reason, failure.started)
        raise RowError(failure.reason)

    async def _follow(self, url: str, max_bytes: int, partial: Partial, *, is_retry: bool) -> bytes:
        """Request a URL once, and follow its redirects."""
        base: str | None = None
        for _ in range(self._options.max_redirects + 1):
            try:
                address = parse_url(url, self._allowed, base)
                answer = await self._request(address, max_bytes, partial, is_retry)
            except RowError as error:
                if base is None:
                    raise
                raise RowError(f"redirects to {shown_url(url)}: {error}") from None
            if not isinstance(answer, Redirect):
                return answer
            self.counts["redirects"] += 1
            url, base = answer.url, str(address)
        raise RowError(f"more than {self._options.max_redirects} redirects")

    async def _request(
        self, address: WebAddress, max_bytes: int, partial: Partial, is_retry: bool
    ) -> bytes | Redirect:
        """Send one request when its host may get one, and note what the host does."""
        host = self._hosts.host(address.host)
        try:
            if address.ip is None:  # before the host's turn: a slow DNS server holds up nobody else
                await self._resolver.addresses(address.host, address.port)
            async with host.slot(is_retry=is_retry), self._slots:
                self.counts["requests"] += 1
                answer = await self._get(address, host, max_bytes, partial)
        except TryFailedError as failure:
            failure.origin = address.origin
            host.failed(failure, is_retry=is_retry)
            raise
        except DeadHostError:
            reason = "its host does not answer"
            await self._server_outage.require_network(address.origin, reason)
            raise RowError(f"{reason}, and is left out for some minutes") from None
        return answer

    async def _get(
        self, address: WebAddress, host: Host, max_bytes: int, partial: Partial
    ) -> bytes | Redirect:
        is_answered, started = True, time.monotonic()
        try:
            return await self._client.get(address, max_bytes, partial, keep_connection=host.is_busy)
        except TryFailedError as failure:
            is_answered, failure.started = failure.is_answered, started
            raise
        except (StorageError, asyncio.CancelledError):
            is_answered = False
            raise
        finally:
            if is_answered:
                host.answered()
                self._server_outage.answered(address.origin)

    async def _can_connect(self, origin: str) -> bool:
        """Tell whether a host that answered before can be connected to now."""
        host, _, port = origin.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                ip = host
                if WebAddress("http", host, int(port), "/").ip is None:
                    [ip, *_] = await self._resolver.addresses(host, int(port))
                _, writer = await asyncio.open_connection(ip, int(port))
        except (OSError, RowError, TryFailedError):  # a time-out is an OSError
            return False
        writer.close()
        return True


@cache
def shared_downloader(options: DownloadOptions, num_processes: int) -> Downloader:
    """Return the downloader of this process, which lives as long as the process.

    A worker process writes many shards. With one downloader for all of them, names in DNS and dead
    hosts are not forgotten with each shard. Its thread does not keep the process alive.
    """
    downloader = Downloader(options, num_processes).__enter__()
    atexit.register(_close_in, os.getpid(), downloader)
    return downloader


def _close_in(process_id: int, downloader: Downloader) -> None:
    """Close a downloader at the end of its process. A fork of it does not have the thread."""
    if os.getpid() == process_id:
        downloader.__exit__(None, None, None)
