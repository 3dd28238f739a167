"""Change the order and the states in many small ways, and see whether their tests notice.

    python -m tools.prove.mutations --count 100       # half an hour where nothing else runs
    python -m tools.prove.mutations --checkout DIR    # the package and the tests of another clone

A mutant is `mmstream/order/**` and `mmstream/state.py` with one change: an operator swapped, a
comparison turned, a number one more or less, a condition negated, a result None, a statement left
out, or two arguments swapped. Texts of errors and of the log are not changed.

The draw of mutants depends on the seed and the source text alone. Each is written into a copy of
the checkout, where pytest runs until a test fails: then the mutant is killed. Tests that are slow
or need S3 are left out. A mutant that survives is a gap in the tests, or means the same.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SOURCES = ("mmstream/order/**/*.py", "mmstream/state.py")
TESTS = (
    *("tests/order", "tests/test_state.py", "tests/packing/test_order.py"),
    *("tests/packing/test_mixture_order.py", "tests/test_damaged_states.py"),
)
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "site", ".hypothesis", "__pycache__")
SWAPS: dict[str, tuple[str, ...]] = {
    "Add": ("Sub",),
    "Sub": ("Add",),
    "Mult": ("FloorDiv",),
    "Div": ("Mult",),
    "Pow": ("Mult",),
    "FloorDiv": (
        "Mult",
        "Mod",
    ),
    "Mod": ("FloorDiv",),
    "LShift": ("RShift",),
    "RShift": ("LShift",),
    "BitAnd": ("BitOr",),
    "BitOr": ("BitAnd",),
    "BitXor": ("BitOr",),
    "And": ("Or",),
    "Or": ("And",),
    "Lt": (
        "LtE",
        "GtE",
    ),
    "LtE": (
        "Lt",
        "Gt",
    ),
    "Gt": (
        "GtE",
        "LtE",
    ),
    "GtE": (
        "Gt",
        "Lt",
    ),
    "Eq": ("NotEq",),
    "NotEq": ("Eq",),
    "Is": ("IsNot",),
    "IsNot": ("Is",),
    "In": ("NotIn",),
    "NotIn": ("In",),
}


class Mutant(NamedTuple):
    """One change of one file."""

    path: str
    line: int
    change: tuple[str, str]
    source: str
    """The changed file."""


def find_mutants(checkout: Path, seed: int) -> list[Mutant]:
    """Return all mutants, in an order that a seed draws.

    The place of a mutant depends on its own file and text, so a change elsewhere leaves it there.
    """
    found: list[tuple[bytes, Mutant]] = []
    for file in sorted(path for pattern in SOURCES for path in checkout.glob(pattern)):
        path, tree = file.relative_to(checkout).as_posix(), ast.parse(file.read_text("utf-8"))
        seen: Counter[tuple[str, str]] = Counter()
        for node, name, place in _places(tree):
            content = getattr(node, name)
            old = content if place is None else content[place]
            for new in _changes(old):
                change = ast.unparse(old), ast.unparse(new)
                if change[0] == change[1]:
                    continue
                seen[change] += 1
                changed = new if place is None else [*content[:place], new, *content[place + 1 :]]
                setattr(node, name, changed)
                mutant = Mutant(
                    path, old.lineno, change, ast.unparse(ast.fix_missing_locations(tree))
                )
                setattr(node, name, content)
                key = f"{seed} {path} {change} {seen[change]}"
                found.append((hashlib.sha256(key.encode()).digest(), mutant))
    return [mutant for _, mutant in sorted(found)]


def _places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Yield where statements and expressions stand: a node, its field, and an index in a list."""
    for name, value in ast.iter_fields(node):
        for place, child in enumerate(value if isinstance(value, list) else [value]):
            is_code = isinstance(child, ast.stmt | ast.expr | ast.comprehension | ast.keyword)
            if not is_code or name in ("annotation", "returns", "decorator_list"):
                continue
            if isinstance(child, ast.stmt | ast.expr):
                yield node, name, place if isinstance(value, list) else None
            if not _is_text(child):
                yield from _places(child)


def _is_text(node: ast.AST) -> bool:
    """Return whether a node is made of words for people or for type checkers."""
    match node:
        case ast.Raise() | ast.AnnAssign(annotation=ast.Name("TypeAlias")):
            return True
        case ast.Call(func=ast.Attribute(ast.Name("logger"))) | ast.If(ast.Name("TYPE_CHECKING")):
            return True
        case ast.JoinedStr(parts):
            return any(isinstance(part, ast.Constant) and " " in str(part.value) for part in parts)
    return False


def _changes(node: Any) -> Iterator[Any]:
    """Yield what may take the place of a statement or an expression."""
    yield from _operators(node)
    yield from _values(node)
    yield from _statements(node)


def _operators(node: Any) -> Iterator[Any]:
    match node:
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp():
            for name in SWAPS.get(type(node.op).__name__, ()):
                yield _with(node, op=getattr(ast, name)())
        case ast.Compare(ops=ops):
            for i, old in enumerate(ops):
                for name in SWAPS[type(old).__name__]:
                    yield _with(node, ops=[*ops[:i], getattr(ast, name)(), *ops[i + 1 :]])
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            yield _with(node, test=ast.UnaryOp(ast.Not(), test))


def _values(node: Any) -> Iterator[Any]:
    match node:
        case ast.Constant(bool(value)):
            yield _with(node, value=not value)
        case ast.Constant(int(value) | float(value)):
            yield from (_with(node, value=value + by) for by in (-1, 1))
        case ast.Call(args=args) if ast.unparse(node.func) not in ("min", "max"):
            for i in range(len(args) - 1):
                if not any(isinstance(arg, ast.Starred) for arg in args[i : i + 2]):
                    yield _with(node, args=[*args[:i], args[i + 1], args[i], *args[i + 2 :]])


def _statements(node: Any) -> Iterator[Any]:
    match node:
        case ast.Return(value) if value is not None:
            yield _with(node, value=ast.Constant(None))
        case ast.Expr(ast.Constant()):
            pass
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Break() | ast.Continue():
            yield ast.copy_location(ast.Pass(), node)
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield ast.copy_location(ast.Pass(), node)


def _with(node: Any, **fields: Any) -> Any:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def run_tests(folder: Path, seconds: float) -> str:
    """Run the tests in a checkout; return "killed", "timed out" or "survived"."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "-m", "not slow and not s3"]
    command = [sys.executable, "-m", "pytest", *options, *TESTS]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "timed out"
    return "killed" if done.returncode else "survived"


def main() -> None:
    """Run the mutants, and print what becomes of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=400, help="mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of their draw (default: %(default)s)")
    parser.add_argument("--checkout", type=Path, default=Path.cwd(), help="default: this folder")
    options = parser.parse_args()
    everything = find_mutants(options.checkout, options.seed)
    chosen = sorted(everything[: options.count])
    print(f"{len(everything)} possible mutants, {len(chosen)} drawn by seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name, "checkout")
        shutil.copytree(options.checkout, folder, ignore=LEFT_OUT)
        start = time.monotonic()
        if run_tests(folder, 3600) != "survived":
            sys.exit(f"the tests of {options.checkout} fail as they are")
        limit = 60 + 3 * (time.monotonic() - start)
        results: Counter[str] = Counter()
        for mutant in chosen:
            unchanged = (folder / mutant.path).read_text("utf-8")
            (folder / mutant.path).write_text(mutant.source, "utf-8")
            result = run_tests(folder, limit)
            (folder / mutant.path).write_text(unchanged, "utf-8")
            results[result] += 1
            print(f"{result:9} {mutant.path}:{mutant.line}: {'  ->  '.join(mutant.change)}"[:160])
    num_killed = len(chosen) - results["survived"]
    print(f"{results['timed out']} timed out")
    print(f"{len(chosen)} mutants: {num_killed} killed, {results['survived']} survived")


if __name__ == "__main__":
    main()
