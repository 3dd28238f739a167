"""torchvision loads by itself where it can, and elsewhere with its operators declared."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT


def python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def stub(folder: Path, source: str) -> Path:
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text(source)
    return folder


USE = """
import gc, sys
from mmstream.families import family
assert "torch" not in sys.modules and "torchvision" not in sys.modules
torchvision = family.import_torchvision()
gc.collect()
assert family.import_torchvision() is torchvision
import torch
from torchvision.transforms import v2
from torchvision.utils import make_grid
images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
assert make_grid(images).shape == (3, 12, 22)
assert v2.Compose([v2.Resize(4), v2.CenterCrop(4)])(images).shape == (2, 3, 4, 4)
print(len(family._declared))
"""


@pytest.mark.slow
def test_transforms_and_grids_work_and_the_cure_is_used_only_where_it_is_needed() -> None:
    alone = python("import torchvision")
    cured = python(USE)
    assert cured.returncode == 0, cured.stderr
    loads_by_itself = alone.returncode == 0
    assert cured.stdout.strip() == ("0" if loads_by_itself else "1")
    if not loads_by_itself:
        assert "operator torchvision::nms does not exist" in alone.stderr


def test_nothing_is_declared_where_torchvision_loads_by_itself(tmp_path: Path) -> None:
    done = python(
        "import sys; from mmstream.families import family as t; m = t.import_torchvision();"
        "print(m.answer, t._declared, 'torch' in sys.modules)",
        stub(tmp_path, "answer = 42"),
    )
    assert done.stdout.strip() == "42 [] False", done.stderr


@pytest.mark.parametrize("error", ["RuntimeError('CUDA versions differ')", "ImportError('broken')"])
def test_other_failures_of_torchvision_are_passed_on(tmp_path: Path, error: str) -> None:
    done = python(
        "from mmstream.families import family as t; t.import_torchvision()",
        stub(tmp_path, f"raise {error}"),
    )
    assert done.returncode == 1
    assert error.split("'")[1] in done.stderr


LOAD_NO_TORCHVISION = {
    "AutoTokenizer",
    "PreTrainedTokenizerFast",
    "logging",
    "mel_filter_bank",
}


def test_whoever_imports_models_or_processors_of_transformers_imports_torchvision_first() -> None:
    num_imports = 0
    for path in ROOT.glob("mmstream/**/*.py"):
        source = path.read_text()
        if "transformers" not in source:
            continue
        for function in ast.walk(ast.parse(source)):
            if not isinstance(function, ast.FunctionDef):
                continue
            imported = {
                alias.name
                for node in ast.walk(function)
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names
                if (getattr(node, "module", None) or alias.name).split(".")[0] == "transformers"
            }
            called = {
                node.func.id
                for node in ast.walk(function)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            num_imports += bool(imported)
            is_safe = imported <= LOAD_NO_TORCHVISION or "import_torchvision" in called
            assert is_safe, f"{path.name}: {function.name}() imports {imported}"
    assert num_imports > 8
