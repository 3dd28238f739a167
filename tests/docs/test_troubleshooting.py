"""The page of troubleshooting quotes only messages that the library still has."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.helpers.paths import DOCS, ROOT

PAGE = (DOCS / "troubleshooting.md").read_text()
PATTERNS = re.findall(r"^- `(.+)`$", PAGE, re.M)
"""Words of messages, with ``...`` for what is known only at run time."""


@cache
def texts_of_modules() -> list[str]:
    """Return all texts in the source of each module, without the holes of f-strings."""
    modules = []
    for path in sorted((ROOT / "mmstream").rglob("*.py")):
        constants = [
            n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)
        ]
        modules.append("\0".join(n.value for n in constants if isinstance(n.value, str)))
    return modules


def is_in_a_module(pattern: str) -> bool:
    """Tell whether one module has all words of a pattern, however its messages are put together."""
    pieces = [piece.strip() for piece in pattern.split("...")]
    return any(all(piece in texts for piece in pieces) for texts in texts_of_modules())


def test_every_quoted_message_is_still_in_the_library():
    assert len(PATTERNS) > 100
    assert [pattern for pattern in PATTERNS if not is_in_a_module(pattern)] == []


@pytest.mark.parametrize("pattern", ["a message of nobody", "... is empty and full"])
def test_a_message_that_is_gone_is_noticed(pattern):
    assert not is_in_a_module(pattern)
