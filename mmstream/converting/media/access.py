"""`MediaAccess`: what a conversion may read for its rows. The rows may be a stranger's.

Place in the flow: made once, in the main process; `load.py` gets it with the rows of a shard. It is
no part of the plan: the same files may lie somewhere else later.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmstream.converting.media.download_options import DownloadOptions
from mmstream.errors import ConfigError
from mmstream.storage import is_remote
from mmstream.storage.urls import require_no_secret

__all__ = ["MediaAccess", "folder_stamp", "require_prefixes"]


@dataclass(frozen=True)
class MediaAccess:
    """What a conversion may read for its rows."""

    root: str | None
    """Real path of the folder that media paths are relative to, or a URL prefix. Nothing outside it
    is read, unless `allow_urls` has it. None: there is none, so rows cannot name files."""
    allow_urls: tuple[str, ...] = ()
    """Other URL prefixes that rows may name, such as ``s3://bucket/photos/``."""
    downloads: DownloadOptions = field(default_factory=DownloadOptions)
    """How media behind http(s) URLs are downloaded."""
    num_processes: int = 1
    """Processes of this machine that download at the same time."""
    root_stamp: tuple[int, int] | None = None
    """`folder_stamp` of a local root when the conversion began."""


def folder_stamp(path: str) -> tuple[int, int] | None:
    """Return what identifies a folder on this machine, or None where it cannot be opened.

    A network mount that is lost leaves an empty folder of the same name, with another stamp.
    """
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return (stat.st_dev, stat.st_ino) if os.access(path, os.X_OK) else None


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
