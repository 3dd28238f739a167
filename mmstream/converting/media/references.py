r"""What a row's path or URL of a medium means.

    load -> REFERENCES -> the bytes

    a/b.jpg, /root/a/b.jpg, file:///root/a.jpg    a file under the media root
    a\b.jpg, C:\a\b.jpg                           the same, as Windows writes it
    https://host/a.jpg                            a download
    s3://bucket/a.jpg, gs://, az://, hf://        an object, where the caller allows its prefix
    data:image/png;base64,...                     the bytes themselves
    tar://b.jpg::a.tar                            a member of a tar, as fsspec writes it
    zip://b.jpg::a.zip                            a member of a zip
    a.bin:4096:100                                100 bytes from byte 4096, as fairseq writes them

Rows may be a stranger's, and objects are read with the user's credentials. So rows never reach
fsspec as they are: only known schemes pass, no chains of URLs, and only under the prefixes that the
caller named.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import quote, unquote

from mmstream.converting.draft import RowError
from mmstream.converting.media.access import MediaAccess
from mmstream.converting.media.addresses import shown_url
from mmstream.converting.media.data_urls import is_base64, is_data_url
from mmstream.storage import is_remote

__all__ = ["Reference", "object_prefix", "parse_reference", "short_name"]

Source: TypeAlias = Literal["file", "object", "web"]

OBJECT_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "memory")
"""Object stores that rows may name. The prefix decides, whether a URL of them is read."""

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):(?=//|[^/\\])")
_SPAN = re.compile(r"(?s)(.*\.\w+):(\d{1,15}):(\d{1,15})")
_MEMBER = re.compile(r"(tar|zip)://")
_MAX_NAME_CHARS = 200
MAX_REFERENCE_CHARS = 16_384
"""Longest path or URL. To look up one of megabytes would take hours."""


class Reference(NamedTuple):
    """Where the bytes of a medium are."""

    source: Source
    location: str
    """Path of a file as the row has it, or a whole URL."""
    member: str | None = None
    """Name of a member of the tar or zip at `location`."""
    is_zip: bool = False
    """Whether `location` is a zip and not a tar."""
    span: tuple[int, int] | None = None
    """(start, stop) in bytes, of the file at `location`."""


def parse_reference(text: str, access: MediaAccess) -> Reference:
    """Return what a path or URL means. Nothing is read.

    Raises:
        RowError: It means nothing, or it may not be read. The message does not name it.
    """
    if len(text) > MAX_REFERENCE_CHARS:
        raise RowError(f"{len(text):,} characters; no path or URL is that long")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a character: Python can hold it, no name can
        raise RowError("not a path or URL") from None
    member, span, is_zip = None, None, False
    if (archive := _MEMBER.match(text)) is not None:
        member, separator, text = text[archive.end() :].partition("::")
        is_zip = archive[1] == "zip"
        if not separator or not member or not text:
            raise RowError("not a member; write tar://MEMBER::TAR or zip://MEMBER::ZIP")
    elif "::" not in text and (match := _SPAN.fullmatch(text)) is not None:
        text, start, length = match[1], int(match[2]), int(match[3])
        span = (start, start + length)
        if not length:
            raise RowError("a span of no bytes")
    reference = _parse_location(text, access)
    if reference.source == "web" and (member or span):
        raise RowError("a part of a file that would have to be downloaded; download it first")
    return reference._replace(member=member, is_zip=is_zip, span=span)


def object_prefix(url: str, access: MediaAccess) -> str | None:
    """Return the allowed prefix that a URL lies under, or None."""
    prefixes: list[str] = [access.root or "", *access.allow_urls]
    for prefix in prefixes:
        if is_remote(prefix) and url.startswith(prefix.rstrip("/") + "/"):
            return prefix.rstrip("/")
    return None


def short_name(path: str) -> str:
    """Return a path or URL for a message: without data and signatures, and not too long."""
    if is_data_url(path) or is_base64(path):
        return f"{path[:40]}... ({len(path):,} characters)"
    if path.startswith(("http://", "https://")):
        path = shown_url(path)
    if len(path) <= _MAX_NAME_CHARS:
        return path
    return f"{path[:80]}...{path[-80:]}"


def _parse_location(text: str, access: MediaAccess) -> Reference:
    if text.startswith("file://"):
        return _in_root(text, access)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return _in_root(text, access)
    name = scheme[1].lower()
    if name in ("http", "https"):
        return Reference("web", text)
    if "::" in text:
        raise RowError(
            "chains of URLs are not read, except for tar://MEMBER::TAR and zip://MEMBER::ZIP"
        )
    return _object(text, name, access)


def _in_root(path: str, access: MediaAccess) -> Reference:
    if access.root is None:
        raise RowError("no media root; remote rows need one to be named")
    if not is_remote(access.root):
        return Reference("file", path)
    name = path.replace("\\", "/")
    if name.startswith(("/", "file://")) or re.match(r"[A-Za-z]:/", name):
        raise RowError("lies outside the media root")
    name = name.removeprefix("./")
    url = f"{access.root.rstrip('/')}/{name}"
    if access.root.startswith(("http://", "https://")):
        _refuse_ways_out(url)
        return Reference("web", f"{access.root.rstrip('/')}/{quote(name)}")
    return _object(url, url.partition("://")[0].lower(), access)


def _object(url: str, scheme: str, access: MediaAccess) -> Reference:
    _refuse_ways_out(url)
    if object_prefix(url, access) is not None:
        return Reference("object", url)
    if scheme not in OBJECT_SCHEMES:
        raise RowError(f"{scheme}: is not read for rows; fetch the media first")
    bucket = "/".join(url.split("/")[:3])
    raise RowError(
        f"rows may not name objects there: they are read with your credentials. "
        f"Allow them with --allow-url {bucket[:80]}/"
    )


def _refuse_ways_out(url: str) -> None:
    """Refuse a URL that may lead out of its prefix, or that a client may read in another way."""
    path = url.partition("://")[2]
    if any(segment in (".", "..") for segment in unquote(path).replace("\\", "/").split("/")):
        raise RowError("lies outside the media root")
    if "::" in path or any(ord(character) < 32 for character in path):
        raise RowError("not a URL")
