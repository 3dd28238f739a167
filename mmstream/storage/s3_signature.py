"""Storage: signatures of requests to S3 (AWS Signature Version 4).

botocore signs too, at 0.1 ms a request. Nine thousand samples of 110 kB are a gigabyte, so that
would cost a second of CPU time. The tests compare both.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping
from hashlib import sha256
from typing import Any
from urllib.parse import urlsplit

_NO_BODY = sha256(b"").hexdigest()
_DAY_S = 86_400


class S3Signer:
    """Signs requests with one set of credentials. It shows them nowhere, and cannot be pickled.

    Args:
        access_key: Name of the key.
        secret_key: The key.
        token: Of a session, or None.
        region: Region of the bucket.
    """

    def __init__(self, access_key: str, secret_key: str, token: str | None, region: str) -> None:
        self._access_key, self._secret_key, self._token = access_key, secret_key, token
        self._region = region
        self._day, self._day_key = -1, b""

    def __reduce__(self) -> Any:
        raise TypeError("credentials are not pickled")

    def headers(
        self, method: str, url: str, headers: Mapping[str, str], now: float
    ) -> dict[str, str]:
        """Return the headers of a signed request.

        Args:
            method: Such as ``GET``.
            url: Quoted, and without a query.
            headers: Further headers, by names in lower case. They are signed too.
            now: The time, in seconds since 1970.
        """
        parts = urlsplit(url)
        utc = time.gmtime(now)
        date, moment = time.strftime("%Y%m%d", utc), time.strftime("%Y%m%dT%H%M%SZ", utc)
        own = {**headers, "x-amz-content-sha256": _NO_BODY, "x-amz-date": moment}
        if self._token:
            own["x-amz-security-token"] = self._token
        signed = sorted({**own, "host": parts.netloc}.items())
        names = ";".join(name for name, _ in signed)
        lines = "".join(f"{name}:{value}\n" for name, value in signed)
        request = f"{method}\n{parts.path}\n\n{lines}\n{names}\n{_NO_BODY}"
        scope = f"{date}/{self._region}/s3/aws4_request"
        digest = sha256(request.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}"
        signature = hmac.digest(self._key(date, int(now) // _DAY_S), text.encode(), "sha256").hex()
        own["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self._access_key}/{scope}, "
            f"SignedHeaders={names}, Signature={signature}"
        )
        return own

    def _key(self, date: str, day: int) -> bytes:
        """Return the key of a day, which is made once."""
        if day != self._day:
            key = f"AWS4{self._secret_key}".encode()
            for text in (date, self._region, "s3", "aws4_request"):
                key = hmac.digest(key, text.encode(), "sha256")
            self._day, self._day_key = day, key
        return self._day_key
