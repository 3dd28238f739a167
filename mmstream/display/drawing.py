"""Charts for notebooks: the metrics of runs.

They need matplotlib: ``pip install matplotlib``. It is imported when something is drawn,
and its global state is left alone.

    lines of metrics -> run_drawing.py -> `Drawing`
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
"""Colours of runs, by turns."""


@dataclass(frozen=True)
class Drawing:
    """A chart that a notebook displays.

    Attributes:
        title: what it shows.
        png: the bytes of a PNG file.
    """

    title: str
    png: bytes

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the PNG to a local file, and return its path."""
        path = Path(path)
        path.write_bytes(self.png)
        return path

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        return f"<Drawing: {self.title}>"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, with its size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def drawing_of(figure: Figure, title: str) -> Drawing:
    """Return a figure as a PNG of 90 pixels an inch. Axes lose their top and right lines."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    buffer = io.BytesIO()
    # Without the name of matplotlib's version in the file.
    metadata: dict[str, Any] = {"Software": None}
    figure.savefig(buffer, format="png", dpi=90, metadata=metadata)
    return Drawing(title, buffer.getvalue())
