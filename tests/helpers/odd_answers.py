"""A store of S3 in this process whose answers are odd: what proxies, caches and other servers do.

Each entry of `ODD` makes another answer of the right one. `OddStub` gives it to the first requests
for each object, or to all of them::

    with running(OddStub, objects, odd=(ODD["page"],), num_odd=2) as server: ...
"""

from __future__ import annotations

import gzip
import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from tests.helpers.stub_server import refused, reply
from tests.helpers.web_stubs import S3Stub


class Right(NamedTuple):
    """The right answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def sent(self, **changes: str | None) -> bytes:
        """Return the bytes of it, with other headers. None: without this one."""
        headers = self.headers | {name.replace("_", "-"): text for name, text in changes.items()}
        lines = [f"HTTP/1.1 {self.status} X"]
        lines += [f"{name}: {text}" for name, text in headers.items() if text is not None]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + self.body


Odd: TypeAlias = Callable[[Right], bytes]

numbers = itertools.count()
PAGE = b"<!DOCTYPE html>\n<html><body>Please log in</body></html>"
XHTML = b'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><body/></html>'
BOMB = b'<!DOCTYPE x [<!ENTITY a "b"><!ENTITY c "&a;&a;">]><Error><Code>&c;</Code></Error>'


def page(status: str, body: bytes = PAGE, kind: str = "text/html", **headers: str) -> Odd:
    return lambda right: reply(status, body, {"Content-Type": kind} | headers)


def other(status: str, code: str, message: str = "", **headers: str) -> Odd:
    return lambda right: refused(status, code, message, **headers)


def headers(**changes: str | None) -> Odd:
    return lambda right: right.sent(**changes)


def body(change: Callable[[bytes], bytes], **changes: str | None) -> Odd:
    """Another body, with its length."""

    def answer(right: Right) -> bytes:
        if not right.body:
            return right.sent()
        data = change(right.body)
        return right._replace(body=data).sent(Content_Length=str(len(data)), **changes)

    return answer


def of_list(pattern: bytes, replacement: bytes) -> Odd:
    return body(lambda data: re.sub(pattern, replacement, data) if b"<List" in data else data)


def framed(change: Callable[[bytes], bytes]) -> Odd:
    """A change of all bytes of the answer."""
    return lambda right: change(right.sent())


def changing_etag(right: Right) -> bytes:
    return right.sent(ETag=f'"{next(numbers)}"')


def chunked(right: Right) -> bytes:
    data = right._replace(body=b"").sent(Content_Length=None, Transfer_Encoding="chunked")
    if not right.body:
        return right.sent()
    return data + b"%x\r\n%s\r\n0\r\n\r\n" % (len(right.body), right.body)


def whole(right: Right) -> bytes:
    """All of the object, for a range."""
    return right._replace(status=200).sent(Content_Range=None)


LATER = "Fri, 01 Jan 2027 00:00:00 "
NO_DAY = "Fri, 99999999999999999999 Jan 2027 00:00:00 GMT"
ODD: dict[str, Odd] = {
    # dates and numbers
    "date zone": headers(Date=LATER + "+999999999999999"),
    "date day": headers(Date=NO_DAY),
    "date year": headers(Date="Fri, 01 Jan 0001 00:00:00 +2359"),
    "date bytes": headers(Date="\xff\xfe"),
    **{
        f"retry {text[:9]}": other("503 Slow", "SlowDown", Retry_After=text)
        for text in ("0", "-5", "1e9", "soon", "", LATER + "+99999999999999", "0.1")
    },
    "retry page": page("503 Busy", Date=NO_DAY),
    "retry day": other("503 Slow", "SlowDown", Retry_After=NO_DAY),
    # pages of proxies
    "page": page("200 OK"),
    "page xhtml": page("200 OK", XHTML, "application/xhtml+xml"),
    "page xml": page("200 OK", XHTML, "application/xml"),
    "page text": page("200 OK", PAGE.upper(), "text/plain"),
    "page bom": page("200 OK", b"\xef\xbb\xbf\n" + PAGE, "text/plain"),
    "page json": page("200 OK", b'["log in"]', "application/json"),
    "page text only": page("200 OK", b"blocked by policy", "text/plain"),
    "page empty": page("200 OK", b"", "text/plain"),
    "page 203": page("203 Non-Authoritative"),
    "page 401": page("401 Unauthorized", **{"WWW-Authenticate": "Basic"}),
    "page 403": page("403 Forbidden"),
    "page 500": page("500 Internal"),
    "page 502": page("502 Bad Gateway"),
    "page 504": page("504 Timeout"),
    "page 511": page("511 Network Authentication Required"),
    "page 520": page("520 Unknown"),
    "to login": page("302 Found", Location="http://login.example/?token=secret"),
    "to page": page("303 See Other", Location="/login"),
    "to host": page("307 Temporary", Location="http://me:secret@other.example/a"),
    "to itself": page("308 Permanent", Location="http://127.0.0.1:1/"),
    "moved": page("301 Moved", b"", "text/plain"),
    # statuses
    "204": page("204 No Content", b""),
    "304": page("304 Not Modified", b""),
    "400 empty": page("400 Bad", b""),
    "400 code": other("400 Bad", "InvalidRequest", "odd"),
    "408": other("408 Timeout", "RequestTimeout"),
    "409": other("409 Conflict", "OperationAborted"),
    "412": other("412 Failed", "PreconditionFailed"),
    "416 lies": other("416 Range", "InvalidRange", Content_Range="bytes */*"),
    "429 empty": page("429 Many", b""),
    "500 xml": other("500 Internal", "InternalError", "We encountered an error"),
    "500 utf-16": page("500 E", "<Error><Code>Ü</Code></Error>".encode("utf-16"), "text/xml"),
    "500 latin-1": page("500 Internal", b"<Error><Code>\xfc\xff</Code></Error>", "text/xml"),
    "500 broken": page("500 Internal", b"<Error><Code>Int", "text/xml"),
    "500 entities": page("500 Internal", BOMB, "text/xml"),
    "501": page("501 Not Implemented"),
    "503 empty": page("503 Busy", b""),
    "skewed": other("403 Forbidden", "RequestTimeTooSkewed", Date="Fri, 01 Jan 1971 00:00:00 GMT"),
    "denied": other("403 Forbidden", "AccessDenied"),
    "200 error": page("200 OK", b"<Error><Code>InternalError</Code></Error>", "text/xml"),
    # versions
    "etag changing": changing_etag,
    "etag weak": lambda right: right.sent(ETag=f"W/{right.headers.get('ETag')}"),
    "etag bare": lambda right: right.sent(ETag=right.headers.get("ETag", "e").strip('"')),
    "etag missing": headers(ETag=None),
    "etag empty": headers(ETag='""'),
    "etag long": lambda right: right.sent(ETag='"' + "e" * 9000 + '"'),
    "etag latin": headers(ETag='"\xfc"'),
    # ranges
    "range other": headers(Content_Range="bytes 7-9/99"),
    "range missing": headers(Content_Range=None),
    "range lines": headers(Content_Range="lines 0-9/99"),
    "range huge": headers(Content_Range="bytes 0-9/" + "9" * 30),
    "range whole": whole,
    "range bytes": lambda right: right.sent(
        Content_Range=right.headers.get("Content-Range", "").replace("bytes", "Bytes")
    ),
    "range parts": headers(Content_Range=None, Content_Type="multipart/byteranges; boundary=b"),
    # bodies
    "chunked": chunked,
    "no length": headers(Content_Length=None, Connection="close"),
    "short": lambda right: right._replace(body=right.body[: len(right.body) // 2]).sent(),
    "shorter": body(lambda data: data[: len(data) // 2]),
    "length word": headers(Content_Length="many"),
    "length minus": headers(Content_Length="-1"),
    "gzip": body(gzip.compress, Content_Encoding="gzip"),
    "aws-chunked": headers(Content_Encoding="aws-chunked"),
    "no chunks": lambda right: right.sent(Content_Length=None, Transfer_Encoding="chunked"),
    # heads
    "lower case": framed(lambda data: re.sub(rb"\r\n[\w-]+:", lambda m: m[0].lower(), data)),
    "upper case": framed(lambda data: re.sub(rb"\r\n[\w-]+:", lambda m: m[0].upper(), data)),
    "hints": framed(lambda data: b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + data),
    "hints forever": framed(lambda data: b"HTTP/1.1 103 Early\r\n\r\n" * 2500),
    "http 1.0": framed(lambda data: data.replace(b"HTTP/1.1", b"HTTP/1.0", 1)),
    "http 2": framed(lambda data: b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" * 3 + b"\r\n\r\n"),
    "no colon": framed(lambda data: data.replace(b"\r\n", b"\r\nodd line\r\n", 1)),
    "head long": headers(X_Long="x" * 70_000),
    "nothing": framed(lambda data: b""),
    # lists
    "list namespace": of_list(b"<ListBucketResult", b'<ListBucketResult xmlns="urn:odd"'),
    "list prefix": of_list(b"<(/?)ListBucketResult", rb"<\1s:ListBucketResult"),
    "list sizes": of_list(b"<Size>[^<]*</Size>", b""),
    "list keys": of_list(b"</ListB", b"<Contents><Size>1</Size></Contents></ListB"),
    "list extra": of_list(
        b"</ListB", b"<Contents><Key>else/x</Key><Size>1</Size></Contents></ListB"
    ),
    "list nested": of_list(
        b"</ListB", b"<Contents><Key>corpus/deep/x</Key><Size>1</Size></Contents></ListB"
    ),
    "list twice": of_list(b"(<Contents>.*</Contents>)", rb"\1\1"),
    "list loops": of_list(
        b"</ListB",
        b"<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken></ListB",
    ),
    "list no token": of_list(b"</ListB", b"<IsTruncated>true</IsTruncated></ListB"),
    "list cut": of_list(b"(?s)</ListB.*", b""),
    "list number": of_list(b"<Size>", b"<Size>about "),
}

FINAL = {"skewed", "denied", "412"}
"""What ends a request at once, because a store that says so means it."""

UNTOLD = {
    **{key: {"stat"} for key in ("page xml", "page text", "page bom", "200 error", "gzip")},
    **{key: {"stat", "whole"} for key in ("page json", "page text only", "page empty", "shorter")},
    "etag changing": {"reader"},  # it has no checksums here
}
"""Requests for which nothing tells the odd answer from the right one."""


class OddStub(S3Stub):
    """A store with one odd answer. Objects can also be written in parts."""

    odd: tuple[Odd]
    """In a tuple, so that it is not a method."""
    num_odd: float
    num_asked: Counter[str]

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        asked = f"{self.command} {self.path} {self.headers.get('Range')}"
        self.num_asked[asked] += 1
        headers = {name.replace("_", "-"): text for name, text in headers.items()}
        right = Right(status, {"Content-Length": str(len(body))} | headers, body)
        data = (self.odd[0] if self.num_asked[asked] <= self.num_odd else Right.sent)(right)
        end = data.rfind(b"HTTP/1.1 1")  # hints come before the head
        end = data.find(b"\r\n\r\n", data.find(b"\r\n\r\n", end) + 4 if end >= 0 else 0) + 4
        self.wfile.write(data[:end] if self.command == "HEAD" else data)
        is_like_others = b"\r\nContent-Length: %d\r\n" % len(data.partition(b"\r\n\r\n")[2]) in data
        self.close_connection = not is_like_others

    def get(self) -> None:
        parts = self.server.parts = getattr(self.server, "parts", {})
        if self.command == "POST" and "uploads" in self.path:
            self.answer(
                200,
                b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
            )
        elif self.command == "POST":
            self.objects[self.name] = b"".join(parts[number] for number in sorted(parts))
            self.answer(
                200,
                b"<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>",
            )
        elif "uploads" in self.path:
            self.answer(200, b"<ListMultipartUploadsResult></ListMultipartUploadsResult>")
        elif self.command == "PUT" and "partNumber" in self.query:
            parts[int(self.query["partNumber"])] = self.body
            self.answer(200, b"", ETag='"p"')
        else:
            super().get()

    head = put = post = delete = get
