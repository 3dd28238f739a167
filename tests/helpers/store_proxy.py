"""A proxy before a real S3 server that behaves as another store does.

It is a proxy of HTTP (``HTTP_PROXY``), so the bucket can stand in the name of any host. It checks
signatures as that store would, and signs requests again for the server behind it::

    with store_proxy(server, STORES["Aliyun OSS"]) as proxy: ...

What a store does is what its users report. None of it was tried against the real store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.helpers.http_servers import Answer, QuietHandler, ask, serving

HOST = "s3.example.test"

NOT_IMPLEMENTED = (501, "NotImplemented")
CONDITIONS = ("if-match", "if-none-match")
CHECKSUMS = "x-amz-checksum-"
TRAILERS = {"x-amz-trailer": (400, "InvalidArgument")}


@dataclass(frozen=True)
class StoreKind:
    """What a store does otherwise than the server behind the proxy.

    Attributes:
        path_style: Code and message for a bucket in the path. None: it is taken there.
        region: The only one that it takes in signatures. "": any.
        refuses: Beginnings of headers of writes, and the status and code that they get.
        ignores: Beginnings of headers that it does not know.
    """

    path_style: tuple[str, str] | None = None
    region: str = ""
    refuses: Mapping[str, tuple[int, str]] = field(default_factory=lambda: TRAILERS)
    ignores: tuple[str, ...] = ()


STORES: Mapping[str, StoreKind] = {
    "AWS": StoreKind(region="eu-west-3", refuses={}),
    "MinIO": StoreKind(),
    "Ceph RGW": StoreKind(ignores=(CHECKSUMS,)),
    "Cloudflare R2": StoreKind(
        region="auto", refuses=TRAILERS | {"x-amz-checksum-type": NOT_IMPLEMENTED}
    ),
    "GCS": StoreKind(region="auto", ignores=(CHECKSUMS, *CONDITIONS)),
    "Aliyun OSS": StoreKind(
        path_style=("SecondLevelDomainForbidden", "Please use virtual hosted style to access."),
        region="oss-cn-hangzhou",
        refuses=TRAILERS | dict.fromkeys(CONDITIONS, NOT_IMPLEMENTED),
        ignores=(CHECKSUMS,),
    ),
    "Tencent COS": StoreKind(
        path_style=(
            "PathStyleDomainForbidden",
            "The bucket you are attempting to access must be addressed using COS virtual-styled "
            "domain.",
        ),
        region="ap-shanghai",
        ignores=(CHECKSUMS, *CONDITIONS),
    ),
    "Volcengine TOS": StoreKind(
        path_style=("InvalidPathAccess", "Forbidden path to access server."),
        region="cn-beijing",
        ignores=(CHECKSUMS, *CONDITIONS),
    ),
    "Backblaze B2": StoreKind(
        region="eu-central-003",
        refuses=TRAILERS
        | dict.fromkeys(CONDITIONS, NOT_IMPLEMENTED)
        | {CHECKSUMS: (400, "InvalidArgument"), "x-amz-sdk-checksum": (400, "InvalidArgument")},
    ),
}


class StoreProxy(QuietHandler):
    """The proxy. `refused` counts what it refused, by code."""

    kind: StoreKind
    server_name: str
    credentials: Credentials
    refused: Counter[str]

    def handle_any(self) -> None:
        body = self.read_body()
        parts = urlsplit(self.path)
        bucket = self.headers["Host"].removesuffix(HOST).removesuffix(".")
        fault = self.fault(bucket, f"http://{self.headers['Host']}{parts.path}?{parts.query}")
        if fault is not None:
            status, code, message = fault
            self.refused[code] += 1
            text = (
                f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message>"
                f"<Region>{self.kind.region}</Region></Error>"
            )
            self.send(Answer(status, {"Content-Type": "application/xml"}, text.encode()))
            return
        path = f"/{bucket}{parts.path}" if bucket else parts.path
        self.send(self.answer_to(f"{path}?{parts.query}" if parts.query else path, body))

    def fault(self, bucket: str, url: str) -> tuple[int, str, str] | None:
        """Return why the store refuses the request, or None."""
        kind, headers = self.kind, self.headers
        if kind.path_style and not bucket:
            return 403, *kind.path_style
        for name in headers:
            for begin, refusal in kind.refuses.items():
                is_write = self.command in ("PUT", "POST")
                if is_write and name.lower().startswith(begin):
                    return *refusal, f"Unsupported header '{name}' received for this API call."
        scope, names, signature = (
            part.partition("=")[2] for part in headers["Authorization"].split(", ")
        )
        region = scope.split("/")[2]
        if kind.region not in ("", region):
            message = f"the region '{region}' is wrong; expecting '{kind.region}'"
            return 400, "AuthorizationHeaderMalformed", message
        request = AWSRequest(
            self.command, url, headers={name: headers[name] for name in names.split(";")}
        )
        request.context["timestamp"] = headers["x-amz-date"]
        auth = S3SigV4Auth(self.credentials, "s3", region)
        text = auth.string_to_sign(request, auth.canonical_request(request))
        if auth.signature(text, request) != signature:
            return 403, "SignatureDoesNotMatch", "The signature is another one."
        return None

    def answer_to(self, target: str, body: bytes) -> Answer:
        """Send the request to the server, signed again."""
        dropped = {"authorization", "host", "connection", "content-length", "x-amz-date"}
        dropped |= {"x-amz-content-sha256", "proxy-connection", "expect"}
        headers = {
            name: text
            for name, text in self.headers.items()
            if name.lower() not in dropped and not name.lower().startswith(self.kind.ignores)
        }
        url = f"http://{self.server_name}{target}"
        request = AWSRequest(self.command, url, data=body, headers=headers)
        S3SigV4Auth(self.credentials, "s3", "us-east-1").add_auth(request)
        answer = ask(self.server_name, self.command, target, dict(request.headers.items()), body)
        if CHECKSUMS in (*self.kind.ignores, *self.kind.refuses):
            for name in [name for name in answer.headers if "checksum" in name.lower()]:
                del answer.headers[name]
        return answer


def store_proxy(environ: Mapping[str, str], kind: StoreKind) -> AbstractContextManager[Any]:
    """Run a proxy in this process before the server that an environment leads to."""
    keys = environ["AWS_ACCESS_KEY_ID"], environ["AWS_SECRET_ACCESS_KEY"]
    return serving(
        StoreProxy,
        kind=kind,
        server_name=urlsplit(environ["AWS_ENDPOINT_URL"]).netloc,
        credentials=Credentials(*keys),
        refused=Counter(),
    )
