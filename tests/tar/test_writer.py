"""Tars that we write, as others read them, and the shapes that a sample can take in one."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st
from webdataset.tariterators import base_plus_ext

from mmstream.dataset.index import sample_checksum
from mmstream.errors import SampleError
from mmstream.tar import writer
from mmstream.tar.samples import parse_sample, split_name
from mmstream.tar.writer import TarWriter
from tests.helpers.foreign_tars import read_by_mmstream, read_by_webdataset

# Anything that a file's name may hold. A key has no dots; names __x__ are metadata.
letters = st.characters(exclude_characters="./\0", exclude_categories=["Cs"])
name_pieces = st.text(letters, min_size=1, max_size=8).filter(
    lambda piece: not piece.startswith("_")
)
folders = st.text(st.characters(exclude_characters="\0/\n", exclude_categories=["Cs"]), min_size=1)
keys = st.one_of(
    name_pieces,
    st.text("ab0-", min_size=90, max_size=300),  # too long for the name of a ustar header
    st.builds("{}/{}".format, folders.filter(lambda piece: not piece.startswith("_")), name_pieces),
)
fields = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), max_size=8)
samples = st.lists(
    st.tuples(
        keys,
        st.dictionaries(
            fields.map(str.lower).filter(
                lambda field: field[:2] != "__" and field.lower() == field
            ),
            st.binary(max_size=1200) | st.sampled_from([bytes(4096), bytes(4097), bytes(9000)]),
            min_size=1,
            max_size=4,
        ),
    ),
    max_size=5,
    unique_by=lambda sample: sample[0],
)


@pytest.mark.parametrize("size", [0, 1, 512, 10**6, 8**11 - 1, 8**11])
@pytest.mark.parametrize(
    "name", ["a.txt", "", "d/" * 20 + "a.0.jpg", "x" * 100, "x" * 101, "\xe9.jpg", "\x7f.txt"]
)
def test_a_header_is_the_one_that_tarfile_writes(name, size):
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o444
    assert writer._header(name, size) == info.tobuf(tarfile.PAX_FORMAT)


def write(samples) -> tuple[bytes, list[int], list[int]]:
    file = io.BytesIO()
    writer = TarWriter(file)
    for key, fields in samples:
        writer.add(key, fields)
    writer.close()
    assert writer.num_bytes == len(file.getvalue())
    return file.getvalue(), writer.offsets, writer.checksums


@given(samples)
def test_what_we_write_is_read_back_by_us_and_by_webdataset_and_by_tarfile(samples):
    data, offsets, checksums = write(samples)
    expected = [[("__key__", key), *fields.items()] for key, fields in samples]
    assert read_by_mmstream(data) == expected
    assert read_by_webdataset(data) == expected
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        members = [(member.name, tar.extractfile(member).read()) for member in tar]
    assert members == [
        (f"{key}.{name}", value) for key, fs in samples for name, value in fs.items()
    ]
    assert len(offsets) == len(samples) + 1
    assert offsets[-1] == len(data) - 1024
    ranges = [data[start:stop] for start, stop in pairwise(offsets)]
    assert checksums == [sample_checksum(of_sample) for of_sample in ranges]
    for of_sample, (key, fields) in zip(ranges, samples, strict=True):
        sample = parse_sample(memoryview(of_sample), "u")
        assert sample == {"__key__": key, "__url__": "u", **fields}
        assert all(type(value) is bytes for name, value in sample.items() if name[:2] != "__")


def test_the_bytes_of_a_shard_are_the_format():
    # A change here is a change of the format: shards of old conversions would differ.
    data, offsets, _ = write(
        [
            ("000000", {"jpg": b"\xff\xd8\xff", "txt": "grün".encode(), "json": b"{}"}),
            ("000001", {"0.png": b"", "1.png": bytes(600)}),
            ("long" * 40, {"txt": b"a name of 164 characters"}),
        ]
    )
    assert offsets == [0, 3072, 5120, 7168]
    assert hashlib.sha256(data).hexdigest() == (
        "fa62729a47557ac617e8573d27c6650a0ca5a18832af77a7685c0efc7d89a059"
    )


@given(st.one_of(st.text(), st.text("a_./\n{}", max_size=12)))
def test_names_are_split_as_webdataset_splits_them_but_for_those_of_a_mac(name):
    key, suffix = base_plus_ext(name)
    meta = re.match(r"__[^/]*__($|/)", name) or re.search(r"(^|/)(__MACOSX/|\._[^/]*$)", name)
    assert split_name(name) == (None if key is None or meta else (key, suffix.lower()))


def test_a_field_twice_is_an_error_of_that_sample():
    data, *_ = write([("a", {"txt": b"1", "TXT": b"2"})])
    with pytest.raises(SampleError, match=r"a\.txt: this field comes twice"):
        read_by_mmstream(data)
    with pytest.raises(ValueError, match="duplicate file name"):
        read_by_webdataset(data)


OWN = ["__key__", "__url__", "__source__", "__lineage__", "__valid__", "__X__", "____"]
BESIDE_IMAGES = ["image_row", "image_tiles", "image_size", "Image_Row"]
LIKE_THEM = ["image", "labels", "image_row.npy", "1.image_row", "txt_row"]
LIKE_THEM += ["__x", "x__", "__x__.txt", "a.__x__y"]


def test_a_field_with_one_of_our_own_names_is_an_error_of_that_sample():
    for fields, message in [(OWN, "__x__ are mmstream's own"), (BESIDE_IMAGES, "image_row, .*ren")]:
        for field in fields:
            data, *_ = write([("a", {"txt": b"1", field: b"1"})])
            with pytest.raises(SampleError, match=rf"a\.{field.lower()}: .*{message}"):
                read_by_mmstream(data)
    for field in LIKE_THEM:
        data, *_ = write([("a", {field: b"1"})])
        assert read_by_mmstream(data) == [[("__key__", "a"), (field, b"1")]]


def test_a_range_that_is_not_one_sample_is_a_sample_error():
    data, offsets, _ = write([("a", {"txt": b"1"}), ("b", {"txt": b"2"})])
    with pytest.raises(SampleError, match=r"a: 'b' lies in the same range.*--overwrite"):
        parse_sample(data[: offsets[-1]], "u")
    for nothing in (b"", bytes(100), bytes(2048)):
        with pytest.raises(SampleError):
            parse_sample(nothing, "u")
