"""Media files are recognised by their bytes, not their names, and must lie inside the root."""

from __future__ import annotations

import io
import os
import struct
import tempfile

import pytest
from PIL import Image

from mmstream.converting.draft import MediaRef, RowError
from mmstream.converting.media import files
from mmstream.converting.media import load as load_module
from mmstream.converting.media.types import sniff
from mmstream.errors import StorageError
from tests.helpers.media import load_media


def encoded(format):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), (200, 30, 40)).save(buffer, format)
    return buffer.getvalue()


def load(root, path, kind="image"):
    [medium] = load_media([MediaRef(kind, path)], os.path.realpath(root))
    return medium.extension, medium.data


@pytest.mark.parametrize(
    ("format", "extension"),
    [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("GIF", "gif"), ("BMP", "bmp")],
)
def test_an_image_gets_the_extension_of_its_bytes_and_keeps_them(tmp_path, format, extension):
    data = encoded(format)
    (tmp_path / "a.jpg").write_bytes(data)
    assert load(tmp_path, "a.jpg") == (extension, data)


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
    assert sniff(head) == expected


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
        load(tmp_path, "x.jpg", kind)
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
    ],
)
def test_a_path_that_leads_to_no_file_of_the_root_is_a_reject(tmp_path, path, reason):
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "a.jpg").write_bytes(encoded("JPEG"))
    (tmp_path / "outside.jpg").write_bytes(encoded("JPEG"))
    (root / "link.jpg").symlink_to(tmp_path / "outside.jpg")
    (root / "linked").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    with pytest.raises(RowError, match=reason):
        load(root, path)


def test_paths_may_be_absolute_file_urls_or_links_inside_the_root(tmp_path):
    data = encoded("PNG")
    (tmp_path / "a b.png").write_bytes(data)
    (tmp_path / "link.png").symlink_to("a b.png")
    url = f"file://{tmp_path}/a%20b.png"
    for path in ("a b.png", "./a b.png", f"{tmp_path}/a b.png", url, "link.png"):
        assert load(tmp_path, path) == ("png", data)


def test_media_of_one_row_have_a_limit_together(tmp_path, monkeypatch):
    data = encoded("PNG")
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
        load("/", path)


def test_a_file_of_the_kernel_that_is_mounted_elsewhere_is_a_reject(monkeypatch):
    monkeypatch.setattr(files, "_KERNEL_FOLDERS", ("/nowhere/",))
    with pytest.raises(RowError, match="empty file"):
        load("/", "/proc/self/mem")


def test_shared_memory_is_a_place_for_media():
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".png") as file:
        file.write(encoded("PNG"))
        file.flush()
        assert load("/", file.name)[0] == "png"


def test_a_file_that_grows_while_it_is_read_is_a_reject(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(encoded("PNG"))
    real = os.fstat

    def status_before_it_grew(fd):
        status = real(fd)
        with path.open("ab") as file:
            file.write(b"more")
        return status

    monkeypatch.setattr(os, "fstat", status_before_it_grew)
    with pytest.raises(RowError, match=r"a\.png: changed its size while it was read"):
        load(tmp_path, "a.png")


def test_a_fault_of_the_disk_is_no_reject_and_names_the_file(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "open", broken)
    with pytest.raises(StorageError, match=r"/a\.jpg: Input/output error; .* stops"):
        load(tmp_path, "a.jpg")
