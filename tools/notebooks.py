"""Run the notebooks and store them with their outputs: ``python -m tools.notebooks [NAME ...]``.

It needs what the tests need: ``pip install --editable ".[dev]"``. A notebook runs in an empty
folder. Its outputs are stored in a form that is the same on every run:

- The temporary folder that a notebook makes is named ``/tmp/mmstream``.
- All that a cell logs is one output, and so is all that it prints.
- Charts are PNGs of 64 colours. Those of the speed in 03_train_and_resume show what was measured.
- No GPU is used.

tests/docs/test_notebooks.py compares the stored texts with those of a new run.
"""

from __future__ import annotations

import base64
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import click
import nbformat
from nbclient import NotebookClient
from PIL import Image

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
PRIVATE_FOLDERS = (
    "IPYTHONDIR",
    "JUPYTER_CONFIG_DIR",
    "JUPYTER_RUNTIME_DIR",
    "MPLCONFIGDIR",
    "XDG_CACHE_HOME",
)
MAX_SECONDS = 250
"""Longest time of one cell."""
NUM_COLOURS = 64


@click.command()
@click.argument("names", nargs=-1)
@click.option(
    "--out", type=click.Path(path_type=Path), default=NOTEBOOKS, help="Folder to write to."
)
def main(names: tuple[str, ...], out: Path) -> None:
    """Run notebooks, all if no NAME is given, and store them with their outputs."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not names or path.stem in names:
            stored = out / path.name
            stored.write_text(nbformat.writes(run(path), indent=1) + "\n", encoding="utf-8")
            click.echo(f"{stored}: {stored.stat().st_size:,} bytes")


def run(path: Path) -> Any:
    """Run one notebook, and return it with its outputs.

    Raises:
        CellExecutionError: A cell failed.
        RuntimeError: The notebook left files in the folder where it was opened.
    """
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        for each in ("opened", "temporary", *PRIVATE_FOLDERS):
            (folder / each).mkdir()
        environment = os.environ | {name: str(folder / name) for name in PRIVATE_FOLDERS}
        environment["TMPDIR"] = str(folder / "temporary")
        environment["CUDA_VISIBLE_DEVICES"] = ""
        resources = {"metadata": {"path": str(folder / "opened")}}
        client = NotebookClient(
            notebook, timeout=MAX_SECONDS, kernel_name="python3", resources=resources
        )
        client.execute(env=environment)
        if any((folder / "opened").iterdir()):
            raise RuntimeError(f"{path.name} left files in the folder where it was opened")
        for cell in notebook.cells:
            cell.metadata = {}
            if cell.cell_type == "code":
                cell.outputs = stored_outputs(cell.outputs, folder / "temporary")
    notebook.metadata = metadata
    return notebook


def stored_outputs(outputs: list[Any], folder: Path) -> list[Any]:
    """Return the outputs of a cell in their stored form.

    Args:
        outputs: As the kernel sent them.
        folder: Where the notebook has made its temporary folder.
    """
    # Samples show the end of a long path only, behind three dots.
    temporary = re.compile(rf"(?:{re.escape(str(folder))}|\.\.\.[^\s']*)/mmstream-\w+")
    streams = {"stderr": "", "stdout": ""}
    others = []
    for output in outputs:
        if output.output_type == "stream":
            streams[output.name] += temporary.sub("/tmp/mmstream", output.text)
            continue
        output.metadata = {}
        for kind, content in output.data.items():
            if kind == "image/png":
                output.data[kind] = with_few_colours(content)
            elif isinstance(content, str):
                output.data[kind] = temporary.sub("/tmp/mmstream", content)
        others.append(output)
    texts = [
        nbformat.v4.new_output("stream", name=name, text=text)
        for name, text in streams.items()
        if text
    ]
    return texts + others


def with_few_colours(png: str) -> str:
    """Return a PNG in base64 with a palette, which takes a fraction of the bytes."""
    with Image.open(io.BytesIO(base64.b64decode(png))) as picture:
        reduced = picture.convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    reduced.save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


if __name__ == "__main__":
    main()
