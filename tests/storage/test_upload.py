"""New objects in S3: parts, what a fault costs, and what is left after an error."""

# ruff: noqa: N803 - parameters have the names of S3

from __future__ import annotations

import base64
import hashlib
import io
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from crc32c import crc32c

from mmstream.errors import StorageError
from mmstream.storage import open_store, upload

URL = "s3://bucket/corpus/a.tar"
PART = 1000


class AnsweredError(Exception):
    """As a ClientError of botocore."""

    def __init__(self, code, status=501):
        super().__init__(code)
        about = {"HTTPStatusCode": status}
        self.response = {"Error": {"Code": code}, "ResponseMetadata": about}


class FakeS3:
    """The requests about one object, as S3 answers them, with faults on demand."""

    def __init__(self, has_checksums=True):
        self.has_checksums = has_checksums
        self.content = None
        self.uploads = {}
        self.num_requests = Counter()
        self.lost_answers = []  # methods that are done, and whose next answer is lost
        self.faults = {}  # {(method, part number or None): [errors to come]}

    def __call__(self, method, **parameters):
        number = parameters.get("PartNumber")
        self.num_requests[method, number] += 1
        faults = self.faults.get((method, number))
        if faults:
            raise faults.pop(0)
        answer = getattr(self, method)(**parameters)
        if method in self.lost_answers:
            self.lost_answers.remove(method)
            raise ConnectionResetError
        return answer

    def put_object(self, Body, ChecksumCRC32C=None, ContentMD5=None):
        self._require_known(ChecksumCRC32C)
        self.content = Body.getvalue()
        md5 = base64.b64encode(hashlib.md5(self.content).digest()).decode()
        assert (ChecksumCRC32C, ContentMD5) in ((encoded(self.content), None), (None, md5))
        return {"ETag": '"e"'}

    def create_multipart_upload(self, ChecksumAlgorithm=None, ChecksumType=None):
        self._require_known(ChecksumAlgorithm)
        self.uploads["new"] = {}
        return {
            "UploadId": "new",
            "ChecksumAlgorithm": ChecksumAlgorithm,
            "ChecksumType": ChecksumType,
        }

    def upload_part(self, UploadId, PartNumber, Body, ChecksumCRC32C=None, ContentMD5=None):
        data = Body.read()
        md5 = hashlib.md5(data)
        if self.has_checksums:
            assert ChecksumCRC32C == encoded(data)
        else:
            assert ContentMD5 == base64.b64encode(md5.digest()).decode()
        self.uploads[UploadId][PartNumber] = data
        return {"ETag": f'"{md5.hexdigest()}"'}

    def complete_multipart_upload(self, UploadId, MultipartUpload, **checksums):
        if UploadId not in self.uploads:
            raise FileNotFoundError("NoSuchUpload")
        parts = self.uploads.pop(UploadId)
        numbers = [part["PartNumber"] for part in MultipartUpload["Parts"]]
        assert numbers == sorted(parts)
        self.content = b"".join(parts[number] for number in numbers)
        assert checksums.get("ChecksumCRC32C") == (
            encoded(self.content) if self.has_checksums else None
        )
        return {}

    def abort_multipart_upload(self, UploadId):
        if self.uploads.pop(UploadId, None) is None:
            raise FileNotFoundError("NoSuchUpload")
        return {}

    def head_object(self, ChecksumMode):
        checksum = {"ChecksumType": "FULL_OBJECT", "ChecksumCRC32C": encoded(self.content)}
        return {"ContentLength": len(self.content), **(checksum if self.has_checksums else {})}

    def _require_known(self, checksum):
        if checksum is not None and not self.has_checksums:
            raise AnsweredError("NotImplemented")


def encoded(data):
    return base64.b64encode(crc32c(data).to_bytes(4, "big")).decode()


@pytest.fixture(autouse=True)
def short_parts(request, monkeypatch):
    if request.node.get_closest_marker("s3") is None:
        monkeypatch.setattr(upload, "PART_BYTES", PART)


@pytest.fixture
def server():
    return FakeS3()


def write(server, *blocks):
    """Write blocks of bytes, and call what is a function between them."""
    with upload.upload(URL, server) as file:
        for block in blocks:
            if callable(block):
                block()
            else:
                file.write(block)


def stop():
    raise ZeroDivisionError


def data_of(num_bytes):
    return os.urandom(num_bytes)


@pytest.mark.parametrize("num_bytes", [0, 1, PART - 1, PART, PART + 1, 2 * PART, 5 * PART + 7])
@pytest.mark.parametrize("has_checksums", [True, False])
def test_an_object_is_what_was_written(num_bytes, has_checksums):
    server, data = FakeS3(has_checksums), data_of(num_bytes)
    write(server, data[:3], data[3:700], data[700:])
    assert server.content == data
    assert not server.uploads  # no part is left
    num_parts = sum(n for (method, _), n in server.num_requests.items() if method == "upload_part")
    assert num_parts == (0 if num_bytes <= PART else -(-num_bytes // PART))


def test_parts_are_sent_while_the_object_is_written_and_few_wait(server):
    may_end, under_way, num_written = threading.Event(), threading.Semaphore(0), []
    send = server.upload_part

    def slow(**parameters):
        under_way.release()
        assert may_end.wait(500)
        return send(**parameters)

    server.upload_part = slow
    blocks = [
        block for number in range(40) for block in (bytes(PART), lambda: num_written.append(1))
    ]
    with ThreadPoolExecutor(1) as thread:
        written = thread.submit(write, server, *blocks)
        for _ in range(upload.MAX_PARTS_IN_FLIGHT):
            assert under_way.acquire(timeout=500)
        wait([written], 0.05)
        # One part is being filled, and the next write waits.
        assert len(num_written) <= upload.MAX_PARTS_IN_FLIGHT + 1
        may_end.set()
        written.result()
    assert server.content == bytes(40 * PART)


def test_parts_grow_so_that_10_000_are_enough(server, monkeypatch):
    monkeypatch.setattr(upload, "PARTS_OF_A_SIZE", 2)
    monkeypatch.setattr(upload, "MAX_PARTS", 5)
    write(server, data := data_of(2 * PART + 2 * 2 * PART + 4 * PART))
    assert server.content == data
    with pytest.raises(StorageError, match=f"{10 * PART} bytes are the most"):
        write(server, bytes(10 * PART + 1))
    assert server.uploads == {}


def test_a_connection_that_breaks_costs_one_part(server, pauses):
    server.faults["upload_part", 2] = [ConnectionResetError(), OSError("truncated")]
    write(server, data := data_of(4 * PART))
    assert server.content == data
    counts = {n: server.num_requests["upload_part", n] for n in (1, 2, 3, 4)}
    assert counts == {1: 1, 2: 3, 3: 1, 4: 1}


@pytest.mark.parametrize(
    ("faults", "last_block", "error"),
    [
        ({}, stop, ZeroDivisionError),
        ({("upload_part", 1): [PermissionError("denied")]}, b"", StorageError),
    ],
    ids=["in the block", "of a part"],
)
def test_an_error_leaves_no_object_and_no_parts(server, faults, last_block, error):
    server.faults = faults
    with pytest.raises(error):
        write(server, *[bytes(PART)] * 40, last_block)
    assert server.content is None
    assert server.uploads == {}


def test_parts_that_cannot_be_removed_are_named(server, caplog):
    server.faults["abort_multipart_upload", None] = [PermissionError("denied")] * 2
    with pytest.raises(ZeroDivisionError):
        write(server, bytes(2 * PART), stop)
    assert "a.tar: parts of an upload that failed stay in the bucket" in caplog.text


def test_the_answer_to_the_last_request_may_be_lost(server, pauses):
    server.lost_answers = ["complete_multipart_upload"]
    write(server, data := data_of(3 * PART))
    assert server.num_requests["complete_multipart_upload", None] == 2
    assert server.content == data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_checksums", "faults", "change"),
    [
        (True, [FileNotFoundError("NoSuchUpload")], None),
        (False, [FileNotFoundError("NoSuchUpload")], None),
        (True, [], lambda content: content[:-1]),
        (True, [], lambda content: b"\1" + content[1:]),
    ],
)
def test_an_upload_that_another_process_removed_or_changed_is_an_error(
    has_checksums, faults, change, pauses
):
    server = FakeS3(has_checksums)
    server.content, complete = data_of(3 * PART), server.complete_multipart_upload  # of this size
    server.faults["complete_multipart_upload", None] = faults

    def damage(**parameters):
        complete(**parameters)
        server.content = change(server.content)

    if change is not None:
        server.complete_multipart_upload = damage
    message = r"another process|which other program|were written, but the object has"
    with pytest.raises(StorageError, match=message):
        write(server, bytes(3 * PART))


class PagedS3:
    """Uploads under a prefix that did not end, three in an answer."""

    def __init__(self, prefix, refusal=None):
        self.prefix, self.refusal = prefix, refusal
        self.left = [(f"{prefix}{i}.tar", f"id{i}") for i in range(8)]

    def __call__(self, url, method, Prefix=None, KeyMarker="", UploadIdMarker="", UploadId=None):
        if self.refusal is not None:
            raise self.refusal
        if method == "abort_multipart_upload":
            self.left.remove((url.removeprefix("s3://bucket/"), UploadId))
            return {}
        page = [left for left in self.left if left > (KeyMarker, UploadIdMarker)][:3]
        assert Prefix == self.prefix
        return {
            "Uploads": [{"Key": key, "UploadId": id} for key, id in page],
            "IsTruncated": page[-1] != self.left[-1],
            "NextKeyMarker": page[-1][0],
            "NextUploadIdMarker": page[-1][1],
        }


@pytest.mark.parametrize(
    ("url", "prefix"),
    [
        *(("s3://bucket", ""), ("s3://bucket//p", "/p/")),
        *(("s3://bucket/p/", "p/"), ("s3://bucket/corpus", "corpus/")),
    ],
)
def test_all_pages_of_a_list_of_uploads_under_a_prefix_are_read(url, prefix):
    server = PagedS3(prefix)
    upload.remove_uploads(url, server, r"[1-7]\.tar")
    assert server.left == [(f"{prefix}0.tar", "id0")]


def test_without_the_right_to_list_uploads_they_stay_and_nothing_is_raised(caplog):
    with caplog.at_level("INFO"):
        upload.remove_uploads("s3://bucket/corpus", PagedS3("", PermissionError("denied")), ".*")
    assert "s3://bucket/corpus: uploads that did not end may stay: denied" in caplog.text


# On a real server


def uploads_of(store):
    return store._send(store.url_of("x"), "list_multipart_uploads", Prefix="").get("Uploads")


@pytest.mark.s3
@pytest.mark.parametrize("num_bytes", [0, 5, 3 * upload.PART_BYTES + 1])
def test_s3_knows_the_checksum_of_the_whole_object(s3, tmp_path, num_bytes):
    store, data = open_store(f"{s3}/{tmp_path.name}"), data_of(num_bytes)
    with store.create("a.tar") as file:
        file.write(data)
    assert store.read("a.tar") == data
    stat = store._send(store.url_of("a.tar"), "head_object", ChecksumMode="ENABLED")
    assert stat["ChecksumCRC32C"] == encoded(data)
    assert not uploads_of(store)


@pytest.mark.s3
def test_what_a_killed_writer_left_is_removed(s3, tmp_path):
    store = open_store(f"{s3}/{tmp_path.name}")
    url = store.url_of("a.tar")
    killed = store._send(url, "create_multipart_upload")["UploadId"]
    store._send(url, "upload_part", UploadId=killed, PartNumber=1, Body=io.BytesIO(b"x"))
    assert [left["UploadId"] for left in uploads_of(store)] == [killed]
    store.remove_uploads(r".*\.tar")
    assert not uploads_of(store)
