"""The caller's function for rows, by its name ``module:function``. Part of step 2 of a conversion.

A module that lies in the working folder is imported from there, as `python -m` does.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmstream.errors import ConfigError

__all__ = ["function_name", "load_function", "load_object", "short_name", "source_sha256"]


def load_function(name: str) -> Callable[..., Any]:
    """Import a function by its name, such as ``my_rows:caption``.

    Raises:
        ConfigError: There is no such module, it has no such name, or that is no function. What the
            module raises when it is imported passes.
    """
    value = load_object(name)
    if not callable(value):
        raise ConfigError(f"{name}: is {type(value).__name__}, and no function")
    return value  # type: ignore[no-any-return]


def load_object(name: str) -> Any:
    """Import an object by its name, such as ``my_rows:caption``.

    Raises:
        ConfigError: There is no such module, or it has no such name. What the module raises when it
            is imported passes.
    """
    module_name, _, attributes = name.partition(":")
    words = (*module_name.split("."), *attributes.split("."))
    if not all(word.isidentifier() for word in words):
        raise ConfigError(f"{name}: is no name such as module:function")
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)  # behind the others, so that nothing there hides an installed one
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0] and error.name != module_name:
            raise
        raise ConfigError(
            f"{name}: no module {module_name!r} here or among the installed ones"
        ) from None
    for attribute in attributes.split("."):
        if not hasattr(value, attribute):
            raise ConfigError(f"{name}: the module has no {attributes!r}")
        value = getattr(value, attribute)
    return value


def function_name(function: Callable[..., Any]) -> str:
    """Return ``module:function``, as plans name it."""
    return f"{function.__module__}:{short_name(function)}"


def short_name(function: Callable[..., Any]) -> str:
    """Return the name that the caller gave a function, as the reasons of rejects name it."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def source_sha256(function: Callable[..., Any]) -> str:
    """Return the checksum of the code of a function: of its module, or of it alone in a script.

    A plan saves it, so that a conversion does not go on with another function than it began with.
    """
    in_script = function.__module__ == "__main__"
    try:
        source = inspect.getsource(function if in_script else sys.modules[function.__module__])
    except (OSError, TypeError):  # written at a prompt, or not in Python
        source = ""
    return hashlib.sha256(source.encode()).hexdigest()
