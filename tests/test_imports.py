"""The imports of mmstream run downward only, and never in a circle.

The package is a house with floors. A module may import from its own floor and from the floors
below it. Every import counts: at the top of a module, inside a function, under TYPE_CHECKING, and
``importlib.import_module`` with a name that is written out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.helpers.paths import DOCS, ROOT

FLOORS = [
    {"errors", "types", "settings", "ranks", "progress", "processes"},
    {"storage", "tar", "media", "order"},
    {"display"},  # shows the classes of the floors above by their attributes
    {"dataset"},
    {"packing"},
    {"reading"},
    {"decoding"},
    {"converting", "families"},
    {"batching"},
    {"pipeline", "state"},
    {"baking", "loader", "measuring"},
    {"audit"},
    {"train", "view"},
    {"cli"},
    {"__init__", "__main__"},  # names of all floors in one place, and the command
]
"""Rooms of mmstream, bottom to top. A room is a folder or module at the top of the package."""


Imports: TypeAlias = dict[str, set[str]]
"""The modules that each module imports. Names are those below the package: ``order.corpus``."""


def imports_of(package: Path) -> Imports:
    """Return what the modules of a package on disk import from each other."""
    paths = {name_of(path, package): path for path in package.rglob("*.py")}
    imports: Imports = {}
    for module, path in paths.items():
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        names = (name for node in nodes for name in names_imported_by(node))
        imports[module] = {
            module_of(name, set(paths)) for name in names if name.split(".")[0] == package.name
        } - {module}
    return imports


def name_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def names_imported_by(node: ast.AST) -> list[str]:
    """Return the full names that a statement or call imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert not node.level, f"from {'.' * node.level}{node.module}: write the full name"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func) and node.args:
        name = node.args[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return [name.value]
    return []


def module_of(full_name: str, modules: set[str]) -> str:
    """Return the module that has the name or defines it."""
    parts = full_name.split(".")[1:]
    while parts and ".".join(parts) not in modules:
        parts.pop()
    return ".".join(parts) or "__init__"


def room_of(module: str, floors: Sequence[set[str]]) -> str:
    """Return the room of the floors in which a module lies."""
    room = module.partition(".")[0]
    assert any(room in rooms for rooms in floors), f"{module} lies on no floor: add it to FLOORS"
    return room


def names_of_nothing(package: Path) -> list[str]:
    """Return a line for each module that a package's text names and that does not exist.

    Such names are ``rows.py``, ``order/rows.py``, and in backticks `order.rows` or a name in it.
    """
    texts = {name_of(path, package): path.read_text("utf-8") for path in package.rglob("*.py")}
    files = {f"/{path.relative_to(ROOT)}" for path in (ROOT / "tests").rglob("*.py")}
    files |= {f"/{path.relative_to(package.parent)}" for path in package.rglob("*.py")}
    folders = "|".join(path.parent.name for path in package.glob("*/__init__.py"))
    missing = []
    for module, text in texts.items():
        for file in re.findall(r"[\w/]+\.py\b", text):
            if not any(path.endswith(f"/{file}") for path in files):
                missing.append(f"{module} names {file}")
        for name in re.findall(rf"`(?:{package.name}\.)?((?:{folders})\.[\w.]+)`", text):
            owner = module_of(f"{package.name}.{name}", set(texts))
            inside = name.removeprefix(owner).split(".")[1:2]
            if not all(re.search(rf"\b{word}\b", texts[owner]) for word in inside):
                missing.append(f"{module} names {name}")
    return missing


def upward_imports(imports: Imports, floors: Sequence[set[str]]) -> list[str]:
    """Return a line for each import of a module from a higher floor."""
    floor_of = {room: number for number, rooms in enumerate(floors) for room in rooms}
    return [
        f"{importer} imports {imported}"
        for importer in sorted(imports)
        for imported in sorted(imports[importer])
        if floor_of[room_of(importer, floors)] < floor_of[room_of(imported, floors)]
    ]


def require_no_circle(imports: Imports) -> None:
    """Raise CycleError with modules of which each imports the next, up to the first again."""
    TopologicalSorter(imports).prepare()


def rooms_imported(imports: Imports, floors: Sequence[set[str]]) -> Imports:
    """Return the rooms that each room imports."""
    rooms: Imports = {}
    for importer, imported in imports.items():
        room = room_of(importer, floors)
        others = {room_of(module, floors) for module in imported} - {room}
        rooms.setdefault(room, set()).update(others)
    return rooms


@pytest.fixture(scope="module")
def imports() -> Imports:
    return imports_of(ROOT / "mmstream")


def test_every_module_lies_on_a_floor_and_every_room_exists(imports: Imports) -> None:
    assert {room_of(module, FLOORS) for module in imports} == set().union(*FLOORS)


def test_floors_hold_whole_folders_and_few_rooms() -> None:
    rooms = [room for floor in FLOORS for room in floor]
    assert all("." not in room for room in rooms)
    assert len(rooms) == len(set(rooms)) <= 29


def test_no_import_runs_upward_or_in_a_circle(imports: Imports) -> None:
    assert upward_imports(imports, FLOORS) == []
    require_no_circle(imports)
    require_no_circle(rooms_imported(imports, FLOORS))


def test_text_names_only_modules_that_exist() -> None:
    assert names_of_nothing(ROOT / "mmstream") == []


def test_the_design_page_lists_these_floors() -> None:
    page = (DOCS / "design.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", page, re.M)
    assert [set(re.findall(r"`([\w.]+)`", names)) for _, names in rows] == FLOORS
    assert [int(number) for number, _ in rows] == list(range(1, len(FLOORS) + 1))


# -- the checks can fail ------------------------------------------------------------------------

SMALL_FLOORS = [{"errors"}, {"tar", "storage"}, {"reading"}, {"__init__"}]
SMALL_PACKAGE = {
    "__init__.py": "from house.reading.reader import Reader\n",
    "errors.py": "",
    "tar/__init__.py": "",
    "tar/header.py": "import os\nfrom house.errors import TarError\n",
    "tar/scan.py": "from house.tar import header\nfrom house.errors import TarError\n",
    "storage/__init__.py": "",
    "storage/local.py": "from house.errors import StorageError\n",
    "reading/__init__.py": "",
    "reading/reader.py": "from house.tar.scan import scan\nimport house.storage.local\n",
}


def small_package(folder: Path, planted: Mapping[str, str] = {}) -> Imports:
    """Write a package of six modules, and `planted` behind those that it names."""
    for name in SMALL_PACKAGE | planted:
        path = folder / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SMALL_PACKAGE.get(name, "") + planted.get(name, ""))
    return imports_of(folder / "house")


@pytest.mark.parametrize(
    "planted",
    [
        "from house.reading.reader import Reader\n",
        "from house.reading import reader\n",
        "import house.reading.reader as reader\n",
        "def read():\n    from house.reading.reader import Reader\n",
        "if TYPE_CHECKING:\n    from house.reading.reader import Reader\n",
        "def read():\n    importlib.import_module('house.reading.reader')\n",
    ],
)
def test_an_upward_import_is_found_wherever_it_stands(tmp_path: Path, planted: str) -> None:
    imports = small_package(tmp_path, {"storage/local.py": planted})
    assert upward_imports(imports, SMALL_FLOORS) == ["storage.local imports reading.reader"]


def test_a_circle_of_modules_is_found_within_one_folder(tmp_path: Path) -> None:
    late = "def late():\n    import house.tar.scan\n"
    with pytest.raises(CycleError, match=r"tar\.header.*tar\.scan"):
        require_no_circle(small_package(tmp_path, {"tar/header.py": late}))


def test_a_circle_of_rooms_is_found_where_no_module_is_in_one(tmp_path: Path) -> None:
    header = "from house.tar.header import Header\n"
    planted = {"storage/local.py": header, "tar/scan.py": "from house.storage import open_store\n"}
    imports = small_package(tmp_path, planted)
    require_no_circle(imports)
    with pytest.raises(CycleError, match=r"'storage', 'tar'|'tar', 'storage'"):
        require_no_circle(rooms_imported(imports, SMALL_FLOORS))


def test_a_module_that_text_names_and_nobody_wrote_is_found(tmp_path: Path) -> None:
    named = "`tar.scan`, `house.tar.header.TarError`, ``tar/header.py``, header.py, test_imports.py"
    missing = "``attic.py``, `tar.attic`, `tar.header.Attic`, # storage/header.py\n"
    small_package(tmp_path, {"errors.py": f"# {named}\n# {missing}"})
    assert names_of_nothing(tmp_path / "house") == [
        "errors names attic.py",
        "errors names storage/header.py",
        "errors names tar.attic",
        "errors names tar.header.Attic",
    ]


def test_a_module_without_a_floor_is_refused(tmp_path: Path) -> None:
    imports = small_package(tmp_path, {"attic.py": "from house.errors import HouseError\n"})
    with pytest.raises(AssertionError, match="attic lies on no floor"):
        upward_imports(imports, SMALL_FLOORS)
