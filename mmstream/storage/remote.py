"""Storage: a prefix of an object store, through fsspec; and the only retries of the package.

Clients are made at the first call, one per process and set of ``AWS_*`` variables: they do not
survive a fork, so a store that was used in the main process makes its own in a worker.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar, cast

from mmstream.errors import ConfigError, StorageError
from mmstream.storage.store import Access
from mmstream.storage.urls import Range, join_url

__all__ = ["RemoteStore"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ATTEMPTS = 5
"""Tries of one remote call, with 0.2, 0.4, 0.8, 1.6 s (+-50 %) between them."""

_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}
"""botocore's, by name: it is imported only where S3 is used."""


@dataclass(frozen=True)
class RemoteStore:
    """A prefix of an object store that fsspec reaches (``s3://`` is the tested one)."""

    url: str

    access: ClassVar[Access] = Access(
        # At 100 MB/s, 256 KiB take 3 ms. A request of their own would take 20 ms.
        max_gap_bytes=256 * 1024,
        # Long enough for full bandwidth, short enough to read several at once.
        max_range_bytes=8 * 1024 * 1024,
        # At 20 ms a request and 100 MB/s, reading 1 MiB takes half a round trip.
        min_header_read_bytes=1024 * 1024,
        max_header_read_bytes=8 * 1024 * 1024,
        concurrent=True,
    )

    def url_of(self, name: str) -> str:
        """Return the URL of an object, whether it exists or not."""
        return join_url(self.url, name)

    def local_path(self, name: str) -> None:
        """Return None: an object behind a URL is no file of this machine."""

    def read(self, name: str) -> bytes:
        """Return a whole object.

        Raises:
            FileNotFoundError: no such object.
            StorageError: the storage failed after retries.
        """
        url = self.url_of(name)
        return cast(bytes, _retry(url, lambda: _client(self.url).cat_file(url)))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return exactly bytes [start, stop) of an object; errors as `read`."""
        return _value(self.read_ranges([(name, start, stop)])[0])

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes | OSError]:
        """Return the bytes of every range, read in parallel, or the error in its place.

        Ranges that fail or come back short are asked for again, together.
        """
        found: dict[int, bytes | OSError] = {
            i: b"" for i, (_, start, stop) in enumerate(ranges) if stop <= start
        }

        def call() -> None:
            left = [i for i in range(len(ranges)) if i not in found]
            if not left:
                return
            names, starts, stops = zip(*(ranges[i] for i in left), strict=True)
            urls = [self.url_of(name) for name in names]
            answers = _client(self.url).cat_ranges(urls, list(starts), list(stops))
            faults: list[Exception] = []
            for i, answer in zip(left, answers, strict=True):
                final = self._judge(*ranges[i], answer)
                if final is not None:
                    found[i] = final
                elif isinstance(answer, Exception):
                    faults.append(answer)
                else:
                    faults.append(OSError(f"{len(answer)} bytes came of {ranges[i]}"))
            if faults:  # one stands for all; only those without an answer are asked for again
                raise faults[0]

        names = {name for name, _, _ in ranges}
        try:
            _retry(self.url_of(names.pop()) if len(names) == 1 else self.url, call)
        except OSError as error:
            return [found.get(i, error) for i in range(len(ranges))]
        return [found[i] for i in range(len(ranges))]

    def _judge(self, name: str, start: int, stop: int, answer: object) -> bytes | OSError | None:
        """Return what is final about the answer to one range; None: it must be asked for again."""
        if isinstance(answer, bytes) and len(answer) == stop - start:
            return answer
        url = self.url_of(name)
        if isinstance(answer, FileNotFoundError):
            return FileNotFoundError(f"{url}: no such object")
        # Less than was asked for: past the end, where S3 also says "invalid range", or cut off.
        if isinstance(answer, bytes) or getattr(answer, "errno", None) == errno.EINVAL:
            size = self.size(name)
            if size < stop:
                return StorageError(f"{url}: ends {stop - size} bytes before {stop}")
        return None

    def size(self, name: str) -> int:
        """Return an object's size in bytes; errors as `read`."""
        url = self.url_of(name)
        info = _retry(url, lambda: _client(self.url).info(url, refresh=True))
        if info["type"] != "file":  # a prefix of other objects
            raise FileNotFoundError(f"{url}: no such object")
        return int(info["size"])

    def exists(self, name: str) -> bool:
        """Tell whether an object of this name exists."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def list(self) -> dict[str, int]:
        """Return {name: size in bytes} of what lies directly under the root, sorted by name.

        Names that start with a dot are left out.
        """
        try:
            found = _retry(self.url, lambda: _client(self.url).ls(self.url, detail=True))
        except FileNotFoundError:
            return {}
        root = self.url.partition("://")[2] + "/"
        names = [entry["name"].lstrip("/") for entry in found]  # some file systems add a slash
        files = {
            name.removeprefix(root): int(entry["size"])
            for name, entry in zip(names, found, strict=True)
            if entry["type"] == "file" and name.startswith(root)
        }
        return dict(sorted(item for item in files.items() if item[0] and item[0][0] != "."))

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a new object for writing; it appears whole when the block ends, or not at all.

        The bytes go to a local temporary file first, then up in one (multipart) upload.
        """
        url = self.url_of(name)
        with tempfile.TemporaryDirectory(prefix="mmstream-") as folder:
            local = Path(folder, "object")
            with local.open("wb") as file:
                yield file
            _retry(url, lambda: _client(self.url).put_file(str(local), url))

    def write(self, name: str, data: bytes) -> None:
        """Write one object, whole or not at all."""
        url = self.url_of(name)
        _retry(url, lambda: _client(self.url).pipe_file(url, data))

    def remove(self, name: str) -> None:
        """Remove an object; one that is absent is fine."""
        url = self.url_of(name)
        try:
            _retry(url, lambda: _client(self.url).rm_file(url))
        except FileNotFoundError:
            return


_HINT = " (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws; AWS_ENDPOINT_URL)"


def _client(url: str) -> Any:
    """Return this process's fsspec file system for a URL, as the environment is now."""
    settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    return _client_of(url.partition("://")[0], os.getpid(), settings)


@lru_cache(maxsize=8)
def _client_of(scheme: str, _pid: int, _settings: tuple[tuple[str, str], ...]) -> Any:
    """Make a file system. One serves all threads, where fsspec's own cache has one for each."""
    import fsspec

    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "s3":
        options["config_kwargs"] = {
            "max_pool_connections": 32,
            "connect_timeout": 10,
            "retries": {"max_attempts": 0},
        }
    try:
        client = fsspec.filesystem(scheme, **options)
    except ImportError as error:  # fsspec's words name the package
        raise ConfigError(f"{scheme}://: {error}") from error
    client.retries = 1  # s3fs'; with botocore's and ours, a dead server would be asked 125 times
    return client


def _retry(url: str, call: Callable[[], T]) -> T:
    """Run a remote call until it answers: the one place that retries.

    An absent object, missing rights and a caller's mistake are answers; anything else is taken for
    a passing fault and tried MAX_ATTEMPTS times.
    """
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return call()
        except (StorageError, ConfigError):  # of a call within the call
            raise
        except FileNotFoundError as error:
            absent = "bucket" if "bucket does not exist" in str(error) else "object"
            raise FileNotFoundError(f"{url}: no such {absent}") from None
        except ValueError as error:
            raise ConfigError(f"{url}: {error}") from error
        except (TypeError, ImportError, AttributeError, MemoryError):
            raise
        except Exception as error:
            kind = type(error).__name__
            if kind == "ParamValidationError":
                raise ConfigError(f"{url}: {error}") from error
            if isinstance(error, PermissionError) or kind in _NO_CREDENTIALS:
                raise StorageError(f"{url}: {error}; check the credentials{_HINT}") from error
            if attempt == MAX_ATTEMPTS:
                raise StorageError(
                    f"{url}: failed {attempt} times, last {kind}: {error}"
                ) from error
            pause = 0.2 * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
            logger.info("%s: %s; again in %.1f s", url, error, pause)
            time.sleep(pause)
    raise AssertionError("unreachable")


def _value(found: bytes | OSError) -> bytes:
    if isinstance(found, OSError):
        raise found
    return found
