"""Caches of a few entries, which the orders and the read stage share."""

from __future__ import annotations

from typing import Any


def keep(cache: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Put a value in a cache, and drop the oldest entries: an eighth of `most`, where it is full.

    Decode threads share the caches of an order. ``list(cache)`` runs as one step under the GIL, so
    another thread cannot change the cache in the middle of it.
    """
    excess = len(cache) - most + 1
    if excess > 0:  # several at once: the list of all keys costs as much as a window
        for oldest in list(cache)[: max(excess, most // 8)]:
            cache.pop(oldest, None)
    cache[key] = value
