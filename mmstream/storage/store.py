"""What every store can do, so that the rest of the package need not know which one it has.

And names of objects: local paths and URLs alike.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple, Protocol, TypeAlias, TypeVar
from urllib.parse import unquote

from mmstream.errors import ConfigError, StorageError, escaped
from mmstream.tar.lazy_bytes import RangeFile

CHANGING = "*"
"""The version of an object whose versions differ from answer to answer, as replicas may say."""


class ObjectStat(NamedTuple):
    """What a store tells of an object without reading it.

    Attributes:
        size: Bytes of the object.
        version: What changes when the object is replaced, or None where the storage does not say.
            It is the ETag in S3, and the time of the last change in a folder. Two versions can be
            compared and mean nothing else.
    """

    size: int
    version: str | None


@dataclass(frozen=True)
class Access:
    """How reads of a store are best cut. A property of the storage, not a user's setting.

    Attributes:
        max_gap_bytes: Two samples with at most this many bytes between them are read in one range.
            The bytes between them are read and dropped.
        max_range_bytes: Longest range that several samples share.
        min_header_read_bytes: Bytes that are read at once where a tar header is expected.
        max_header_read_bytes: Header reads grow up to this size while members are small.
        concurrent: Whether many ranges are best read at the same time, because each of them is a
            request that mostly waits. False: ranges are read one after the other.
        max_reads: Ranges that the reader process asks for side by side, where threads read them.
            Those that were given up do not count.
    """

    max_gap_bytes: int
    max_range_bytes: int
    min_header_read_bytes: int
    max_header_read_bytes: int
    concurrent: bool
    max_reads: int = 64


class NotAFileError(StorageError):
    """A folder, a FIFO, a socket or a device has the name of an object."""


class TooLargeError(StorageError):
    """An object is larger than its reader takes."""


class ReplacedError(StorageError):
    """An object is another one than before: it was replaced, or changed where it lies.

    Attributes:
        expected: The object that was expected.
        current: The object that answered.
        difference: What differs, as messages say it.
    """

    def __init__(self, url: str, expected: ObjectStat, current: ObjectStat) -> None:
        self.expected, self.current = expected, current
        self.difference = f"its version was {expected.version} and is {current.version}"
        if expected.size != current.size:
            self.difference = f"its size was {expected.size} bytes and is {current.size}"
        super().__init__(f"{url}: was replaced: {self.difference}")


class RequestError(OSError):
    """A request failed for a passing reason. It may be sent again.

    The clients of `mmstream.storage.range_client` raise it, and `mmstream.storage.transfers` alone
    decides what follows.

    Attributes:
        is_throttled: The server asks for fewer requests.
        retry_after_s: Seconds that the server asks to wait. 0: it did not say.
        may_be_final: It looks like a response that stays. So it is tried as often as the first
            request to a store, in seconds and not in minutes.
    """

    def __init__(
        self,
        message: str,
        *,
        is_throttled: bool = False,
        retry_after_s: float = 0.0,
        may_be_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.is_throttled, self.retry_after_s = is_throttled, retry_after_s
        self.may_be_final = may_be_final


def require_known(
    url: str, name: str, current: ObjectStat, expected: MutableMapping[str, ObjectStat] | None
) -> None:
    """Raise a ReplacedError where an object is not the known one. Remember it if none is known.

    Versions are compared where both are known, and sizes always. A version that was not known is
    remembered. One that is `CHANGING` fits every other.
    """
    if expected is None:
        return
    recorded = expected.setdefault(name, current)
    if recorded.version is None and recorded.size == current.size:
        expected[name] = current
    versions = {recorded.version, current.version}
    is_other_version = len(versions) == 2 and not versions & {None, CHANGING}
    if is_other_version or recorded.size != current.size:
        raise ReplacedError(url, recorded, current)


def require_size(url: str, size: int, max_bytes: int | None) -> None:
    """Raise a TooLargeError where an object is larger than its reader takes."""
    if max_bytes is not None and size > max_bytes:
        raise TooLargeError(f"{url}: {size} bytes, {max_bytes} are the most that it can have")


class Store(Protocol):
    """A folder of named objects: on a local disk, in an object store, or in memory.

    A store is a plain value: a root URL and no connection. It can be pickled, compared and hashed,
    and used by several threads. Every other name is relative to the root. It may contain slashes.
    """

    @property
    def url(self) -> str:
        """The root: a local path, or a URL such as ``s3://bucket/prefix``."""

    @property
    def access(self) -> Access:
        """How reads are best cut."""

    def url_of(self, name: str) -> str:
        """Return the path or URL of an object, whether it exists or not."""

    def local_path(self, name: str) -> str | None:
        """Return the path of an object that is a file and may be mapped into memory.

        The file need not exist. The empty name stands for the root folder.

        Returns:
            The path, or None where objects are not files of this machine.
        """

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Return a whole object.

        Args:
            name: Of the object.
            max_bytes: The largest object that is read. A larger one takes no memory.

        Raises:
            FileNotFoundError: No such object.
            StorageError: The object has more than `max_bytes`, or the storage failed after retries.
        """

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return exactly bytes [start, stop) of an object.

        Raises:
            FileNotFoundError: No such object.
            StorageError: The object is shorter than `stop`, or the storage failed after retries.
        """

    def read_ranges(
        self, ranges: Sequence[Range], expected: MutableMapping[str, ObjectStat] | None = None
    ) -> list[bytes | OSError]:
        """Return the bytes of every (name, start, stop), in the order of `ranges`.

        A range that cannot be read has the error of `read_range` as its value. Nothing is raised
        for it, so the other ranges stay usable.

        Args:
            ranges: What to read.
            expected: The objects as they are expected, by name. Where another version or size
                answers, the value is a ReplacedError. An object that is not in it is entered as it
                was read. None: nothing is compared.
        """

    def drop_cache(self, name: str, start: int, stop: int) -> None:
        """Make the next read of bytes [start, stop) pass what this machine has cached of them.

        It is asked for when bytes came wrong, and it is a request to the system: it raises nothing.
        """

    def size(self, name: str) -> int:
        """Return the size of an object in bytes; errors as `read`."""

    def stat(self, name: str) -> ObjectStat:
        """Return the size and the version of an object; errors as `read`."""

    def exists(self, name: str) -> bool:
        """Tell whether an object of this name exists. A folder is not an object."""

    def list(self) -> dict[str, ObjectStat]:
        """Return the objects directly under the root by their names, sorted by name.

        Objects in subfolders and names that start with a dot are left out. A root that does not
        exist gives an empty dict.
        """

    def folders(self) -> Sequence[str]:
        """Return the names of the folders directly under the root, sorted.

        Names that start with a dot are left out. A root that does not exist has none.
        """

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a new object for writing.

        The object appears when the block ends without an error, and it is whole then. After an
        error there is no new object; an old one of this name stays as it was.
        """

    def write(self, name: str, data: bytes) -> None:
        """Write one object, whole or not at all. An old object of this name is replaced."""

    def write_if(self, name: str, data: bytes, version: str | None) -> bool:
        """Write one object if nobody else wrote it meanwhile. Return whether it was written.

        A store that knows no such conditions writes it in any case.

        Args:
            name: Of the object.
            data: Its content.
            version: What `stat` said of the object that is replaced. None: there must be none.
        """

    def remove(self, name: str) -> None:
        """Remove an object. It is not an error when there is none."""


class CommonCalls:
    """The calls of a store that follow from its others, or that most stores answer alike."""

    def url_of(self: Store, name: str) -> str:
        """Return the path or URL of an object, whether it exists or not."""
        return join_url(self.url, name)

    def local_path(self, name: str) -> str | None:  # noqa: ARG002
        """Return None: an object is not a file of this machine."""
        return None

    def drop_cache(self, name: str, start: int, stop: int) -> None:
        """Do nothing: this machine holds no copy of an object."""

    def size(self: Store, name: str) -> int:
        """Return the size of an object in bytes; errors as `read`."""
        return self.stat(name).size

    def exists(self: Store, name: str) -> bool:
        """Tell whether an object of this name exists. A folder is not an object."""
        try:
            self.stat(name)
        except FileNotFoundError:
            return False
        return True

    def read_range(self: Store, name: str, start: int, stop: int) -> bytes:
        """Return exactly bytes [start, stop) of an object.

        Raises:
            FileNotFoundError: No such object.
            StorageError: The object is shorter than `stop`, or the storage failed after retries.
        """
        (outcome,) = self.read_ranges([(name, start, stop)])
        if isinstance(outcome, OSError):
            raise outcome
        return outcome


# -- many small requests at once -------------------------------------------------------------------
#
# `Store.read_ranges` does so for ranges. This is for all other requests, such as the writes of the
# files of a shard or the removal of many objects.

MAX_REQUESTS_SIDE_BY_SIDE = 16

T = TypeVar("T")
R = TypeVar("R")


def map_requests(store: Store, request: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call a function for each item, and return the results in the order of the items.

    Calls run side by side in threads where the store's requests are best sent so, otherwise one
    after the other.

    Args:
        store: The store that the requests go to.
        request: Sends the request of one item.
        items: One for each request.

    Raises:
        Exception: The first error in the order of the items. No new request begins after it.
    """
    items = list(items)
    if not store.access.concurrent or len(items) < 2:
        return [request(item) for item in items]
    num_threads = min(len(items), MAX_REQUESTS_SIDE_BY_SIDE)
    with ThreadPoolExecutor(num_threads, "mmstream-requests") as threads:
        try:
            return list(threads.map(request, items))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def sizes_of(store: Store, names: Iterable[str]) -> list[int | None]:
    """Return the size of each object in bytes, in the order of the names. None: there is none."""

    def size(name: str) -> int | None:
        try:
            return store.size(name)
        except FileNotFoundError:
            return None

    return map_requests(store, size, names)


# -- an object as a file that other libraries read -------------------------------------------------


class ObjectFile(RangeFile):
    """An object of a store, read by ranges. Another version of it is a ReplacedError."""

    def __init__(self, store: Store, name: str, stat: ObjectStat) -> None:
        super().__init__(stat.size)
        self._store, self._name = store, name
        self._expected = {name: stat}

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes, at most `size`. Negative or None: all of the rest."""
        stop = self._size if size is None or size < 0 else min(self._size, self._position + size)
        if stop <= self._position:
            return b""
        response = self._store.read_ranges([(self._name, self._position, stop)], self._expected)[0]
        if isinstance(response, OSError):
            raise response
        self._position = stop
        return response


# -- names of objects ------------------------------------------------------------------------------

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
