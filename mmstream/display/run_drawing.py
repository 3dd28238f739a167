"""The metrics of training runs as pictures: the loss of runs side by side, and their speed.

They need matplotlib: ``pip install matplotlib``. It is imported when something is drawn, and its
global state is left alone.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
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


Lines = Sequence[Mapping[str, Any]]
"""The lines of ``metrics-rank0.jsonl``, parsed."""


def draw_losses(runs: Mapping[str, Lines], *, marks: Mapping[int, str] | None = None) -> Drawing:
    """Draw the loss of runs over their steps. The first is a broad line, and the others lie on it.

    Args:
        runs: {name: lines of its metrics}.
        marks: {step: name} of vertical lines.
    """
    figure = new_figure(10, 4.2)
    axes = figure.add_subplot()
    for number, (name, lines) in enumerate(runs.items()):
        axes.plot(
            [line["num_steps"] for line in lines],
            [line["loss"] for line in lines],
            color="0.7" if number == 0 else COLOURS[(number - 1) % len(COLOURS)],
            linewidth=5 if number == 0 else 1.5,
            linestyle="-" if number < 2 else "--",
            label=name,
        )
    for number, (step, name) in enumerate(sorted((marks or {}).items())):
        # Names stand to the left and to the right by turns, because two marks may be close.
        side, offset = ("left", 4) if number % 2 else ("right", -4)
        axes.axvline(step, color="0.3", linestyle=":")
        axes.annotate(
            name,
            (step, 0.95),
            xycoords=("data", "axes fraction"),
            xytext=(offset, 0),
            textcoords="offset points",
            ha=side,
        )
    axes.set(xlabel="step", ylabel="loss")
    axes.legend(loc="lower left", frameon=False)
    return drawing_of(figure, "The loss of each step")


def draw_speed(lines: Lines) -> Drawing:
    """Draw the losses of each epoch, the samples per second, and the share of time without data.

    Args:
        lines: the metrics of one run.
    """
    figure = new_figure(11, 2.9)
    left, middle, right = figure.subplots(1, 3)
    steps = [line["num_steps"] for line in lines]
    epochs = sorted({line["epoch"] for line in lines})
    losses = [[line["loss"] for line in lines if line["epoch"] == epoch] for epoch in epochs]
    left.boxplot(losses, tick_labels=[str(epoch) for epoch in epochs])
    left.set(xlabel="epoch", ylabel="loss of a step")
    middle.plot(steps, [line["samples_per_s"] for line in lines], linewidth=1)
    middle.set(xlabel="step", ylabel="samples/s", ylim=(0, None))
    right.plot(steps, [100 * line["wait_fraction"] for line in lines], linewidth=1)
    right.set(xlabel="step", ylabel="% of a step waiting for data", ylim=(0, 100))
    return drawing_of(figure, "Loss, speed, and waiting for data")
