"""Every snippet of the documentation runs as it stands, or says why not and names only what is."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import os
import shlex
import shutil
import types
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.families.family import import_torchvision
from mmstream.train.demo import corpus_rows
from tests.helpers.doc_pages import LANGUAGES, PAGES, ROOT, blocks_of, problems_of, run_page
from tests.helpers.warm_ranks import warm_ranks


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    """What a reader has: rows and their media, and the same converted."""
    folder = tmp_path_factory.mktemp("reader")
    corpus = Path(corpus_rows())
    shutil.copytree(corpus.parent / "images", folder / "media" / "images")
    photographs = [json.loads(line) for line in corpus.read_text().splitlines()]
    captions = [
        {"image": row["image"], "text": caption}
        for row in photographs
        for caption in row["captions"]
    ]
    chats = [
        {
            "image": row["image"],
            "conversations": [
                {"from": "human", "value": "<image>\nWhat is this?"},
                {"from": "gpt", "value": row["captions"][0]},
            ],
        }
        for row in photographs
    ]
    for rows, name, shards in (
        (captions, "rows.jsonl", ["shards", "captions", "bucket/val"]),
        (chats, "chats.jsonl", ["chats"]),
        (chats[:10], "rare.jsonl", ["rare"]),
    ):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        for each in shards:
            mm.convert(folder / name, folder / each, media_root=folder / "media", progress=False)
    return folder


@pytest.fixture
def folder(material, tmp_path):
    """A folder of its own for each page; files are rewritten and never changed in place."""
    return Path(shutil.copytree(material, tmp_path / "here", copy_function=os.link))


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """Variables with which the ranks of torchrun are forks that need not import torch."""
    with warm_ranks(tmp_path_factory.mktemp("warm")) as variables:
        yield variables


READMES = ("README.md", "README.zh-CN.md")
"""test_launching.py runs what is in them."""


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in READMES])
def test_the_blocks_of_a_page_run_from_top_to_bottom(page, folder, monkeypatch, request):
    text = (ROOT / page).read_text()
    if "\ntorchrun " in text:
        for name, value in request.getfixturevalue("warm").items():
            monkeypatch.setenv(name, value)
    run_page(page, text, folder, monkeypatch)


def test_the_code_of_the_readme_in_chinese_is_that_of_the_one_in_english():
    english, chinese = (
        [
            ast.dump(ast.parse(block.code))
            if block.language == "python"
            else shlex.split(block.code, comments=True)
            for block in blocks_of((ROOT / page).read_text())
            if not block.not_run
        ]
        for page in READMES
    )
    assert english == chinese


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_run_names_only_what_is(page):
    blocks = blocks_of((ROOT / page).read_text())
    assert {block.language for block in blocks} <= LANGUAGES
    problems = [
        f"{page}:{block.line}: {problem}"
        for block in blocks
        if block.not_run
        for problem in problems_of(block)
    ]
    assert problems == []


# -- docstrings -----------------------------------------------------------------------------------

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "mmstream").rglob("*.py"))
    if ">>> " in path.read_text()
]


def examples_that_fail(module):
    """Run the examples in a module's docstrings; they see `mm` and the folder of the pages."""
    import_torchvision()  # some examples import models of transformers, which need it
    result = doctest.testmod(module, extraglobs={"mm": mm}, optionflags=doctest.ELLIPSIS)
    assert result.attempted
    return result.failed


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_do_what_they_say(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert examples_that_fail(importlib.import_module(name)) == 0


def test_an_example_that_is_wrong_is_found():
    module = types.ModuleType("planted", ">>> 1 + 1\n3\n")
    assert examples_that_fail(module) == 1


# -- the mechanism itself -------------------------------------------------------------------------


def run(text, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        run_page("planted.md", text, tmp_path, patch)


def test_a_wrong_snippet_fails_and_names_the_line_of_the_page(tmp_path):
    page = """# Planted

```python
import mmstream as mm
```
text
```python
mm.Loder
```
"""
    with pytest.raises(AttributeError) as error:
        run(page, tmp_path)
    assert error.traceback[-2].lineno + 1 == 8
    assert error.traceback[-2].frame.code.raw.co_filename.startswith("planted.md")


def test_blocks_see_what_those_above_them_did(tmp_path):
    page = """
<!-- setup
from pathlib import Path
hidden = 1
-->
<!-- file: a/b.txt -->
```text
written
```

```bash
cp a/b.txt copy.txt  # a comment
```

1. In a list:

    ```python
    seen = hidden + len(Path("copy.txt").read_text())
    ```

```python
assert seen == 9
```

<!-- not run: it would fail -->
```python
raise SystemExit
```
"""
    run(page, tmp_path)


def test_workers_run_the_functions_of_a_page_with_a_main_guard(folder):
    page = """
```python
import mmstream as mm

def same(sample):
    return sample
```

```python
if __name__ == "__main__":
    dataset = mm.open_dataset("shards")
    pipeline = mm.Pipeline(dataset, global_batch_size=8, transforms=(same,))
    loader = mm.Loader(pipeline, num_workers=1)
    assert len(list(loader)) == 60
    loader.close()
```
"""
    run(page, folder)


@pytest.mark.parametrize(
    ("language", "code", "problem"),
    [
        ("python", "x = (", "does not compile"),
        ("python", "mm.Loder(pipeline)", "no public Loder"),
        ("python", "mm.Loader(pipeline, prefetsch=2)", "no prefetsch="),
        ("python", "from mmstream.train import trian", "no trian"),
        ("bash", "mmstream conwert a b", "no command mmstream conwert"),
        ("bash", "mmstream convert a b --wokers 3", "--wokers"),
        ("bash", "torchrun --nproc-per-node 2 -m mmstream train x --out y --epoch two", "--epoch"),
        ("bash", "cd x && mmstream tools", "no command mmstream tools"),
        ("bash", "python tools/nothing.py", "no tools/nothing.py"),
        ("bash", "python -m tools.nothing", "no module tools.nothing"),
        ("bash", "python -m nothing.at_all", "no module nothing.at_all"),
        ("bash", "echo 'unclosed", "unexpected EOF"),
    ],
)
def test_what_is_wrong_in_a_block_that_is_not_run_is_found(language, code, problem):
    page = f"<!-- not run: planted -->\n```{language}\n{code}\n```\n"
    (block,) = blocks_of(page)
    assert block.not_run == "planted"
    assert problem in " ".join(problems_of(block))
