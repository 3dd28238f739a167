"""The pages of the documentation, as tests read and run them.

The blocks of a page run from top to bottom in one namespace and one folder, as a reader would copy
them. Comments that a reader does not see say what differs:

    <!-- not run: WHY -->   before a block that cannot run in a test: it is only checked
    <!-- file: NAME -->     before a block that is the content of a file
    <!-- setup              code that runs there and that readers do not see, as for a model that
    CODE -->                a snippet needs and that every reader has
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import os
import re
import shlex
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

import mmstream as mm
from mmstream.cli import cli
from tests.helpers.commands import run_command
from tests.helpers.paths import ROOT

PAGES = sorted(
    page.relative_to(ROOT).as_posix() for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
)
LANGUAGES = {"", "bash", "ini", "json", "python", "text"}
FENCE = re.compile(r"( *)(`{3,})(.*)")
NOT_RUN = re.compile(r"\s*<!-- not run: (.+) -->")
FILE = re.compile(r"\s*<!-- file: (.+) -->")

SHORTER = (
    (r"s3://bucket/", "bucket/"),  # what a page calls a bucket is a folder here
    # The processor of a model's folder has settings of its own.
    (
        r"(\bmmstream train (?![^#\n]*--model \S+/)[^#\n]*)",
        r"\1 --max-steps 2 --image-size 16 --max-length 16 --num-workers 0 ",
    ),
    (r"--nproc-per-node \d+", "--nproc-per-node 2"),
    (r"--num-workers 8", "--num-workers 2"),
    (r"num_workers=[2-9]", "num_workers=1"),
)


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    language: str
    code: str
    line: int
    """Of the page, from 1: where the code begins."""
    not_run: str = ""
    """Why it is not run; empty: it is run."""
    file: str = ""
    """The file that it is the content of."""


def blocks_of(text: str) -> list[Block]:
    """Return the blocks of code of a page, those that readers do not see among them."""
    blocks, lines, number, before = [], text.splitlines(), 0, ""
    while number < len(lines):
        line = lines[number]
        number += 1
        if fence := FENCE.fullmatch(line):
            end, language = fence[1] + fence[2], fence[3].split(" ")[0]
        elif line.strip() == "<!-- setup":
            end, language = "-->", "python"
        else:
            before = line if line.strip() else before
            continue
        start = number
        while lines[number].rstrip() != end:
            number += 1
        code = textwrap.dedent("\n".join(lines[start:number])) + "\n"
        not_run, file = NOT_RUN.fullmatch(before), FILE.fullmatch(before)
        blocks.append(
            Block(
                language,
                code,
                start + 1,
                not_run=not_run[1] if not_run else "",
                file=file[1] if file else "",
            )
        )
        number, before = number + 1, ""
    return blocks


# -- running ------------------------------------------------------------------------------------


def run_page(name: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of a page in a folder; an error names the line of the page.

    The Python of the page is one file there, because worker processes import the functions of a
    script. Where the page has a main guard, it is the main module.
    """
    blocks = [block for block in blocks_of(text) if not block.not_run]
    python = "".join(block.code for block in blocks if block.language == "python")
    module = types.ModuleType("__main__" if "__main__" in python else f"page_{Path(name).stem}")
    path = folder / f"page_{Path(name).stem.replace('-', '_')}.py"
    path.write_text(_shorter(_in_place(*(b for b in blocks if b.language == "python"))))
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    for block in blocks:
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.code)
        elif block.language == "python":
            code = _shorter(_in_place(block))
            exec(compile(code, f"{name} (as {path.name})", "exec"), module.__dict__)
        elif block.language == "bash":
            _run_commands(name, block, folder)


def _run_commands(name: str, block: Block, folder: Path) -> None:
    """Run commands of mmstream in this process, which has imported torch, and others in bash."""
    lines = _shorter(block.code).replace("\\\n", " ").splitlines()
    commands = [words for line in lines if (words := shlex.split(line, comments=True))]
    if any(words[0] != "mmstream" or {"|", "&&", ">"} & {*words} for words in commands):
        _run_bash(name, block, folder)
        return
    for words in commands:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
            code = run_command(words[1:], patch)
        assert code == 0, f"{name}:{block.line}: {shlex.join(words)}"


def _run_bash(name: str, block: Block, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    python_path = f"{folder / 'site'}{os.pathsep}{ROOT}"  # site/: what a page sets up for processes
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", _shorter(block.code)],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{name}:{block.line}:\n{block.code}{done.stdout}{done.stderr}"


def _in_place(*blocks: Block) -> str:
    """Return blocks at the lines where the page has them."""
    text = ""
    for block in blocks:
        text += "\n" * (block.line - 1 - text.count("\n")) + block.code
    return text


def _shorter(code: str) -> str:
    for pattern, replacement in SHORTER:
        code = re.sub(pattern, replacement, code)
    return code


# -- checking what is not run ---------------------------------------------------------------------


def problems_of(block: Block) -> list[str]:
    """Return what is wrong with a block, as far as one can tell without running it."""
    check = {"python": _python_problems, "bash": _bash_problems}.get(block.language)
    return list(check(block.code)) if check else []


def _python_problems(code: str) -> Iterator[str]:
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        yield f"does not compile: {error}"
        return
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "mmstream":
                for alias in node.names:
                    if not hasattr(importlib.import_module(module), alias.name):
                        yield f"{module} has no {alias.name}"
            case ast.Attribute(value=ast.Name(id="mm"), attr=name) if name not in mm.__all__:
                yield f"mm has no public {name}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="mm"), attr=name)):
                if name in mm.__all__:
                    known = inspect.signature(getattr(mm, name)).parameters
                    unknown = {keyword.arg for keyword in node.keywords} - {*known, None}
                    yield from (f"mm.{name} has no {keyword}=" for keyword in unknown)


def _bash_problems(code: str) -> Iterator[str]:
    done = subprocess.run(["bash", "-n", "-c", code], capture_output=True, text=True)
    if done.returncode:
        yield done.stderr
        return
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for number, (before, word) in enumerate(itertools.pairwise(["&&", *words])):
            if word == "mmstream" and before in ("&&", "|", "-m"):
                yield from _command_problems(words[number + 1 :])
        for program, file in itertools.pairwise(words):
            if program in ("bash", "python") and not file.startswith("-"):
                if not (ROOT / file).is_file():
                    yield f"there is no {file}"
            elif program == "-m" and words[0] != "pytest" and not _is_module(file):
                yield f"there is no module {file}"


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that it would be in
        return False


def _command_problems(words: list[str]) -> Iterator[str]:
    name, *options = words or [""]
    if name not in cli.commands:
        yield f"there is no command mmstream {name}"
        return
    try:
        cli.commands[name].make_context(name, options)
    except click.UsageError as error:
        yield f"mmstream {name}: {error.message}"


# -- links ----------------------------------------------------------------------------------------

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def links_of(text: str) -> list[str]:
    """Return the relative links of a page, and those to its own headings."""
    links = LINK.findall(without_code(text))
    return [link for link in links if not re.match(r"[a-z]+:", link)]


def headings_of(text: str) -> list[str]:
    """Return the anchors of a page's headings, as code hosts and the site make them."""
    anchors: list[str] = []
    for title in re.findall(r"^#+ (.+?)\s*$", without_code(text), re.M):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower())
        anchor = words.replace(" ", "-")
        again = sum(
            re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", known) is not None for known in anchors
        )
        anchors.append(f"{anchor}-{again}" if again else anchor)
    return anchors


def without_code(text: str) -> str:
    """Return a page without its blocks of code and its comments."""
    text = re.sub(r"^( *)(`{3,}).*?^\1\2 *$", "", text, flags=re.M | re.S)
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


def broken_links(page: Path, root: Path) -> list[str]:
    """Return the links of a page that lead nowhere, or out of the repository."""
    broken = []
    for link in links_of(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        leads_there = target.exists() and target.is_relative_to(root)
        if not leads_there or (anchor and anchor not in headings_of(target.read_text())):
            broken.append(link)
    return broken
