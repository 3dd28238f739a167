"""Ranges of a reader process: in which order they are requested, and what becomes of them."""

from __future__ import annotations

import asyncio

import pytest

from mmstream.storage import open_store
from mmstream.storage.range_client import range_client
from mmstream.storage.transfers import RangeRequest, Transfers

DATA = bytes(range(256)) * 100


def test_a_store_without_a_client_of_its_own_serves_ranges(tmp_path):
    store = open_store(tmp_path)
    store.write("a", DATA)

    async def read():
        transfers = Transfers([range_client(store)], [{}])
        futures = [transfers.submit(RangeRequest(0, "a", i, 5 * i, i)) for i in range(100)]
        absent = transfers.submit(RangeRequest(0, "b", 0, 1, 0))
        outcomes = await asyncio.gather(*futures)
        with pytest.raises(FileNotFoundError):
            await absent
        counts = transfers.pop_counts()
        await transfers.close()
        return outcomes, counts

    outcomes, counts = asyncio.run(read())
    assert outcomes == [DATA[i : 5 * i] for i in range(100)]
    assert counts.num_requests == 100  # none for the empty range
    assert counts.num_bytes == sum(4 * i for i in range(100))
    assert counts.busy_s > 0
