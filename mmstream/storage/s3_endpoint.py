"""Storage: where a bucket of S3 is, how requests to it are signed, and the session of s3fs.

botocore decides where and how, from all that it reads: environment, profiles, ``~/.aws``, SSO,
processes, web identities and roles of instances. So the hot read path goes where every other S3
tool goes. What is set for s3fs (``FSSPEC_S3_...``, or fsspec's configuration) counts too.

s3fs sends everything else, through a session of botocore.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from mmstream.errors import ConfigError, escaped
from mmstream.storage.responses import refused_setting
from mmstream.storage.store import RequestError

Signer: TypeAlias = Callable[[Any], None]
"""Adds a signature to a request of botocore."""


@dataclass(frozen=True)
class S3Endpoint:
    """How to reach one bucket.

    Attributes:
        url: Of the bucket, with a slash at its end. The quoted name of an object follows.
        region: The one that requests are signed for.
        headers: Of every request.
        proxy: URL of the proxy for it, or None.
        tls: For ``https``.
        credentials: Those of botocore, which renews them before they expire. None: anonymous.
    """

    url: str
    region: str
    headers: Mapping[str, str] = field(repr=False)
    proxy: str | None = field(repr=False)
    tls: ssl.SSLContext | None = field(repr=False)
    credentials: Any = field(repr=False)

    def signer(self) -> Signer | None:
        """Return what adds a signature to a request. Renewing credentials may take seconds."""
        from botocore.auth import S3SigV4Auth

        if self.credentials is None:
            return None
        keys = self.credentials.get_frozen_credentials()
        sign: Signer = S3SigV4Auth(keys, "s3", self.region).add_auth
        return sign


def is_anonymous() -> bool:
    """Tell whether requests to S3 are not signed: ``AWS_NO_SIGN_REQUEST``, or s3fs' ``anon``."""
    value = os.environ.get("AWS_NO_SIGN_REQUEST") or s3fs_settings().get("anon")
    return str(value).lower() in ("1", "true", "yes", "on")


def require_certificates() -> None:
    """Raise a ConfigError if ``AWS_CA_BUNDLE`` names what is not there. botocore says it badly."""
    name = os.environ.get("AWS_CA_BUNDLE")
    if name and not Path(name).exists():
        raise ConfigError(f"AWS_CA_BUNDLE: no such file: {escaped(name)}")


def s3_endpoint(bucket: str, region: str | None = None) -> S3Endpoint:
    """Return how to reach a bucket, for the present settings. Files and services may be asked.

    Args:
        bucket: Its name.
        region: Its region, where the settings name another one or none.

    Raises:
        ConfigError: A setting, or the name of the bucket, cannot be.
        Exception: There are no credentials, or whatever else botocore says of them.
    """
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import ParamValidationError
    from botocore.httpsession import get_cert_path
    from botocore.session import Session

    require_certificates()
    settings = s3fs_settings()
    options = dict(settings.get("client_kwargs") or {})
    session = Session(profile=settings.get("profile"))
    share_models(session)
    verify = options.pop("verify", None)
    if verify is None:
        verify = session.get_config_variable("ca_bundle") or True
    client_options: dict[str, Any] = {
        "aws_access_key_id": settings.get("key"),
        "aws_secret_access_key": settings.get("secret"),
        "aws_session_token": settings.get("token"),
        "endpoint_url": settings.get("endpoint_url"),
        **options,
    }
    if region is not None:
        client_options["region_name"] = region
    config = Config(**(settings.get("config_kwargs") or {}))
    anonymous = is_anonymous()
    if anonymous:
        config = config.merge(Config(signature_version=UNSIGNED))
    try:
        client = session.create_client("s3", **client_options, config=config)
        request = _request(client, bucket)
    except (ValueError, ParamValidationError) as error:
        raise refused_setting(f"s3://{bucket}", error) from error
    url = request.url.removesuffix("key")
    signature = str(request.headers.get("Authorization", b""), "ascii")
    scope = re.search(r"Credential=[^,]*/([^/,]+)/s3/aws4_request", signature)
    payer = {"x-amz-request-payer": "requester"} if settings.get("requester_pays") else {}
    return S3Endpoint(
        url,
        region=scope[1] if scope else client.meta.region_name,
        headers=payer,
        proxy=_proxy(url),
        tls=_tls_context(get_cert_path(verify)) if url.startswith("https:") else None,
        credentials=None if anonymous else _credentials(session, client_options),
    )


def share_models(session: Any) -> None:
    """Have all sessions of this process read botocore's models once: that takes a while."""
    path = session.get_config_variable("data_path")
    session.register_component("data_loader", _models(path))


@lru_cache(maxsize=4)
def _models(path: str | None) -> Any:
    from botocore.loaders import create_loader

    return create_loader(path)


def _credentials(session: Any, options: Mapping[str, Any]) -> Any:
    """Return the credentials that botocore takes for a client of these options."""
    from botocore.credentials import Credentials

    if options["aws_access_key_id"] is None:
        return session.get_credentials()
    names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    return Credentials(*(options[name] for name in names))


def _request(client: Any, bucket: str) -> Any:
    """Return the request that botocore would send for the object ``key`` of a bucket."""
    from botocore.awsrequest import AWSResponse

    requests = []

    def keep(request: Any, **_: Any) -> Any:
        requests.append(request)
        return AWSResponse(request.url, 200, {}, None)  # so nothing is sent

    client.meta.events.register("before-send.s3.GetObject", keep)
    client.get_object(Bucket=bucket, Key="key")
    return requests[-1]


def _proxy(url: str) -> str | None:
    """Return the URL of the proxy for a URL, from the environment."""
    from botocore.utils import get_environ_proxies

    scheme = url.partition(":")[0]
    proxy: str | None = get_environ_proxies(url).get(scheme)
    if proxy and "://" not in proxy:
        proxy = f"http://{proxy.lstrip('/')}"  # as botocore and curl take it
    if proxy and not proxy.lower().startswith("http://"):
        raise ConfigError(
            f"{scheme.upper()}_PROXY={proxy.partition('://')[0]}://...: the reader process speaks "
            "plain HTTP to proxies; write http://, or name the server in NO_PROXY"
        )
    return proxy


def _tls_context(certificates: str | bool) -> ssl.SSLContext:
    """Return settings for TLS that trust a file of certificates, or (False) every server."""
    if certificates is False:
        return ssl._create_unverified_context()
    context = ssl.create_default_context(cafile=str(certificates))
    context.load_default_certs()
    return context


def s3fs_settings() -> Mapping[str, Any]:
    """Return what users set for s3fs, in fsspec's configuration or by ``FSSPEC_S3_...``."""
    from fsspec.config import conf

    settings: Mapping[str, Any] = conf.get("s3") or {}
    return settings


# -- the session that s3fs sends its requests with -------------------------------------------------
#
# It looks at answers before botocore reads them. botocore would take a login page with status 200
# for an empty list, and for the end of a write.

_OF_S3 = re.compile(
    rb"(?s)(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<([\w.-]+:)?\w*(Result|Error)\b"
)
"""How the XML of S3 begins."""


def session_options() -> dict[str, Any]:
    """Return the options of s3fs by which its requests go through such a session."""
    from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]
    from aiobotocore.session import AioSession  # type: ignore[import-untyped]

    class NoRedirects(AIOHTTPSession):  # type: ignore[misc]
        """Refuses answers from where another led to: a login page, or an unsigned request."""

        async def send(self, request: Any) -> Any:
            """Send a request."""
            response = await super().send(request)
            history = response.raw.history  # a redirect that names no place is the last of it
            if history and history[-1] is not response.raw:
                response.raw.close()
                host = escaped(response.raw.url.host)
                raise RequestError(f"the answer sends on to {host}: a proxy or a login page?")
            return response

    require_certificates()
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
        "http_session_cls": NoRedirects,
    }
    return {"session": session, "config_kwargs": config, "anon": is_anonymous()}


def _require_s3(response_dict: Mapping[str, Any], operation_model: Any, **_: Any) -> None:
    """Raise a RequestError for a response that no S3 sends. Readers of objects look themselves."""
    body = b"" if operation_model.has_streaming_output else response_dict["body"]
    is_wrong = not _OF_S3.match(body) if body else operation_model.name.startswith("List")
    if response_dict["status_code"] < 300 and is_wrong:
        begin = escaped(body[:40].decode("latin-1"))
        raise RequestError(f"what answers is not S3, its answer begins with {begin!r}: a proxy?")
