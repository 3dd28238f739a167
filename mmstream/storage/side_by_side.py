"""Storage: many small requests at once, where each of them mostly waits.

`Store.read_ranges` does so for ranges. This is for all other requests, such as the writes of the
files of a shard or the removal of many objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mmstream.storage.store import Store

MAX_REQUESTS_SIDE_BY_SIDE = 16

T = TypeVar("T")
R = TypeVar("R")


def map_requests(store: Store, request: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call a function for each item, and return the results in the order of the items.

    Calls run side by side in threads where the store's requests are best sent so, otherwise one
    after the other.

    Args:
        store: The store that the requests go to.
        request: Sends the request of one item.
        items: One for each request.

    Raises:
        Exception: The first error in the order of the items. No new request begins after it.
    """
    items = list(items)
    if not store.access.concurrent or len(items) < 2:
        return [request(item) for item in items]
    num_threads = min(len(items), MAX_REQUESTS_SIDE_BY_SIDE)
    with ThreadPoolExecutor(num_threads, "mmstream-requests") as threads:
        try:
            return list(threads.map(request, items))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def sizes_of(store: Store, names: Iterable[str]) -> list[int | None]:
    """Return the size of each object in bytes, in the order of the names. None: there is none."""

    def size(name: str) -> int | None:
        try:
            return store.size(name)
        except FileNotFoundError:
            return None

    return map_requests(store, size, names)
