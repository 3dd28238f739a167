"""What every command shares: help that starts with an example, exit codes, mistakes in a line.

The library's messages name its arguments, as ``overwrite=True``; a command says ``--overwrite``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import click

from mmstream.errors import MMStreamError

__all__ = ["AT_LEAST_0", "AT_LEAST_1", "INTERRUPTED", "PROBLEM", "USAGE", "command", "in_options",
           "usage"]  # fmt: skip

PROBLEM, USAGE, INTERRUPTED = 1, 2, 130
AT_LEAST_0, AT_LEAST_1 = click.IntRange(min=0), click.IntRange(min=1)


def command(example: str, **names: str) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function a command whose help starts with an example to copy.

    Args:
        example: a command line.
        names: of the library's arguments, by their option where that is not of the same name.
    """

    def wrap(function: Callable[..., None]) -> click.Command:
        @wraps(function)
        def call(*args: Any, **options: Any) -> None:
            try:
                function(*args, **options)
            except MMStreamError as error:
                params = click.get_current_context().command.params
                known = [(p.name or "", p.opts[0]) for p in params if isinstance(p, click.Option)]
                raise type(error)(in_options(str(error), dict(known) | names)) from error

        text = inspect.getdoc(function) or ""
        make = click.command(help=f"\b\n{example}\n\n{text}", short_help=text.partition("\n")[0])
        return make(call)

    return wrap


def in_options(message: str, options: Mapping[str, str]) -> str:
    """Return a message with options in the place of the library's arguments.

    Args:
        message: in which ``name=value``, a ``name:`` or ``name is`` that it begins with, or a name
            of several words is an argument.
        options: argument -> option.
    """
    name = f"({'|'.join(sorted(options, key=len, reverse=True))})"
    longer = f"({'|'.join(name for name in options if '_' in name) or '(?!)'})"
    free = r"(?<![-\w./])"  # of a path, or of an option already
    for pattern, form in (
        (rf"\bLoader\({name}=([^()]*)\)", r"\1=\2"),
        (rf"{free}{name}=True\b", "{}"),
        (rf"""{free}{name}=(['"])([\w-]*)\2""", r"{} \3"),
        (rf"{free}{name}=(?=[^\s,;)])", "{} "),
        (rf"{free}{name}=", "{}"),
        (rf"^(?:train: )?{name}(?=: | is )", "{}"),
        (rf"{free}{longer}(?![\w./])", "{}"),
    ):

        def with_option(found: re.Match[str], form: str = form) -> str:
            return found.expand(form.replace("{}", options[found[1]]))

        message = re.sub(pattern, with_option, message)
    return message


@contextmanager
def usage(message: str) -> Iterator[None]:
    """Turn a ValueError into a line about the command line, exit code 2."""
    try:
        yield
    except ValueError:
        raise click.UsageError(message) from None
