"""Arguments that Python would take, or refuse without a hint, and what to write instead.

Ground floor. `advise` is for arguments of other libraries: Python's own error names the argument,
and no more. `refuse_bools` is for numbers: Python takes True and False as 1 and 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from mmstream.errors import ConfigError

__all__ = ["advise", "refuse_bools"]

T = TypeVar("T")


def advise(advice: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Return a class decorator: these arguments are a ConfigError that says what to write.

    Args:
        advice: What to write, by the name of the argument that the class does not have.

    Examples:
        >>> @advise({"batch_size": "write global_batch_size="})
        ... class Pipeline:
        ...     def __init__(self, *, global_batch_size): ...
        >>> Pipeline(batch_size=8)
        Traceback (most recent call last):
        mmstream.errors.ConfigError: Pipeline has no batch_size=: write global_batch_size=
    """

    def decorated(cls: type[T]) -> type[T]:
        start: Callable[..., None] = cls.__init__

        @wraps(start)
        def checked(self: T, *args: Any, **arguments: Any) -> None:
            for name in arguments.keys() & advice.keys():
                raise ConfigError(f"{cls.__name__} has no {name}=: {advice[name]}")
            start(self, *args, **arguments)

        cls.__init__ = checked  # type: ignore[assignment]
        return cls

    return decorated


def refuse_bools(**numbers: object) -> None:
    """Refuse True and False where numbers are expected. Everything else is left to other checks.

    Args:
        numbers: Values by the names of their settings. Lists and tuples are looked through, two
            levels deep.

    Raises:
        ConfigError: A value is a bool, or holds one; the message names it.

    Examples:
        >>> refuse_bools(num_workers=2, grid=(4, 8))
        >>> refuse_bools(num_workers=True)
        Traceback (most recent call last):
        mmstream.errors.ConfigError: num_workers=True: give a number, not True or False
    """
    for name, value in numbers.items():
        if _has_bool(value):
            raise ConfigError(f"{name}={value!r}: give a number, not True or False")


def _has_bool(value: object, num_levels: int = 2) -> bool:
    if isinstance(value, tuple | list):  # a state of strangers may nest thousands of lists
        return num_levels > 0 and any(_has_bool(item, num_levels - 1) for item in value)
    return isinstance(value, bool | np.bool_)
