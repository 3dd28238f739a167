"""The client by threads sends each request once; the transfers alone send it again."""

from __future__ import annotations

import asyncio
import threading
from itertools import count

import pytest

from mmstream.storage import open_store
from mmstream.storage.range_client import StoreClient
from mmstream.storage.retry import health_of, retry
from mmstream.storage.store import Access, ObjectStat, RequestError
from mmstream.storage.transfers import RangeRequest, TransferLimits, Transfers
from tests.helpers.far_limits import far_limits
from tests.helpers.web_stubs import WebStub, running

DATA = bytes(range(250)) * 4

urls = (f"fake://store-{number}" for number in count())


class Store:
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

    store = Store(fail)
    counts = read_all(store, far_limits())
    assert counts.num_retries == 11  # one in ten of 100, and of those that were sent again
    assert counts.num_requests == next(store.num_reads) - 1 == 111


@pytest.mark.slow
def test_reads_that_hang_leave_room_for_others():
    go_on = threading.Event()

    def hang(number):
        if number <= 2 * Store.access.max_reads:
            go_on.wait(500)

    impatient = TransferLimits(stall_s=0.2, tick_s=0.02)
    try:
        counts = read_all(Store(hang), impatient)
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
