"""Storage: what responses mean, whichever client sent the request: headers, refusals of S3, errors.

`range_client` reads the refusals of S3 from HTTP. Everything else goes through s3fs, whose errors
are botocore's, or Python's with one of those behind it. Both become the same errors here: passing
ones (`RequestError`), and final ones that say what to do. Errors of other clients become Python's
own, without secrets.
"""

from __future__ import annotations

import errno
import json
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, NamedTuple

from mmstream.errors import ConfigError, MMStreamError, StorageError, escaped
from mmstream.storage.retry import CREDENTIALS_HINT, THROTTLED_STATUS, StoreHealth, may_pass
from mmstream.storage.store import ObjectStat, RequestError

# -- headers of responses --------------------------------------------------------------------------

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.IGNORECASE)

_PAGE_TYPES = ("text/html", "application/xhtml+xml")
_PAGE_BEGIN = re.compile(
    rb"(?i)(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!doctype html|<html\b|<error>\s*<code>)"
)
_PAGE_NAMES = (".html", ".htm", ".xhtml")


def require_object(url: str, headers: Mapping[str, str], begin: bytes = b"") -> None:
    """Raise a RequestError if something else came than the bytes of an object.

    Proxies, login pages of networks and load balancers send web pages, with status 200 too. Some
    compress what nobody asked them to compress.

    Args:
        url: Of the object. Its name may end in ``.html``: then it is a page.
        headers: Of the response, by names in lower case.
        begin: First bytes of the body, as far as they are known.
    """
    kind = headers.get("content-type", "").lower()
    is_page = kind.startswith(_PAGE_TYPES) or (begin and _PAGE_BEGIN.match(begin))
    if is_page and not url.lower().endswith(_PAGE_NAMES):
        raise RequestError(
            "a web page came and not the object: a proxy or a login page answers in place of the "
            "storage"
        )
    coding = headers.get("content-encoding", "")
    if "gzip" in coding and begin.startswith(b"\x1f\x8b") and not url.endswith(("gz", "GZ")):
        raise RequestError(f"the bytes came compressed ({escaped(coding)}), which nobody asked for")


def range_stat(
    url: str, status: int, headers: Mapping[str, str], start: int, stop: int, health: StoreHealth
) -> ObjectStat | None:
    """Return the object that a response to the request of a range is of. None: it does not say.

    Args:
        url: Of the object.
        status: 200 or 206.
        headers: Of the response, by names in lower case.
        start: First byte that was asked for.
        stop: The byte after the last one.
        health: Of the store. A server that has sent ranges is expected to do so again.

    Raises:
        RequestError: It is no such range: a cache may answer with another one. A response may end
            earlier, where the object does.
    """
    require_object(url, headers)
    if status == 206:
        content_range = headers.get("content-range", "")
        match = _CONTENT_RANGE.fullmatch(content_range)
        if match is None or int(match[1]) != start or int(match[2]) >= stop:
            came = escaped(content_range) or "a range without Content-Range"
            raise RequestError(f"bytes {start}-{stop - 1} were asked for, {came} came")
        size = None if match[3] == "*" else int(match[3])
    elif start == 0 and number_of_bytes(headers) == stop:
        size = None  # the whole object, or a server that says 200 always
    else:
        raise RequestError(
            f"the server does not know ranges of objects (it answers {status} where 206 is right); "
            "serve them by another one, or download them first",
            may_be_final=not health.has_ranges,
        )
    num_expected = min(stop, size or stop) - start
    if "content-encoding" in headers and (number_of_bytes(headers) or stop) < num_expected:
        require_object(url, headers, b"\x1f\x8b")
    health.has_ranges |= status == 206
    return None if size is None else ObjectStat(size, version_of(headers))


def version_of(headers: Mapping[str, str]) -> str | None:
    """Return an ETag without its quotes, and without the mark of a weak one. None: it has none."""
    return headers.get("etag", "").removeprefix("W/").strip('"') or None


def number_of_bytes(headers: Mapping[str, str]) -> int | None:
    """Return the length of a body. None: the response does not say it, as with chunks."""
    text = headers.get("content-length", "")
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None


def timestamp(date: str) -> float | None:
    """Return the time that a header says, in seconds since 1970. None: it says none."""
    try:
        moment = parsedate_to_datetime(date)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, TypeError, IndexError):  # zones and years that cannot be
        return None


def seconds_until(text: str, now: float | None = None) -> float | None:
    """Return what ``Retry-After`` says, in seconds: a number of them, or a date. None: nothing."""
    if re.fullmatch("[0-9]+", text):
        return float(text[:9])
    moment = timestamp(text)
    return None if moment is None else max(0.0, moment - (now or time.time()))


# -- refusals of S3 --------------------------------------------------------------------------------

MAX_SKEW_S = 900.0
"""Seconds that a clock may be wrong. S3 refuses signatures that are older."""

_NO_S3_STATUS = (405, 501)
"""What other servers answer to a method that they do not know."""

_THROTTLED_CODES = {
    "BandwidthLimitExceeded",
    "RequestLimitExceeded",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
_TOKEN_CODES = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"}
"""With status 400. Other refusals of access have 401 or 403."""

_PASSING_CODES = {"ConditionalRequestConflict", "OperationAborted", "RequestTimeout"}
"""With a status of 4xx. What else S3 says with such a status mostly stays as it is."""

_FINAL_ACCESS = {"AccountProblem", "AllAccessDisabled", "InvalidObjectState"}
"""With status 403: no other credentials help."""

_ARCHIVE_HINT = "; the object lies in an archive: restore it first"

_TLS_HINT = "; if this server speaks TLS, write https:// in AWS_ENDPOINT_URL"

_SCHEME_HINT = "; write http:// or https:// before it in AWS_ENDPOINT_URL"

_REGION_CODES = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
}

_REDIRECTS = (301, 302, 303, 307, 308)

_REDIRECT_HINT = "; a proxy or a login page? Or the bucket is in another region: see AWS_REGION"

_HOST = re.compile(r"(?s)(?:[\w+.-]*://)?(?:[^/?#]*@)?([^/?#]*).*")
"""The host of a URL, without what may be secret."""

_PATH_STYLE = re.compile(r"(?i)virtual[ -]?(host|style)|path[ -]?(style|access)|SecondLevelDomain")
"""What stores say that take a bucket only in the name of the host: ``SecondLevelDomainForbidden``,
``PathStyleDomainForbidden``, ``InvalidPathAccess``."""

_STYLE_HINT = (
    "this store wants the bucket in the name of the host: run `aws configure set "
    "s3.addressing_style virtual`, or write that into ~/.aws/config (see S3-compatible stores in "
    "docs/object-storage.md)"
)

_NO_TLS = {
    "HTTP_REQUEST",
    "PACKET_LENGTH_TOO_LONG",
    "RECORD_LAYER_FAILURE",
    "UNKNOWN_PROTOCOL",
    "WRONG_VERSION_NUMBER",
}
"""What OpenSSL says of a response that is not TLS."""


class Refusal(NamedTuple):
    """A response of S3 that says an error."""

    status: int
    code: str
    message: str
    region: str | None
    retry_after_s: float
    skew_s: float
    """Seconds that the clock of this machine is ahead of the server's."""
    is_bare: bool = False
    """It is the response to a HEAD, which has no body, so no code and no message."""
    write_right: str = ""
    """The right that the request needs, if it is one that writes."""
    is_page: bool = False
    """It is a web page: a proxy says it, and not the store."""
    location: str = ""
    """The host that the response sends on to."""

    @classmethod
    def of(cls, status: int, headers: Mapping[str, str], **said: Any) -> Refusal:
        """Return what a response says.

        Args:
            status: Of the response.
            headers: Of the response, by names in lower case.
            said: What its body says, and what was asked for: the other fields.
        """
        now, region = time.time(), said.pop("region", None)
        return cls(
            status,
            region=headers.get("x-amz-bucket-region") or region,
            retry_after_s=seconds_until(headers.get("retry-after", "")) or 0.0,
            skew_s=now - (timestamp(headers.get("date", "")) or now),
            is_page="html" in headers.get("content-type", ""),
            location=_HOST.sub(r"\1", headers.get("location", "")),
            **said,
        )

    def __str__(self) -> str:
        details = [str(self.status), self.code, self.message]
        if self.location:
            details.append(f"(sends on to {self.location})")
        return escaped(" ".join(filter(None, details)))

    @property
    def is_skewed(self) -> bool:
        """The signature is too old or too new. A bare answer says it by its date alone.

        Where the date of the response is right, the request was only held up, such as by a machine
        that slept.
        """
        return self.code == "RequestTimeTooSkewed" or (
            self.is_bare and self.status == 403 and abs(self.skew_s) > MAX_SKEW_S
        )

    @property
    def is_token(self) -> bool:
        """The token of a session has expired. A bare answer is 400 then."""
        return self.code in _TOKEN_CODES or (self.is_bare and self.status == 400)

    @property
    def is_path_style(self) -> bool:
        """The store refuses the bucket in the path of a URL."""
        return self.status < 500 and bool(_PATH_STYLE.search(f"{self.code} {self.message}"))

    @property
    def remedy(self) -> str | None:
        """What to renew before the same request is sent again: "region" or "credentials"."""
        if self.is_skewed or self.is_path_style:
            return None
        if self.code in _REGION_CODES or (self.status in _REDIRECTS and (self.region or self.code)):
            return "region"
        if self.status in (401, 403) or self.is_token:
            return None if self.code in _FINAL_ACCESS else "credentials"
        return None

    @property
    def may_be_final(self) -> bool:
        """S3 names a fault of the request or of the object, which a later request has, too."""
        is_of_client = 400 <= self.status < 500 and not may_pass(self.status)
        return is_of_client and self.remedy is None and self.code not in {"", *_PASSING_CODES}


def failure(url: str, refusal: Refusal, health: StoreHealth, *, waits_for_access: bool) -> OSError:
    """Return the error of a refused request.

    Args:
        url: Named in final errors.
        refusal: What the server said.
        health: Of the store.
        waits_for_access: Access that is refused may come back, where the store has answered before.
            Expired tokens may in any case: somebody renews them.
    """
    status, code = refusal.status, refusal.code
    if status == 404:
        health.answered()
        absent = "bucket" if code == "NoSuchBucket" else "object"
        return FileNotFoundError(f"{url}: no such {absent}")
    if refusal.is_skewed and abs(refusal.skew_s) > MAX_SKEW_S:
        side = "ahead of" if refusal.skew_s > 0 else "behind"
        return StorageError(
            f"{url}: the clock of this machine is {abs(refusal.skew_s):,.0f} s {side} the server's "
            "(RequestTimeTooSkewed); set it"
        )
    is_of_s3 = bool(code) or (refusal.is_bare and not refusal.is_page)
    waits = health.has_answered and (waits_for_access or refusal.is_token or not is_of_s3)
    if refusal.is_path_style or (refusal.remedy == "credentials" and not waits):
        return StorageError(f"{url}: {refusal}; {_access_hint(refusal)}")
    if refusal.remedy == "region":
        return StorageError(f"{url}: {refusal}; set AWS_REGION to the region of the bucket")
    if status in _NO_S3_STATUS and not health.has_answered:
        said = refusal if code else f"{status} {HTTPStatus(status).phrase}"
        return StorageError(f"{url}: {said}; is AWS_ENDPOINT_URL the address of an S3 server?")
    is_throttled = status in THROTTLED_STATUS or code in _THROTTLED_CODES
    if is_throttled and code:  # S3 itself says so, perhaps as thousands of ranks start
        health.has_answered = True
    if status == 407 and not health.has_answered:
        return _proxy_failure(url)
    is_unlike_s3 = status == 400 and not (is_of_s3 or health.has_answered)
    hint = _REDIRECT_HINT if status in _REDIRECTS else _TLS_HINT if is_unlike_s3 else ""
    hint = _ARCHIVE_HINT if code == "InvalidObjectState" else hint
    return RequestError(
        f"{refusal}{hint}",
        is_throttled=is_throttled,
        retry_after_s=refusal.retry_after_s,
        may_be_final=refusal.may_be_final and not is_throttled,
    )


def _access_hint(refusal: Refusal) -> str:
    """Return what to do about a refused access."""
    if refusal.is_path_style:
        return _STYLE_HINT
    if refusal.status != 403 or refusal.code not in ("", "AccessDenied"):
        return CREDENTIALS_HINT
    right = f"the credentials may lack the right to write there ({refusal.write_right})"
    absent = "without the right s3:ListBucket, S3 answers so for absent objects too"
    return f"{CREDENTIALS_HINT}; {right if refusal.write_right else absent}"


def _write_right(operation: str) -> str:
    """Return the right that a request needs, as botocore names it; "" for one that reads."""
    if operation.startswith(("Get", "Head", "List")):
        return ""
    return "s3:DeleteObject" if operation.startswith("Delete") else "s3:PutObject"


def connection_failure(url: str, error: BaseException) -> StorageError | None:
    """Return the error of a connection that no second try brings about. None: it may pass."""
    for cause in _causes(error):
        # Errors of aiohttp are of these classes too, and know nothing of them.
        message, reason = getattr(cause, "verify_message", None), getattr(cause, "reason", None)
        if getattr(cause, "status", None) == 407:
            return _proxy_failure(url)
        if isinstance(cause, ssl.SSLCertVerificationError) and message:
            return StorageError(f"{url}: {message}; AWS_CA_BUNDLE names a file of certificates")
        if isinstance(cause, ssl.SSLError) and reason in _NO_TLS:
            return StorageError(
                f"{url}: what answers does not speak TLS ({reason}); if it is plain HTTP, write "
                "http:// in AWS_ENDPOINT_URL"
            )
    return None


def _proxy_failure(url: str) -> StorageError:
    """Return the error of a proxy that wants a name and a password (407)."""
    return StorageError(
        f"{url}: the proxy answers 407; write HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT "
        "(HTTP_PROXY for http://), or name the server in NO_PROXY"
    )


def plain_s3_error(url: str, error: Exception, health: StoreHealth) -> Exception:
    """Return an error of Python's own classes, or of this package, for one of s3fs.

    Args:
        url: Named in final errors.
        error: Of s3fs, botocore or aiohttp.
        health: Of the store.

    Returns:
        A final error, a `RequestError`, or the error itself where nothing more is known of it.
    """
    if isinstance(error, MMStreamError | RequestError):
        return error
    refusal = refusal_of(error)
    if refusal is not None:
        plain = failure(url, refusal, health, waits_for_access=False)
        if refusal.status == 416:
            plain.errno = errno.EINVAL
        return plain
    if isinstance(error, RecursionError):  # botocore follows redirects that lead nowhere
        return StorageError(
            f"{url}: the bucket is in another region, and the server does not say in which: set "
            "AWS_REGION"
        )
    if type(error) is ValueError:  # errors of certificates are of a subclass
        is_answer = health.has_answered  # whose numbers are none
        return RequestError(escaped(error)) if is_answer else refused_setting(url, error)
    if type(error).__name__ == "EndpointResolutionError":
        return ConfigError(f"{url}: {escaped(error)}; see AWS_ENDPOINT_URL")
    return (None if health.has_answered else connection_failure(url, error)) or error


def refused_setting(url: str, error: Exception) -> ConfigError:
    """Return the error of a setting, or of a name, that botocore does not take."""
    text = escaped(error)
    is_without_scheme = text.startswith("Invalid endpoint") and "://" not in text
    return ConfigError(f"{url}: {text}{_SCHEME_HINT if is_without_scheme else ''}")


def refusal_of(error: Exception) -> Refusal | None:
    """Return the response of S3 that led to an error of s3fs, if there was one."""
    for cause in _causes(error):
        response = getattr(cause, "response", None)  # of a ClientError of botocore
        if isinstance(response, dict):
            break
    else:
        return None
    said: Mapping[str, Any] = response.get("Error", {})
    about: Mapping[str, Any] = response.get("ResponseMetadata", {})
    headers: Mapping[str, str] = about.get("HTTPHeaders", {})
    status, code = int(about.get("HTTPStatusCode", 0)), str(said.get("Code", ""))
    operation = getattr(cause, "operation_name", "Get")
    has_code = code != str(status)  # botocore says so, where there was no XML
    return Refusal.of(
        status,
        headers,
        code=code if has_code else "",
        message=str(said.get("Message", "")),
        is_bare=operation.startswith("Head"),
        write_right=_write_right(operation),
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and what led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# -- errors of other clients, without secrets ------------------------------------------------------
#
# A client of an object store has error classes of its own. Their texts may show the URL of a
# redirect, and that URL may be signed: whoever has it can read the object. So an error becomes one
# of Python's own classes, and signatures, passwords and tokens are taken out of its text.
#
# S3 needs none of that: botocore signs headers, and `plain_s3_error` knows its errors.

_PASSWORD = re.compile(r"(\w://)[^/\s@?#]*:[^/\s@?#]*@")
_QUERY = re.compile(r"(\w://[^\s?#'\"<>]*)\?[^\s'\"<>)\]]*")
_TOKEN = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}")

_ERRNO_OF: dict[int | None, int] = {
    416: errno.EINVAL,
    **dict.fromkeys((405, 501), errno.EOPNOTSUPP),  # the server does not know such a request
}

_OF_PROGRAMS = (TypeError, AttributeError, ImportError, MemoryError, NotImplementedError)


def without_secrets(text: object) -> str:
    """Return a text in which URLs have no password and no query, and headers no token.

    Examples:
        >>> without_secrets("403 for https://user:pw@host/a.tar?X-Amz-Signature=1f")
        '403 for https://***@host/a.tar?***'
    """
    text = _PASSWORD.sub(r"\1***@", str(text))
    text = _QUERY.sub(r"\1?***", text)
    return _TOKEN.sub(r"\1 ***", text)


def plain_error(error: Exception) -> Exception:
    """Return an error of Python's own classes for one of a client library.

    Args:
        error: Of fsspec, gcsfs, adlfs, huggingface_hub or aiohttp.

    Returns:
        FileNotFoundError, PermissionError, ValueError or OSError, by its class and by the status of
        the HTTP answer behind it. A RequestError for 429 and 503. Mistakes of a program stay what
        they are.
    """
    if isinstance(error, (MMStreamError, RequestError, *_OF_PROGRAMS)):
        return error
    text, status = without_secrets(error), _status(error)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return FileNotFoundError(text)
    if isinstance(error, PermissionError) or status in (401, 403):
        return PermissionError(text)
    if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
        return ValueError(text)
    if status in THROTTLED_STATUS:
        return RequestError(
            f"{type(error).__name__}: {text}",
            is_throttled=True,
            retry_after_s=_retry_after_s(error),
        )
    plain = OSError(f"{type(error).__name__}: {text}")
    plain.errno = _ERRNO_OF.get(status, getattr(error, "errno", None))
    return plain


def _status(error: Exception) -> int | None:
    """Return the status of the HTTP answer that an error is about."""
    for holder in (error, getattr(error, "response", None)):  # the second of huggingface_hub
        for name in ("status_code", "status", "code"):  # Azure and HTTPX, aiohttp, gcsfs
            status = getattr(holder, name, None)
            if isinstance(status, int):
                return status
    return 403 if str(error).startswith("Forbidden") else None  # of gcsfs


def _retry_after_s(error: Exception) -> float:
    """Return the seconds that a server asks to wait. Errors of gcsfs do not keep its headers."""
    response = getattr(error, "response", None)  # of Azure and huggingface_hub
    headers = getattr(error, "headers", None) or getattr(response, "headers", None) or {}
    return seconds_until(headers.get("Retry-After", "")) or 0.0
