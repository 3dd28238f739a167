"""All clients of the hot read path keep one contract, whatever the store."""

from __future__ import annotations

import asyncio
import threading
from itertools import count

import pytest

from mmstream.storage import Store, open_store
from mmstream.storage.range_client import RangeClient, StoreClient, range_client
from mmstream.storage.retry import health_of, retry
from mmstream.storage.store import Access, ObjectStat, RequestError
from mmstream.storage.transfers import RangeRequest, TransferLimits, Transfers
from tests.helpers.far_limits import far_limits
from tests.helpers.web_stubs import WebStub, running

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


def test_ranges_are_read_side_by_side_and_have_exactly_their_bytes(store):
    name = "sub/a b.bin"
    store.write(name, DATA)
    bounds = [(start, start + 100) for start in range(3, len(DATA) - 300, 100)]

    async def read_all(client):
        stream = await client.open(name, 10, 20)
        await stream.close()
        await stream.close()
        assert stream.stat == store.stat(name)
        with pytest.raises(FileNotFoundError, match="nothing"):
            await read(client, "nothing", 0, 10)
        return await asyncio.gather(*(read(client, name, *bound) for bound in bounds))

    assert run(store, read_all) == [DATA[start:stop] for start, stop in bounds]


def test_a_range_goes_into_the_memory_that_is_given(store):
    data = bytes(range(256)) * 10_000  # several pieces
    store.write("a.bin", data)
    buffer = bytearray(len(data))

    async def read_into(client):
        stream = await client.open(
            "a.bin", 10, len(data) - 7, memoryview(buffer)[3 : len(data) - 14]
        )
        pieces = [piece async for piece in stream]
        await stream.close()
        return client.streams, b"".join(pieces)

    has_received, came = run(store, read_into)
    assert came == data[10:-7]
    # A client of threads has memory of its own.
    assert bytes(buffer) == (bytes(3) + came + bytes(14) if has_received else bytes(len(data)))


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


# -- the client by threads sends each request once; the transfers alone send it again --------------

urls = (f"fake://store-{number}" for number in count())


class FlakyStore:
    """A store whose reads go wrong as a test says, and that tries again by itself."""

    access = Access(0, 1000, 512, 512, concurrent=True)

    def __init__(self, before_read) -> None:
        self.before_read, self.url = before_read, next(urls)
        self.num_reads = count(1)

    def url_of(self, name):
        return f"{self.url}/{name}"

    def read_ranges(self, ranges, known):
        ((name, start, stop),) = ranges

        def read():
            self.before_read(next(self.num_reads))
            known[name] = ObjectStat(len(DATA), "v1")
            return DATA[start:stop]

        try:
            return [retry(self.url_of(name), read)]
        except OSError as error:
            return [error]


def read_all(store, limits, num_ranges=100):
    """Read ranges through transfers. Return the counts."""
    health_of(store.url).answered()  # so it is expected to come back, however often it fails

    async def read():
        transfers = Transfers([StoreClient(store)], [{}], limits)
        futures = [transfers.submit(RangeRequest(0, "a", i, i + 9, 0)) for i in range(num_ranges)]
        try:
            assert await asyncio.gather(*futures) == [DATA[i : i + 9] for i in range(num_ranges)]
        finally:
            counts = transfers.pop_counts()
            await transfers.close()
        return counts

    return asyncio.run(read())


def test_failed_requests_are_sent_again_and_counted_by_the_transfers():
    def fail(number):
        if number % 10 == 0:
            raise ConnectionResetError("by peer")

    store = FlakyStore(fail)
    counts = read_all(store, far_limits())
    assert counts.num_retries == 11  # one in ten of 100, and of those that were sent again
    assert counts.num_requests == next(store.num_reads) - 1 == 111


@pytest.mark.slow
def test_reads_that_hang_leave_room_for_others():
    go_on = threading.Event()

    def hang(number):
        if number <= 2 * FlakyStore.access.max_reads:
            go_on.wait(500)

    impatient = TransferLimits(stall_s=0.2, tick_s=0.02)
    try:
        counts = read_all(FlakyStore(hang), impatient)
    finally:
        go_on.set()
    assert counts.num_stalls >= 100


@pytest.mark.parametrize(("status", "is_throttled"), [(500, False), (429, True), (503, True)])
def test_a_web_server_gets_each_request_once_and_may_ask_for_fewer(status, is_throttled):
    async def open_range():
        client = StoreClient(open_store(f"{server.url}/corpus"))
        with pytest.raises(RequestError) as caught:
            await client.open("a.tar", 0, 10)
        await client.close()
        return caught.value

    with running(WebStub, {"corpus/a.tar": DATA}) as server:
        health_of(server.url).answered()
        server.statuses_to_come[:] = [status]
        assert asyncio.run(open_range()).is_throttled == is_throttled
        assert len(server.requests) == 1
