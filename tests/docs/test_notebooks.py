"""The notebooks run from an empty folder and draw what their text speaks of."""

import subprocess
import sys

import nbformat
import pytest

from tests.helpers.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NUM_FIGURES = {"01_convert_and_explore": 1, "02_pipeline": 6, "03_train_and_resume": 2}
NUM_PAGES = {"01_convert_and_explore": 7, "02_pipeline": 6, "03_train_and_resume": 0}


def test_these_are_the_notebooks():
    assert [path.stem for path in NOTEBOOKS] == sorted(NUM_FIGURES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
        assert not cell.metadata
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert path.read_text() == nbformat.writes(notebook, indent=1) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_says(path, tmp_path, monkeypatch):
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "empty").mkdir()
    executed = tmp_path / "executed.ipynb"
    subprocess.run(
        [sys.executable, "-c", RUN, str(path), str(executed)],
        check=True,
        cwd=tmp_path / "empty",
        timeout=240,
    )
    outputs = [
        output
        for cell in nbformat.read(executed, as_version=4).cells
        for output in cell.get("outputs", [])
    ]
    kinds = [kind for output in outputs for kind in output.get("data", {})]
    assert kinds.count("image/png") == NUM_FIGURES[path.stem]
    assert kinds.count("text/html") == NUM_PAGES[path.stem]
    said = "".join(o["text"] for o in outputs if o.get("name") == "stderr")
    assert "Warning" not in said
    assert list((tmp_path / "empty").iterdir()) == []  # all is written to a temporary folder


RUN = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""
"""In a process of its own: nbclient starts an event loop and threads."""
