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

`MediaAccess`: what a conversion may read for its rows. The rows may be a stranger's.

Place in the flow: made once, in the main process; `load.py` gets it with the rows of a shard. It is
no part of the plan: the same files may lie somewhere else later.

Media that stand in the text of a row: ``data:`` URLs and plain base64.

references -> DATA_URLS

Media behind the URLs of object stores, read with the caller's credentials.

    references (which prefixes are allowed) -> OBJECTS

Storage that fails ends the conversion: that is no fault of a row. An object that is missing is one.
"""

from __future__ import annotations

import binascii
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import quote, unquote, unquote_to_bytes

from mmstream.converting.draft import RowError
from mmstream.converting.media.addresses import shown_url
from mmstream.converting.media.download_options import DownloadOptions
from mmstream.errors import ConfigError, StorageError
from mmstream.storage import Store, is_remote, open_store
from mmstream.storage.store import TooLargeError
from mmstream.storage.urls import require_no_secret


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


_DATA_URL = re.compile(r"data:([^,;]{0,100})((?:;[^,;]{0,200}){0,8}),", re.IGNORECASE)

_BASE64_STARTS = (
    "/9j/",  # JPEG
    "iVBORw0KGgo",  # PNG
    "R0lGODdh",  # GIF
    "R0lGODlh",
    "UklGR",  # WebP, WAV, AVI
    "T2dnUw",  # Ogg
    "ZkxhQw",  # FLAC
    "SUQz",  # MP3
)
"""How base64 begins of files whose type is known by their first bytes."""
MIN_BASE64_CHARS = 64
"""A shorter text is a path. No media file is that small."""
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
_HEAD_CHARS = 1024
"""What lies behind the beginning is not looked at: a path is not that long."""
MAX_ESCAPES = 1 << 18
"""Most percent signs of a ``data:`` URL. Each costs a third of a microsecond."""


def is_inline(text: str) -> bool:
    """Tell whether a text in place of a path is a ``data:`` URL or a media file in base64."""
    is_base64 = (
        len(text) >= MIN_BASE64_CHARS
        and text.startswith(_BASE64_STARTS)
        and _BASE64.fullmatch(text, 0, _HEAD_CHARS) is not None
    )
    return is_base64 or text[:5].lower() == "data:"


def inline_bytes(text: str) -> bytes | None:
    """Return the bytes that a text in place of a path is. None: it is a path or a URL.

    Raises:
        RowError: They are damaged.
    """
    if not is_inline(text):
        return None
    return _decode_data_url(text) if text[:5].lower() == "data:" else _decode_base64(text)


def _decode_data_url(url: str) -> bytes:
    """Return the bytes of a ``data:`` URL (RFC 2397). Its type is not trusted.

    Raises:
        RowError: It is damaged.
    """
    match = _DATA_URL.match(url)
    if match is None:
        raise RowError("a data: URL without a comma")
    text = url[match.end() :]
    if text.count("%") > MAX_ESCAPES:
        raise RowError(f"a data: URL of more than {MAX_ESCAPES:,} percent signs; use base64")
    if not match[2].lower().endswith(";base64"):
        return unquote_to_bytes(text)
    return _decode_base64(unquote_to_bytes(text).decode("latin-1") if "%" in text else text)


def _decode_base64(text: str) -> bytes:
    """Return the bytes of base64, with or without padding and line ends, in either alphabet.

    Raises:
        RowError: It is damaged.
    """
    text = "".join(text.split()).rstrip("=")
    if "-" in text or "_" in text:
        text = text.replace("-", "+").replace("_", "/")
    try:
        return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
    except ValueError as error:  # also characters outside ASCII
        raise RowError(f"damaged base64: {error}") from None


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
    if is_inline(path):
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


def read_object(url: str, access: MediaAccess, max_bytes: int) -> bytes:
    """Return a whole object.

    Args:
        url: Under a prefix that `access` allows.
        access: What may be read.
        max_bytes: The largest object that is read.

    Raises:
        RowError: It is missing, empty or too large. The message does not name it.
        StorageError: Storage failed after retries.
    """
    store, name = _locate(url, access)
    try:
        data = store.read(name, max_bytes)
    except FileNotFoundError as error:
        raise _missing(error) from None
    except TooLargeError:
        raise RowError(f"more than {max_bytes:,} bytes") from None
    if not data:
        raise RowError("empty file")
    return data


def read_object_range(url: str, access: MediaAccess, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of an object; errors as `read_object`."""
    size = object_size(url, access)
    if stop > size:
        raise RowError(f"bytes {start} to {stop} of an object of {size}")
    store, name = _locate(url, access)
    return store.read_range(name, start, stop)


def object_size(url: str, access: MediaAccess) -> int:
    """Return the size of an object in bytes; errors as `read_object`."""
    store, name = _locate(url, access)
    try:
        return store.size(name)
    except FileNotFoundError as error:
        raise _missing(error) from None


def _missing(error: FileNotFoundError) -> RowError | StorageError:
    """Return the error of an object that does not exist. A missing bucket is no fault of a row."""
    if str(error).endswith("no such bucket"):
        return StorageError(str(error))
    return RowError("no such object")


def _locate(url: str, access: MediaAccess) -> tuple[Store, str]:
    prefix = object_prefix(url, access)
    assert prefix is not None  # `parse_reference` refused it
    return _store(prefix), url[len(prefix) + 1 :]


@lru_cache(maxsize=64)
def _store(prefix: str) -> Store:
    return open_store(prefix)
