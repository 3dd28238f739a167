"""The imports of mmstream run downward only, and never in a circle.

The package is a house with floors. A module may import from its own floor and from the floors
below it. Every import counts: at the top of a module, inside a function, under TYPE_CHECKING, and
``importlib.import_module`` with a name that is written out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.paths import DOCS, ROOT

FLOORS = [
    {
        "agreement",
        "errors",
        "gone",
        "lazy_bytes",
        "media_types",
        "types",
        "processes",
        "progress",
        "forkserver_preload",
        "world",
        "_torchvision",
        "_plain_tensors",
        "_vector_math",
        "wrong_arguments",
    },
    {
        "storage",
        "tar",
        "order",
        "decoding.audio",
        "decoding.facts",
        "decoding.fields",
        "decoding.ffmpeg",
        "decoding.image",
        "decoding.media_shapes",
        "decoding.spans",
        "decoding.text",
        "decoding.sample_rng",
        "decoding.video",
    },
    {"display"},  # shows the classes of the floors above by their attributes
    {"dataset"},
    {"packing"},
    {"bad_samples"},
    {"converting"},
    {"reading"},
    {"decoding"},
    {"batching"},
    {"measuring"},
    {"pipeline", "state"},
    {"loader", "baking", "measuring.plan"},
    {"device"},
    {"integrations"},
    {"audit"},
    {"train"},
    {"demo"},
    {"cli"},
    {"__init__", "__main__"},  # names of all floors in one place, and the command
]
"""Rooms of mmstream, bottom to top. A room is a folder or a module."""


class Import(NamedTuple):
    importer: str
    """A module's name below the package, such as ``order.mixture.draws``."""
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


class Package:
    """The modules of a package on disk, and what they import from each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules = {self._name_of(path): path for path in folder.rglob("*.py")}
        self.imports = [
            imported for name in sorted(self.modules) for imported in self._imports_of(name)
        ]

    def _name_of(self, path: Path) -> str:
        parts = path.relative_to(self.folder).with_suffix("").parts
        return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)

    def _imports_of(self, importer: str) -> Iterator[Import]:
        for node in ast.walk(ast.parse(self.modules[importer].read_text("utf-8"))):
            for name in self._names_in(node, importer):
                imported = self._module_of(name)
                if imported is not None and imported != importer:
                    yield Import(importer, imported, node.lineno)  # type: ignore[attr-defined]

    def _names_in(self, node: ast.AST, importer: str) -> list[str]:
        """Return the full names that a statement or call imports."""
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                parents = [self.folder.name, *importer.split(".")]
                is_package = self.modules[importer].name == "__init__.py"
                parents = parents[: len(parents) - node.level + is_package]
                start = ".".join([*parents, *([start] if start else [])])
            return [f"{start}.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func) and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                return [name.value]
        return []

    def _module_of(self, full_name: str) -> str | None:
        """Return the module of this package that has the name or defines it."""
        first, *parts = full_name.split(".")
        if first != self.folder.name:
            return None
        while parts and ".".join(parts) not in self.modules:
            parts.pop()
        return ".".join(parts) or "__init__"


def room_of(module: str, floors: Sequence[set[str]]) -> str:
    """Return the innermost room of the floors in which a module lies."""
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    rooms = set().union(*floors)
    for name in names:
        if name in rooms:
            return name
    raise AssertionError(f"{module} lies on no floor: name its folder or module in FLOORS")


def floor_of(module: str, floors: Sequence[set[str]]) -> int:
    room = room_of(module, floors)
    return next(number for number, rooms in enumerate(floors) if room in rooms)


def upward_imports(package: Package, floors: Sequence[set[str]]) -> list[str]:
    """Return a line for each import of a module from a higher floor."""
    return [
        str(imported)
        for imported in package.imports
        if floor_of(imported.importer, floors) < floor_of(imported.imported, floors)
    ]


def circle(pairs: set[tuple[str, str]]) -> list[str]:
    """Return modules of which each imports the next, and the last is the first again."""
    sorter = TopologicalSorter[str]()
    for importer, imported in sorted(pairs):
        sorter.add(importer, imported)
    try:
        sorter.prepare()
    except CycleError as error:
        names: list[str] = error.args[1]
        return names[::-1]
    return []


def module_circle(package: Package) -> list[str]:
    return circle({(imported.importer, imported.imported) for imported in package.imports})


def room_circle(package: Package, floors: Sequence[set[str]]) -> list[str]:
    pairs = {
        (room_of(imported.importer, floors), room_of(imported.imported, floors))
        for imported in package.imports
    }
    return circle({(importer, imported) for importer, imported in pairs if importer != imported})


@pytest.fixture(scope="module")
def mmstream() -> Package:
    return Package(ROOT / "mmstream")


def test_every_module_lies_on_a_floor_and_every_room_exists(mmstream: Package) -> None:
    rooms = {room_of(module, FLOORS) for module in mmstream.modules}
    assert rooms == set().union(*FLOORS)


def test_no_import_runs_upward(mmstream: Package) -> None:
    assert upward_imports(mmstream, FLOORS) == []


def test_no_modules_import_each_other_in_a_circle(mmstream: Package) -> None:
    assert module_circle(mmstream) == []


def test_no_rooms_import_each_other_in_a_circle(mmstream: Package) -> None:
    assert room_circle(mmstream, FLOORS) == []


def test_the_design_page_lists_these_floors() -> None:
    page = (DOCS / "design.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", page, re.M)
    assert [set(re.findall(r"`([\w.]+)`", names)) for _, names in rows] == FLOORS
    assert [int(number) for number, _ in rows] == list(range(1, len(FLOORS) + 1))


def unlisted_modules(package: Path) -> list[str]:
    """Return the modules that the docstring of their package does not name, and names without one.

    The docstring of a package is its list of contents. That of the whole package has none.
    """
    differences = []
    for init in sorted(package.glob("*/**/__init__.py")):
        text = ast.get_docstring(ast.parse(init.read_text("utf-8"))) or ""
        modules = {path.name for path in init.parent.glob("*.py")} - {"__init__.py"}
        folders = {f"{path.name}/" for path in init.parent.glob("[a-z]*/")}
        listed = set(re.findall(r"(?<![\w/])\w+(?:\.py|/(?!\w))", text))
        room = init.parent.relative_to(package)
        differences += [f"{room}: {name}" for name in sorted((modules | folders) ^ listed)]
    return differences


def test_the_docstring_of_every_package_lists_its_modules() -> None:
    assert unlisted_modules(ROOT / "mmstream") == []


# -- the checks can fail ------------------------------------------------------------------------

SMALL_FLOORS = [{"errors"}, {"tar", "storage"}, {"reading"}, {"__init__"}]
SMALL_PACKAGE = {
    "__init__.py": "from house.reading.reader import Reader\n",
    "errors.py": "",
    "tar/__init__.py": "",
    "tar/header.py": "import os\nfrom house.errors import TarError\n",
    "tar/scan.py": "from . import header\nfrom ..errors import TarError\n",
    "storage/__init__.py": "",
    "storage/local.py": "from house.errors import StorageError\n",
    "reading/__init__.py": "",
    "reading/reader.py": "from house.tar.scan import scan\nimport house.storage.local\n",
}


def small_package(folder: Path, **planted: str) -> Package:
    """Write a package of six modules; `planted` is appended to the modules that it names."""
    for name, text in SMALL_PACKAGE.items():
        path = folder / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        module = name.removesuffix(".py").replace("/", "_")
        path.write_text(text + planted.pop(module, ""))
    assert not planted
    return Package(folder / "house")


def test_a_module_that_its_package_does_not_name_is_found(tmp_path: Path) -> None:
    planted = '"""Tars.\n\nheader.py  one header\ngone.py    no more\n"""\n'
    small_package(tmp_path, tar___init__=planted)
    assert unlisted_modules(tmp_path / "house") == [
        "reading: reader.py",
        "storage: local.py",
        "tar: gone.py",
        "tar: scan.py",
    ]


def test_a_package_without_faults_has_none(tmp_path: Path) -> None:
    package = small_package(tmp_path)
    assert [str(imported) for imported in package.imports] == [
        "__init__:1 imports reading.reader",
        "reading.reader:1 imports tar.scan",
        "reading.reader:2 imports storage.local",
        "storage.local:1 imports errors",
        "tar.header:2 imports errors",
        "tar.scan:1 imports tar.header",
        "tar.scan:2 imports errors",
    ]
    assert upward_imports(package, SMALL_FLOORS) == []
    assert module_circle(package) == []
    assert room_circle(package, SMALL_FLOORS) == []


@pytest.mark.parametrize(
    "planted",
    [
        "from house.reading.reader import Reader\n",
        "from house.reading import reader\n",
        "import house.reading.reader as reader\n",
        "def read():\n    from house.reading.reader import Reader\n",
        "if TYPE_CHECKING:\n    from ..reading.reader import Reader\n",
        "def read():\n    importlib.import_module('house.reading.reader')\n",
    ],
)
def test_an_upward_import_is_found_wherever_it_stands(tmp_path: Path, planted: str) -> None:
    package = small_package(tmp_path, storage_local=planted)
    (line,) = upward_imports(package, SMALL_FLOORS)
    assert line.startswith("storage.local:")
    assert line.endswith(" imports reading.reader")


def test_the_public_names_are_too_high_for_every_module_below(tmp_path: Path) -> None:
    package = small_package(tmp_path, tar_scan="import house\n")
    assert upward_imports(package, SMALL_FLOORS) == ["tar.scan:3 imports __init__"]


def test_a_circle_of_modules_is_found_within_one_folder(tmp_path: Path) -> None:
    package = small_package(tmp_path, tar_header="def late():\n    import house.tar.scan\n")
    assert upward_imports(package, SMALL_FLOORS) == []
    assert set(module_circle(package)) == {"tar.header", "tar.scan"}


def test_a_circle_of_rooms_is_found_where_no_module_is_in_one(tmp_path: Path) -> None:
    package = small_package(
        tmp_path,
        storage_local="from house.tar.header import Header\n",
        tar_scan="from house.storage import open_store\n",
    )
    assert module_circle(package) == []
    assert upward_imports(package, SMALL_FLOORS) == []
    assert set(room_circle(package, SMALL_FLOORS)) == {"storage", "tar"}


def test_a_module_without_a_floor_is_refused(tmp_path: Path) -> None:
    package = small_package(tmp_path)
    (tmp_path / "house" / "attic.py").write_text("from house.errors import HouseError\n")
    package = Package(tmp_path / "house")
    with pytest.raises(AssertionError, match="attic lies on no floor"):
        upward_imports(package, SMALL_FLOORS)
