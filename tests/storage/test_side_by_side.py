"""Small requests that are sent side by side."""

from __future__ import annotations

import threading

import pytest

from mmstream.storage import open_store
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

    with pytest.raises(OSError, match="failed 3"):
        map_requests(open_store("s3://bucket/x"), request, range(10_000))
    assert len(sent) < 10_000
