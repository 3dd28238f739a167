"""Names of objects: local paths and URLs alike."""

from __future__ import annotations

import re
from typing import TypeAlias

from mmstream.errors import ConfigError

__all__ = [
    "Range",
    "is_remote",
    "join_url",
    "require_no_secret",
    "require_two_slashes",
    "split_url",
]

_ONE_SLASH = re.compile(r"(s3|gs|gcs|az|abfss?|https?|hf|memory|file):/(?!/)", re.IGNORECASE)

Range: TypeAlias = tuple[str, int, int]
"""(name, start, stop): bytes [start, stop) of one object."""


def is_remote(url: str) -> bool:
    """Tell whether a name is a URL rather than a path; ``file://`` counts as a path."""
    return "://" in url and not url.startswith("file://")


def require_two_slashes(url: str) -> None:
    """Raise a ConfigError for a URL that lost a slash, such as ``s3:/bucket/x``.

    It would be a path: a conversion would write to the local folder ``s3:``. The message does not
    show the rest of the URL, which may hold a secret. ``./s3:/bucket/x`` is such a path.
    """
    match = _ONE_SLASH.match(url)
    if match is not None:
        scheme = match[1].lower()
        raise ConfigError(
            f"{scheme}:/...: write {scheme}:// with two slashes; pathlib.Path leaves one out, so "
            "pass a URL as a str"
        )


def split_url(url: str) -> tuple[str, str]:
    """Return (folder, name) of the path or URL of one object."""
    folder, _, name = url.rpartition("/")
    return folder or ("/" if url.startswith("/") else "."), name


def join_url(root: str, name: str) -> str:
    """Return the path or URL of `name` under `root`; of `root` itself for an empty name."""
    return f"{root.rstrip('/')}/{name}" if name else root


def require_no_secret(url: str) -> None:
    """Raise a ConfigError if a URL has a password or a signature in it. Paths have neither.

    The URL of a store stands in messages, states, samples and manifests. So no URL of a store may
    hold a secret, and the message does not show it either.
    """
    if not is_remote(url):
        return
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0]
    is_web = scheme in ("http", "https")
    name, is_user, bucket = host.rpartition("@")
    if is_user and (is_web or ":" in name):
        hint = "put them into ~/.netrc" if is_web else "give them by the environment"
        raise ConfigError(
            f"{scheme}://***@{bucket}: a URL must not hold a user or password; {hint}"
        )
    if is_web and "?" in rest:
        path = rest.partition("?")[0]
        raise ConfigError(
            f"{scheme}://{path}?***: a URL with a query, such as a signed one, names one object; "
            "a dataset needs the URL of its folder"
        )
