"""Arguments that Python would take, or refuse without a hint, and what to write instead.

Ground floor. `advise` is for arguments of other libraries: Python's own error names the argument,
and no more. `refuse_bools` is for numbers: Python takes True and False as 1 and 0. So are
`require_numbers`, for settings that are never a word, and `require_counts`, for those that are
always a whole number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from mmstream.errors import ConfigError

__all__ = ["advise", "refuse_bools", "require_counts", "require_numbers"]

F = TypeVar("F", bound=Callable[..., Any])


def advise(advice: Mapping[str, str]) -> Callable[[F], F]:
    """Return a decorator of a class or function: these arguments are a ConfigError with advice.

    Args:
        advice: What to write, by the name of the argument that the class or function does not have.

    Examples:
        >>> @advise({"batch_size": "write global_batch_size="})
        ... class Pipeline:
        ...     def __init__(self, *, global_batch_size): ...
        >>> Pipeline(batch_size=8)
        Traceback (most recent call last):
        mmstream.errors.ConfigError: Pipeline has no batch_size=: write global_batch_size=
    """

    def decorated(target: Any) -> Any:
        is_class = isinstance(target, type)
        function = target.__init__ if is_class else target

        @wraps(function)
        def checked(*args: Any, **arguments: Any) -> Any:
            for name in arguments.keys() & advice.keys():
                raise ConfigError(f"{target.__name__} has no {name}=: {advice[name]}")
            return function(*args, **arguments)

        if not is_class:
            return checked
        target.__init__ = checked
        return target

    return decorated


def refuse_bools(**numbers: object) -> None:
    """Refuse True and False where numbers are expected. Everything else is left to other checks.

    Args:
        numbers: Values by the names of their settings. Lists, tuples and the values of mappings
            are looked through, two levels deep.

    Raises:
        ConfigError: A value is a bool, or holds one; the message names it.

    Examples:
        >>> refuse_bools(num_workers=2, grid=(4, 8))
        >>> refuse_bools(num_workers=True)
        Traceback (most recent call last):
        mmstream.errors.ConfigError: num_workers=True: give a number, not True or False
    """
    for name, value in numbers.items():
        if _holds(value, (bool, np.bool_)):
            raise ConfigError(f"{name}={value!r}: give a number, not True or False")


def require_numbers(**numbers: object) -> None:
    """Refuse text too, such as that of a command line or an environment variable.

    Args:
        numbers: As for `refuse_bools`, of settings that are never a word.

    Raises:
        ConfigError: A value is text or a bool, or holds one; the message names it.

    Examples:
        >>> require_numbers(num_workers="2")
        Traceback (most recent call last):
        mmstream.errors.ConfigError: num_workers='2': give a number, not text
    """
    refuse_bools(**numbers)
    for name, value in numbers.items():
        if _holds(value, (str,)):
            raise ConfigError(f"{name}={value!r}: give a number, not text")


def require_counts(**numbers: object) -> None:
    """Refuse everything but whole numbers from 1 up.

    Args:
        numbers: Values by the names of their settings.

    Raises:
        ConfigError: A value is something else; the message names it.

    Examples:
        >>> require_counts(patch_size=None)
        Traceback (most recent call last):
        mmstream.errors.ConfigError: patch_size=None: give a number from 1 up
    """
    refuse_bools(**numbers)
    for name, value in numbers.items():
        if not isinstance(value, int | np.integer) or value < 1:
            raise ConfigError(f"{name}={value!r}: give a number from 1 up")


def _holds(value: object, types: tuple[type, ...], num_levels: int = 2) -> bool:
    """Tell whether a value is of one of the types, or holds such a value."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):  # a state of strangers may nest thousands of lists
        return num_levels > 0 and any(_holds(item, types, num_levels - 1) for item in value)
    return isinstance(value, types)
