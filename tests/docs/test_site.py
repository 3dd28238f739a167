"""The documentation site: it builds without a warning or a network, and lacks no public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.cli import cli
from tests.helpers.browser import open_page
from tests.helpers.doc_pages import PAGES, ROOT, broken_links

OUTSIDE = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>"
)


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    """Build the site with as little of a network as a process can have."""
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", folder],
        env=os.environ | nowhere | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_reference_asks_for_every_public_name_once():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    assert sorted(re.findall(r"^::: mmstream\.(\w+)$", pages, re.M)) == mm.__all__


@pytest.mark.slow
def test_every_command_and_option_is_on_the_page_of_the_command_line(site):
    page = (site / "command-line.html").read_text()
    for name, command in cli.commands.items():
        assert f'id="mmstream-{name}"' in page
        for parameter in command.params:
            for option in parameter.opts:
                assert option[0] != "-" or option in page, (name, option)


@pytest.mark.slow
def test_no_page_loads_anything_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    assert [(page.name, link) for page in pages for link in OUTSIDE.findall(page.read_text())] == []


def test_what_is_loaded_from_elsewhere_would_be_seen():
    for tag in ('<script src="https://x/y.js">', '<link rel=a href="//x/y.css">'):
        assert OUTSIDE.search(tag)


@pytest.mark.slow
def test_the_search_finds_pages_that_are_opened_from_disk(site, tmp_path):
    opened = open_page(site / "index.html", tmp_path / "profile", query="?q=quarantine")
    assert re.search(r"md-search-result__meta\">\s*\d+ matching documents", opened.dom)
    assert opened.messages == []


# -- links, and paths that pages name --------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_somewhere(page):
    assert broken_links(ROOT / page, ROOT) == []


@pytest.mark.parametrize(
    "words",
    ["open_clip", "TensorBoard", "LMDB", "Horovod", "EMA", "Aliyun OSS", "virtual-hosted",
     "SpecAugment", "bucket", "zero-shot", "W&B", "GBK", "虚拟主机风格"],
)  # fmt: skip
def test_what_users_search_for_is_on_a_page(words):
    assert any(words.lower() in (ROOT / page).read_text().lower() for page in PAGES)


def test_broken_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# A title: `code` & more\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#a-title-code--more) [c](#here) [d](https://nowhere)\n# Here\n"
        "[e](nothing.md) [f](other.md#nothing) [g](#nothing) [h](../../..)\n"
        "```\n[i](in-code.md)\n```\n"
    )
    assert broken_links(page, tmp_path) == [
        "nothing.md",
        "other.md#nothing",
        "#nothing",
        "../../..",
    ]


PATH = re.compile(r"`((?:mmstream|tests|tools|docs)/[\w./-]+)`")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_every_path_that_a_page_names_exists(page):
    paths = PATH.findall((ROOT / page).read_text())
    assert [path for path in paths if not (ROOT / path).exists()] == []
