"""Caches of a few entries, which all orders use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def cached(cache: dict[K, V], key: K, max_entries: int, make: Callable[[], V]) -> V:
    """Return a value of a cache, which is made where the cache lacks it.

    A full cache drops its oldest entries, an eighth of `max_entries`. Decode threads share the
    caches of an order. ``list(cache)`` runs as one step under the GIL, so another thread cannot
    change the cache in the middle of it.
    """
    value = cache.get(key)
    if value is None:
        value = make()
        excess = len(cache) - max_entries + 1
        if excess > 0:  # several at once: the list of all keys costs as much as a window
            for oldest in list(cache)[: max(excess, max_entries // 8)]:
                cache.pop(oldest, None)
        cache[key] = value
    return value
