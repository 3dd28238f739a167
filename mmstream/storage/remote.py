"""Storage: a prefix of an object store, through fsspec.

A request that fails for a passing reason is sent again, see `mmstream.storage.retry`.

Clients are made at the first call. There is one per process and set of ``AWS_*`` variables, because
a client does not survive a fork. So a store that was used in the main process also works in a
worker.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import sys
import tempfile
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, NoReturn, TypeVar, cast

from mmstream.errors import ConfigError, StorageError
from mmstream.storage.responses import (
    number_of_bytes,
    plain_error,
    plain_s3_error,
    range_stat,
    refusal_of,
    require_object,
    version_of,
    without_secrets,
)
from mmstream.storage.retry import health_of, retry
from mmstream.storage.s3_endpoint import session_options
from mmstream.storage.store import (
    Access,
    CommonCalls,
    ObjectStat,
    Range,
    ReplacedError,
    RequestError,
    map_requests,
    require_known,
    require_size,
)
from mmstream.storage.upload import pages_of, remove_uploads, send_with, upload

T = TypeVar("T")

REQUEST_TIMEOUT_S = 180.0
"""Of a request that writes. It lets 8 parts of 8 MiB pass a link of 3 Mb/s side by side."""

_READ_ONLY = {
    "http": "write to a folder, and let the server serve that",
    "https": "write to a folder, and let the server serve that",
    "hf": "write to a folder, then `hf upload` it",
}

_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}
"""What must be installed for a scheme, beside what mmstream itself needs."""

_SETTINGS = ("AWS_", "AZURE_", "GOOGLE_", "GCSFS_", "HF_", "STORAGE_EMULATOR_HOST")
"""Beginnings of the environment variables that clients are made by."""

MAX_REQUESTS_IN_FLIGHT = 128
"""Ranges of one call that are requested at a time. A client has fewer connections than that."""

MAX_THREADS = 16
"""Ranges of one call that are requested at a time by a client that takes one request a thread."""

_CONDITION_FAILED = (412, 404)
"""Statuses of S3: the object is not the one that was expected, or it is gone."""


@dataclass(frozen=True)
class RemoteStore(CommonCalls):
    """A prefix of an object store that fsspec reaches. ``s3://`` is the tested one."""

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

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.url, health_of(self.url).has_answered)

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Return a whole object.

        Raises:
            FileNotFoundError: No such object.
            StorageError: The object has more than `max_bytes`, or the storage failed after retries.
        """
        url = self.url_of(name)
        if self._is_s3:
            return self._retry(url, lambda client: _read_object(client, url, max_bytes))
        if self._is_web:
            return self._retry(url, lambda client: _read_on_web(client, url, max_bytes))
        if max_bytes is not None:
            require_size(url, self.size(name), max_bytes)

        def read(client: Any) -> bytes:
            data = cast(bytes, client.cat_file(url))
            require_object(url, {}, data)
            return data

        return self._retry(url, read)

    def read_ranges(
        self, ranges: Sequence[Range], expected: MutableMapping[str, ObjectStat] | None = None
    ) -> list[bytes | OSError]:
        """Return the bytes of every range, or the error in its place. All are read in parallel.

        Ranges that fail or come back short are requested again, together.
        """
        outcomes: dict[int, bytes | OSError] = {
            i: b"" for i, (_, start, stop) in enumerate(ranges) if stop <= start
        }

        def request_missing() -> None:
            missing = [i for i in range(len(ranges)) if i not in outcomes]
            if not missing:
                return
            responses = self._request([ranges[i] for i in missing])
            if any(isinstance(response, RangeResponse) for response in responses):
                health_of(self.url).answered()
            faults: list[Exception] = []
            for i, response in zip(missing, responses, strict=True):
                try:
                    outcome = self._outcome(*ranges[i], response, expected)
                except ReplacedError as error:
                    outcome = error
                if outcome is not None:
                    outcomes[i] = outcome
                elif isinstance(response, Exception):
                    faults.append(response)
                else:
                    faults.append(OSError(f"{len(response.data)} bytes came of {ranges[i]}"))
            if faults:
                # The first one stands for all. `retry` calls again, for ranges without an outcome.
                raise faults[0]

        names = {name for name, _, _ in ranges}
        try:
            retry(self.url_of(names.pop()) if len(names) == 1 else self.url, request_missing)
        except OSError as error:
            return [outcomes.get(i, error) for i in range(len(ranges))]
        return [outcomes[i] for i in range(len(ranges))]

    def _request(self, ranges: Sequence[Range]) -> list[RangeResponse | Exception]:
        """Request ranges once, side by side."""
        client = _client(self.url)
        urls = [self.url_of(name) for name, _, _ in ranges]
        bounds = [(start, stop) for _, start, stop in ranges]
        if self._is_s3:
            return self._request_s3(client, urls, bounds)
        request = _read_ranges_on_web if self._is_web else _read_by_fsspec
        return [
            plain_error(response) if isinstance(response, Exception) else response
            for response in request(client, urls, bounds)
        ]

    def _request_s3(
        self, client: Any, urls: Sequence[str], bounds: Sequence[tuple[int, int]]
    ) -> list[RangeResponse | Exception]:
        """Request ranges, and those again once for which credentials must be read again."""
        responses = _read_ranges(client, urls, bounds)
        refused = [i for i, response in enumerate(responses) if _needs_credentials(response)]
        if refused:
            _forget(self.url, client)
            again = _read_ranges(
                _client(self.url), [urls[i] for i in refused], [bounds[i] for i in refused]
            )
            for i, response in zip(refused, again, strict=True):
                responses[i] = response
        health = health_of(self.url)
        return [
            plain_s3_error(url, response, health) if isinstance(response, Exception) else response
            for url, response in zip(urls, responses, strict=True)
        ]

    def _outcome(
        self,
        name: str,
        start: int,
        stop: int,
        response: RangeResponse | Exception,
        expected: MutableMapping[str, ObjectStat] | None,
    ) -> bytes | OSError | None:
        """Return the bytes of a range, or its final error. None: it must be requested again.

        Raises:
            ReplacedError: The object is not the expected one.
        """
        url = self.url_of(name)
        if isinstance(response, FileNotFoundError):
            return FileNotFoundError(f"{url}: no such object")
        if isinstance(response, StorageError):
            return response
        current = response.stat if isinstance(response, RangeResponse) else None
        if current is not None:
            require_known(url, name, current, expected)
        if isinstance(response, RangeResponse) and len(response.data) == stop - start:
            return response.data
        # Fewer bytes than requested: the range goes past the end (S3 may also answer "invalid
        # range"), or the connection broke. The size tells which.
        if isinstance(response, RangeResponse) or getattr(response, "errno", None) == errno.EINVAL:
            current = current or self.stat(name)
            require_known(url, name, current, expected)
            if current.size < stop:
                return StorageError(f"{url}: ends {stop - current.size} bytes before {stop}")
        return None

    @property
    def _is_s3(self) -> bool:
        return self.url.startswith("s3://")

    @property
    def _is_web(self) -> bool:
        return self.url.startswith(("http://", "https://"))

    def _retry(self, url: str, call: Callable[[Any], T]) -> T:
        """Call a function with the client, and again when it fails for a passing reason."""
        return retry(url, lambda: self._call(url, call))

    def _call(self, url: str, call: Callable[[Any], T]) -> T:
        """Call a function with the client. Errors of libraries become those of this package.

        Credentials that S3 refuses are read again, and the function is called once more: somebody
        may have renewed them since the client was made.
        """
        client = _client(self.url)
        try:
            return call(client)
        except Exception as error:
            if not (self._is_s3 and _needs_credentials(error)):
                self._raise_plain(url, error)
        _forget(self.url, client)
        try:
            return call(_client(self.url))
        except Exception as error:
            self._raise_plain(url, error)

    def _raise_plain(self, url: str, error: Exception) -> NoReturn:
        """Raise an error without the classes of a library, and without its secrets."""
        if self._is_s3:
            plain, cause = plain_s3_error(url, error, health_of(self.url)), error
        else:
            plain, cause = plain_error(error), None
        if plain is error:
            raise error
        raise plain from cause

    def _send(self, url: str, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one request about an object in S3, and return the response."""
        return self._call(url, lambda client: _request(client, url, method, **parameters))

    def _require_writable(self, url: str) -> None:
        scheme = self.url.partition("://")[0]
        if scheme in _READ_ONLY:
            raise ConfigError(f"{url}: {scheme}:// can only be read; {_READ_ONLY[scheme]}")

    def stat(self, name: str) -> ObjectStat:
        """Return the size and the version of an object; errors as `read`."""
        url = self.url_of(name)
        if self._is_web:
            return self._retry(url, lambda client: _head_on_web(client, url))
        if self._is_s3:
            response = retry(url, lambda: self._send(url, "head_object"))
            return ObjectStat(int(response["ContentLength"]), version_of(_headers(response)))
        info = self._retry(url, lambda client: client.info(url, refresh=True))
        if info["type"] != "file":  # a prefix of other objects
            raise FileNotFoundError(f"{url}: no such object")
        return self._object_stat(info)

    def list(self) -> dict[str, ObjectStat]:
        """Return the objects directly under the root by their names, sorted by name.

        Names that start with a dot are left out.

        Raises:
            FileNotFoundError: No such bucket. A prefix without objects gives an empty dict.
            StorageError: The storage failed after retries.
        """
        root = self._listed_root()
        files: dict[str, Mapping[str, Any]] = {}
        for entry in self._entries():
            path = entry["name"].lstrip("/")  # some file systems begin with a slash
            name = path.removeprefix(root)
            is_here = name != path and name and not name.startswith(".") and "/" not in name
            if entry["type"] == "file" and is_here:
                files[name] = entry
        # The page that lists a folder of a web server names files and not their sizes.
        unsized = [name for name in files if self._is_web or files[name].get("size") is None]
        stats = dict(zip(unsized, map_requests(self, self.stat, unsized), strict=True))
        return {name: stats.get(name) or self._object_stat(files[name]) for name in sorted(files)}

    def folders(self) -> Sequence[str]:
        """Return the names of the folders directly under the root, sorted; errors as `list`."""
        root = self._listed_root()
        paths = [
            entry["name"].strip("/") for entry in self._entries() if entry["type"] == "directory"
        ]
        names = [path.removeprefix(root) for path in paths if path.startswith(root)]
        return sorted(name for name in names if name and not name.startswith("."))

    def _entries(self) -> Sequence[Mapping[str, Any]]:
        try:
            return self._retry(
                self.url,
                lambda client: (
                    _list(client, self.url) if self._is_s3 else client.ls(self.url, detail=True)
                ),
            )
        except FileNotFoundError as error:
            if str(error).endswith("no such bucket"):
                raise
            return []

    def _listed_root(self) -> str:
        """Return the root as entries of a listing name it."""
        return str(_client(self.url)._strip_protocol(self.url).strip("/") + "/")

    def _object_stat(self, info: Mapping[str, Any]) -> ObjectStat:
        # Other file systems than S3's do not say which version a range was read from.
        version = version_of({"etag": info.get("ETag") or ""}) if self._is_s3 else None
        return ObjectStat(int(info["size"]), version)

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a new object for writing; it appears whole when the block ends, or not at all.

        In S3, parts are sent while the object is written. Elsewhere, the bytes go to a local
        temporary file first.
        """
        url = self.url_of(name)
        if self._is_s3:
            with upload(url, partial(self._send, url)) as file:
                yield file
            return
        self._require_writable(url)
        with tempfile.TemporaryDirectory(prefix="mmstream-") as folder:
            path = Path(folder, "object")
            with path.open("wb") as file:
                yield file
            self._retry(url, lambda client: client.put_file(str(path), url))

    def write(self, name: str, data: bytes) -> None:
        """Write one object, whole or not at all."""
        url = self.url_of(name)
        if not self._is_s3:
            self._require_writable(url)
            options: dict[str, Any] = {}
            if self.url.startswith(("gs://", "gcs://")) and data.endswith(b"\r"):
                # gcsfs' upload in one request writes "\n--" after it: the server takes both for
                # the end of a line, and the object loses its last byte. In chunks it is right.
                options["chunksize"] = len(data)
            self._retry(url, lambda client: client.pipe_file(url, data, **options))
        else:
            with self.create(name) as file:
                file.write(data)

    def remove_uploads(self, names: str) -> None:
        """Remove the parts that killed processes left in S3 of objects that never appeared.

        Only for whoever knows that no other process writes these objects.

        Args:
            names: A regular expression for the names of the objects.
        """
        if self._is_s3:
            remove_uploads(self.url, self._send, names)

    def write_if(self, name: str, data: bytes, version: str | None) -> bool:
        """Write one small object if nobody else wrote it meanwhile. Return whether it was written.

        S3 decides, if the server knows conditional writes. Other storage just writes, and so does a
        server that refuses or ignores conditions.

        Args:
            name: Of the object.
            data: Its content.
            version: What `stat` said of the object that is replaced. None: there must be none.
        """
        url = self.url_of(name)
        if not self._is_s3:
            self.write(name, data)
            return True
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": f'"{version}"'}

        def request() -> bool:
            try:
                send_with(partial(self._send, url), "put_object", condition, Body=io.BytesIO(data))
            except Exception as error:
                refusal = refusal_of(error)
                if refusal is None or refusal.status not in _CONDITION_FAILED:
                    raise
                if refusal.code == "NoSuchBucket":
                    raise
                return False
            return True

        return retry(url, request)

    def remove(self, name: str) -> None:
        """Remove an object. It is not an error when there is none."""
        url = self.url_of(name)
        self._require_writable(url)
        with suppress(FileNotFoundError):
            self._retry(url, lambda client: client.rm_file(url))


def _restore(kind: type[RemoteStore], url: str, has_answered: bool) -> RemoteStore:
    """Make a store from its pickle. A worker has the patience of the process that started it."""
    health_of(url).has_answered |= has_answered
    return kind(url)


class RangeResponse(NamedTuple):
    """The response to the request of a range."""

    data: bytes
    stat: ObjectStat | None
    """The object that it is a range of. None: the storage did not say."""


def _read_ranges(
    client: Any, urls: Sequence[str], bounds: Sequence[tuple[int, int]]
) -> list[RangeResponse | Exception]:
    """Request ranges of objects in S3, side by side.

    `cat_ranges` of s3fs sends the same requests, but it drops what the responses say of the object.
    """
    health = health_of(urls[0])

    async def read_range(url: str, start: int, stop: int) -> RangeResponse:
        bucket, key, _ = client.split_path(url)
        response = await client._call_s3(
            "get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}"
        )
        status = response["ResponseMetadata"]["HTTPStatusCode"]
        try:  # `async with` would cost 0.1 ms more
            stat = range_stat(url, status, _headers(response), start, stop, health)
            return RangeResponse(await response["Body"].read(), stat)
        finally:
            response["Body"].close()

    return _side_by_side(client, read_range, urls, bounds, MAX_REQUESTS_IN_FLIGHT)


def _read_object(client: Any, url: str, max_bytes: int | None) -> bytes:
    """Request a whole object in S3."""
    bucket, key, _ = client.split_path(url)

    async def read() -> bytes:
        response = await client._call_s3("get_object", Bucket=bucket, Key=key)
        async with response["Body"] as body:
            data = await _read_body(url, _headers(response), body, max_bytes)
        size = number_of_bytes(_headers(response))
        if size not in (None, len(data)):
            raise OSError(f"{len(data)} bytes came of {size}")
        return data

    return _run(client, read)


def _list(client: Any, url: str) -> list[Mapping[str, Any]]:
    """List what lies directly under a prefix in S3, as fsspec names it.

    s3fs takes each page as it comes: one without sizes, or without the next one, is an error there.
    """
    bucket, prefix, _ = client.split_path(f"{url}/")
    request = partial(_request, client, url, "list_objects_v2", Prefix=prefix, Delimiter="/")
    entries: list[Mapping[str, Any]] = []
    for page in pages_of(request, {"ContinuationToken": "NextContinuationToken"}):
        entries += [
            {"type": "file", "name": f"{bucket}/{item['Key']}", "size": item.get("Size"), **item}
            for item in page.get("Contents", ())
            if "Key" in item
        ]
        entries += [
            {"type": "directory", "name": f"{bucket}/{item['Prefix']}"}
            for item in page.get("CommonPrefixes", ())
            if "Prefix" in item
        ]
    return entries


async def _read_body(
    url: str, headers: Mapping[str, str], body: Any, max_bytes: int | None
) -> bytes:
    """Read a whole object. Its size comes first, mostly, and is compared first."""
    require_size(url, number_of_bytes(headers) or 0, max_bytes)
    pieces, left = [], sys.maxsize if max_bytes is None else max_bytes + 1
    while left and (piece := await body.read(left)):
        pieces.append(piece)
        left -= len(piece)
    data = b"".join(pieces)
    require_size(url, len(data), max_bytes)
    require_object(url, headers, data)
    return data


def _request(client: Any, url: str, method: str, **parameters: Any) -> dict[str, Any]:
    """Send one request about an object in S3, and return the response."""
    bucket, key, _ = client.split_path(url)
    if "Body" in parameters:
        parameters["Body"].seek(0)  # it may have been sent before

    async def send() -> dict[str, Any]:
        # s3fs drops the key where a method takes none.
        call = client._call_s3(method, Bucket=bucket, Key=key, **parameters)
        try:
            response = cast(dict[str, Any], await asyncio.wait_for(call, REQUEST_TIMEOUT_S))
        except TimeoutError as error:
            raise OSError(f"{method} took more than {REQUEST_TIMEOUT_S:.0f} s") from error
        if method == "head_object":
            require_object(url, _headers(response))
            if number_of_bytes(_headers(response)) is None:
                raise RequestError("the server does not say the size", may_be_final=True)
        return response

    return _run(client, send)


def _read_by_fsspec(
    client: Any, urls: Sequence[str], bounds: Sequence[tuple[int, int]]
) -> list[RangeResponse | Exception]:
    """Request ranges by a client of fsspec that says nothing of the objects that they are of."""

    async def request_range(url: str, start: int, stop: int) -> RangeResponse:
        return RangeResponse(await client._cat_file(url, start=start, end=stop), None)

    if client.async_impl:
        return _side_by_side(client, request_range, urls, bounds, MAX_REQUESTS_IN_FLIGHT)

    def read_range(url: str, bound: tuple[int, int]) -> RangeResponse | Exception:
        try:
            return RangeResponse(client.cat_file(url, *bound, cache_type="none"), None)
        except Exception as error:
            return error

    with ThreadPoolExecutor(MAX_THREADS, "mmstream-ranges") as threads:
        return list(threads.map(read_range, urls, bounds))


def _side_by_side(
    client: Any,
    read_range: Callable[[str, int, int], Awaitable[RangeResponse]],
    urls: Sequence[str],
    bounds: Sequence[tuple[int, int]],
    max_in_flight: int,
) -> list[RangeResponse | Exception]:
    """Request ranges in the event loop of a client. Errors are values."""

    async def read_one(limit: asyncio.Semaphore, url: str, start: int, stop: int) -> RangeResponse:
        async with limit:
            return await read_range(url, start, stop)

    async def read_all() -> Any:
        limit = asyncio.Semaphore(max_in_flight)
        requests = (read_one(limit, url, *bound) for url, bound in zip(urls, bounds, strict=True))
        return await asyncio.gather(*requests, return_exceptions=True)

    return _run(client, read_all)


def _run(client: Any, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Call a function in the event loop of a client, and wait for its result."""
    from fsspec.asyn import sync

    return cast(T, sync(client.loop, function))


def _headers(response: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the headers of a response of S3, by names in lower case."""
    headers: Mapping[str, str] = response["ResponseMetadata"]["HTTPHeaders"]
    return headers


def _needs_credentials(response: object) -> bool:
    """Tell whether S3 refused access."""
    refusal = refusal_of(response) if isinstance(response, Exception) else None
    return refusal is not None and refusal.remedy == "credentials"


def _forget(url: str, client: Any) -> None:
    """Make a new client at the next call, unless somebody did so meanwhile."""
    if _client(url) is client:
        _client_of.cache_clear()


def _client(url: str) -> Any:
    """Return this process's fsspec file system for a URL, for the current environment."""
    settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith(_SETTINGS)))
    return _client_of(url.partition("://")[0], os.getpid(), settings)


@lru_cache(maxsize=8)
def _client_of(scheme: str, _pid: int, _settings: tuple[tuple[str, str], ...]) -> Any:
    """Make a file system that serves all threads; fsspec's own cache would make one for each."""
    import fsspec

    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "s3":
        options.update(session_options())
    elif scheme in ("http", "https"):
        options.update(_web_options())
    elif scheme == "hf":
        options["endpoint"] = os.environ.get("HF_ENDPOINT")
    try:
        client = fsspec.filesystem(scheme, **options)
    except ImportError as error:
        command = f"pip install {_PACKAGES[scheme]}" if scheme in _PACKAGES else str(error)
        raise ConfigError(f"{scheme}:// needs another package: {command}") from error
    except (ValueError, TypeError) as error:  # TypeError: it needs more than a URL, such as a host
        raise ConfigError(
            f"{scheme}://: {without_secrets(error)}; give a local folder, or a URL of s3://, "
            "gs://, az://, hf:// or https://"
        ) from None
    # s3fs and botocore would retry too: 5 * 5 * 5 requests to a server that is down.
    client.retries = 1
    return client


# -- requests to a plain web server ----------------------------------------------------------------
#
# fsspec sends them too, but it drops what the responses say: a server that is down would be an
# absent object, and a server that ignores ranges would send whole shards. Here a 206 is a range, a
# 200 is none, and `ObjectStat` has the size and the ETag of the response.
#
# The client is fsspec's, so its connections and its event loop are shared with all other requests.

MAX_WEB_REQUESTS = 64
"""Ranges of one call that are requested of a web server at a time."""

_AS_IT_IS = {"Accept-Encoding": "identity"}


def _web_options() -> dict[str, Any]:
    """Return the settings of fsspec's file system for web servers.

    Passwords come from ``~/.netrc``, and proxies from the environment.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}}


def _head_on_web(client: Any, url: str) -> ObjectStat:
    """Return the size and the ETag of an object.

    Raises:
        StorageError: The server does not say the size.
        Exception: The request failed.
    """

    async def request() -> ObjectStat:
        session = await client.set_session()
        settings = {"headers": _AS_IT_IS, "allow_redirects": True}
        async with session.head(client.encode_url(url), **settings) as response:
            response.raise_for_status()
            require_object(url, response.headers)
            size = number_of_bytes(response.headers)
            if size is None:
                raise StorageError(f"{url}: the server does not say its size; download it first")
            return ObjectStat(size, version_of(response.headers))

    return _run(client, request)


def _read_on_web(client: Any, url: str, max_bytes: int | None) -> bytes:
    """Return a whole object; errors as `_head_on_web`. One with more bytes is a TooLargeError."""

    async def request() -> bytes:
        session = await client.set_session()
        async with session.get(client.encode_url(url), headers=_AS_IT_IS) as response:
            response.raise_for_status()
            return await _read_body(url, response.headers, response.content, max_bytes)

    return _run(client, request)


def _read_ranges_on_web(
    client: Any, urls: Sequence[str], bounds: Sequence[tuple[int, int]]
) -> list[RangeResponse | Exception]:
    """Request ranges once, side by side. Return the response to each of them, or its error."""
    health = health_of(urls[0])

    async def read_range(url: str, start: int, stop: int) -> RangeResponse:
        headers = {**_AS_IT_IS, "Range": f"bytes={start}-{stop - 1}"}
        session = await client.set_session()
        async with session.get(client.encode_url(url), headers=headers) as response:
            response.raise_for_status()
            stat = range_stat(url, response.status, response.headers, start, stop, health)
            return RangeResponse(await response.read(), stat)

    return _side_by_side(client, read_range, urls, bounds, MAX_WEB_REQUESTS)
