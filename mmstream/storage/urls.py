"""Names of objects: local paths and URLs alike."""

from __future__ import annotations

import os
import re
from typing import TypeAlias
from urllib.parse import unquote

from mmstream.errors import ConfigError, escaped

_ONE_SLASH = re.compile(r"(s3|gs|gcs|az|abfss?|https?|hf|memory|file):/(?!/)", re.IGNORECASE)

MAX_FILE_NAME_BYTES = 255
"""Longest name of a file or folder, in the file systems of Linux and macOS."""

BUCKET_SCHEMES = {"s3", "gs", "gcs", "az", "abfs", "abfss"}
"""Their URLs begin with the name of a bucket or a container."""

Range: TypeAlias = tuple[str, int, int]
"""(name, start, stop): bytes [start, stop) of one object."""


def is_remote(url: str) -> bool:
    """Tell whether a name is a URL rather than a path; ``file://`` counts as a path."""
    return "://" in url and not url.startswith("file://")


def file_path(name: str) -> str:
    """Return the path that a ``file://`` URL names (RFC 8089). A path stands for itself.

    Examples:
        >>> file_path("file:///tmp/a%20b"), file_path("/tmp/a%20b")
        ('/tmp/a b', '/tmp/a%20b')
        >>> file_path("file://localhost/tmp"), file_path("file://a/b")
        ('/tmp', 'a/b')
    """
    if not name.startswith("file://"):
        return name
    path = re.sub("^localhost(?=/)", "", name.removeprefix("file://"))
    return unquote(path, errors="surrogateescape")  # a name of a file may be no UTF-8


def local_path(name: str) -> str:
    """Return a path or ``file://`` URL as a path, with the home folder for ``~`` and ``~user``.

    A folder whose name begins with ``~`` and names no user stands for itself.

    Raises:
        ConfigError: No file can have the name: it has a NUL character or half of a surrogate pair,
            or is too long.
    """
    path = file_path(name)
    try:
        segments = os.fsencode(path).split(b"/")
    except UnicodeEncodeError:
        segments = [b"\0"]
    if any(b"\0" in segment or len(segment) > MAX_FILE_NAME_BYTES for segment in segments):
        raise ConfigError(
            f"{escaped(name, 80)}: no file can have this name: it holds a NUL or half a surrogate "
            f"pair, or a part of it has more than {MAX_FILE_NAME_BYTES} bytes; name another"
        )
    return os.path.expanduser(path)  # noqa: PTH111 - as said


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
    url = file_path(url)
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
    scheme, _, location = url.partition("://")
    host = location.partition("/")[0]
    is_web = scheme in ("http", "https")
    user, is_user, _ = host.rpartition("@")
    # A secret with a slash in it ends the host too early, before its "@".
    _, has_port, port = host.rpartition("]")[2].partition(":")  # an IPv6 address is in brackets
    if is_web and (is_user or (has_port and not port.isdecimal() and "@" in location)):
        raise ConfigError(
            f"{scheme}://***: a URL must not hold a user or password; put them into ~/.netrc"
        )
    has_key = scheme in BUCKET_SCHEMES and has_port and not host.startswith("arn:")
    if has_key or (is_user and ":" in user):
        raise ConfigError(
            f'{scheme}://***: a URL must not hold a user or password, or a bucket with ":"; give '
            "keys by the environment"
        )
    if is_web and "?" in location:
        path = location.partition("?")[0]
        raise ConfigError(
            f"{scheme}://{path}?***: a URL with a query, such as a signed one, names one object; "
            "a dataset needs the URL of its folder"
        )
