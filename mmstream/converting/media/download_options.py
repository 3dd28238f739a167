"""How media behind http(s) URLs are downloaded while rows are converted.

They change how the work is done, not what is written, so the plan of a conversion leaves them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mmstream.converting.media.addresses import host_rule
from mmstream.wrong_arguments import (
    NonNegativeInt,
    PositiveInt,
    Seconds,
    checked,
)

DOWNLOAD_FLAGS = {
    "num_connections": "--num-connections",
    "num_connections_per_host": "--num-connections-per-host",
    "timeout_s": "--download-timeout",
    "idle_timeout_s": "--download-idle-timeout",
    "num_tries": "--download-tries",
    "max_bytes": "--max-download-bytes",
    "max_redirects": "--max-redirects",
    "max_unanswered": "--max-unanswered",
}
"""Flags of ``mmstream convert`` by the names of the numbers."""


@checked()
@dataclass(frozen=True)
class DownloadOptions:
    """How to download media that rows name by ``http://`` and ``https://`` URLs.

    The worker processes of a conversion share the connections.

    Args:
        num_connections: Downloads that run at the same time, over all worker processes of this
            machine. Each worker has one at least.
        num_connections_per_host: The same, to one host. A host that asks for patience (429, 503)
            gets fewer for a while.
        timeout_s: Seconds for one try. A try gets a further second for every 128 KiB that arrived,
            so that a large file may take longer.
        idle_timeout_s: Seconds without a byte, after which a try has failed.
        num_tries: Tries of one URL. Only failures that may pass are tried again: time-outs, broken
            connections, a DNS server that does not answer, and the statuses 408, 425, 429 and 5xx.
        max_bytes: Longest medium in bytes, also after decompression.
        max_redirects: Redirects that one download follows.
        honor_robots: Refuse media whose server says ``noai``, ``noimageai``, ``noindex`` or
            ``noimageindex`` in ``X-Robots-Tag``, or reserves its rights by ``TDM-Reservation: 1``.
        allow_hosts: Hosts that may have private addresses and any port, as ``NAME`` or
            ``NAME:PORT``. By default, addresses that are not public are refused.
        max_unanswered: Stop with a StorageError after so many downloads in a row that no server
            answered. 0: never stop.

    Raises:
        ConfigError: A value is impossible.

    Examples:
        >>> options = mm.DownloadOptions(num_tries=5, allow_hosts=("media.lan", "127.0.0.1:8080"))
        >>> options.num_connections
        64
    """

    num_connections: PositiveInt = 64
    num_connections_per_host: PositiveInt = 16
    timeout_s: Seconds = 20.0
    idle_timeout_s: Seconds = 10.0
    num_tries: PositiveInt = 3
    max_bytes: PositiveInt = 128 << 20
    max_redirects: NonNegativeInt = 5
    honor_robots: bool = True
    allow_hosts: tuple[str, ...] = ()
    max_unanswered: NonNegativeInt = 100

    def __post_init__(self) -> None:
        for host in self.allow_hosts:
            host_rule(host)

    def words(self) -> Iterator[str]:
        """Yield the words of a command line that has these options, without the defaults."""
        default = DownloadOptions()
        for name, flag in DOWNLOAD_FLAGS.items():
            if getattr(self, name) != getattr(default, name):
                yield from (flag, str(getattr(self, name)))
        if not self.honor_robots:
            yield "--ignore-robots"
        for host in self.allow_hosts:
            yield from ("--allow-host", host)
