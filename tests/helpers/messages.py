"""The messages that users of the library meet, read from its source.

A message is what an exception is made of, or what the log gets at WARNING or above. Text that is
known only at run time is a hole, `HOLE`. A function of the same module that returns text is read
too: each text that it returns is a message.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.paths import ROOT

HOLE = "\0"
FORMAT = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]")
"""A hole of a message of the log."""

ERRORS = {"click.UsageError", "FileNotFoundError", "IndexError", "KeyError", "SystemExit"}
"""Exceptions of others that are raised with a message of mmstream."""

CHECKS = {"require": 1}
"""Functions that raise their argument of this position."""

LEVELS = {"logger.warning", "logger.error", "logger.exception", "logger.log", "warnings.warn"}


@dataclass(frozen=True)
class Message:
    """A message of the library, with `HOLE` for what is known only at run time."""

    path: str
    """Of the module, from the root of the repository."""
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text.replace(HOLE, '...')}"


def messages_of(root: Path = ROOT / "mmstream") -> list[Message]:
    """Return the messages of all modules, without those that only pass on another text."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
    errors = errors_of(trees.values())
    return [
        message
        for path, tree in trees.items()
        for message in messages_in(tree, path.relative_to(root.parent).as_posix(), errors)
    ]


def errors_of(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names of exceptions: those that the modules define, and some of others.

    Their calls count wherever they stand, because some are returned, and raised elsewhere.
    """
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    errors = ERRORS | {"Exception", "OSError", "ValueError"}
    for _ in range(4):  # an exception may derive from one of a later module
        for node in classes:
            if {ast.unparse(base) for base in node.bases} & errors:
                errors.add(node.name)
    return {name for name in errors if not name.startswith("_")} - {"OSError", "ValueError"}


def messages_in(tree: ast.Module, path: str, errors: set[str]) -> Iterator[Message]:
    """Yield the messages of one module, from top to bottom."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    functions = {
        node.name: [line.value for line in ast.walk(node) if isinstance(line, ast.Return)]
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.returns and ast.unparse(node.returns) == "str"
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    for node in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        name = ast.unparse(node.func)
        is_format = name in LEVELS
        if not (is_format or name in errors or name in CHECKS):
            continue
        text_node = node.args[1 if name == "logger.log" else CHECKS.get(name, 0)]
        for text in sorted(set(_texts(text_node, constants, functions))):
            shown = FORMAT.sub(HOLE, text) if is_format else text
            if re.search(r"[A-Za-z]{2}", shown):
                yield Message(path, node.lineno, shown)


def _texts(
    node: ast.expr | None,
    constants: dict[str, ast.expr],
    functions: dict[str, list[ast.expr | None]],
) -> list[str]:
    """Return the texts that an expression may be: one for each branch of a condition."""
    match node:
        case ast.Constant(value=str(value)):
            return [value]
        case ast.JoinedStr(values=values):
            return [
                "".join(parts)
                for parts in itertools.product(
                    *(_texts(value, constants, functions) for value in values)
                )
            ]
        case ast.FormattedValue(value=value):
            return _texts(value, constants, functions)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            pairs = itertools.product(
                _texts(left, constants, functions), _texts(right, constants, functions)
            )
            return ["".join(pair) for pair in pairs]
        case ast.IfExp(body=body, orelse=orelse):
            return [*_texts(body, constants, functions), *_texts(orelse, constants, functions)]
        case ast.Name(id=name) if isinstance(constants.get(name), ast.expr):
            return _texts(constants[name], {}, {})
        case ast.Call(func=ast.Name(id=name)) if name in functions:
            texts = [text for value in functions[name] for text in _texts(value, constants, {})]
            return [text if re.search(r"[A-Za-z]{2}", text) else HOLE for text in texts]
        case _:
            return [HOLE]
