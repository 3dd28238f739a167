"""All clients of the hot read path keep one contract, whatever the store."""

from __future__ import annotations

import asyncio

import pytest

from mmstream.storage import Store
from mmstream.storage.range_client import RangeClient, range_client

DATA = bytes(range(256)) * 40


async def read(client: RangeClient, name: str, start: int, stop: int) -> bytes:
    """The bytes of one range."""
    stream = await client.open(name, start, stop)
    try:
        return b"".join([piece async for piece in stream])
    finally:
        await stream.close()


def run(store: Store, calls):
    """What a coroutine function returns that gets a client of the store."""

    async def with_client():
        client = range_client(store)
        try:
            return await calls(client)
        finally:
            await client.close()

    return asyncio.run(with_client())


def test_a_range_has_exactly_its_bytes(store):
    store.write("sub/a b.bin", DATA)
    assert run(store, lambda client: read(client, "sub/a b.bin", 3, 5000)) == DATA[3:5000]


def test_a_range_goes_into_the_memory_that_is_given(store):
    data = bytes(range(256)) * 10_000  # several pieces
    store.write("a.bin", data)
    buffer = bytearray(len(data))

    async def read_into(client):
        stream = await client.open(
            "a.bin", 10, len(data) - 7, memoryview(buffer)[3 : len(data) - 14]
        )
        pieces = [piece async for piece in stream]
        assert all(piece.obj is buffer for piece in pieces)
        await stream.close()
        return sum(map(len, pieces))

    assert run(store, read_into) == len(data) - 17
    assert bytes(buffer) == bytes(3) + data[10:-7] + bytes(14)


def test_an_answer_says_which_object_it_is_of(store):
    store.write("a.bin", DATA)

    async def stat_of(client):
        stream = await client.open("a.bin", 10, 20)
        await stream.close()
        await stream.close()
        return stream.stat

    assert run(store, stat_of) == store.stat("a.bin")


def test_ranges_are_read_side_by_side(store):
    store.write("a.bin", DATA)
    bounds = [(start, start + 100) for start in range(0, len(DATA), 100)][:-3]

    async def read_all(client):
        return await asyncio.gather(*(read(client, "a.bin", *bound) for bound in bounds))

    assert run(store, read_all) == [DATA[start:stop] for start, stop in bounds]


def test_an_absent_object_is_named(store):
    store.write("a.bin", DATA)
    with pytest.raises(FileNotFoundError, match="nothing"):
        run(store, lambda client: read(client, "nothing", 0, 10))


@pytest.mark.parametrize("start", [len(DATA) - 5, len(DATA) + 1])
def test_a_range_past_the_end_ends_early_and_says_the_size(store, start):
    store.write("a.bin", DATA)

    async def read_past_the_end(client):
        stream = await client.open("a.bin", start, len(DATA) + 7)
        data = b"".join([piece async for piece in stream])
        await stream.close()
        return len(data), stream.stat

    length, stat = run(store, read_past_the_end)
    assert length <= max(0, len(DATA) - start)
    assert stat == store.stat("a.bin")
