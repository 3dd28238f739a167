"""Storage: one new object in S3, sent in parts while it is still being written.

    shard, checkpoint -> `RemoteStore.create` -> UPLOAD -> S3

A part is sent as soon as it is full. Several are under way side by side, and each is tried again
alone, see `mmstream.storage.retry`. The object appears when all parts have arrived; after an
error, the parts are removed. An object of one part at most is one plain PUT.

Every part has a CRC-32C, and so has the whole object, where the server knows them. It then refuses
bytes that changed on the way. Other servers get the MD5 of every part.

A killed process leaves the parts that it sent. They are in no listing, but they take room.
`remove_uploads` removes them, which whoever holds the lock of a prefix calls. Otherwise a lifecycle
rule of the bucket does.

Example: 20 MiB are parts of 8, 8 and 4 MiB. The first one is sent when byte 8,388,608 is written.
"""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, BinaryIO, TypeAlias, cast

from crc32c import crc32c

from mmstream.errors import StorageError, escaped
from mmstream.storage.responses import refusal_of
from mmstream.storage.retry import retry
from mmstream.storage.store import RequestError, join_url, key_of

logger = logging.getLogger(__name__)

PART_BYTES = 8 << 20
"""Bytes of a part. S3 takes 5 MiB to 5 GiB, and short parts need few bytes of memory."""

PARTS_OF_A_SIZE = 2500
"""After so many parts, parts are twice as long."""

MAX_PARTS = 10_000
"""Of an object in S3: 314 GB, with parts of 8, 16, 32 and 64 MiB."""

MAX_PARTS_IN_FLIGHT = 8
"""Parts that are sent at a time. With the one being filled, they are the memory of an upload. At
50 ms to the response and 40 MB/s a connection, 8 parts of 8 MiB send 260 MB/s."""

_UNKNOWN_HEADER = ("NotImplemented", "InvalidArgument", "InvalidRequest")
"""Codes of servers that refuse a header which they do not know. Most of them ignore it.

Other codes of status 400, such as RequestTimeout, pass: what was a condition stays one.
"""

Request: TypeAlias = Callable[..., dict[str, Any]]
"""Sends one request about the object: ``request("upload_part", PartNumber=1, Body=file)``."""


@contextmanager
def upload(url: str, request: Request) -> Iterator[BinaryIO]:
    """Open a new object in S3 for writing. It appears whole when the block ends, or not at all.

    Args:
        url: Of the object, for messages.
        request: Sends one request about the object. It is called by several threads.

    Yields:
        A file that takes `write`, `flush` and `tell`, front to back.

    Raises:
        StorageError: A request failed after retries, or the object is not what was written.
    """
    file = Upload(url, request)
    try:
        yield cast(BinaryIO, file)
        file.complete()
    except BaseException:
        file.abort()
        raise


def put_object(url: str, request: Request, data: bytes) -> None:
    """Write an object of up to `PART_BYTES` by one request, with its CRC-32C."""

    def put() -> None:
        checksum = {"ChecksumCRC32C": _encoded(crc32c(data))}
        response = send_with(request, "put_object", checksum, _md5(data), Body=io.BytesIO(data))
        if not response.get("ETag"):  # S3 gives one, and what answers in its place does not
            size = request("head_object").get("ContentLength", len(data))
            if size != len(data):
                raise RequestError(f"{size} bytes are there of {len(data)} that were written")

    retry(url, put)


def send_with(
    request: Request,
    method: str,
    optional: Mapping[str, Any],
    instead: Mapping[str, Any] | None = None,
    **parameters: Any,
) -> dict[str, Any]:
    """Send a request with optional headers. A server that refuses it gets it without them.

    Args:
        request: Sends one request about an object.
        method: Of the request.
        optional: What not all servers know, such as checksums and conditions.
        instead: What goes with the second request.
        parameters: Of both.
    """
    try:
        return request(method, **parameters, **optional)
    except Exception as error:
        refusal = refusal_of(error)
        is_unknown = refusal is not None and (
            refusal.status == 501 or refusal.code in _UNKNOWN_HEADER
        )
        if not optional or not is_unknown:
            raise
    return request(method, **parameters, **(instead or {}))


def remove_uploads(url: str, send: Callable[..., dict[str, Any]], names: str) -> None:
    """Remove the parts that killed processes left of objects under a prefix.

    Only for whoever knows that no other process writes these objects: it ends their uploads. What
    the server refuses stays, for a lifecycle rule of the bucket.

    Args:
        url: Of the prefix.
        send: Sends one request about an object: ``send(url, "abort_multipart_upload", ...)``.
        names: A regular expression for names relative to the prefix. Uploads of other objects stay.
    """
    prefix = key_of(join_url(url, "name")).removesuffix("name")
    try:
        markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        request = partial(send, url, "list_multipart_uploads", Prefix=prefix)
        pages = pages_of(request, markers)
        for left in chain.from_iterable(page.get("Uploads", ()) for page in pages):
            name = left["Key"].removeprefix(prefix)
            if re.fullmatch(names, name):
                send(join_url(url, name), "abort_multipart_upload", UploadId=left["UploadId"])
                logger.info("%s: removed an upload that did not end", escaped(join_url(url, name)))
    except Exception as error:  # such as without the right to list
        logger.info("%s: uploads that did not end may stay: %s", escaped(url), escaped(error))


def pages_of(request: Request, markers: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the pages of a list in S3.

    Args:
        request: Asks for one page.
        markers: Parameters that say where a page begins, and what the page before calls them.

    Raises:
        RequestError: A page says that more follow, and not where.
    """
    begin: dict[str, str] = {}
    while True:
        page = request(**begin)
        yield page
        if not page.get("IsTruncated"):
            return
        following = {name: page.get(key, "") for name, key in markers.items()}
        if following == begin or not any(following.values()):
            raise RequestError("a page of the list says that more follow, and not where")
        begin = following


class Upload:
    """A file that becomes an object in S3. `upload` opens and ends it.

    Args:
        url: Of the object, for messages.
        request: Sends one request about the object.
    """

    def __init__(self, url: str, request: Request) -> None:
        self._url, self._request = url, request
        self._buffer = io.BytesIO()
        self._num_bytes = 0
        self._checksum = 0
        """CRC-32C of all bytes in parts so far."""
        self._id: str | None = None
        self._has_checksums = False
        self._is_ended = False
        self._room = threading.BoundedSemaphore(MAX_PARTS_IN_FLIGHT)
        self._parts: list[Future[dict[str, Any]]] = []
        self._threads: ThreadPoolExecutor | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes. Waits while `MAX_PARTS_IN_FLIGHT` parts are under way.

        Raises:
            StorageError: A part could not be sent.
        """
        remaining = memoryview(data).cast("B")
        num_bytes = len(remaining)
        while len(remaining):
            room = (PART_BYTES << len(self._parts) // PARTS_OF_A_SIZE) - self._buffer.tell()
            if not room:  # a full part is sent when another one follows
                self._send()
                continue
            self._buffer.write(remaining[:room])
            remaining = remaining[room:]
        return num_bytes

    def flush(self) -> None:
        """Do nothing: a part is sent when it is full."""

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._num_bytes + self._buffer.tell()

    def complete(self) -> None:
        """Send what is left, and have the object appear."""
        if self._id is None:
            put_object(self._url, self._request, self._buffer.getvalue())
            self._is_ended = True
            return
        self._send()
        parts = [part.result() for part in self._parts]
        self._end()
        checksum = _encoded(self._checksum)
        whole = {"ChecksumCRC32C": checksum, "ChecksumType": "FULL_OBJECT"}
        try:
            retry(
                self._url,
                lambda: self._request(
                    "complete_multipart_upload",
                    UploadId=self._id,
                    MultipartUpload={"Parts": parts},
                    **(whole if self._has_checksums else {}),
                ),
            )
            is_answered = True
        except FileNotFoundError:
            # A first request may have done it, and its answer was lost. The object tells.
            is_answered = False
        self._id = None
        retry(self._url, lambda: self._require_object(checksum, None if is_answered else parts))

    def abort(self) -> None:
        """Remove the parts that were sent. There is no object then. Raises nothing."""
        self._end()
        if self._id is None:
            return
        try:
            retry(self._url, lambda: self._request("abort_multipart_upload", UploadId=self._id))
        except FileNotFoundError:
            pass
        except Exception as error:
            logger.warning(
                "%s: parts of an upload that failed stay in the bucket, because %s",
                escaped(self._url),
                escaped(error),
            )

    def _send(self) -> None:
        """Hand the part that is full to a thread, and begin the next one."""
        if self._id is None:
            self._start()
        if len(self._parts) == MAX_PARTS:
            raise StorageError(f"{self._url}: {self._num_bytes} bytes are the most for one object")
        self._room.acquire()
        for part in self._parts:
            if part.done():
                part.result()  # raises its error
        data, self._buffer = self._buffer.getvalue(), io.BytesIO()
        self._num_bytes += len(data)
        self._checksum = crc32c(data, self._checksum)
        threads = cast(ThreadPoolExecutor, self._threads)
        self._parts.append(threads.submit(self._send_part, len(self._parts) + 1, data))

    def _start(self) -> None:
        """Have the server begin an upload."""

        def create() -> dict[str, Any]:
            checksums = {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"}
            response = send_with(self._request, "create_multipart_upload", checksums)
            return _require(response, "UploadId")

        response = retry(self._url, create)
        self._id = response["UploadId"]
        self._has_checksums = (
            response.get("ChecksumAlgorithm") == "CRC32C"
            and response.get("ChecksumType") == "FULL_OBJECT"
        )
        self._threads = ThreadPoolExecutor(MAX_PARTS_IN_FLIGHT, "mmstream-upload")

    def _send_part(self, number: int, data: bytes) -> dict[str, Any]:
        """Send a part. Return what the last request says of it."""
        try:
            is_known = self._has_checksums
            checksum = {"ChecksumCRC32C": _encoded(crc32c(data))} if is_known else {}

            def send() -> dict[str, Any]:
                if self._is_ended:
                    raise StorageError(f"{self._url}: the upload has ended")
                body = io.BytesIO(data)  # shares the bytes
                response = self._request(
                    "upload_part",
                    UploadId=self._id,
                    PartNumber=number,
                    Body=body,
                    **(checksum or _md5(data)),
                )
                return _require(response, "ETag")

            response = retry(self._url, send)
        finally:
            self._room.release()
        return {"PartNumber": number, "ETag": response["ETag"], **checksum}

    def _end(self) -> None:
        """Wait until no part is under way any more. Parts that failed are not sent again."""
        self._is_ended = True
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _require_object(self, checksum: str, parts: list[dict[str, Any]] | None) -> None:
        """Raise an error if the object is not what was written.

        Args:
            checksum: CRC-32C of all bytes.
            parts: Given where the server did not say that this upload made the object: its ETag,
                a checksum of those of its parts, must say it.
        """
        stat = send_with(self._request, "head_object", {"ChecksumMode": "ENABLED"})
        is_whole = stat.get("ChecksumType") == "FULL_OBJECT"
        current = stat.get("ChecksumCRC32C") if is_whole else None
        if int(stat["ContentLength"]) != self._num_bytes or current not in (None, checksum):
            raise RequestError(
                f"{self._num_bytes} bytes with the CRC-32C {checksum} were written, but the object "
                f"has {stat['ContentLength']} and {current}; see which other program writes there",
                may_be_final=True,
            )
        if current is None and parts is not None and stat.get("ETag") != _etag_of(parts):
            raise StorageError(
                f"{self._url}: the upload is gone: another process removed it, or writes there too"
            )


def _require(response: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a response that has what S3 sends, or raise a RequestError."""
    if name not in response:
        raise RequestError(f"an answer without {name} came")
    return response


def _md5(data: bytes) -> dict[str, str]:
    """Return the MD5 of a body, for servers that know no CRC-32C."""
    digest = hashlib.md5(data, usedforsecurity=False).digest()
    return {"ContentMD5": base64.b64encode(digest).decode()}


def _encoded(checksum: int) -> str:
    """Return a CRC-32C as S3 writes it."""
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def _etag_of(parts: list[dict[str, Any]]) -> str | None:
    """Return the ETag of an object of these parts, where ETags are MD5s."""
    try:
        digests = b"".join(bytes.fromhex(part["ETag"].strip('"')) for part in parts)
    except ValueError:
        return None
    return f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"'
