"""The public surface: its names, where they live, what importing costs, and that it type-checks."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mmstream as mm
from tests.helpers.paths import ROOT

ERRORS = [
    value
    for value in vars(mm.errors).values()
    if isinstance(value, type) and issubclass(value, Exception)
]


def test_every_name_can_be_used_and_is_documented():
    names: dict[str, object] = {}
    exec("from mmstream import *", names)
    assert mm.__all__ == sorted(names.keys() - {"__builtins__"})
    assert [name for name in mm.__all__ if not getattr(mm, name).__doc__] == []


def test_the_errors_are_one_tree_and_built_from_one_string():
    for kind in ERRORS:
        error = kind("shard[3] key.jpg: reason")
        assert isinstance(error, mm.MMStreamError)
        assert str(error) == "shard[3] key.jpg: reason"
    assert issubclass(mm.ConfigError, ValueError)
    assert issubclass(mm.errors.StorageError, OSError)
    assert issubclass(mm.StateError, ValueError)
    assert issubclass(mm.errors.DecodeError, mm.SampleError)
    assert not issubclass(mm.errors.BadSampleLimitError, mm.SampleError)


# -- what importing costs -----------------------------------------------------------------------

LIGHT = """
import sys, mmstream as mm
dir(mm), mm.__all__, mm.Order, mm.open_dataset, mm.convert, mm.World, mm.errors.ShardError
mm.Order.from_counts([10, 20], global_batch_size=4, seed=0).refs(0, 0)
import mmstream.tar.samples, mmstream.dataset.index, mmstream.dataset.manifest, mmstream.storage
import mmstream.dataset.index_tars
import mmstream.cli
"""
CHECK = """
heavy = {'torch', 'torchvision', 'transformers', 'webdataset', 'PIL', 's3fs'} & set(sys.modules)
sys.exit(f'imported: {sorted(heavy)}' if heavy else 0)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


def test_converting_and_planning_import_neither_torch_nor_transformers():
    done = run(LIGHT + CHECK)
    assert done.returncode == 0, done.stderr


def test_the_check_of_imports_can_fail():
    done = run("import sys, PIL\n" + CHECK)
    assert (done.returncode, done.stderr) == (1, "imported: ['PIL']\n")


# -- types --------------------------------------------------------------------------------------


WRONG = """import mmstream as mm
dataset = mm.open_dataset(3)
mm.Pipeline(dataset, global_batch_size='many')
mm.Order.from_counts([1], global_batch_size=1, sede=0)
"""


@pytest.mark.slow
def test_the_public_surface_type_checks_as_it_is_documented_and_a_wrong_use_does_not(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    right = ROOT / "tests" / "typing_api.py"
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", right, wrong]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "typing_api.py:" not in done.stdout  # others are those of what the files import
    for line in (2, 3, 4):
        assert f"wrong.py:{line}: error" in done.stdout
