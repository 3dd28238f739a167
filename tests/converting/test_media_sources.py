"""Where media may lie: URLs, data: URLs, tars, spans. And where rows of strangers may not lead."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import threading
import zipfile
from concurrent.futures import Future
from functools import cache

import fsspec
import pytest
from PIL import Image

from mmstream.converting.draft import Draft, MediaRef, RowError
from mmstream.converting.media import load as load_module
from mmstream.converting.media import zip_members
from mmstream.converting.media.access import MediaAccess, folder_stamp, require_prefixes
from mmstream.converting.media.load import load_rows
from mmstream.converting.media.look_ahead import ArrivedBytes
from mmstream.converting.media.options import MediaOptions
from mmstream.converting.rows.source import Row
from mmstream.errors import ConfigError, StorageError
from tests.helpers.media import load_media
from tests.helpers.wait import wait_until


def png(width=8, height=6):
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 40)).save(file, "PNG")
    return file.getvalue()


def load(path, root=None, **access):
    [medium] = load_media([MediaRef("image", path)], root, **access)
    return medium.data


@pytest.fixture
def bucket():
    fs = fsspec.filesystem("memory")
    fs.pipe("/corpus/photos/a.png", png())
    fs.pipe("/private/a.png", png())
    yield fs
    fs.rm("/", recursive=True)


@pytest.mark.parametrize("padding", ["", "="])
def test_data_urls_and_base64_hold_the_media_themselves(padding):
    data = png()
    text = base64.b64encode(data).decode().rstrip("=")
    text += padding * (-len(text) % 4)
    assert load(f"data:image/png;base64,{text}") == data
    assert load(f"data:;name=a b.png;base64,{text}") == data
    assert load(f"DATA:image/png;BASE64,{text[:40]}\n{text[40:]}") == data
    url_safe = text.replace("+", "-").replace("/", "_")
    assert load(f"data:image/png;base64,{url_safe}") == data
    assert load(text) == data


def test_a_data_url_may_be_percent_encoded():
    data = png()
    assert load("data:image/png," + "".join(f"%{byte:02x}" for byte in data)) == data


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,iVBO*", "damaged base64"),
        ("data:image/png;base64,\u00e4", "damaged base64"),
        ("data:image/png;base64", "without a comma"),
        ("data:text/html;base64,PGh0bWw+", "not an image"),
        ("data:" + ";" * 100_000, "without a comma"),
        ("data:," + "%41" * 300_000, "use base64"),
        ("/9j/" + "A" * 2000 + "!", "damaged base64"),
    ],
)
def test_a_damaged_data_url_is_a_reject_without_its_data(url, reason):
    with pytest.raises(RowError, match=reason) as caught:
        load(url)
    assert len(str(caught.value)) < 200


def test_reasons_hold_no_signature_of_a_url(monkeypatch):
    monkeypatch.setattr(load_module, "shared_downloader", cache(SlowDownloader))
    url = "https://host/a.png?X-Amz-Signature=1f2e3d"

    def rows():
        yield Row(0, "f", 1, {}), Draft({}, (MediaRef("image", url),))
        SlowDownloader.last.futures[url].set_result(b"<html>")

    [(_, error, _)] = load_rows(rows(), MediaAccess(None), MediaOptions())
    assert str(error).startswith("https://host/a.png?***: not an image")


def test_bytes_of_the_row_need_no_root_and_are_compared_with_their_checksum():
    data = png()
    ref = MediaRef("image", "images[0]", data, sha256=hashlib.sha256(data).hexdigest())
    assert load_media([ref], None)[0].data == data
    with pytest.raises(RowError, match=r"images\[0\]: another file than the row says"):
        load_media([MediaRef("image", "images[0]", data, sha256="0" * 64)], None)


def test_paths_of_windows_lie_under_the_root(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(png())
    (tmp_path / "b\\c.png").write_bytes(png(3, 3))
    for path in (
        "photos\\a.png",
        ".\\photos\\a.png",
        "C:\\photos\\a.png",
        "c:/photos/a.png",
        "file:///C:/photos/a.png",
    ):
        assert load(path, tmp_path) == png()
    assert load("b\\c.png", tmp_path) == png(3, 3)


@pytest.mark.parametrize("path", ["C:\\photos\\my a.png", "photos\\my a.png"])
def test_a_path_of_windows_that_is_missing_says_what_was_tried(tmp_path, path):
    with pytest.raises(RowError, match=r"no such file; tried 'photos/my a.png' in the media root"):
        load(path, tmp_path)


@pytest.mark.parametrize("path", ["..\\a.png", "C:\\..\\a.png", "\\\\server\\a.png", "C:\\\\..\\a"])
def test_paths_of_windows_do_not_leave_the_root_either(tmp_path, path):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "a.png").write_bytes(png())
    with pytest.raises(RowError, match=r"outside the media root|no such file"):
        load(path, root)


def test_a_root_may_be_a_prefix_of_an_object_store(bucket):
    root = "memory://corpus"
    for path in ("photos/a.png", "./photos/a.png", "photos\\a.png", f"{root}/photos/a.png"):
        assert load(path, root) == png()
    with pytest.raises(RowError, match=r"photos/b\.png: no such object"):
        load("photos/b.png", root)


@pytest.mark.parametrize(
    "path",
    [
        "../private/a.png",
        "photos/../../private/a.png",
        "photos/%2e%2e/%2E%2e/private/a.png",
        "..\\private\\a.png",
        "memory://corpus/../private/a.png",
        "memory://private/a.png",
        "memory://corpus-2/a.png",
        "/private/a.png",
        "C:\\private\\a.png",
        "file:///private/a.png",
        "simplecache::memory://corpus/photos/a.png",
        "memory://corpus/x::memory://private/a.png",
        "local:///etc/passwd",
        "zip://a.png::memory://private/a.zip",
        "tar://a.png::simplecache::memory://corpus/a.tar",
        "tar://a.png::memory://private/a.tar",
        "reference://a.png",
        "ftp://host/a.png",
        "github://o:r@/a.png",
    ],
)
def test_rows_lead_out_of_no_prefix_of_an_object_store(bucket, path):
    with pytest.raises(RowError):
        load(path, "memory://corpus")


def test_objects_elsewhere_are_read_only_where_the_caller_allows_them(bucket, tmp_path):
    with pytest.raises(
        RowError, match=r"read with your credentials.*--allow-url memory://private/"
    ):
        load("memory://private/a.png", tmp_path)
    assert load("memory://private/a.png", tmp_path, allow_urls=("memory://private/",)) == png()
    with pytest.raises(RowError, match="--allow-url"):
        load("memory://private/a.png", tmp_path, allow_urls=("memory://priv",))


@pytest.mark.parametrize(
    ("prefixes", "reason"),
    [
        ("s3://bucket/", "a list of prefixes"),
        (["bucket/x"], "not the URL"),
        (["s3://"], "not the URL"),
        (["zip://a::s3://b/c"], "not the URL"),
        (["https://host/"], "may name https:// anyway"),
        (["s3://key:secret@bucket/x"], r"s3://\*\*\*: a URL must not"),
    ],
)
def test_an_allowed_prefix_is_the_url_of_a_bucket(prefixes, reason):
    with pytest.raises(ConfigError, match=reason):
        require_prefixes(prefixes)


def tar_of(members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return file.getvalue()


def test_members_of_a_tar_and_spans_of_a_file_are_read_from_where_they_lie(tmp_path, bucket):
    tar = tar_of([("img/1.png", png(1, 1)), ("./2.png", png(2, 2)), ("empty.png", b"")])
    (tmp_path / "a.tar").write_bytes(tar)
    (tmp_path / "all.bin").write_bytes(b"junk" + png(5, 5) + png(6, 6))
    bucket.pipe("/corpus/a.tar", tar)
    bucket.pipe("/corpus/all.bin", b"junk" + png(5, 5) + png(6, 6))
    for root in (tmp_path, "memory://corpus"):
        assert load("tar://img/1.png::a.tar", root) == png(1, 1)
        assert load("tar://2.png::a.tar", root) == png(2, 2)
        assert load(f"all.bin:4:{len(png(5, 5))}", root) == png(5, 5)
        for path, reason in {
            "tar://3.png::a.tar": "no such member",
            "tar://link.png::a.tar": "no such member",
            "tar://empty.png::a.tar": "empty file",
            "tar://1.png::all.bin": "not a plain tar",
            "tar://1.png": "write tar://MEMBER::TAR",
            "tar://1.png::none.tar": "no such",
            "all.bin:4:0": "a span of no bytes",
            "all.bin:4:999999": "bytes 4 to 1000003 of",
        }.items():
            with pytest.raises(RowError, match=reason):
                load(path, root)
    with pytest.raises(RowError, match="outside the media root"):
        load("tar://1.png::../a.tar", tmp_path / "sub")
    with pytest.raises(RowError, match="download it first"):
        load("tar://1.png::https://example.com/a.tar", tmp_path)


def zip_of(members, **settings):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **settings) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_of_a_zip_are_read_from_where_they_lie(tmp_path, bucket, method):
    members = [("img/1.png", png(1, 1)), ("2.png", png(2, 2)), ("empty.png", b""), ("sub/", b"")]
    data = b"a program that unpacks itself" + zip_of(members, compression=method)
    (tmp_path / "a.zip").write_bytes(data)
    bucket.pipe("/corpus/a.zip", data)
    for root in (tmp_path, "memory://corpus"):
        assert load("zip://img/1.png::a.zip", root) == png(1, 1)
        assert load("zip://./2.png::a.zip", root) == png(2, 2)
        for path, reason in {
            "zip://3.png::a.zip": "no such member of the zip",
            "zip://sub/::a.zip": "no such member of the zip",
            "zip://empty.png::a.zip": "empty file",
            "zip://1.png::none.zip": "no such",
            "zip://1.png": "write tar://MEMBER::TAR or zip://MEMBER::ZIP",
        }.items():
            with pytest.raises(RowError, match=reason):
                load(path, root)
    with pytest.raises(RowError, match="outside the media root"):
        load("zip://1.png::../a.zip", tmp_path / "sub")


def damaged_zips():
    """Yield (bytes of a zip with a.png, why it cannot be read)."""
    stored = zip_of([("a.png", png())])
    yield b"PK no zip", "not a zip"
    yield stored[:-10], "not a zip"
    yield stored.replace(png()[:20], bytes(20), 1), "another checksum than the zip says"
    yield stored.replace(b"PK\3\4", b"PK\5\4", 1), "not where the zip's directory says"
    name_bytes = bytearray(stored)
    name_bytes[26:28] = b"\xff\xff"
    yield bytes(name_bytes), "not where the zip's directory says"
    deflated = bytearray(zip_of([("a.png", bytes(1000) + png())], compression=zipfile.ZIP_DEFLATED))
    deflated[35:45] = bytes(range(245, 255))
    yield bytes(deflated), "is damaged"
    encrypted = bytearray(stored)
    encrypted[encrypted.index(b"PK\1\2") + 8] |= 1
    yield bytes(encrypted), "is encrypted; unpack the zip first"
    yield zip_of([("a.png", png())], compression=zipfile.ZIP_BZIP2), "unpack the zip first"


def test_damaged_zips_are_rejects(tmp_path):
    for data, reason in damaged_zips():
        (tmp_path / "a.zip").write_bytes(data)
        with pytest.raises(RowError, match=reason):
            load("zip://a.png::a.zip", tmp_path)


def test_a_zip_takes_no_more_memory_than_its_limits(tmp_path, monkeypatch):
    bomb = zip_of([("a.png", bytes(1 << 20))], compression=zipfile.ZIP_DEFLATED)
    (tmp_path / "a.zip").write_bytes(bomb)
    with monkeypatch.context() as patch:
        patch.setattr(load_module, "MAX_ROW_BYTES", 1000)
        with pytest.raises(RowError, match="more than 1,000 bytes"):
            load("zip://a.png::a.zip", tmp_path)
    # The directory says that few bytes come out.
    start = bomb.index(b"PK\1\2") + 24
    (tmp_path / "b.zip").write_bytes(bomb[:start] + (100).to_bytes(4, "little") + bomb[start + 4 :])
    with pytest.raises(RowError, match="another checksum"):
        load("zip://a.png::b.zip", tmp_path)
    monkeypatch.setattr(zip_members, "MAX_DIRECTORY_BYTES", 10)
    with pytest.raises(RowError, match="directory has more than"):
        load("zip://a.png::a.zip", tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        "x" * 5000,
        "\ud800.png",
        "s3://b/\ud800",
        "a/" * 10_000_000,
        "a/" * 3000 + "a.png",
        "\0",
        "a\nb.png",
        "~/a.png",
    ],
)
def test_odd_paths_are_rejects(tmp_path, path):
    with pytest.raises(RowError) as caught:
        load(path, tmp_path)
    assert len(str(caught.value)) < 300


def test_a_root_that_is_gone_stops_the_conversion(tmp_path):
    root = tmp_path / "mount"
    root.mkdir()
    (root / "a.png").write_bytes(png())
    stamp = folder_stamp(str(root))
    with pytest.raises(RowError, match="no such file"):
        load("b.png", root, root_stamp=stamp)
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="media root is gone"):
        load("a.png", root, root_stamp=stamp)
    root.mkdir()  # an empty folder stays where a mount was
    with pytest.raises(StorageError, match="media root is gone"):
        load("a.png", root, root_stamp=stamp)


class SlowDownloader:
    """Downloads that arrive when the test says so."""

    def __init__(self, options, num_processes):
        self.futures: dict[str, Future[bytes]] = {}
        SlowDownloader.last = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def start(self, url, max_bytes=None):
        return self.futures.setdefault(url, Future())


def web_rows(count):
    for i in range(count):
        ref = MediaRef("image", f"https://host/{i}.png")
        yield Row(i, "f", i + 1, {}), Draft({"id": i}, (ref,))


def test_downloads_arrive_in_any_order_and_rows_keep_theirs(monkeypatch):
    monkeypatch.setattr(load_module, "shared_downloader", cache(SlowDownloader))
    monkeypatch.setattr(load_module, "MAX_BYTES_AHEAD", 3 * len(png()))
    rows = load_rows(web_rows(20), MediaAccess(None), MediaOptions())
    numbers = []
    thread = threading.Thread(target=lambda: numbers.extend(row.number for row, _, _ in rows))
    SlowDownloader.last = None
    thread.start()
    wait_until(lambda: SlowDownloader.last and len(SlowDownloader.last.futures) == 20)
    futures = SlowDownloader.last.futures
    for i in reversed(range(20)):
        assert numbers == []
        if i == 7:
            futures[f"https://host/{i}.png"].set_exception(RowError("https://host/7.png: 404"))
        else:
            futures[f"https://host/{i}.png"].set_result(png())
    thread.join(500)
    assert numbers == list(range(1, 21))


def test_no_more_rows_than_the_limit_are_ahead(monkeypatch):
    monkeypatch.setattr(load_module, "shared_downloader", cache(SlowDownloader))
    monkeypatch.setattr(load_module, "MAX_ROWS_AHEAD", 5)
    pulled = []

    def rows():
        for row, draft in web_rows(50):
            pulled.append(row)
            if len(pulled) > 1:  # only the first one is late
                SlowDownloader.last.start(f"https://host/{row.index}.png").set_result(png())
            yield row, draft

    loaded = load_rows(rows(), MediaAccess(None), MediaOptions())
    threading.Timer(
        0.2, lambda: SlowDownloader.last.futures["https://host/0.png"].set_result(png())
    ).start()
    assert next(loaded)[0].number == 1
    assert len(pulled) == 5
    assert [row.number for row, _, _ in loaded] == list(range(2, 51))


def test_a_root_may_be_a_folder_of_a_web_server(monkeypatch):
    monkeypatch.setattr(load_module, "shared_downloader", cache(SlowDownloader))

    def rows():
        for path in ("a b.png", "x/c#d?.png", "../secret.png", "/etc/a.png"):
            yield Row(0, "f", 1, {}), Draft({}, (MediaRef("image", path),))
        for future in SlowDownloader.last.futures.values():
            future.set_result(png())

    loaded = list(load_rows(rows(), MediaAccess("https://host/media"), MediaOptions()))
    assert list(SlowDownloader.last.futures) == [
        "https://host/media/a%20b.png",
        "https://host/media/x/c%23d%3F.png",
    ]
    assert [len(media) for _, _, media in loaded] == [1, 1, 0, 0]


def test_rows_that_wait_count_with_their_own_size(monkeypatch):
    monkeypatch.setattr(load_module, "shared_downloader", cache(SlowDownloader))
    monkeypatch.setattr(load_module, "MAX_INLINE_BYTES_AHEAD", 5500)
    pulled = []

    def rows():
        for row, _ in web_rows(50):
            pulled.append(row)
            ref = MediaRef("image", f"https://host/{row.index}.png")
            if row.index == 8:  # nine rows of 600 bytes are more than the limit
                for future in SlowDownloader.last.futures.values():
                    future.set_result(png())
            yield row, Draft({"text": "x" * 600}, (ref,) if row.index < 8 else ())

    loaded = load_rows(rows(), MediaAccess(None), MediaOptions())
    next(loaded)
    assert len(pulled) == 9


def test_a_failed_network_stops_the_conversion_and_is_no_reject(monkeypatch):
    monkeypatch.setattr(load_module, "shared_downloader", cache(SlowDownloader))

    def rows():
        yield from web_rows(1)
        SlowDownloader.last.futures["https://host/0.png"].set_exception(StorageError("no network"))

    with pytest.raises(StorageError, match="no network"):
        list(load_rows(rows(), MediaAccess(None), MediaOptions()))


def test_what_does_not_fit_in_memory_waits_on_disk():
    with ArrivedBytes(max_bytes=10) as arrived:
        tickets = []
        for i in range(4):
            future: Future[bytes] = Future()
            tickets.append(arrived.wait_for(future))
            future.set_result(bytes([i]) * 8)
        assert arrived._file_size == 24
        arrived.drop(tickets[1])
        assert [arrived.take(ticket) for ticket in (tickets[3], tickets[0], tickets[2])] == [
            b"\3" * 8,
            b"\0" * 8,
            b"\2" * 8,
        ]
        assert arrived._num_bytes == 0


def test_a_full_temporary_folder_stops_the_conversion(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with ArrivedBytes(max_bytes=1) as arrived:
        future: Future[bytes] = Future()
        ticket = arrived.wait_for(future)
        future.set_result(b"too many")
        with pytest.raises(StorageError, match="Set TMPDIR"):
            arrived.take(ticket)
