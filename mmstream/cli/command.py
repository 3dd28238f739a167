"""What every command shares: help that starts with an example, exit codes, mistakes in a line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

__all__ = ["AT_LEAST_0", "AT_LEAST_1", "INTERRUPTED", "PROBLEM", "USAGE", "command", "usage"]

PROBLEM, USAGE, INTERRUPTED = 1, 2, 130
AT_LEAST_0, AT_LEAST_1 = click.IntRange(min=0), click.IntRange(min=1)


def command(example: str) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function a command whose help starts with an example to copy."""

    def wrap(function: Callable[..., None]) -> click.Command:
        text = inspect.getdoc(function) or ""
        make = click.command(help=f"\b\n{example}\n\n{text}", short_help=text.partition("\n")[0])
        return make(function)

    return wrap


@contextmanager
def usage(message: str) -> Iterator[None]:
    """Turn a ValueError into a line about the command line, exit code 2."""
    try:
        yield
    except ValueError:
        raise click.UsageError(message) from None
