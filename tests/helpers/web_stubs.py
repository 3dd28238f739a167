"""Small servers on loopback that answer as a web server, Google's, Azure's or Hugging Face's does.

They know the requests that mmstream's clients send, and nothing else: any other is a 501. Objects
lie in a dict. Each server counts its requests, and can fail the next ones::

    with running(GoogleStub, {"bucket/a.tar": data}) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.helpers.http_servers import Answer, QuietHandler, serving


class Stub(QuietHandler):
    """What all of them have in common."""

    objects: dict[str, bytes]
    requests: list[str]
    statuses_to_come: list[int]

    def handle_any(self) -> None:
        split = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(split.query).items()}
        self.name = unquote(split.path).lstrip("/")
        self.requests.append(f"{self.command} {self.path}")
        self.body = self.read_body()
        if self.statuses_to_come:
            self.answer(self.statuses_to_come.pop(0), b"")
            return
        method = getattr(self, self.command.lower(), None)
        if method is None or method() is False:
            self.answer(501, b"")

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        self.send(Answer(status, named, body))

    def answer_json(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def answer_object(self, name: str, **headers: str) -> None:
        """Answer with an object, or with the range of it that is asked for."""
        data = self.objects.get(name)
        if data is None:
            self.answer(404, b"")
            return
        headers = {
            "ETag": f'"{hashlib.md5(data).hexdigest()}"',
            "Accept_Ranges": "bytes",
            **headers,
        }
        asked = self.headers.get("x-ms-range") or self.headers.get("Range")
        if self.command == "HEAD":
            self.answer(200, b"", Content_Length=str(len(data)), **headers)
        elif asked is None:
            self.answer(200, data, **headers)
        else:
            start, stop = re.fullmatch(r"bytes=(\d+)-(\d*)", asked).groups()
            part = data[int(start) : int(stop) + 1 if stop else None]
            if not part:
                self.answer(416, b"", Content_Range=f"bytes */{len(data)}")
                return
            last = int(start) + len(part) - 1
            headers["Content_Range"] = f"bytes {start}-{last}/{len(data)}"
            self.answer(206, part, **headers)

    def children(self, prefix: str) -> tuple[list[str], list[str]]:
        """Return (objects, folders) directly under a prefix that ends in a slash, or is empty."""
        below = [name for name in sorted(self.objects) if name.startswith(prefix)]
        names = [name for name in below if "/" not in name[len(prefix) :]]
        folders = {
            prefix + name[len(prefix) :].split("/")[0] for name in below if name not in names
        }
        return names, sorted(folders)


class WebStub(Stub):
    """A web server with pages that list folders. Its user is "user", its password "password"."""

    has_ranges = True
    needs_password = False

    def get(self) -> None:
        login = base64.b64encode(b"user:password").decode()
        if self.needs_password and self.headers.get("Authorization") != f"Basic {login}":
            self.answer(401, b"")
        elif self.name.endswith("/"):
            links = "".join(
                f'<a href="{n.split("/")[-1]}">x</a>' for n in self.children(self.name)[0]
            )
            self.answer(200, links.encode(), Content_Type="text/html")
        else:
            if not self.has_ranges:
                del self.headers["Range"]
            if self.name not in self.objects and self.children(f"{self.name}/")[0]:
                self.answer(301, b"", Location=f"/{self.name}/")
                return
            self.answer_object(self.name)

    head = get


class GoogleStub(Stub):
    """The JSON API of Google Cloud Storage."""

    def get(self) -> bool | None:
        match = re.fullmatch(r"(download/)?storage/v1/b/([^/]+)/o(/(.+))?", self.name)
        if match is None:
            return False
        bucket, key = match[2], match[4]
        if key is None:
            names, folders = self.children(f"{bucket}/{self.query.get('prefix', '')}")
            items = [self._item(name) for name in names]
            prefixes = [folder.partition("/")[2] + "/" for folder in folders]
            self.answer_json({"items": items, "prefixes": prefixes})
        elif self.query.get("alt") == "media":
            self.answer_object(f"{bucket}/{key}")
        elif f"{bucket}/{key}" in self.objects:
            self.answer_json(self._item(f"{bucket}/{key}"))
        else:
            self.answer(404, b"")
        return None

    def post(self) -> bool | None:
        if self.name.startswith("chunks/"):  # an upload in one chunk
            name = self.name.removeprefix("chunks/")
            self.objects[name] = self.body
            self.answer_json(self._item(name))
            return None
        match = re.fullmatch(r"upload/storage/v1/b/([^/]+)/o", self.name)
        if match is not None and self.query.get("uploadType") == "resumable":
            name = json.loads(self.body)["name"]
            self.answer(
                200, b"", Location=f"http://{self.headers['Host']}/chunks/{match[1]}/{name}"
            )
            return None
        if match is None or self.query.get("uploadType") != "multipart":
            return False
        boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
        _, described, content, _ = self.body.split(b"--" + boundary)
        name = json.loads(described.partition(b"\n\n")[2])["name"]
        content = content.partition(b"\n\n")[2].removesuffix(b"\n")
        # The end of the line before a boundary belongs to it, also where it is of two bytes.
        self.objects[f"{match[1]}/{name}"] = content.removesuffix(b"\r")
        self.answer_json(self._item(f"{match[1]}/{name}"))
        return None

    def delete(self) -> None:
        bucket, key = re.fullmatch(r"storage/v1/b/([^/]+)/o/(.+)", self.name).groups()
        is_absent = self.objects.pop(f"{bucket}/{key}", None) is None
        self.answer(404 if is_absent else 204, b"")

    def _item(self, name: str) -> dict[str, str]:
        bucket, _, key = name.partition("/")
        data = self.objects[name]
        digest = base64.b64encode(hashlib.md5(data).digest()).decode()
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": key,
            "size": str(len(data)),
            "generation": "1",
            "etag": "e",
            "md5Hash": digest,
            "updated": "2026-01-01T00:00:00Z",
            "timeCreated": "2026-01-01T00:00:00Z",
        }


class AzureStub(Stub):
    """The Blob service, without a look at signatures. Names begin with account and container."""

    def get(self) -> None:
        if self.query.get("comp") == "list":
            prefix = self.query.get("prefix", "")
            names, folders = self.children(f"{self.name}/{prefix}")
            cut = len(self.name) + 1
            date = "Thu, 01 Jan 2026 00:00:00 GMT"
            blobs = "".join(
                f"<Blob><Name>{escape(name[cut:])}</Name><Properties><Creation-Time>{date}"
                f"</Creation-Time><Last-Modified>{date}</Last-Modified><Etag>e</Etag>"
                f"<Content-Length>{len(self.objects[name])}</Content-Length>"
                "<Content-Type>application/octet-stream</Content-Type>"
                "<BlobType>BlockBlob</BlobType></Properties></Blob>"
                for name in names
            )
            prefixes = "".join(
                f"<BlobPrefix><Name>{escape(name[cut:])}/</Name></BlobPrefix>" for name in folders
            )
            text = (
                '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>'
                f'<EnumerationResults ServiceEndpoint="http://host/account" ContainerName="bucket">'
                f"<Prefix>{escape(prefix)}</Prefix><Marker/><MaxResults>5000</MaxResults>"
                f"<Delimiter>/</Delimiter><Blobs>{blobs}{prefixes}</Blobs><NextMarker/>"
                "</EnumerationResults>"
            )
            self.answer(200, text.encode(), Content_Type="application/xml")
        else:
            self.answer_object(
                self.name,
                x_ms_blob_type="BlockBlob",
                Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT",
                x_ms_creation_time="Thu, 01 Jan 2026 00:00:00 GMT",
            )

    head = get

    def put(self) -> bool | None:
        blocks = self.server.blocks = getattr(self.server, "blocks", {})
        if self.query.get("comp") == "block":
            blocks[self.query["blockid"]] = self.body
        elif self.query.get("comp") == "blocklist":
            names = re.findall(rb"<Latest>([^<]+)</Latest>", self.body)
            self.objects[self.name] = b"".join(blocks.pop(name.decode()) for name in names)
        else:
            self.objects[self.name] = self.body
        self.answer(
            201, b"", ETag='"e"', Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT", x_ms_version="2026"
        )
        return None

    def delete(self) -> None:
        is_absent = self.objects.pop(self.name, None) is None
        self.answer(404 if is_absent else 202, b"", x_ms_error_code="BlobNotFound")


class HubStub(Stub):
    """The hub of Hugging Face, for dataset repositories: ``datasets/user/corpus/a.tar``."""

    def get(self) -> bool | None:
        if match := re.fullmatch(r"api/(datasets/[^/]+/[^/]+)(/revision/[^/]+)?", self.name):
            is_known = any(name.startswith(f"{match[1]}/") for name in self.objects)
            if not is_known:
                self.answer(404, b"", X_Error_Code="RepoNotFound")
                return None
            repo = match[1].partition("/")[2]
            self.answer_json({"_id": "1", "id": repo, "sha": "a" * 40, "private": False})
        elif match := re.fullmatch(r"api/(datasets/[^/]+/[^/]+)/tree/[^/]+(/.+)?", self.name):
            prefix = f"{match[1]}{match[2] or ''}/"
            names, folders = self.children(prefix)
            entries = [self._entry(name, "file") for name in names]
            self.answer_json(entries + [self._entry(name, "directory") for name in folders])
        elif match := re.fullmatch(r"(datasets/[^/]+/[^/]+)/resolve/[^/]+/(.+)", self.name):
            self.answer_object(f"{match[1]}/{match[2]}")
        else:
            return False
        return None

    head = get

    def post(self) -> bool | None:
        match = re.fullmatch(r"api/(datasets/[^/]+/[^/]+)/paths-info/[^/]+", self.name)
        if match is None:
            return False
        try:
            paths = json.loads(self.body)["paths"]
        except ValueError:
            paths = [value for values in parse_qs(self.body.decode()).values() for value in values]
        names = [f"{match[1]}/{path}" for path in paths]
        self.answer_json([self._entry(name, "file") for name in names if name in self.objects])
        return None

    def _entry(self, name: str, kind: str) -> dict[str, object]:
        path = name.split("/", 3)[3]
        size = len(self.objects.get(name, b""))
        return {"type": kind, "oid": "b" * 40, "size": size, "path": path}


class S3Stub(Stub):
    """S3, as far as a folder of shards needs it. Objects have the name of their bucket in front."""

    def refuse(self) -> bytes | None:
        """The whole answer to a request that is refused, see `stub_server.refused`."""
        return None

    @property
    def access_key(self) -> str:
        """The name of the key that signed the request."""
        _, _, credential = self.headers.get("Authorization", "").partition("Credential=")
        return credential.partition("/")[0]

    def get(self) -> None:
        if refusal := self.refuse():
            head, end, body = refusal.partition(b"\r\n\r\n")
            self.wfile.write(head + end + (b"" if self.command == "HEAD" else body))
        elif self.command == "PUT":
            self.objects[self.name] = self.body
            self.answer(200, b"", ETag='"e1"')
        elif self.command == "DELETE":
            self.objects.pop(self.name, None)
            self.answer(204, b"")
        elif "list-type" in self.query:
            names, folders = self.children(f"{self.name}/{self.query['prefix']}")
            contents = "".join(
                f"<Contents><Key>{escape(name.partition('/')[2])}</Key><ETag>e</ETag>"
                f"<Size>{len(self.objects[name])}</Size></Contents>"
                for name in names
            )
            contents += "".join(
                f"<CommonPrefixes><Prefix>{escape(name.partition('/')[2])}/</Prefix></CommonPrefixes>"
                for name in folders
            )
            self.answer(200, f"<ListBucketResult>{contents}</ListBucketResult>".encode())
        else:
            self.answer_object(self.name)

    head = put = delete = get


def running(
    kind: type[Stub], objects: dict[str, bytes], **settings: Any
) -> AbstractContextManager[Any]:
    """Run a server in this process.

    Args:
        kind: One of the classes above.
        objects: Names and contents; the caller may change it.
        settings: Attributes of the class; `tls` for ``https``.
    """
    return serving(kind, objects=objects, requests=[], statuses_to_come=[], **settings)
