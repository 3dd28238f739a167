"""Where media may lie: URLs, data: URLs, tars, spans. And where rows of strangers may not lead."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import struct
import tarfile
import tempfile
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import fsspec
import pytest
from PIL import Image

import mmstream as mm
from mmstream.converting.draft import Draft, MediaRef, RowError
from mmstream.converting.media import download as download_module, load as load_module, references
from mmstream.converting.media.load import load_rows
from mmstream.converting.media.references import Archive, Archives, MediaAccess, require_prefixes
from mmstream.converting.rows.records import Row
from mmstream.media.types import sniff, sniff_file
from mmstream.storage import open_store
from tests.helpers.convert_corpus import write_files
from tests.helpers.media import load_media
from tests.helpers.pictures import encoded
from tests.helpers.wait import wait_until


def picture(format, width=8, height=6):
    return encoded(Image.new("RGB", (width, height), (200, 30, 40)), format)


def png(width=8, height=6):
    return picture("PNG", width, height)


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
    assert load("\n".join(text[start : start + 40] for start in range(0, len(text), 40))) == data
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


def test_reasons_hold_no_signature_of_a_url(downloads):
    signed = "https://host/a.png?X-Amz-Signature=1f2e3d"

    def rows():
        yield Row(0, "f", 1, {}), Draft({}, (MediaRef("image", signed),))
        downloads[signed].set_result(b"<html>")

    [(_, error, _)] = loaded(rows())
    assert str(error).startswith("https://host/a.png?***: not an image")


def test_bytes_of_the_row_need_no_root_and_are_compared_with_their_checksum():
    data = png()
    ref = MediaRef("image", "images[0]", data, sha256=hashlib.sha256(data).hexdigest())
    assert load_media([ref], None)[0].data == data
    with pytest.raises(RowError, match=r"images\[0\]: another file than the row says"):
        load_media([MediaRef("image", "images[0]", data, sha256="0" * 64)], None)


def test_paths_of_windows_lie_under_the_root(tmp_path):
    write_files(tmp_path, {"photos/a.png": png(), "b\\c.png": png(3, 3)})
    for path in (
        "photos\\a.png",
        ".\\photos\\a.png",
        "C:\\photos\\a.png",
        "c:/photos/a.png",
        "file:///C:/photos/a.png",
    ):
        assert load(path, tmp_path) == png()
    assert load("b\\c.png", tmp_path) == png(3, 3)


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
    url = "memory://private/a.png"
    assert load(url, tmp_path, allow_urls=("memory://private/",)) == png()
    for allowed in ((), ("memory://priv",)):
        with pytest.raises(
            RowError, match=r"read with your credentials.*--allow-url memory://private/"
        ):
            load(url, tmp_path, allow_urls=allowed)


@pytest.mark.parametrize(
    ("prefixes", "reason"),
    [
        (["bucket/x"], "not the URL"),
        (["s3://"], "not the URL"),
        (["zip://a::s3://b/c"], "not the URL"),
        (["https://host/"], "may name https:// anyway"),
        (["s3://key:secret@bucket/x"], r"s3://\*\*\*: a URL must not"),
    ],
)
def test_an_allowed_prefix_is_the_url_of_a_bucket(prefixes, reason):
    with pytest.raises(mm.ConfigError, match=reason):
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


def zip_of(members, **settings):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **settings) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


MEMBERS = [("img/1.png", png(1, 1)), ("./2.png", png(2, 2)), ("empty.png", b"")]
IN_ZIP = [*((name.removeprefix("./"), data) for name, data in MEMBERS), ("sub/", b"")]
PROGRAM = b"a program that unpacks itself"
ARCHIVES = {
    "a.tar": tar_of(MEMBERS),
    "stored.zip": PROGRAM + zip_of(IN_ZIP, compression=zipfile.ZIP_STORED),
    "deflated.zip": PROGRAM + zip_of(IN_ZIP, compression=zipfile.ZIP_DEFLATED),
    "all.bin": b"junk" + png(5, 5) + png(6, 6),
    "a b.png": png(),
}
INSIDE = {
    "a b.png": png(),
    "tar://img/1.png::a.tar": png(1, 1),
    "tar://2.png::a.tar": png(2, 2),
    f"all.bin:4:{len(png(5, 5))}": png(5, 5),
}
NOT_INSIDE = {
    "absent.png": "no such",
    "tar://3.png::a.tar": "no such member",
    "tar://link.png::a.tar": "no such member",
    "tar://empty.png::a.tar": "empty file",
    "tar://1.png::all.bin": "not a plain tar",
    "tar://1.png": "write tar://MEMBER::TAR or zip://MEMBER::ZIP",
    "tar://1.png::none.tar": "no such",
    "tar://1.png::https://example.com/a.tar": "download it first",
    "tar://1.png::../a.tar": "outside the media root",
    "zip://1.png::none.zip": "no such",
    "zip://1.png": "write tar://MEMBER::TAR or zip://MEMBER::ZIP",
    "zip://1.png::../a.zip": "outside the media root",
    "all.bin:4:0": "a span of no bytes",
    "all.bin:4:999999": "bytes 4 to 1000003 of",
}
for name in ("stored.zip", "deflated.zip"):
    INSIDE |= {f"zip://img/1.png::{name}": png(1, 1), f"zip://./2.png::{name}": png(2, 2)}
    NOT_INSIDE |= {
        f"zip://3.png::{name}": "no such member of the zip",
        f"zip://sub/::{name}": "no such member of the zip",
        f"zip://empty.png::{name}": "empty file",
    }


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.s3)])
def root(request, tmp_path):
    """A folder with archives, or a prefix of an object store."""
    if request.param == "local":
        return write_files(tmp_path, ARCHIVES)
    place = "memory:/" if request.param == "memory" else request.getfixturevalue("s3")
    store = open_store(f"{place}/{tmp_path.name}")
    for name, data in ARCHIVES.items():
        store.write(name, data)
    return store.url


def test_members_of_archives_and_spans_of_files_are_read_from_where_they_lie(root):
    for path, data in INSIDE.items():
        assert load(path, root) == data, path


def test_an_archive_is_read_as_what_each_row_calls_it(root):
    paths = ["zip://img/1.png::a.tar", "tar://img/1.png::a.tar"]
    drafts = [(Row(0, "f", 1, {}), Draft({}, (MediaRef("image", path),))) for path in paths]
    folder = root if "://" in str(root) else os.path.realpath(root)
    (_, wrong, _), (_, _, [medium]) = loaded(drafts, folder)
    assert "not a zip" in str(wrong)
    assert medium.data == png(1, 1)


def test_a_member_or_a_span_that_is_not_there_is_a_reject(root):
    for path, reason in NOT_INSIDE.items():
        with pytest.raises(RowError, match=reason):
            load(path, root)


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


@pytest.mark.parametrize(("data", "reason"), damaged_zips())
def test_damaged_zips_are_rejects(tmp_path, data, reason):
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
    monkeypatch.setattr(references, "MAX_DIRECTORY_BYTES", 10)
    with pytest.raises(RowError, match="directory has more than"):
        load("zip://a.png::a.zip", tmp_path)


@pytest.fixture
def downloads(monkeypatch):
    """The downloads that were started, by their URLs. They arrive when the test says so."""
    futures = {}

    def start(url, _, keep):
        kept = Future()

        def arrive(future):
            try:
                kept.set_result(keep(future.result()))
            except Exception as error:
                kept.set_exception(error)

        futures.setdefault(url, Future()).add_done_callback(arrive)
        return kept

    downloader = SimpleNamespace(start=start)
    monkeypatch.setattr(download_module, "shared_downloader", lambda *_: downloader)
    return futures


def loaded(rows, root=None):
    return load_rows(rows, MediaAccess(root), mm.MediaOptions())


def url(number):
    return f"https://host/{number}.png"


def web_rows(count):
    for i in range(count):
        yield Row(i, "f", i + 1, {}), Draft({"id": i}, (MediaRef("image", url(i)),))


def test_downloads_arrive_in_any_order_and_rows_keep_theirs(monkeypatch, downloads):
    monkeypatch.setattr(load_module, "MAX_BYTES_AHEAD", 3 * len(png()))  # most wait on disk
    with ThreadPoolExecutor() as pool:
        read = pool.submit(list, loaded(web_rows(20)))
        wait_until(lambda: len(downloads) == 20)
        for i in reversed(range(20)):
            assert not read.done()
            if i == 7:
                downloads[url(i)].set_exception(RowError(f"{url(i)}: 404"))
            else:
                downloads[url(i)].set_result(png(i + 1))
    expected = [(i + 1, [png(i + 1)] if i != 7 else []) for i in range(20)]
    assert [(row.number, [m.data for m in media]) for row, _, media in read.result()] == expected


def test_no_more_rows_than_the_limit_are_ahead(monkeypatch, downloads):
    monkeypatch.setattr(load_module, "MAX_ROWS_AHEAD", 5)
    for i in range(1, 50):  # only the first one is late
        downloads.setdefault(url(i), Future()).set_result(png())
    pulled = []

    def rows():
        for row, draft in web_rows(50):
            pulled.append(row)
            yield row, draft

    read = loaded(rows())
    with ThreadPoolExecutor() as pool:
        first = pool.submit(next, read)
        wait_until(lambda: len(pulled) >= 5)
        downloads[url(0)].set_result(png())
    assert first.result()[0].number == 1
    assert len(pulled) == 5
    assert [row.number for row, _, _ in read] == list(range(2, 51))


def test_a_root_may_be_a_folder_of_a_web_server(downloads):
    def rows():
        for path in ("a b.png", "x/c#d?.png", "../secret.png", "/etc/a.png"):
            yield Row(0, "f", 1, {}), Draft({}, (MediaRef("image", path),))
        for future in downloads.values():
            future.set_result(png())

    read = list(loaded(rows(), "https://host/media"))
    assert list(downloads) == [
        "https://host/media/a%20b.png",
        "https://host/media/x/c%23d%3F.png",
    ]
    assert [len(media) for _, _, media in read] == [1, 1, 0, 0]


def test_rows_that_wait_count_with_their_own_size(monkeypatch, downloads):
    monkeypatch.setattr(load_module, "MAX_INLINE_BYTES_AHEAD", 5500)
    pulled = []

    def rows():
        for row, _ in web_rows(50):
            pulled.append(row)
            ref = MediaRef("image", url(row.index))
            if row.index == 8:  # nine rows of 600 bytes are more than the limit
                for future in downloads.values():
                    future.set_result(png())
            yield row, Draft({"text": "x" * 600}, (ref,) if row.index < 8 else ())

    next(loaded(rows()))
    assert len(pulled) == 9


def test_a_full_temporary_folder_stops_the_conversion(monkeypatch, downloads):
    def full(*_):
        raise OSError(28, "No space left on device")

    def rows():
        yield from web_rows(1)
        downloads[url(0)].set_result(png())

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    monkeypatch.setattr(load_module, "MAX_BYTES_AHEAD", 1)
    with pytest.raises(mm.errors.StorageError, match="Set TMPDIR"):
        list(loaded(rows()))


# -- files: recognised by their bytes, not their names, and only inside the root


def load_file(root, path, kind="image"):
    [medium] = load_media([MediaRef(kind, path)], os.path.realpath(root))
    return medium.extension, medium.data


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"RIFF\0\0\0\0WAVEfmt ", ("audio", "wav")),
        (b"RIFF\0\0\0\0AVI LIST", ("video", "avi")),
        (b"RIFF\0\0\0\0RMID", None),
        (b"ID3\x04\0", ("audio", "mp3")),
        (b"\xff\xfb\x90\x64", ("audio", "mp3")),
        (b"\xff\xf3\x40\xc0", ("audio", "mp3")),
        (b"\xff\xfeh\0i\0", None),  # UTF-16 text
        (b"fLaC\0\0", ("audio", "flac")),
        (b"OggS\0\2", ("audio", "ogg")),
        (struct.pack(">I", 24) + b"ftypisom\0\0\2\0isommp42", ("video", "mp4")),
        (struct.pack(">I", 20) + b"ftypqt  \0\0\2\0qt  ", ("video", "mov")),
        (struct.pack(">I", 20) + b"ftypM4A \0\0\2\0M4A ", ("audio", "m4a")),
        (struct.pack(">I", 24) + b"ftypavif\0\0\0\0avifmif1", ("image", "avif")),
        (struct.pack(">I", 24) + b"ftypheic\0\0\0\0mif1heic", ("image", "heic")),
        (b"\x1aE\xdf\xa3\x9fB\x86\x81\x01B\x82\x84webm", ("video", "webm")),
        (b"\x1aE\xdf\xa3\x9fB\x86\x81\x01B\x82\x88matroska", ("video", "mkv")),
        (b"BMW is a maker of cars, among others", None),
        (b"<html>", None),
        (b"", None),
    ],
)
def test_a_type_is_told_by_the_first_bytes(head, expected):
    found = sniff(head)
    assert (found and (found.kind, found.extension)) == expected


@pytest.mark.parametrize(
    ("before", "content", "extension"),
    [
        (b"ID3\x04\0\0\0\0\0\x0a" + bytes(10), b"fLaC\0\0\0\x22" + bytes(99), "flac"),
        (b"ID3\x04\0\0\0\0\0\x0a" + bytes(10), b"\xff\xf1\x50\x80" + bytes(99), "aac"),
        (struct.pack(">I", 8) + b"free", struct.pack(">I", 24) + b"ftypisom" + bytes(12), "mp4"),
        (struct.pack(">I", 99) + b"skip" + bytes(91), bytes(4) + b"moov" + bytes(99), "mov"),
    ],
)
def test_a_type_is_told_behind_tags_and_empty_boxes(before, content, extension):
    found = sniff_file(before + content)
    assert found is not None
    assert found.extension == extension


@pytest.mark.parametrize(
    ("content", "kind", "reason"),
    [
        (b"<html>not found</html>", "image", "not an image (starts with b'<html>not fo')"),
        (b"", "image", "empty file"),
        (b"ID3\x04\0", "image", "not an image but mp3"),
        (b"\x89PNG\r\n\x1a\n", "video", "not a video but png"),
        (b"II*\0\x08\0\0\0", "image", "tiff is not supported"),
    ],
)
def test_a_file_that_is_not_what_the_row_says_is_named(tmp_path, content, kind, reason):
    (tmp_path / "x.jpg").write_bytes(content)
    with pytest.raises(RowError) as caught:
        load_file(tmp_path, "x.jpg", kind)
    assert str(caught.value).startswith(f"x.jpg: {reason}")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("none.jpg", "no such file"),
        ("a.jpg/b.jpg", "no such file"),
        ("x" * 300 + ".jpg", "no such file"),
        ("../outside.jpg", "lies outside the media root; name a higher folder"),
        ("sub/../../outside.jpg", "lies outside the media root"),
        ("link.jpg", "lies outside the media root, behind a link"),
        ("linked/outside.jpg", "lies outside the media root, behind a link"),
        ("/etc/hostname", "lies outside the media root"),
        (".", "lies outside the media root"),
        ("sub", "not a file"),
        ("pipe", "not a file"),
        ("nul\0.jpg", "not a path"),
        # of Windows
        ("C:\\photos\\my a.png", "no such file; tried 'photos/my a.png' in the media root"),
        ("photos\\my a.png", "no such file; tried 'photos/my a.png' in the media root"),
        ("..\\outside.jpg", "lies outside the media root"),
        ("C:\\..\\outside.jpg", "lies outside the media root"),
        ("\\\\server\\outside.jpg", "lies outside the media root"),
        ("C:\\\\..\\a", "lies outside the media root"),
        # odd
        ("x" * 5000, "no such file"),
        ("\ud800.png", "not a path or URL"),
        ("s3://b/\ud800", "not a path or URL"),
        ("a/" * 10_000_000, "no path or URL is that long"),
        ("a/" * 3000 + "a.png", "no such file"),
        ("a\nb.png", "no such file"),
        ("~/a.png", "no such file"),
    ],
)
def test_a_path_that_leads_to_no_file_of_the_root_is_a_short_reject(tmp_path, path, reason):
    root = tmp_path / "root"
    write_files(tmp_path, {"root/a.jpg": picture("JPEG"), "outside.jpg": picture("JPEG")})
    (root / "sub").mkdir()
    (root / "link.jpg").symlink_to(tmp_path / "outside.jpg")
    (root / "linked").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    with pytest.raises(RowError, match=reason) as caught:
        load_file(root, path)
    assert len(str(caught.value)) < 300


def test_paths_may_be_absolute_file_urls_or_links_inside_the_root(tmp_path):
    data = png()
    (tmp_path / "a b.png").write_bytes(data)
    (tmp_path / "link.png").symlink_to("a b.png")
    url = f"file://{tmp_path}/a%20b.png"
    for path in ("a b.png", "./a b.png", f"{tmp_path}/a b.png", url, "link.png"):
        assert load_file(tmp_path, path) == ("png", data)


def test_media_of_one_row_have_a_limit_together(tmp_path, monkeypatch):
    data = png()
    (tmp_path / "a.png").write_bytes(data)
    refs = [MediaRef("image", "a.png")] * 3
    monkeypatch.setattr(load_module, "MAX_ROW_BYTES", 3 * len(data))
    assert len(load_media(refs, tmp_path)) == 3
    with pytest.raises(RowError, match="limit of a row"):
        load_media([*refs, refs[0]], tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        *("/proc/self/mem", "/proc/kmsg", "/proc/self/maps", "/proc/1/environ", "proc/self/mem"),
        *("/sys/kernel/notes", "/dev/zero", "/dev/null", "dev/stdin", "tmp/../proc/self/mem"),
    ],
)
def test_files_of_the_kernel_are_rejects_also_under_a_root_that_holds_everything(path):
    with pytest.raises(RowError, match=r"not a file|no such file"):
        load_file("/", path)


def test_a_file_of_the_kernel_that_is_mounted_elsewhere_is_a_reject(monkeypatch):
    monkeypatch.setattr(references, "_KERNEL_FOLDERS", ("/nowhere/",))
    with pytest.raises(RowError, match="empty file"):
        load_file("/", "/proc/self/mem")


def test_shared_memory_is_a_place_for_media():
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".png") as file:
        file.write(png())
        file.flush()
        assert load_file("/", file.name)[0] == "png"


def test_a_file_that_grows_while_it_is_read_is_a_reject(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(png())
    real = os.fstat

    def status_before_it_grew(fd):
        status = real(fd)
        with path.open("ab") as file:
            file.write(b"more")
        return status

    monkeypatch.setattr(os, "fstat", status_before_it_grew)
    with pytest.raises(RowError, match=r"a\.png: changed its size while it was read"):
        load_file(tmp_path, "a.png")


def test_a_fault_of_the_disk_is_no_reject_and_names_the_file(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "open", broken)
    with pytest.raises(mm.errors.StorageError, match=r"/a\.jpg: Input/output error; .* stops"):
        load_file(tmp_path, "a.jpg")


@pytest.mark.parametrize(
    ("max_members", "asked", "read"),
    [
        (5, [2, 3, 2, 3, 1, 3, 1, 2], [2, 3, 1, 2]),  # at 1, that of 2 was named first
        (3, [0, 2, 0, 3, 0], [0, 2, 3, 0]),  # a fault counts as one member
        (5, [2, 100, 100, 2, 2], [2, 100, 2]),  # one beyond the limit is kept alone
    ],
    ids=["named last", "a fault", "beyond the limit"],
)
def test_the_directories_of_the_archives_named_last_are_kept(monkeypatch, max_members, asked, read):
    """Here an archive is the number of its members. One without members is damaged."""
    monkeypatch.setattr(references, "MAX_KEPT_MEMBERS", max_members)
    directories_read = []

    def read_directory(archive):
        directories_read.append(archive.num_bytes)
        if not archive.num_bytes:
            raise RowError("damaged")
        return {str(number): (0, 1) for number in range(archive.num_bytes)}

    monkeypatch.setattr(references, "_tar_members", read_directory)
    kept = Archives()
    for num_members in asked:
        archive = Archive(False, ("a", num_members), lambda start, stop: bytes(stop - start))
        with nullcontext() if num_members else pytest.raises(RowError, match="damaged"):
            assert kept.read(archive, "0", 10) == b"\0"
    assert directories_read == read
