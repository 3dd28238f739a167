"""Storage: the session of botocore that s3fs sends its requests with.

It looks at answers before botocore reads them. botocore would take a login page with status 200 for
an empty list, and for the end of a write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]
from aiobotocore.session import AioSession  # type: ignore[import-untyped]

from mmstream.errors import escaped
from mmstream.storage.s3_endpoint import s3fs_settings, share_models
from mmstream.storage.store import RequestError

_OF_S3 = re.compile(
    rb"(?s)(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<([\w.-]+:)?\w*(Result|Error)\b"
)
"""How the XML of S3 begins."""


def session_options() -> dict[str, Any]:
    """Return the options of s3fs by which its requests go through such a session."""
    settings = s3fs_settings()
    session = AioSession(profile=settings.get("profile"))
    share_models(session)
    session.register("before-parse.s3", _require_s3)
    config = {
        # Checksums of our own go with what is written. botocore's, in trailers, are refused by
        # many stores that are not Amazon's.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **(settings.get("config_kwargs") or {}),
        "max_pool_connections": 32,
        "connect_timeout": 10,
        "retries": {"max_attempts": 0},
        "http_session_cls": _NoRedirects,
    }
    return {"session": session, "config_kwargs": config}


class _NoRedirects(AIOHTTPSession):  # type: ignore[misc]
    """Refuses answers from where another response led to: a login page, or an unsigned request."""

    async def send(self, request: Any) -> Any:
        """Send a request."""
        response = await super().send(request)
        history = response.raw.history  # a redirect that names no place is the last of it
        if history and history[-1] is not response.raw:
            response.raw.close()
            host = escaped(response.raw.url.host)
            raise RequestError(f"the answer sends on to {host}: a proxy or a login page?")
        return response


def _require_s3(response_dict: Mapping[str, Any], operation_model: Any, **_: Any) -> None:
    """Raise a RequestError for a response that no S3 sends. Readers of objects look themselves."""
    body = b"" if operation_model.has_streaming_output else response_dict["body"]
    is_wrong = not _OF_S3.match(body) if body else operation_model.name.startswith("List")
    if response_dict["status_code"] < 300 and is_wrong:
        begin = escaped(body[:40].decode("latin-1"))
        raise RequestError(f"what answers is not S3, its answer begins with {begin!r}: a proxy?")
