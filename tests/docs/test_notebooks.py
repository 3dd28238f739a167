"""The notebooks run from an empty folder, and their stored outputs are those of the code.

To store them again after a change: ``python -m tools.notebooks``, or with the names of some, such
as ``python -m tools.notebooks 02_pipeline``.
"""

import re
import subprocess
import sys

import nbformat
import pytest

from tests.helpers.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 300_000
"""A notebook with its outputs. Larger ones make every clone slow."""

MEASURED = re.compile(r"\d+\.\d+(?:e[+-]\d+)?")
"""Numbers with a point, such as losses. Their last digits depend on the processor."""


def outputs_of(notebook):
    """Return [(kind, text or None)] of each cell. Pictures and pages have no text here."""
    return [
        [
            pair
            for output in cell.get("outputs", [])
            for pair in (
                [(output.name, output.text)]
                if output.output_type == "stream"
                else [
                    (kind, content if kind == "text/plain" else None)
                    for kind, content in output.data.items()
                ]
            )
        ]
        for cell in notebook.cells
    ]


def in_words(cells):
    """Return the outputs with a mark in the place of every measured number, and the numbers."""
    texts = [(kind, text or "") for pairs in cells for kind, text in pairs]
    words = [[(kind, MEASURED.sub("<n>", text or "")) for kind, text in pairs] for pairs in cells]
    return words, [float(number) for _, text in texts for number in MEASURED.findall(text)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_small_with_outputs_and_without_traces_of_a_machine(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(cell.metadata for cell in notebook.cells)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    stored = path.read_text(encoding="utf-8")
    assert stored == nbformat.writes(notebook, indent=1) + "\n"
    assert len(stored.encode()) <= MAX_BYTES
    cells = outputs_of(notebook)
    kinds = [kind for pairs in cells for kind, _ in pairs]
    assert {"image/png", "text/html"} & set(kinds)
    said = "\n".join(text for pairs in cells for _, text in pairs if text)
    assert not re.search(r"/(?:home|root|Users|tmp/(?!mmstream/))|it/s|\x1b", said)
    assert "Warning" not in said
    assert not re.search(r"/(?:home|root|Users)/", re.sub(r"data:[^\"]*", "", stored))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_stored_outputs_are_those_of_the_code(path, tmp_path):
    # In a process of its own: nbclient starts an event loop and threads.
    command = [sys.executable, "-m", "tools.notebooks", path.stem, "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=500)
    stored, numbers = in_words(outputs_of(nbformat.read(path, as_version=4)))
    again, new_numbers = in_words(outputs_of(nbformat.read(tmp_path / path.name, as_version=4)))
    assert again == stored, "store it again: python -m tools.notebooks"
    assert new_numbers == pytest.approx(numbers, rel=0.15, abs=1e-6)
