"""Tars that others made give the same samples as `webdataset` reads from them."""

from __future__ import annotations

import io
import re
import tarfile

import pytest
import webdataset as wds
from hypothesis import given, strategies as st

from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.open import open_dataset
from mmstream.errors import SampleError, ShardError
from mmstream.tar.samples import iter_members, parse_sample
from tests.helpers.foreign_tars import (
    gnu_tar,
    make_tar,
    read_by_mmstream,
    read_by_webdataset,
    special,
)

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
LONG, LONGER = "n" * 120, "n" * 240


def assert_same(data: bytes, num_samples: int | None = None) -> None:
    """Both read the same samples, and as many as expected."""
    samples = read_by_mmstream(data)
    assert samples == read_by_webdataset(data)
    assert num_samples is None or len(samples) == num_samples


@pytest.mark.parametrize("format", FORMATS)
def test_the_stdlib_writes_what_we_read(format):
    folder = special("dir.d", tarfile.DIRTYPE)
    members = [
        ("./a.jpg", b"1"),
        ("./a.JSON", b"{}"),
        (folder, b""),
        ("dir.d/b.x.txt", b"2"),
        ("dir.d/b.y", b""),
        ("README", b"no extension"),
        (".hidden", b""),
        ("dir.d/.hidden.txt", b"no key"),
        ("__meta__", b"skipped"),
        ("__meta__.json", b"not skipped"),
        ("__more__/x.txt", b"skipped"),
        ("x/__meta__/c.txt", b"kept"),
        ("grün/ünï.txt", b"3"),
        ("path/" * 18 + "d" * 90 + ".txt", b"prefix and name"),
        (special("g.txt", tarfile.FIFOTYPE), b""),
        (special("h.txt", tarfile.CONTTYPE), b"contiguous"),
        (special("i.txt", tarfile.AREGTYPE), b"of old"),
        ("./a.jpg", b"a file that came before"),
    ]
    assert_same(make_tar(members, format), 9)


@pytest.mark.parametrize("format", FORMATS[1:])
@pytest.mark.parametrize("name", [f"{LONG}.txt", f"{LONGER}/{LONGER}/k.txt", "ü" * 200 + ".txt"])
def test_names_beyond_100_and_255_characters(format, name):
    data = make_tar(
        [("a.txt", b"0"), (name, b"1"), (name[:-3] + "jpg", b"2"), ("z.txt", b"3")], format
    )
    assert_same(data, 3)
    assert read_by_mmstream(data)[1][0] == ("__key__", name.removesuffix(".txt"))


def with_pax_headers(name: str, **headers: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.pax_headers = headers
    return info


def test_a_zero_byte_in_a_name_is_an_error_of_its_sample():
    odd = with_pax_headers("a.txt", path="a\0b.txt")
    with pytest.raises(SampleError, match=r"a\\x00b: a zero byte in the name a\\x00b.txt; rename"):
        read_by_mmstream(make_tar([(odd, b"1"), C], tarfile.PAX_FORMAT))


A, C = ("a.txt", b"1"), ("c.txt", b"4")
OTHER_RECORDS = {"mtime": "1.5", "SCHILY.xattr.user.x": "path=b\n20 path=c", "comment": "=="}
IN_SLASHES = [A, ("b.txt/", b"2"), (LONG + ".txt/", b"3"), C]


@pytest.mark.parametrize(
    ("members", "format", "num_samples"),
    [
        *(([("caf\udce9.txt", b"1"), C], format, 2) for format in FORMATS),  # no UTF-8
        ([(with_pax_headers("a.txt", **OTHER_RECORDS), b"1")], tarfile.PAX_FORMAT, 1),
        *(
            ([A, (special("b.txt", kind), bytes(700)), C], tarfile.PAX_FORMAT, 2)
            for kind in (b"D", b"V", b"M", b"N", b"A", b"Z")  # of members that nobody knows
        ),
        # An old tar marks a folder by a slash.
        ([A, (special("a.d/", tarfile.AREGTYPE), b""), ("a.jpg", b"2")], tarfile.USTAR_FORMAT, 1),
        *((IN_SLASHES, format, None) for format in FORMATS[1:]),
        ([A, C, ("a.txt", b"3")], tarfile.PAX_FORMAT, 3),  # a key that comes back is another sample
    ],
)
def test_odd_members_are_read_as_webdataset_reads_them(members, format, num_samples):
    assert_same(make_tar(members, format), num_samples)


@given(
    st.lists(
        st.tuples(
            st.one_of(
                st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
                st.from_regex(r"(\./)?([ab]/)?[ab_]{1,4}(\.[xY]{1,2}){0,2}", fullmatch=True),
            ).filter(lambda name: name.strip("/") and not re.search(r"(^|/)\._[^/]*$", name)),
            st.binary(max_size=600),
        ),
        max_size=8,
    ),
    st.sampled_from(FORMATS[1:]),
)
def test_any_names_give_what_webdataset_gives(members, format):
    data = make_tar(members, format)
    try:
        expected = read_by_webdataset(data)
    except ValueError:  # a suffix twice in a sample
        expected = None
    fields = {}
    for sample in expected or []:  # a key that comes back with other fields is refused
        names = {name for name, _ in sample[1:]}
        if not fields.setdefault(sample[0], names) & names:
            expected = None
    if expected is not None:
        assert read_by_mmstream(data) == expected


MAC = b"\0\5\x16\7\0\2\0\0Mac OS X        "
"""How an AppleDouble file begins."""


@pytest.mark.parametrize("prefix", ["", "./", "train/", "./a/b.c/", "/abs/"])
def test_the_files_that_a_mac_adds_are_no_samples_and_tear_none_apart(prefix):
    files = [(f"{prefix}{i}.{field}", field.encode()) for i in range(2) for field in ("jpg", "txt")]
    added = [
        [(f"{prefix}._{name.removeprefix(prefix)}", MAC), (f"__MACOSX/{name}", MAC), (name, data)]
        for name, data in files
    ]
    samples = read_by_mmstream(make_tar([member for group in added for member in group]))
    assert samples == read_by_webdataset(make_tar(files))
    assert [len(sample) for sample in samples] == [3, 3]


def test_an_index_from_before_says_what_to_do_about_the_files_of_a_mac():
    data = make_tar([("train/._0.jpg", MAC), ("train/0.jpg", b"a picture")])
    offsets = [member.offset for member in iter_members(lambda a, b: data[a:b], len(data))]
    with pytest.raises(SampleError, match=r"made it, with files named \._x, run `mmstream index"):
        parse_sample(data[offsets[0] : offsets[1]], "x.tar")
    assert parse_sample(data[offsets[1] :], "x.tar")["jpg"] == b"a picture"


def test_of_two_long_names_the_first_one_holds():
    long = make_tar([(LONG + ".txt", b"")], tarfile.GNU_FORMAT)[:1024]
    pax = make_tar([(LONGER + ".jpg", b"")], tarfile.PAX_FORMAT)[:1024]
    tail = make_tar([("a.txt", b"1")], tarfile.USTAR_FORMAT)
    assert long[156:157] + pax[156:157] == b"Lx"
    for head in (long + pax, pax + long, long, pax, pax + pax + long):
        assert_same(head + tail, 1)


@pytest.mark.parametrize("format", FORMATS[1:])
def test_a_file_beyond_8_gib_is_hopped_over_by_its_header(format):
    huge = 9 << 30
    info = tarfile.TarInfo("a.bin")
    info.size = huge
    head = info.tobuf(format)
    tail = tarfile.TarInfo("b.txt").tobuf(tarfile.USTAR_FORMAT) + bytes(1024)
    end = len(head) + huge

    def read(start: int, stop: int) -> bytes:
        return head[start:stop] if start < len(head) else tail[start - end : stop - end]

    first, second = iter_members(read, end + len(tail))
    assert (first.name, first.size, first.end) == ("a.bin", huge, end)
    assert (second.name, second.offset) == ("b.txt", end)


def test_a_sparse_file_is_refused_by_name_of_the_option(tmp_path):
    with (tmp_path / "a.bin").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"x")
    for format in "gnu", "posix":
        data = gnu_tar(tmp_path, "a.bin", options=("--sparse", f"--format={format}"))
        with pytest.raises(ShardError, match="--sparse"):
            read_by_mmstream(data)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Files of samples in folders, with everything else that a folder holds."""
    root = tmp_path_factory.mktemp("tree")
    names = [
        "0001.jpg",
        "0001.json",
        "0002.JPG",
        "0002.seg.png",
        "a.b/0003.txt",
        "a.b/c.d/0003.txt",
    ]
    names += [
        "README",
        ".hidden",
        "__meta__",
        "__index__.json",
        "empty.txt",
        "grün.txt",
        "sp ace.txt",
    ]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"" if name == "empty.txt" else name.encode() * 90)
    (root / "link.txt").symlink_to("0001.jpg")
    (root / "hard.txt").hardlink_to(root / "0001.json")
    return root


@pytest.mark.parametrize("format", ["v7", "oldgnu", "gnu", "ustar", "pax"])
@pytest.mark.parametrize("what", [".", "*"])
def test_gnu_tar_on_the_command_line(tree, tmp_path, format, what):
    names = ["."] if what == "." else sorted(path.name for path in tree.iterdir())
    data = gnu_tar(tree, *names, options=(f"--format={format}",))
    files = gnu_tar(tree, *names, options=("--dereference", "--hard-dereference"))
    assert read_by_mmstream(data) == read_by_webdataset(files)
    keys = dict(sample[0][::-1] for sample in read_by_mmstream(data))
    prefix = "./" if what == "." else ""
    assert {f"{prefix}0001", f"{prefix}a.b/c.d/0003", f"{prefix}grün"} <= set(keys)
    if format in ("oldgnu", "gnu", "pax"):
        deep = tmp_path / LONGER / LONGER
        deep.mkdir(parents=True)
        for name in f"{LONG}.txt", f"{LONG}.jpg", "ü" * 100 + ".txt":
            (deep / name).write_bytes(name.encode())
        assert_same(gnu_tar(tmp_path, ".", options=(f"--format={format}",)), 2)


@pytest.mark.parametrize(
    "names", ["0.jpg 1.jpg 0.txt 1.txt", "0.jpg 0.txt 1.jpg 0.json", "0.jpg 1.jpg | 0.txt 1.txt"]
)
def test_samples_in_pieces_are_refused_with_the_cure(tmp_path, names):
    files, tars = tmp_path / "files", tmp_path / "tars"
    for folder in files, tars:
        folder.mkdir()
    for name in names.replace("|", "").split():
        (files / name).write_bytes(name.encode())
    data = b"".join(gnu_tar(files, *part.split()) for part in names.split("|"))
    (tars / "x.tar").write_bytes(data)
    for read in (open_dataset, index_tars):
        with pytest.raises(
            ShardError, match=r"x\.tar: 0\.\w+ does not stand beside 0\.jpg.*--sort"
        ):
            read(tars)
    assert_same(gnu_tar(files, ".", options=("--sort=name",)), 2)


def test_tars_written_by_webdataset():
    file = io.BytesIO()
    with wds.TarWriter(file, keep_meta=True) as sink:
        for i in range(20):
            sink.write(
                {"__key__": f"x/{i:04d}", "json": {"i": i}, "txt": "é", "cls": i, "0.bin": b"1"}
            )
        sink.write({"__key__": "__meta__", "txt": "a sample"})
        sink.write({"__key__": "__meta__/x", "txt": "left out"})
    assert_same(file.getvalue(), 21)
    with wds.TarWriter(file, keep_meta=True) as sink:
        sink.write({"__key__": "a", "txt": "1", "__local_path__": "kept"})
    with pytest.raises(SampleError, match=r"a\.__local_path__: .*rename this file in the tar"):
        read_by_mmstream(file.getvalue())
