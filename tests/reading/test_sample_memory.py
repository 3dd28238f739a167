"""The memory of a reader process: pieces of their own, used again, seen by other processes."""

from __future__ import annotations

import mmap
import os
import random
import resource
import threading

import pytest

from mmstream.reading import server
from mmstream.reading.server import SampleMemory, most_bytes

MB = 1 << 20


def resident_bytes(memory: SampleMemory) -> int:
    return os.fstat(memory.file).st_blocks * 512


def test_pieces_are_written_here_and_read_by_another_process() -> None:
    memory = SampleMemory(MB)
    pieces = [memory.take(number) for number in (0, 1, 1000, 5000)]
    for number, piece in enumerate(pieces):
        piece[:] = bytes([number]) * len(piece)
    other = mmap.mmap(memory.file, memory.num_bytes)
    for number, piece in enumerate(pieces[1:], start=1):
        start = memory.position(piece)
        assert other[start : start + len(piece)] == bytes([number]) * len(piece)
        assert memory.position(piece[len(piece) // 2 :]) == start + len(piece) // 2
        assert start % 512 == 0
    memory.close()


def test_a_piece_comes_back_with_its_last_view_and_joins_its_neighbours() -> None:
    memory = SampleMemory(4 * mmap.PAGESIZE)
    first, second, third = (memory.take(mmap.PAGESIZE) for _ in range(3))
    view = second[10:20]
    del second
    with pytest.raises(MemoryError, match="8,192 bytes"):
        memory.take(2 * mmap.PAGESIZE)
    del first, view
    assert memory.position(memory.take(2 * mmap.PAGESIZE)) == 0
    views = [third]
    del third
    thread = threading.Thread(target=views.clear)  # any thread may drop the last view
    thread.start()
    thread.join()
    assert len(memory.take(4 * mmap.PAGESIZE)) == memory.num_bytes
    memory.close()


@pytest.mark.parametrize("seed", range(4))
def test_pieces_never_overlap_and_fill_the_memory_in_any_order(seed: int) -> None:
    memory = SampleMemory(MB)
    take_and_drop(memory, random.Random(seed))
    assert len(memory.take(MB)) == MB  # all holes have become one
    memory.close()


def take_and_drop(memory: SampleMemory, draw: random.Random) -> None:
    """Fill each piece with a number of its own, and look for it before the piece is dropped."""
    pieces: list[tuple[int, memoryview]] = []
    for number in range(600):
        if pieces and draw.random() < 0.45:
            value, piece = pieces.pop(draw.randrange(len(pieces)))
            assert bytes(piece) == bytes([value]) * len(piece)
            del piece
            continue
        try:
            piece = memory.take(draw.choice((1, 511, 512, 513, 4000, 30_000)))
        except MemoryError:
            pieces.clear()
            del piece
            continue
        piece[:] = bytes([number % 256]) * len(piece)
        pieces.append((number % 256, piece))


def test_what_is_unused_at_the_end_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SPARE_BYTES", MB)
    memory = SampleMemory(16 * MB)
    first = memory.take(1000)
    pieces = [memory.take(MB) for _ in range(8)]
    for piece in (first, *pieces):
        piece[:] = b"x" * len(piece)
    assert resident_bytes(memory) > 8 * MB
    del piece
    pieces.clear()
    memory.take(1000)
    assert resident_bytes(memory) <= MB
    assert bytes(first) == b"x" * 1000
    memory.close()


@pytest.mark.parametrize(
    ("kind", "share"), [(resource.RLIMIT_AS, 2), (resource.RLIMIT_FSIZE, 1)], ids=["v", "f"]
)
def test_the_memory_stays_within_limits_of_the_shell(
    kind: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = most_bytes()
    limits = {kind: (8 * MB, resource.RLIM_INFINITY)}
    none = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind, none))
    assert most_bytes() == 8 * MB // share < free
