"""`LazyBytes`: they stand for the bytes of a file, and read little more than is asked for."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mmstream.tar import lazy_bytes
from mmstream.tar.lazy_bytes import LazyBytes, LazyFile

MIB = 1 << 20


class RangedFile:
    """A file that notes what is read of it."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.calls: list[list[tuple[int, int]]] = []

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.calls.append(list(ranges))
        return [self.content[start:stop] for start, stop in ranges]

    @property
    def num_bytes(self) -> int:
        return sum(stop - start for call in self.calls for start, stop in call)

    def value(self, head: bytes = b"") -> LazyBytes:
        return LazyBytes(len(self.content), self.read_ranges, head)


def content_of(num_bytes: int) -> bytes:
    return np.random.default_rng(0).bytes(num_bytes)


CONTENT = content_of(3 * MIB)


@given(data=st.data())
def test_any_reads_give_what_bytes_give(data: st.DataObject) -> None:
    positions = st.integers(-10, len(CONTENT) + 10)
    head = CONTENT[: data.draw(st.sampled_from((0, 1, 70_000)))]
    whole = RangedFile(CONTENT).value(head)
    first, last = sorted(data.draw(st.integers(0, len(CONTENT))) for _ in range(2))
    value, content = whole.within(first, last), CONTENT[first:last]
    assert len(value) == len(content)
    for _ in range(data.draw(st.integers(1, 8))):
        start, stop = data.draw(positions), data.draw(positions)
        match data.draw(st.sampled_from(("read", "slice", "expect", "forget", "clear", "file"))):
            case "read":
                assert value.read(start, stop) == content[max(0, start) : max(0, stop)]
            case "slice":
                assert value[start:stop] == content[start:stop]
            case "expect":
                value.expect([(start, stop), (start + 5, stop + 100_000)])
            case "forget":
                value.forget()
            case "clear":
                value.clear()
            case "file":
                with value.open() as file, io.BytesIO(content) as expected:
                    assert file.seek(max(0, start)) == expected.seek(max(0, start))
                    size = max(0, stop)
                    data_read = file.read(size)
                    assert data_read == expected.read(len(data_read))
                    assert data_read or not size or max(0, start) >= len(content)
                    assert file.read() == expected.read()
    assert bytes(value) == content


def test_bytes_of_the_head_and_those_that_were_read_are_not_fetched_again() -> None:
    file = RangedFile(CONTENT)
    value = file.value(head=CONTENT[:1000])
    for start, stop in [(0, 1000), (1000, 2000), (1500, 60_000)]:
        assert value.read(start, stop) == CONTENT[start:stop]
    value.within(500, 5000).read(1000, 1500)
    assert file.calls == [[(1000, 1000 + lazy_bytes.MIN_FETCH_BYTES)]]


def test_reads_in_a_row_fetch_at_most_a_quarter_too_much() -> None:
    file = RangedFile(content_of(40 * MIB))
    with file.value().open() as reads:
        for num_needed in range(32_768, 30 * MIB, 32_768):
            position = reads.tell()
            while reads.tell() < num_needed:
                reads.read(num_needed - reads.tell())
            assert reads.tell() > position
            assert file.num_bytes <= 1.25 * num_needed + lazy_bytes.MIN_FETCH_BYTES
    assert len(file.calls) < 40  # 915 reads


def test_announced_ranges_are_fetched_exactly_and_side_by_side() -> None:
    file = RangedFile(CONTENT)
    value = file.value()
    ranges = [(100_000, 300_000), (1_000_000, 1_200_000), (2_000_000, 2_000_100)]
    value.expect(ranges)
    with value.open() as reads:
        for start, stop in ranges:
            reads.seek(start)
            while reads.tell() < stop:  # asks for more than is announced
                assert reads.read(32_768)
    assert file.calls == [ranges]


def test_a_long_announced_range_comes_in_long_pieces() -> None:
    file = RangedFile(content_of(50 * MIB))
    value = file.value()
    value.expect([(MIB, 49 * MIB)])
    assert value.read(MIB, 49 * MIB) == file.content[MIB : 49 * MIB]
    assert file.num_bytes == 48 * MIB
    assert [len(call) for call in file.calls] == [4, 2]


def test_memory_is_bounded_while_a_large_file_is_read() -> None:
    class Endless(RangedFile):
        held = 0

        def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
            cache = value._cache
            self.held = max(self.held, sum(len(piece.data) for piece in cache._pieces))
            return [bytes(stop - start) for start, stop in ranges]

    file = Endless(b"")
    value = LazyBytes(150 * MIB, file.read_ranges)
    value.expect([(0, 150 * MIB)])
    with value.open() as reads:
        while reads.read(MIB):
            pass
        assert file.held <= lazy_bytes.MAX_HELD_BYTES + lazy_bytes.KEPT_BYTES
    kept = sum(len(piece.data) for piece in value._cache._pieces)
    assert 0 < kept <= lazy_bytes.KEPT_BYTES
    value.clear()
    assert not value._cache._pieces


def test_two_reads_are_compared_where_bytes_were_read() -> None:
    value = RangedFile(CONTENT).value()
    value.read(1_000_000, 1_000_100)
    changed_there = CONTENT[:1_000_050] + b"?" + CONTENT[1_000_051:]
    changed_elsewhere = CONTENT[:-1] + b"?"
    assert value.is_same(RangedFile(CONTENT).value())
    assert value.is_same(RangedFile(changed_elsewhere).value())
    assert not value.is_same(RangedFile(changed_there).value())
    assert not value.is_same(RangedFile(CONTENT[:-1]).value())
    assert not value.is_same(CONTENT)


def test_it_pickles_as_bytes() -> None:
    assert pickle.loads(pickle.dumps(RangedFile(CONTENT).value())) == CONTENT


def test_a_check_ends_a_read_before_it_begins() -> None:
    file = RangedFile(CONTENT)

    def stop() -> None:
        raise TimeoutError("too late")

    reads = LazyFile(file.value(), stop)
    with pytest.raises(TimeoutError, match="too late"):
        reads.read(10)
    assert not file.calls
