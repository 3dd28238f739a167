"""`MediaAccess`: what a conversion may read for its rows. The rows themselves may be a stranger's.

Place in the flow: made once, in the main process; `load.py` gets it with the rows of a shard. It is
no part of the plan: the same files may lie somewhere else later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmstream.errors import ConfigError
from mmstream.storage.urls import is_remote, require_no_secret

__all__ = ["MediaAccess", "require_prefixes"]


@dataclass(frozen=True)
class MediaAccess:
    """What a conversion may read for its rows."""

    root: str | None
    """Real path of the folder that media paths are relative to, or a URL prefix. Nothing outside it
    is read, unless `allow_urls` has it. None: there is none, so rows cannot name files."""
    allow_urls: tuple[str, ...] = ()
    """Other URL prefixes that rows may name, such as ``s3://bucket/photos/``."""


def require_prefixes(allow_urls: Sequence[str]) -> tuple[str, ...]:
    """Return URL prefixes that rows may name, checked.

    Raises:
        ConfigError: One of them is no URL of a bucket or folder.
    """
    if isinstance(allow_urls, str):
        raise ConfigError(f"allow_urls={allow_urls!r}: give a list of prefixes, not one text")
    for prefix in allow_urls:
        require_no_secret(prefix)
        scheme, _, rest = prefix.partition("://")
        if not is_remote(prefix) or "::" in prefix or not rest.strip("/"):
            raise ConfigError(
                f"allow_urls: {prefix!r} is not the URL of a bucket or a folder in it; "
                "write s3://bucket/folder/"
            )
        if scheme in ("http", "https"):
            raise ConfigError(
                f"allow_urls: {prefix!r}: rows may name {scheme}:// anyway; private addresses need "
                "an allowed host"
            )
    return tuple(allow_urls)
