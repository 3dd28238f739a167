"""A release: what the files of a package hold, and where the repository's address is written."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import mmstream as mm
from mmstream.cli import cli
from tests.helpers.doc_pages import LINK, links_of
from tests.helpers.paths import DOCS, ROOT
from tools import release

URL = "https://host.example/owner/mmstream"
WRITTEN = ("pyproject.toml", "README.md", "CITATION.cff")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the address is written into, and the version."""
    (tmp_path / "mmstream").mkdir()
    for name in (*WRITTEN, "mmstream/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def texts(folder: Path) -> list[str]:
    return [(folder / name).read_text() for name in WRITTEN]


def test_the_address_is_in_the_metadata_the_citation_and_every_link(checkout):
    release.write_address(checkout, URL)
    project, readme, citation = texts(checkout)
    urls = tomllib.loads(project)["project"]["urls"]
    assert urls["Source"] == URL
    assert all(address.startswith(URL) for address in urls.values())
    assert tomllib.loads(project)["project"]["scripts"]
    cited = yaml.safe_load(citation)
    assert (cited["repository-code"], cited["version"]) == (URL, mm.__version__)
    before = links_of((ROOT / "README.md").read_text())
    assert len(before) > 20
    targets = LINK.findall(readme)
    for link in before:
        kind = "raw" if link.endswith(".png") else "blob"
        assert f"{URL}/{kind}/v{mm.__version__}/{link}" in targets
    assert links_of(readme) == []


def test_a_second_address_takes_the_place_of_the_first(checkout, tmp_path):
    release.write_address(checkout, "https://elsewhere.example/a/b")
    assert "elsewhere" in "".join(texts(checkout))
    for _ in range(2):
        release.write_address(checkout, URL)
    again = texts(checkout)
    for name in WRITTEN:
        shutil.copy(ROOT / name, checkout / name)
    release.write_address(checkout, URL)
    assert texts(checkout) == again


def test_no_address_is_invented():
    project, _, citation = texts(ROOT)
    assert "urls" not in tomllib.loads(project)["project"]
    assert not {"repository-code", "url", "version"} & yaml.safe_load(citation).keys()


@pytest.mark.parametrize(
    ("heading", "tag", "problem"),
    [
        ("## [0.3.0] - 2027-01-31", "v0.3.0", ""),
        ("## [0.3.0] - 2027-01-31", "v0.3.1", "has version 0.3.0; change one of them"),
        ("## [0.3.0] - 2027-01-31", "0.3.0", "has version 0.3.0; change one of them"),
        ("## [0.3.0]", "v0.3.0", "no heading ## [0.3.0] - YYYY-MM-DD"),
        ("## [0x3.0] - 2027-01-31", "v0.3.0", "no heading ## [0.3.0] - YYYY-MM-DD"),
        ("## [Unreleased]", "v0.3.0", "no heading ## [0.3.0] - YYYY-MM-DD"),
    ],
)
def test_a_tag_fits_the_version_and_the_changelog(tmp_path, heading, tag, problem):
    (tmp_path / "mmstream").mkdir()
    (tmp_path / "mmstream" / "__init__.py").write_text('"""Docs."""\n__version__ = "0.3.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n\n- Text.\n")
    said = release.problem_of(tmp_path, tag)
    assert problem in said
    assert bool(problem) is bool(said)


@pytest.mark.parametrize("arguments", [["host/owner"], ["http://a/b/c"], [URL, "--tag", "v9.9.9"]])
def test_a_wrong_address_or_tag_changes_nothing_and_is_one_line(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["release", *arguments])
    before = texts(ROOT)
    with pytest.raises(SystemExit) as ended:
        release.main()
    assert len(str(ended.value).splitlines()) == 1
    assert texts(ROOT) == before


def test_the_version_is_written_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert "version" not in project["project"]
    assert release.version_of(ROOT) == mm.__version__
    said = CliRunner().invoke(cli, ["--version"]).output
    assert said == f"mmstream, version {mm.__version__}\n"
    newest = re.findall(r"^## \[(.+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    assert newest in ("Unreleased", mm.__version__)
    assert f"The present version is {mm.__version__}" in (DOCS / "index.md").read_text()


def test_classifiers_workflows_and_the_table_of_versions_name_the_same_pythons():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    row = re.search(r"^\| Python \|(.+?)\|", (DOCS / "index.md").read_text(), re.M)[1]
    assert re.findall(r"\b3\.\d\d", row) == named
    assert project["requires-python"] == f">={named[0]}"
    workflows = [
        yaml.safe_load(path.read_text())["jobs"]
        for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    ]
    matrices = [
        job["strategy"]["matrix"]["python"]
        for jobs in workflows
        for job in jobs.values()
        if "strategy" in job
    ]
    assert len(matrices) == 2
    assert all(matrix == named for matrix in matrices)


# -- what is published ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, and the wheel that is made of it, without a network or a compiler."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    if "pyproject.toml" not in names:
        pytest.skip("this is not a clone of the repository")
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = "import sys, setuptools.build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"

    def run(kind: str, folder: Path) -> None:
        command = [sys.executable, "-c", build, kind, str(out)]
        environment = {"PATH": "/nowhere", "CC": "/nowhere/cc", "HOME": str(out)}
        subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)

    run("build_sdist", source)
    with tarfile.open(next(out.glob("*.tar.gz"))) as tar:
        tar.extractall(out / "unpacked", filter="data")
    run("build_wheel", next((out / "unpacked").iterdir()))
    (out / "tracked").write_text("\n".join(names))
    return out


@pytest.mark.slow
def test_a_source_distribution_has_every_file_of_the_repository(built):
    (folder,) = (built / "unpacked").iterdir()
    assert folder.name == f"mmstream-{mm.__version__}"
    packed = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    tracked = set((built / "tracked").read_text().splitlines())
    assert tracked - packed == set()
    made = re.compile(r"PKG-INFO|setup\.cfg|mmstream\.egg-info/.*|build/.*")  # by setuptools
    assert {name for name in packed - tracked if not made.fullmatch(name)} == set()


@pytest.mark.slow
def test_a_wheel_is_pure_python_with_its_data_licences_and_version(built):
    (path,) = built.glob("*.whl")
    assert path.name == f"mmstream-{mm.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        info = f"mmstream-{mm.__version__}.dist-info"
        metadata = wheel.read(f"{info}/METADATA").decode()
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    package = {
        name
        for name in (built / "tracked").read_text().splitlines()
        if name.startswith("mmstream/")
    }
    assert {name for name in names if not name.startswith(info)} == package
    licences = {name.removeprefix(f"{info}/licenses/") for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "mmstream/train/corpus/ATTRIBUTION.md"}
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Author: The mmstream authors\n" in metadata
    assert "mmstream = mmstream.cli:main" in entry_points
