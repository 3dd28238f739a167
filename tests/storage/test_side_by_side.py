"""Small requests that are sent side by side."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from fsspec.asyn import AsyncFileSystem

from mmstream.storage import open_store, remote
from mmstream.storage.store import MAX_REQUESTS_SIDE_BY_SIDE, map_requests


def test_requests_to_an_object_store_wait_side_by_side():
    all_sent = threading.Barrier(MAX_REQUESTS_SIDE_BY_SIDE, timeout=500)

    def request(item):
        all_sent.wait()
        return 2 * item

    items = range(2 * MAX_REQUESTS_SIDE_BY_SIDE)
    assert map_requests(open_store("s3://bucket/x"), request, items) == [2 * i for i in items]


def test_the_first_error_is_raised_and_few_requests_follow():
    sent = []

    def request(item):
        sent.append(item)
        if item in (3, 5):
            raise OSError(f"failed {item}")
        if item > 5:
            time.sleep(0.05)  # all of them take far longer than noticing the error

    with pytest.raises(OSError, match="failed 3"):
        map_requests(open_store("s3://bucket/x"), request, range(10_000))
    assert len(sent) < 10_000


def test_ranges_of_an_asynchronous_client_are_requested_side_by_side(monkeypatch):
    class Client(AsyncFileSystem):
        num_in_flight = most_in_flight = 0

        async def _cat_file(self, path, start=None, end=None, **_):
            self.num_in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
            await asyncio.sleep(0.01)
            self.num_in_flight -= 1
            return bytes(end - start)

    client = Client(skip_instance_cache=True)
    monkeypatch.setattr(remote, "_client", lambda url: client)
    ranges = [("a", start, start + 1) for start in range(500)]
    assert open_store("gs://bucket/x").read_ranges(ranges) == [bytes(1)] * 500
    assert client.most_in_flight == remote.MAX_REQUESTS_IN_FLIGHT
