"""Storage: errors of other libraries as errors of Python, without secrets.

A client of an object store has error classes of its own. Their texts may show the URL of a
redirect, and that URL may be signed: whoever has it can read the object. So an error becomes one of
Python's own classes, and signatures, passwords and tokens are taken out of its text.

S3 needs none of that: botocore signs headers, and `mmstream.storage.s3_errors` knows its errors.
"""

from __future__ import annotations

import errno
import json
import re

from mmstream.errors import MMStreamError
from mmstream.storage.http_headers import seconds_until
from mmstream.storage.patience import THROTTLED_STATUS
from mmstream.storage.store import RequestError

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
    answer = getattr(error, "response", None)  # of Azure and huggingface_hub
    headers = getattr(error, "headers", None) or getattr(answer, "headers", None) or {}
    return seconds_until(headers.get("Retry-After", "")) or 0.0
