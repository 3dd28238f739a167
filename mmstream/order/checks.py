"""Small helpers that all files of `order/` share: early errors, and caches of a few entries."""

from __future__ import annotations

import operator
from typing import Any

from mmstream.errors import ConfigError

__all__ = ["integer", "keep", "require"]


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with a message if a condition is false."""
    if not condition:
        raise ConfigError(message)


def integer(name: str, value: Any) -> int:
    """Return a value as a plain int.

    Keys and saved states contain the repr of such values, and numpy's integers have another repr.

    Raises:
        ConfigError: the value is not an integer; the message names it.
    """
    try:
        return int(operator.index(value))
    except TypeError:
        raise ConfigError(f"{name} {value!r}: needs an integer") from None


def keep(cache: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Put a value in a cache, and drop the oldest entries above `most`.

    Decode threads share the caches of an order. ``list(cache)`` runs as one step under the GIL, so
    another thread cannot change the cache in the middle of it.
    """
    for oldest in list(cache)[: max(0, len(cache) - most + 1)]:
        cache.pop(oldest, None)
    cache[key] = value
