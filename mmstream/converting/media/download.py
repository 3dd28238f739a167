"""Downloads of media: one event loop in one thread of a worker process.

load -> DOWNLOAD (URL -> bytes)
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from types import TracebackType

import aiohttp

from mmstream.converting.draft import RowError
from mmstream.converting.media.addresses import AllowedHosts, WebAddress, parse_url, shown_url
from mmstream.converting.media.download_options import DownloadOptions

__all__ = ["Downloader"]


class Downloader:
    """Downloads media, many at a time. A context manager; its thread ends with it.

    Keep it for all shards of a process: it remembers connections, names in DNS and bad hosts.

    Args:
        options: Limits.
        num_processes: Processes of this machine that download at the same time. They share the
            connections of `options` evenly.
    """

    def __init__(self, options: DownloadOptions, num_processes: int = 1) -> None:
        self._options = options
        self._num_processes = num_processes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._allowed = AllowedHosts.from_names(options.allow_hosts)

    def __enter__(self) -> Downloader:
        self._thread.start()
        self._session = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._session.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

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
            row's fault, so the conversion must stop.
        """
        limit = min(self._options.max_bytes, max_bytes or self._options.max_bytes)
        return asyncio.run_coroutine_threadsafe(self._download(url, limit), self._loop)

    async def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession()

    async def _download(self, url: str, max_bytes: int) -> bytes:
        try:
            return await self._get(parse_url(url, self._allowed), max_bytes)
        except RowError as error:
            raise RowError(f"{shown_url(url)}: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise RowError(f"{shown_url(url)}: {type(error).__name__}") from None

    async def _get(self, address: WebAddress, max_bytes: int) -> bytes:
        async with self._session.get(str(address), allow_redirects=False) as response:
            if response.status != 200:
                raise RowError(f"http {response.status}")
            data = await response.read()
        if len(data) > max_bytes:
            raise RowError(f"larger than {max_bytes:,} bytes")
        return data
