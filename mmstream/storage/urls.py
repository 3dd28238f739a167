"""Names of objects: local paths and URLs alike."""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["Range", "is_remote", "join_url", "split_url"]

Range: TypeAlias = tuple[str, int, int]
"""(name, start, stop): bytes [start, stop) of one object."""


def is_remote(url: str) -> bool:
    """Tell whether a name is a URL rather than a path; ``file://`` counts as a path."""
    return "://" in url and not url.startswith("file://")


def split_url(url: str) -> tuple[str, str]:
    """Return (folder, name) of the path or URL of one object."""
    folder, _, name = url.rpartition("/")
    return folder or ("/" if url.startswith("/") else "."), name


def join_url(root: str, name: str) -> str:
    """Return the path or URL of `name` under `root`; of `root` itself for an empty name."""
    return f"{root.rstrip('/')}/{name}" if name else root
