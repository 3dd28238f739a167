"""Arguments that users bring along from other libraries, and what to write instead.

Ground floor: `Pipeline` and `Loader` use it. Python's own error names the argument, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from mmstream.errors import ConfigError

__all__ = ["advise"]

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
