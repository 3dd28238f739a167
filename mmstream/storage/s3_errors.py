"""Storage: what the refusals of S3 mean, whichever client sent the request.

`range_client` reads them from HTTP. Everything else goes through s3fs, whose errors are botocore's,
or Python's with one of those behind it. Both become the same errors here: passing ones
(`RequestError`), and final ones that say what to do.
"""

from __future__ import annotations

import errno
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from mmstream.errors import ConfigError, MMStreamError, StorageError, escaped
from mmstream.storage.retry import CREDENTIALS_HINT, THROTTLED_STATUS, StoreHealth, may_pass
from mmstream.storage.store import RequestError
from mmstream.storage.web import seconds_until, timestamp

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
