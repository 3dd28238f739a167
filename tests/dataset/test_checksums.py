"""The checksums of samples: their file, and what they notice."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmstream.dataset.checksums import (
    checksums_name,
    checksums_size,
    decode_checksums,
    encode_checksums,
    read_samples,
    sample_checksum,
    wrong_samples,
)
from mmstream.dataset.index import encode_index
from mmstream.errors import ShardError
from mmstream.storage import open_store

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


@given(numbers)
def test_checksums_read_back(checksums):
    data = encode_checksums(checksums, index_of(checksums))
    assert len(data) == checksums_size(len(checksums))
    decoded = decode_checksums(data, index_of(checksums), "c")
    assert decoded.tolist() == checksums
    assert decoded.dtype == np.uint32


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


@given(st.lists(st.binary(max_size=30), max_size=8), st.data())
def test_wrong_samples_are_those_with_other_bytes(samples, data):
    wrong = [data.draw(st.booleans()) for _ in samples]
    stops = np.cumsum([len(sample) for sample in samples], dtype=np.int64)
    starts = stops - [len(sample) for sample in samples]
    checksums = [
        sample_checksum(sample) ^ is_wrong for sample, is_wrong in zip(samples, wrong, strict=True)
    ]
    for content in (b"".join(samples), memoryview(b"".join(samples))):
        numbers = wrong_samples(content, starts, stops, np.array(checksums, dtype=np.int64))
        assert numbers == np.flatnonzero(wrong).tolist()


@given(st.lists(st.integers(1, 40), max_size=10), st.integers(0, 9), st.integers(0, 50))
def test_a_tar_is_read_once_whatever_its_samples_sizes(tmp_path_factory, sizes, first, rest):
    from mmstream.dataset import checksums as module

    offsets = first + np.cumsum([0, *sizes])
    content = np.random.default_rng(1).bytes(int(offsets[-1]) + rest)
    store = open_store(f"memory://{tmp_path_factory.mktemp('sizes').name}")
    store.write("a.tar", content)
    read: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "READ_BYTES", 16)
        samples = list(read_samples(store, "a.tar", len(content), offsets, read.append))
    assert samples == [content[a:b] for a, b in pairwise(offsets)]
    assert b"".join(read) == content
    assert max(map(len, read), default=0) <= 16
