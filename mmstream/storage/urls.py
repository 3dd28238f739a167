"""Names of objects: local paths and URLs alike."""

from __future__ import annotations

import re
from typing import TypeAlias

from mmstream.errors import ConfigError

__all__ = [
    "BUCKET_SCHEMES",
    "Range",
    "is_remote",
    "join_url",
    "key_of",
    "require_no_secret",
    "require_two_slashes",
    "split_url",
]

_ONE_SLASH = re.compile(r"(s3|gs|gcs|az|abfss?|https?|hf|memory|file):/(?!/)", re.IGNORECASE)

BUCKET_SCHEMES = {"s3", "gs", "gcs", "az", "abfs", "abfss"}
"""Their URLs begin with the name of a bucket or a container."""

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


def key_of(url: str) -> str:
    """Return the key of an object in S3. A key may begin with a slash.

    Examples:
        >>> key_of("s3://bucket/a/b"), key_of("s3://bucket//a/b")
        ('a/b', '/a/b')
    """
    return url.partition("://")[2].partition("/")[2]


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
    user, is_user, _ = host.rpartition("@")
    # A secret with a slash in it ends the host too early, before its "@".
    _, has_port, port = host.rpartition("]")[2].partition(":")  # an IPv6 address is in brackets
    if is_web and (is_user or (has_port and not port.isdecimal() and "@" in rest)):
        raise ConfigError(
            f"{scheme}://***: a URL must not hold a user or password; put them into ~/.netrc"
        )
    has_key = scheme in BUCKET_SCHEMES and has_port and not host.startswith("arn:")
    if has_key or (is_user and ":" in user):
        raise ConfigError(
            f'{scheme}://***: a URL must not hold a user or password, or a bucket with ":"; give '
            "keys by the environment"
        )
    if is_web and "?" in rest:
        path = rest.partition("?")[0]
        raise ConfigError(
            f"{scheme}://{path}?***: a URL with a query, such as a signed one, names one object; "
            "a dataset needs the URL of its folder"
        )
