"""Parts of an index: the format, what is checked before it is used, and where samples lie."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, strategies as st

from mmstream.dataset.index import (
    HEADER_BYTES,
    ROW,
    PartWriter,
    columns_of,
    columns_sizes,
    decode_columns,
    decode_table,
)
from mmstream.dataset.manifest import IndexPart
from mmstream.errors import ShardError
from mmstream.storage import open_store

LONG = [0, 512, 512 + (1 << 25), 1024 + (1 << 25)]
"""Offsets of three samples; the second one is too long for 16 bits."""

GOLDEN = (
    "4d4d494e44455831 02000000b841a4a1"
    " 0200000002000000 0010000000000000 000c000000000000 6000000000000000 681857f600000000"
    " 0300000001000000 0000000400000000 0004000200000000 7100000000000000 78b6e9d900000000"
    " 0000000000020004 0044332211050000 0000000000000100 0000000001000100 0000"
)


def written(store, *shards):
    """Write a part of (bytes of the tar, offsets, checksums); return what the manifest says."""
    writer = PartWriter(io.BytesIO())
    for num_bytes, offsets, checksums in shards:
        checksums = None if checksums is None else np.array(checksums, dtype=np.uint32)
        writer.add(num_bytes, columns_of(np.array(offsets), checksums))
    return writer.write(store)


def columns_in(data, part, shard=0):
    row = decode_table(data, part.name, part)[shard]
    start = int(row["offset"])
    return decode_columns(data[start : start + int(columns_sizes(row))], row, "a.tar")


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


def test_the_bytes_of_a_part_are_the_format(store):
    # A change here is a change of the format, which index.py describes.
    part = written(store, (4096, [0, 1024, 3072], [0x11223344, 5]), (1 << 26, LONG, None))
    data = store.read(part.name)
    assert data.hex(" ", -8) == GOLDEN
    assert part == IndexPart(part.name, 130, part.sha256, 0, 1)
    assert part.name == f"mmstream.index.{part.sha256[:12]}"
    assert written(store, (4096, [0, 1024, 3072], [0x11223344, 5]), (1 << 26, LONG, None)) == part


@given(
    lengths=st.lists(st.integers(1, 70_000), max_size=700),
    first=st.integers(0, 1 << 30),
    index=st.lists(st.integers(0, 699), max_size=30),
)
def test_bounds_are_those_of_the_offsets(lengths, first, index):
    offsets = 512 * (first + np.cumsum([0, *lengths]))
    checksums = np.arange(len(lengths), dtype=np.uint32)
    columns = columns_of(offsets, checksums)
    assert np.array_equal(columns.offsets(), offsets)
    wanted = np.array([i % len(lengths) for i in index if lengths], dtype=np.int64)
    bounds = columns.bounds(wanted)
    assert np.array_equal(bounds.start, offsets[wanted])
    assert np.array_equal(bounds.stop, offsets[wanted + 1])
    assert np.array_equal(bounds.checksum, wanted)


def test_the_worked_example_of_the_module():
    columns = columns_of(np.arange(301) * 3 * 512, None)
    assert columns.num_bytes == 610
    assert columns.bounds(np.array([260])).start.tolist() == [399_360]
    with pytest.raises(IndexError, match="samples 0 to 300 of 300"):
        columns.bounds(np.array([0, 300]))


def test_no_changed_byte_is_taken_for_a_part(store):
    part = written(store, (4096, [0, 1024, 3072], [0x11223344, 5]), (1 << 26, LONG, None))
    right = store.read(part.name)
    for byte in range(len(right)):
        data = bytearray(right)
        data[byte] ^= 4
        with pytest.raises(ShardError):
            _ = [columns_in(bytes(data), part, shard) for shard in range(2)]


def resealed(data, part, shard, **values):
    """Return a part with another row and a right checksum of the table: what a stranger writes."""
    data = bytearray(data)
    table = np.frombuffer(data, ROW, part.last_shard + 1, HEADER_BYTES)
    for name, value in values.items():
        table[name][shard] = value
    start = int(table["offset"][shard])
    if start < len(data) and "columns_crc32c" not in values:
        size = int(columns_sizes(table[shard]))
        table["columns_crc32c"][shard] = crc32c(data[start : start + size])
    data[12:16] = crc32c(table.tobytes()).to_bytes(4, "little")
    return bytes(data)


@pytest.mark.parametrize(
    "values",
    [
        {"offset": (1 << 64) - 1},
        {"offset": 114},
        {"num_samples": 0xFFFFFFFF},
        {"num_samples": 1},
        {"num_samples": 3},
        {"flags": 3},
        {"stop": 3072 + 512},
        {"stop": 3071},
        {"stop": 1 << 60, "num_bytes": 1 << 63},
        {"stop": 8192},
        {"num_bytes": 3071},
        {"columns_crc32c": 1},
    ],
    ids=str,
)
def test_what_a_stranger_wrote_into_a_table_is_refused_before_memory_is_taken(store, values):
    part = written(store, (4096, [0, 1024, 3072], [0x11223344, 5]), (1 << 26, LONG, None))
    data = resealed(store.read(part.name), part, 0, **values)
    with pytest.raises(ShardError):
        columns_in(data, part)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": np.array([0, 6], dtype="<u2")},
        {"anchors": np.array([[1, 0, 0, 0, 0]], dtype=np.uint8)},
    ],
    ids=["lengths", "anchors"],
)
def test_lengths_that_do_not_lead_from_anchor_to_anchor_are_refused(store, wrong):
    writer = PartWriter(io.BytesIO())
    writer.add(4096, replace(columns_of(np.array([0, 1024, 3072]), None), **wrong))
    part = writer.write(store)
    with pytest.raises(ShardError, match="not those of a tar"):
        columns_in(store.read(part.name), part)
