"""The metrics of training runs as pictures: the loss of runs side by side, and their speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmstream.display.drawing import COLOURS, Drawing, drawing_of, new_figure

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
