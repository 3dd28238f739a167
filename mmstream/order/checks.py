"""Checks of arguments that all files of `order/` share: early errors."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from mmstream.errors import ConfigError
from mmstream.wrong_arguments import shown

# A saved state is a stranger's data too. These limits keep it from taking the machine's memory.
MAX_ROWS = 1 << 24
"""Largest global batch size."""
MAX_LANES = 1 << 20
"""Most lanes of a grid, P * Q."""
MAX_SETTING = 1 << 40
"""Largest window, interleave and chunk: more samples than a dataset has."""

Reshuffle: TypeAlias = Literal["global", "lanes"]
"""Where an epoch may put a sample: anywhere, or in the lane that has it in all epochs of a seed."""


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with a message if a condition is false."""
    if not condition:
        raise ConfigError(message)


def integer(name: str, value: Any, most: int | None = None) -> int:
    """Return a value as a plain int.

    Keys and saved states contain the repr of such values, and numpy's integers have another repr.

    Args:
        name: of the setting, for messages.
        value: any value.
        most: the largest value that is allowed.

    Raises:
        ConfigError: the value is not an integer, or too large; the message names it.
    """
    try:
        number = int(operator.index("" if isinstance(value, bool) else value))  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name} {shown(value)}: needs an integer") from None
    if most is not None:
        require(number <= most, f"{name} {number}: at most {most:,}")
    return number


def checked_size(name: str, value: Any) -> int | None:
    """Return a setting that counts samples or bytes as a plain int; None stays None.

    Args:
        name: of the setting, for messages.
        value: any value.

    Raises:
        ConfigError: it is not an integer from 1 to `MAX_SETTING`.
    """
    if value is None:
        return None
    size = integer(name, value, MAX_SETTING)
    require(size >= 1, f"{name} {size}: needs at least 1")
    return size


def checked_window(window: Any, window_bytes: Any) -> tuple[int | None, int | None]:
    """Return the settings of windows, of which one at most is given.

    Raises:
        ConfigError: both are given, or one is not an integer from 1 to `MAX_SETTING`.
    """
    require(
        window is None or window_bytes is None,
        f"window {shown(window)} and window_bytes {shown(window_bytes)}: give one of the two",
    )
    return checked_size("window", window), checked_size("window_bytes", window_bytes)


def checked_grid(grid: Any, global_batch_size: int, most: int = MAX_LANES) -> tuple[int, int]:
    """Return a grid (P, Q) as plain ints.

    Args:
        grid: any value.
        global_batch_size: G.
        most: lanes that are allowed, P * Q.

    Raises:
        ConfigError: it is not two integers from 1, has too many lanes, or Q does not divide G.
    """
    require(
        isinstance(grid, Sequence) and len(grid) == 2,
        f"grid {shown(grid)}: needs two integers, P and Q",
    )
    groups, lanes = (integer("grid", number, most) for number in grid)
    require(groups * lanes <= most, f"grid {(groups, lanes)}: at most {most:,} lanes")
    require(
        min(groups, lanes) >= 1 and global_batch_size % lanes == 0,
        f"grid {(groups, lanes)}: P and Q must be positive, and Q must divide global_batch_size "
        f"{global_batch_size}",
    )
    return groups, lanes


def checked_reshuffle(reshuffle: Any, *, shuffle: bool, has_cache: bool) -> Reshuffle:
    """Return how epochs are shuffled anew.

    Args:
        reshuffle: any value. None: "lanes" with a node cache, else "global".
        shuffle: whether epochs are shuffled at all.
        has_cache: whether nodes keep what they read.

    Raises:
        ConfigError: it is neither, or "lanes" where nothing is shuffled.
    """
    if reshuffle is None:
        return "lanes" if has_cache and shuffle else "global"
    if reshuffle not in get_args(Reshuffle):
        raise ConfigError(f"reshuffle {shown(reshuffle)}: give global or lanes")
    require(
        shuffle or reshuffle == "global",
        "reshuffle lanes with shuffle=False: every epoch is the same, so leave out one of the two",
    )
    return "lanes" if reshuffle == "lanes" else "global"


def reshuffle_of(identity: Mapping[str, Any]) -> Reshuffle:
    """Return how the epochs of an identity are shuffled anew. It has the key only for "lanes".

    Raises:
        ConfigError: it has another value there.
    """
    return checked_reshuffle(identity.get("reshuffle", "global"), shuffle=True, has_cache=False)
