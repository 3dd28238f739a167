"""What the documentation site has beside the pages of docs/. mkdocs.yml names these hooks.

- CHANGELOG.md, CONTRIBUTING.md and SECURITY.md, which lie at the root of the repository, become
  pages.
- A page may link to any other file of the repository. The site gets a copy of that file, so that
  it is whole without a network. On a code host the same link opens the file itself.
- The page about the command line is filled with the help of every command.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from mmstream.cli import cli

ROOT = Path(__file__).parent.parent
ROOT_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "SECURITY.md": "security.md",
}
COMMAND_LINE_PAGE = "command-line.md"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")  # the path in a relative link
LANGUAGES = {".py": "python", ".sh": "bash", ".yml": "yaml", ".toml": "toml", ".c": "c", ".h": "c"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and a copy of each file that a page links to."""
    for name, uri in ROOT_PAGES.items():
        if uri not in files.src_uris:
            files.append(File.generated(config, uri, content=(ROOT / name).read_text()))
    for page in list(files.documentation_pages()):
        for link in LINK.findall(page.content_string):
            target = _target(page.src_uri, link)
            uri = _uri(target)
            if (ROOT / target).is_file() and uri not in files.src_uris:
                files.append(File.generated(config, uri, content=_source_page(target)))
    return files


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: object) -> str:
    """Lead the links of a page to what `on_files` added, and fill the command line's page."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    if uri == COMMAND_LINE_PAGE:
        markdown += "\n".join(_help_of_commands())

    def in_site(link: re.Match[str]) -> str:
        linked = _uri(_target(uri, link[1]))
        if linked not in files.src_uris:
            return link[1]  # mkdocs reports it
        return posixpath.relpath(linked, posixpath.dirname(uri) or ".")

    return LINK.sub(in_site, markdown)


def _target(uri: str, link: str) -> str:
    """Return the path, from the repository's root, of what a page's link leads to."""
    at_root = uri in ROOT_PAGES.values() and uri != "index.md"
    folder = "" if at_root else posixpath.join("docs", posixpath.dirname(uri))
    return posixpath.normpath(posixpath.join(folder, link))


def _uri(target: str) -> str:
    """Return where the site has a file of the repository."""
    if target in ROOT_PAGES:
        return ROOT_PAGES[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"source/{target}.md"


def _source_page(target: str) -> str:
    """Return a page that shows a file of the repository."""
    language = LANGUAGES.get(posixpath.splitext(target)[1], "text")
    return (
        f"---\nsearch: {{exclude: true}}\nhide: [navigation, toc]\n---\n# {target}\n\n"
        f'``````{language} linenums="1"\n{(ROOT / target).read_text()}\n``````\n'
    )


def _help_of_commands() -> Iterator[str]:
    """Yield the lines that describe all commands."""
    for name, command in sorted(cli.commands.items()):
        context = click.Context(command, info_name=f"mmstream {name}")
        example, _, text = (command.help or "").removeprefix("\b\n").partition("\n\n")
        usage = " ".join(command.collect_usage_pieces(context))
        yield f"\n### mmstream {name}\n\n{text}\n"
        yield f"```bash\n{example}\n```\n"
        yield f"Usage: `mmstream {name} {usage}`\n"
        yield "| option | |\n|---|---|"
        for parameter in command.get_params(context):
            option, description = parameter.get_help_record(context) or ("", "")
            if description:
                yield f"| `{option}` | {description} |"
