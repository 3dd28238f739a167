"""Write where the repository lies: ``python -m tools.release URL [--tag v0.2.0]``.

    pyproject.toml  [project.urls]
    CITATION.cff    version, repository-code
    README.md       relative links become links to the files of the version, for package indexes

The release workflow runs it in its own checkout, with the repository that it runs in, and builds
what comes out. Until then the project has no address. A second call replaces the address of the
first.

With ``--tag`` it changes nothing unless the tag is the version of `mmstream/__init__.py`, and the
changelog has a heading for it.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = re.compile(r"https://[\w.-]+(/[\w.-]+)+")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s]+)")
"""The target of a relative link."""
PICTURES = (".png", ".svg")


def main() -> None:
    """Check the tag, and write the address."""
    parser = argparse.ArgumentParser(description="Write where the repository lies.")
    parser.add_argument("url", help="such as https://HOST/OWNER/mmstream")
    parser.add_argument("--tag", help="the tag that is released")
    given = parser.parse_args()
    url = given.url.removesuffix("/").removesuffix(".git")
    if not ADDRESS.fullmatch(url):
        sys.exit(f"{given.url}: give the https address of the repository")
    if given.tag and (problem := problem_of(ROOT, given.tag)):
        sys.exit(problem)
    write_address(ROOT, url)


def version_of(root: Path) -> str:
    """Return the version of a checkout."""
    text = (root / "mmstream" / "__init__.py").read_text("utf-8")
    return str(re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0])


def problem_of(root: Path, tag: str) -> str:
    """Return why a checkout cannot be released as this tag, or nothing."""
    version = version_of(root)
    if tag != f"v{version}":
        return f"tag {tag}: mmstream/__init__.py has version {version}; change one of them"
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(heading, (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE):
        return f"CHANGELOG.md has no heading ## [{version}] - YYYY-MM-DD; rename [Unreleased]"
    return ""


def write_address(root: Path, url: str) -> None:
    """Write the address into all files of a checkout that name one."""
    tag = f"v{version_of(root)}"

    def of_version(link: re.Match[str]) -> str:
        kind = "raw" if link[1].endswith(PICTURES) else "blob"
        return f"{url}/{kind}/{tag}/{link[1]}"

    def relative_again(text: str) -> str:
        before = re.findall(r'^Source = "(.+)"$', project, re.MULTILINE)
        return re.sub(rf"{re.escape(before[0])}/(?:raw|blob)/v[^/]+/", "", text) if before else text

    project = (root / "pyproject.toml").read_text("utf-8")
    readme = (root / "README.md").read_text("utf-8")
    citation = (root / "CITATION.cff").read_text("utf-8")
    (root / "README.md").write_text(LINK.sub(of_version, relative_again(readme)), "utf-8")
    urls = {
        "Source": url,
        "Documentation": f"{url}/blob/{tag}/docs/index.md",
        "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    table = "".join(f'{name} = "{address}"\n' for name, address in urls.items())
    project = re.sub(r"\[project\.urls\]\n(.+\n)*\n", "", project)
    before, mark, after = project.partition("[project.scripts]\n")
    (root / "pyproject.toml").write_text(f"{before}[project.urls]\n{table}\n{mark}{after}", "utf-8")
    citation = re.sub(r"^(version|repository-code): .*\n", "", citation, flags=re.MULTILINE)
    citation += f'version: {version_of(root)}\nrepository-code: "{url}"\n'
    (root / "CITATION.cff").write_text(citation, "utf-8")


if __name__ == "__main__":
    main()
