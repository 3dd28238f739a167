"""Secrets in URLs that rows name. They get neither into the ``json`` nor into the sidecar."""

from __future__ import annotations

import re

__all__ = ["without_secrets"]

_SECRET = re.compile(
    r"(?i)(?<=://)[^/?#]*(?=@)|(?<=[?&])((?:x-(?:amz|goog)-(?:signature|credential|security-token)"
    r"|(?:access_?)?token|sig|signature|api_?key|awsaccesskeyid)=)[^&#]*"
)
"""Passwords, tokens and signatures in a URL. Other parameters may be part of the address."""


def without_secrets(url: str) -> str:
    """Return a URL with asterisks for its password, token or signature.

    Examples:
        >>> without_secrets("https://me:word@host/a.jpg?w=100&X-Amz-Signature=1f2e")
        'https://***@host/a.jpg?w=100&X-Amz-Signature=***'
    """
    return _SECRET.sub(r"\1***", url) if "://" in url else url
