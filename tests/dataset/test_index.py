"""The byte index: its layout, how little is read to build it, and indexes that are damaged.

And the checksums of samples beside it: their file, and what they notice.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from mmstream.dataset.index import (
    build_index,
    checksums_name,
    checksums_size,
    decode_checksums,
    decode_index,
    encode_checksums,
    encode_index,
    index_name,
    num_indexed,
    read_samples,
    sample_checksum,
    wrong_samples,
)
from mmstream.errors import ShardError
from mmstream.storage import open_store
from mmstream.tar.header import BLOCK
from mmstream.tar.writer import TarWriter
from tests.helpers.corpora import write_shard
from tests.helpers.foreign_tars import (
    FOREIGN,
    CountingStore,
    make_tar,
    special,
)
from tests.helpers.stores import WatchedStore


def test_an_index_has_an_offset_a_sample_and_the_end(tmp_path):
    info = write_shard(tmp_path, "a.tar", [(f"{i:06d}", {"txt": b"x" * i}) for i in range(500)])
    store = open_store(tmp_path)
    data = store.read("a.tar.idx")
    assert (len(data), num_indexed(len(data))) == (4008, 500)
    offsets = decode_index(data, "a.tar.idx")
    assert (offsets.dtype, offsets[0], offsets[-1]) == (np.int64, 0, info.num_bytes - 1024)
    assert np.array_equal(build_index(store, "a.tar"), offsets)
    assert index_name("a.tar") == "a.tar.idx"


def test_the_bytes_of_an_index_are_the_format():
    # A change here is a change of the format: little-endian u64, as in Energon's indexes.
    data = encode_index([0, 1024, 1 << 40])
    assert data.hex() == "000000000000000000040000000000000000000000010000"
    real = build_index(CountingStore((FOREIGN / "testgz.tar").read_bytes()), "testgz.tar")
    assert hashlib.sha256(encode_index(real)).hexdigest() == (
        "cbea4797f6a9b97c09d483d33a396c2059309a326f59f3715d4df1482a0bc47f"
    )


def test_energon_counts_what_is_skipped_into_the_sample_before_it():
    # Offsets that `energon prepare` 7.4.1 writes for such tars.
    skipped = [(special("d", tarfile.DIRTYPE), b""), ("README", bytes(700))]
    data = make_tar([("README", b""), ("a.txt", b"1"), *skipped, ("b.txt", b"2"), *skipped])
    assert build_index(CountingStore(data), "x.tar").tolist() == [512, 3584, 6656]
    data = make_tar([("a.txt", b"1"), ("b.txt", b"2")], pax_headers={"comment": "x"})
    assert build_index(CountingStore(data), "x.tar").tolist() == [1024, 2048, 3072]
    assert build_index(CountingStore(make_tar([("README", b"")])), "x.tar").tolist() == [512]


def big_tar() -> bytes:
    file = io.BytesIO()
    writer = TarWriter(file)
    for i in range(20):
        writer.add(f"{i:06d}", {"jpg": bytes(1_000_000), "txt": b"x", "json": b"{}"})
    writer.close()
    return file.getvalue()


def test_headers_are_hopped_over_payloads(tmp_path):
    (tmp_path / "a.tar").write_bytes(big_tar())
    store = WatchedStore(open_store(tmp_path))
    assert build_index(store, "a.tar").size == 21
    assert store.num_range_bytes < 0.05 * store.size("a.tar")
    assert len(store.ranges) <= 2 * 20 + 2  # small members come with their neighbours


@mock.patch("mmstream.dataset.index.READ_BYTES", 16)
@given(st.lists(st.integers(0, 40), max_size=8), st.integers(0, 9), st.integers(0, 50))
@example([40, 3, 5, 33], 2, 50)
def test_a_tar_is_read_once_and_samples_with_other_bytes_are_named(sizes, first, rest):
    offsets = first + np.cumsum([0, *sizes])
    content = np.random.default_rng(1).bytes(int(offsets[-1]) + rest)
    read: list[bytes] = []
    samples = list(
        read_samples(CountingStore(content), "x.tar", len(content), offsets, read.append)
    )
    assert samples == [content[start:stop] for start, stop in pairwise(offsets)]
    assert b"".join(read) == content
    assert max(map(len, read), default=0) <= 16
    wrong = [number % 3 == 1 for number in range(len(sizes))]
    checksums = [sample_checksum(sample) ^ bad for sample, bad in zip(samples, wrong, strict=True)]
    found = wrong_samples(content, offsets[:-1], offsets[1:], np.array(checksums, dtype=np.int64))
    assert found == np.flatnonzero(wrong).tolist()


def u64(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        b"<html>not found</html>",
        u64(0, 1024, 512),
        u64(0, 512, 512),
        u64(0, 100),
        u64(0, 1 << 63),
        u64(1 << 62, 1 << 63),
        u64(0, 1 << 62, (1 << 64) - 512),
        u64((1 << 64) - 512, 0),
    ],
)
def test_a_damaged_index_is_a_shard_error_with_the_cure(data):
    with pytest.raises(ShardError, match=r"^a\.tar\.idx: .*mmstream index --overwrite"):
        decode_index(data, "a.tar.idx")


any_number = st.integers(0, 2**64 - 1)
block_start = st.integers(0, 2**63 // BLOCK).map(lambda number: number * BLOCK)


@given(st.lists(any_number | block_start, min_size=1, max_size=5, unique=True), st.booleans())
@example([0, 1024, 2048], True)
@example([0, 1024, 1000], True)
def test_numbers_are_an_index_if_they_are_ascending_blocks(numbers, in_order):
    numbers = sorted(numbers) if in_order else numbers
    is_index = numbers == sorted(numbers) and not any(n % BLOCK or n >= 2**63 for n in numbers)
    if is_index:
        assert decode_index(u64(*numbers), "i").tolist() == numbers
    else:
        with pytest.raises(ShardError):
            decode_index(u64(*numbers), "i")


# -- checksums of samples -------------------------------------------------------------------------


numbers = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def index_of(checksums: list[int]) -> bytes:
    return encode_index([512 * number for number in range(len(checksums) + 1)])


def test_the_bytes_of_the_checksums_are_the_format():
    # A change here is a change of the format: little-endian u32, the last one is the seal.
    data = encode_checksums([0xE3069283, 1], encode_index([0, 1024, 2048]))
    assert data.hex() == "839206e301000000" + "32c85382"
    assert checksums_name("a/b.tar") == "a/b.tar.crc32c"
    assert checksums_size(500) == 2004
    assert sample_checksum(b"123456789") == 0xE3069283  # the check value of CRC-32C


@given(numbers, st.data())
def test_one_flipped_bit_of_checksums_or_index_is_noticed(checksums, data):
    index = index_of(checksums)
    both = bytearray(encode_checksums(checksums, index) + index)
    bit = data.draw(st.integers(0, 8 * len(both) - 1))
    both[bit // 8] ^= 1 << bit % 8
    size = checksums_size(len(checksums))
    with pytest.raises(ShardError, match=r"^a\.tar\.crc32c: .*mmstream index --checksums"):
        decode_checksums(bytes(both[:size]), bytes(both[size:]), "a.tar.crc32c")


@pytest.mark.parametrize("size", [0, 3, 4, 11, 13, 16])
def test_a_file_of_another_size_is_no_checksums(size):
    with pytest.raises(ShardError, match="do not fit"):
        decode_checksums(bytes(size), index_of([1, 2]), "c")
