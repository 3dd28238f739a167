"""Whatever a tar's bytes are: its samples, or a ShardError or SampleError that says why."""

from __future__ import annotations

import gzip
import tarfile

import pytest
from hypothesis import given, strategies as st

from mmstream.dataset.index import build_index
from mmstream.errors import SampleError, ShardError
from mmstream.tar.header import BLOCK, plain_file, read_member
from mmstream.tar.samples import MAX_MEMBERS, iter_members, parse_sample, sample_offsets
from tests.helpers.foreign_tars import CountingStore, make_tar, read_by_mmstream

SMALL = make_tar(
    [("a.txt", b"1" * 600), ("a.jpg", b"2"), ("n" * 150 + ".txt", b"3"), ("b.txt", b"")]
)
END = len(SMALL.rstrip(b"\0")) // 512 * 512 + 512  # past the last header


def header(name="a.txt", size=0, kind=b"0", size_field: bytes | None = None) -> bytes:
    """A header with a right checksum, whatever its size field."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    if size_field is not None:
        block[124:136] = size_field.ljust(12, b"\0")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(records: bytes) -> bytes:
    return header(size=len(records), kind=b"x") + records + bytes(-len(records) % 512)


def pax_size(value: bytes) -> bytes:
    length = len(value) + 7
    length += len(str(length + len(str(length))))
    return pax(b"%d size=%s\n" % (length, value))


def read_anyhow(data: bytes):
    try:
        return read_by_mmstream(data)
    except (ShardError, SampleError):
        return []


def test_a_tar_cut_at_any_block_is_an_error_or_its_first_samples():
    whole = read_by_mmstream(SMALL)
    for cut in range(0, END, 512):
        samples = read_anyhow(SMALL[:cut])
        # Between two members nothing in the tar itself tells of a cut; sizes and indexes do.
        assert all(set(a) <= set(b) for a, b in zip(samples, whole))
        assert len(samples) <= len(whole)


def test_a_cut_inside_a_member_or_its_header_is_always_found():
    for member in iter_members(lambda start, stop: SMALL[start:stop], len(SMALL)):
        in_header = [member.offset + byte for byte in (1, 100, 511)]
        for cut in [*in_header, *range(member.offset + 512, member.end, 512)]:
            with pytest.raises(ShardError, match=r"truncated|not a tar"):
                read_by_mmstream(SMALL[:cut])


def test_a_flipped_byte_of_a_header_is_found():
    for byte in {*range(512)} - {155}:  # the byte behind the checksum's digits says nothing
        data = bytearray(SMALL)
        data[byte] ^= 0x55
        with pytest.raises(ShardError):
            read_by_mmstream(bytes(data))
    data = bytearray(SMALL)
    data[1536 + 3] ^= 1  # of a later header
    with pytest.raises(ShardError, match=r"x\.tar: not a tar header at byte 1536: wrong checksum"):
        read_by_mmstream(bytes(data))
    offsets = build_index(CountingStore(SMALL), "x.tar")
    with pytest.raises(SampleError, match="a: damaged tar header"):
        parse_sample(bytes(data[: offsets[1]]), "u")
    empty = make_tar([])
    assert read_by_mmstream(empty) == []
    assert build_index(CountingStore(empty), "x.tar").tolist() == [0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a tar"),
        (b"x", "not a tar"),
        (b"<!DOCTYPE html><html>" + b"<p>404 not found</p>" * 100, "not a tar"),
        (bytes(range(256)) * 8, "not a tar"),
        (b"\xff" * 5120, "not a tar"),
        (b"0" * 5120, "not a tar"),
        (b"PK\x03\x04" + bytes(5000), "not a tar"),
        (b"BZh9" + b"1AY&SY" * 1000, "not a tar"),
        (gzip.compress(SMALL, mtime=0), "`mmstream convert` writes a plain one"),
    ],
)
def test_what_is_not_a_tar_is_a_shard_error(data, message):
    with pytest.raises(ShardError, match=message):
        read_by_mmstream(data)


@given(
    st.lists(st.tuples(st.integers(0, END - 1), st.integers(0, 255)), max_size=12),
    st.binary(max_size=3000),
)
def test_random_bytes_and_damage_never_do_anything_else(changes, anything):
    read_anyhow(anything)
    data = bytearray(SMALL)
    for byte, value in changes:
        data[byte] = value
    read_anyhow(bytes(data))


@given(
    st.lists(
        st.one_of(
            st.builds(
                header,
                name=st.sampled_from(["a.txt", "b.jpg", "c/", "d"]),
                kind=st.sampled_from([bytes([kind]) for kind in b"0125xgLKSXVZ\0"]),
                size_field=st.one_of(
                    st.binary(min_size=12, max_size=12),
                    st.from_regex(rb"[-+ ]?[0-7_]{0,8}[ \0]?", fullmatch=True),
                ),
            ),
            st.builds(pax, st.binary(max_size=40)),
            st.builds(
                pax, st.from_regex(rb"([0-9]{1,4} (path|size)=[-0-9a.]*\n){1,3}", fullmatch=True)
            ),
            st.builds(bytes, st.just(512)),
        ),
        max_size=8,
    )
)
def test_random_headers_with_right_checksums_never_do_anything_else(blocks):
    read_anyhow(b"".join(blocks))


@pytest.mark.parametrize(
    "size",
    [
        b"-0000001000",  # an offset that goes back would be read for ever
        b"-1",
        b"+10",
        b"1_0",
        b"0o17",
        b"99999999999",
        b"77777777777",
        b"\x80" + b"\xff" * 11,
        b"\xff" * 12,
        b"\xff" * 11 + b"\x00",
        "٣".encode(),  # a digit of another script
    ],
)
@pytest.mark.parametrize("kind", [b"0", b"x", b"L", b"g", b"Z"])
def test_impossible_sizes_are_shard_errors(size, kind):
    with pytest.raises(ShardError):
        read_by_mmstream(header(size_field=size, kind=kind) + header("b.txt") + bytes(1024))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pax(b"0 path=a\n") + header("b.txt"), "bad pax header"),
        (pax(b"4 x\n") + header("b.txt"), "bad pax header"),
        (pax(b"x path=a\n") + header("b.txt"), "bad pax header"),
        (pax(b"-9 path=a\n") + header("b.txt"), "bad pax header"),
        (pax(b" 9 path=a\n") + header("b.txt"), "bad pax header"),
        (pax(b"9" * 400 + b" path=a\n") + header("b.txt"), "bad pax header"),
        (pax(b"13 comment=x\n") * 17 + header(), "more than 16 extension headers"),
        (header() + pax(b"9 path=a\n"), None),  # and no member behind it
        *(
            (pax_size(value) + header("b.txt"), "bad pax size|truncated")
            for value in (b"-1", b"", b"1e3", b"9" * 30, b"9" * 5000, "٣".encode(), b"99999999999")
        ),
    ],
)
def test_pax_headers_that_lead_nowhere_are_shard_errors(data, message):
    for end in (b"", bytes(1024)):
        with pytest.raises(ShardError, match=message):
            read_by_mmstream(data + end)
    assert len(read_by_mmstream(pax(b"13 comment=x\n") * 16 + header() + bytes(1024))) == 1


@pytest.mark.slow
def test_a_sample_of_too_many_files_is_a_sample_error_and_its_neighbours_are_read():
    many = [(f"b.{number}", b"") for number in range(MAX_MEMBERS + 1)]
    data = make_tar([("a.txt", b"1"), *many, ("c.txt", b"2")])
    offsets = sample_offsets(iter_members(lambda start, stop: data[start:stop], len(data)))
    assert len(offsets) == 4
    with pytest.raises(SampleError, match=r"b: .*more than 16,384 files"):
        parse_sample(data[offsets[1] : offsets[2]], "u")
    assert parse_sample(data[offsets[2] : offsets[3]], "u")["txt"] == b"2"
    parse_sample(data[offsets[1] : offsets[2] - 512], "u")  # one file less


@pytest.mark.parametrize("name", ["k" * 5000 + ".txt", "k." + "f" * 5000, "d/" * 3000 + "k.txt"])
def test_a_name_that_is_too_long_is_a_sample_error_with_a_short_message(name):
    data = make_tar([(name, b"1")], tarfile.PAX_FORMAT)
    offsets = sample_offsets(iter_members(lambda start, stop: data[start:stop], len(data)))
    with pytest.raises(SampleError, match="no sample is like that") as caught:
        parse_sample(data[: offsets[1]], "u")
    assert len(str(caught.value)) < 500


def test_a_tar_of_too_many_samples_is_a_shard_error(monkeypatch):
    monkeypatch.setattr("mmstream.tar.samples.MAX_SAMPLES", 3)
    data = make_tar([(f"{number}.txt", b"") for number in range(4)])
    members = list(iter_members(lambda start, stop: data[start:stop], len(data)))
    assert len(sample_offsets(members[:3])) == 4
    with pytest.raises(ShardError, match="more than 3 samples: pack them into more tars"):
        sample_offsets(members)


@pytest.mark.parametrize("size", [(1 << 20) + 1, 1 << 30, 8**11 - 1])
@pytest.mark.parametrize("kind", [b"L", b"K", b"x", b"g"])
def test_the_size_of_an_extension_header_is_checked_before_it_is_read(kind, size):
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    header = info.tobuf(tarfile.GNU_FORMAT)
    reads = []

    def read(start, stop):
        reads.append(stop - start)
        return header[start:stop]

    with pytest.raises(ShardError, match=f"extension header of {size} bytes at byte 0"):
        list(iter_members(read, 1 << 40))
    assert max(reads) <= 512


names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=110)


@given(names, st.integers(0, 8**11 - 1), st.sampled_from([b"0", b"\0", b"5", b"L"]),
       st.none() | st.tuples(st.integers(0, BLOCK - 1), st.integers(1, 255)))  # fmt: skip
def test_the_quick_look_at_a_header_says_what_the_thorough_one_says(name, size, kind, flip):
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")[-BLOCK:])
    if flip is not None:
        header[flip[0]] ^= flip[1]
    quick = plain_file(bytes(header), 0)
    if quick is not None:
        member = read_member(lambda start, stop: b"", bytes(header), 0, 1 << 40)
        assert (member.name, member.size, member.is_file) == (*quick, True)
        assert member.data_offset == BLOCK
    elif flip is None and kind == b"0" and len(name.encode()) <= 100:
        raise AssertionError("a plain header was not seen as one")
