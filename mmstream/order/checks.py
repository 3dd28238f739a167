"""Order's early errors, and its small caches."""

from __future__ import annotations

import operator
from typing import Any

from mmstream.errors import ConfigError

__all__ = ["integer", "keep", "require"]


def require(condition: bool, message: str) -> None:
    """Raise ConfigError unless a condition holds."""
    if not condition:
        raise ConfigError(message)


def integer(name: str, value: Any) -> int:
    """Return a plain int: keys and states are made of its repr, where numpy's integers differ."""
    try:
        return int(operator.index(value))
    except TypeError:
        raise ConfigError(f"{name} {value!r}: needs an integer") from None


def keep(cache: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Put a value in a cache that holds the latest few. Decode threads share the cache."""
    for oldest in list(cache)[: max(0, len(cache) - most + 1)]:  # list() is one step under the GIL
        cache.pop(oldest, None)
    cache[key] = value
