"""How large this project is: ``python -m tools.size [--compare CHECKOUT]``.

Prints one line a figure: statements and modules of the package, names and options that users meet,
tests, tools and documentation. With ``--compare`` each line has the figure of another checkout, and
the difference. Statements are counted in the syntax tree, without docstrings, so that longer lines
gain nothing.

`PACKAGE_STATEMENTS` and `TEST_STATEMENTS` are the size that was agreed on. A test allows 3 % more
or less. A change that needs more raises the number here, and its commit says who gains from it.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_STATEMENTS = 38_600
TEST_STATEMENTS = 40_300

OPTIONS = """
import click
from mmstream.cli import cli
for name, command in sorted(cli.commands.items()):
    print(name, sum(isinstance(setting, click.Option) for setting in command.params))
"""
"""Runs in a process of its own, because it imports the package of a checkout."""


def main() -> None:
    """Print the figures of this checkout, beside those of another one if asked."""
    parser = argparse.ArgumentParser(description="Print how large this project is.")
    parser.add_argument("--compare", type=Path, metavar="CHECKOUT", help="another checkout")
    other: Path | None = parser.parse_args().compare
    if other is not None and not (other / "mmstream").is_dir():
        parser.error(f"--compare {other}: no folder mmstream/ in it; give the root of a checkout")
    figures = figures_of(ROOT)
    before = figures_of(other) if other is not None else {}
    for name, value in figures.items():
        print(f"{name:44} {value:>10,}{difference(value, before.get(name))}")
    for name in before.keys() - figures.keys():
        print(f"{name:44} {'gone':>10} {before[name]:>10,}")


def difference(value: float, before: float | None) -> str:
    """Return the figure of the other checkout and what has changed since, as text."""
    if before is None:
        return ""
    return f" {before:>10,} {round(value - before, 2):>+10,}"


def figures_of(root: Path) -> dict[str, float]:
    """Return the figures of a checkout by their names, in the order to print them in."""
    package = root / "mmstream"
    trees = [parse(path) for path in python_files(package)]
    docs = [path for path in (root / "docs").rglob("*.md") if "zh" not in path.parts]
    return {
        "package: statements": statements_in(package),
        "package: nodes a statement": nodes_per_statement(trees, with_imports=True),
        "package: nodes a statement, no imports": nodes_per_statement(trees, with_imports=False),
        "package: modules": len(trees),
        "package: folders and modules at the top": len(list(rooms_in(package))),
        "package: public names": len(public_names(package)),
        **options_of(root),
        "tests: statements": statements_in(root / "tests"),
        "tests: cases": cases_in(root),
        "tools: statements": statements_in(root / "tools"),
        "docs: words": sum(len(path.read_text("utf-8").split()) for path in docs),
        "docs: pages": len(docs),
    }


def python_files(folder: Path) -> list[Path]:
    """Return the Python files of a folder and its folders, sorted. Stubs are among them."""
    return sorted([*folder.rglob("*.py"), *folder.rglob("*.pyi")])


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text("utf-8"))


def statements_in(folder: Path) -> int:
    """Count the statements of all Python files of a folder, without docstrings."""
    return sum(len(list(statements_of(parse(path)))) for path in python_files(folder))


def statements_of(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a tree but those that are only a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not is_string(node):
            yield node


def is_string(node: ast.AST) -> bool:
    """Tell whether a statement is a docstring, or a string below a constant that explains it."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def nodes_per_statement(trees: list[ast.Module], *, with_imports: bool) -> float:
    """Return the syntax nodes for each statement: squeezed code has more of them."""
    statements = [statement for tree in trees for statement in statements_of(tree)]
    num_nodes = sum(num_nodes_in(tree) for tree in trees)
    if not with_imports:
        imports = [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
        num_nodes -= sum(num_nodes_in(node) for node in imports)
        return round(num_nodes / (len(statements) - len(imports)), 2)
    return round(num_nodes / len(statements), 2)


def num_nodes_in(tree: ast.AST) -> int:
    """Count the nodes of a syntax tree, docstrings included."""
    return sum(1 for _ in ast.walk(tree))


def rooms_in(package: Path) -> Iterator[Path]:
    """Yield the modules at the top of the package, and the folders that hold modules."""
    for path in package.iterdir():
        if path.suffix == ".py" or (path.is_dir() and any(path.rglob("*.py"))):
            yield path


def public_names(package: Path) -> list[str]:
    """Return the names that the stub of the package lists."""
    imports = [
        node for node in parse(package / "__init__.pyi").body if isinstance(node, ast.ImportFrom)
    ]
    return [alias.name for node in imports for alias in node.names]


def options_of(root: Path) -> dict[str, float]:
    """Return how many options each command has, without ``--help``."""
    lines = printed([sys.executable, "-c", OPTIONS], root).splitlines()
    return {f"options of mmstream {name}": int(count) for name, count in map(str.split, lines)}


def cases_in(root: Path) -> int:
    """Count the cases that pytest collects."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "--quiet",
        "-p",
        "no:cacheprovider",
    ]
    return sum("::" in line for line in printed(command, root).splitlines())


def printed(command: list[str], root: Path) -> str:
    """Return what a command prints that runs in a checkout and imports its package."""
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{root}: {' '.join(command[1:4])} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
