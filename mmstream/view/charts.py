"""Statistics of the data, and the metrics of a run, as pictures: SVG of templates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mmstream.audit import log_files, read_lines
from mmstream.dataset.dataset import Dataset
from mmstream.display.html import round_step
from mmstream.errors import ConfigError
from mmstream.measuring.statistics import Statistics, statistics
from mmstream.order.corpus import differing_keys
from mmstream.view.pages import show
from mmstream.view.samples import choice_of

MAX_MEASURED = 400
"""Samples that are measured."""

MAX_MEASURED_BYTES = 256 << 20
"""What is read to measure them, about."""

WIDTH, HEIGHT = 560, 150
"""Of a curve, without its labels."""

MAX_POINTS = 560
"""Points of a curve."""

NUM_BARS = 12
"""Bars of a histogram, about, and classes that are named."""

MAX_WAITS = 12
"""Steps that are listed, those with the longest waits first."""


# -- statistics ------------------------------------------------------------------------------------


def statistics_page(request: Request) -> Response:
    """Return what some samples of a choice hold, as histograms."""
    choice = choice_of(request, request.query_params)
    stats = _measured(choice.dataset)
    return show(
        request, "statistics_page.html", choice=choice, stats=stats, charts=list(histograms(stats))
    )


@lru_cache(4)
def _measured(dataset: Dataset) -> Statistics:
    mean_bytes = max(1, dataset.num_bytes // max(1, len(dataset)))
    return statistics(dataset, max(8, min(MAX_MEASURED, MAX_MEASURED_BYTES // mean_bytes)))


def histograms(stats: Statistics) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yield a name and its bars: a label and a count each. The last bar holds all outliers."""
    for name, values in stats.values.items():
        low, high = float(values.min()), float(np.quantile(values, 0.99))
        if low < high:
            step = round_step((high - low) / NUM_BARS)
            edges = step * np.arange(math.floor(low / step), math.floor(high / step) + 2)
            counts = np.histogram(np.minimum(values, edges[-1]), edges)[0].tolist()
            labels = [f"from {edge:,.10g}" for edge in edges.tolist()]
            yield name, list(zip(labels, counts, strict=False))
    if stats.classes:
        yield f"classes ({len(stats.classes):,})", list(stats.classes.items())[:NUM_BARS]


# -- a run -----------------------------------------------------------------------------------------


class _Entry(msgspec.Struct):
    """What of a step's lineage says where a run began."""

    order: dict[str, Any] | None = None


class Line(msgspec.Struct):
    """A line of metrics, as far as it is shown."""

    num_steps: int
    loss: float | None = None
    epoch: int = 0
    step: int = 0
    wait_fraction: float | None = None
    read_s: float = 0.0
    decode_s: float = 0.0
    collate_s: float = 0.0
    samples_per_s: float | None = None
    num_bad: int = 0
    num_bytes: int = 0
    rank: int = 0
    world_size: int = 1
    lineage: list[_Entry] = []

    @property
    def longest_stage(self) -> str:
        """What took most of the time in which the batches of this line were made; "" if unknown."""
        seconds = {stage: getattr(self, name) for stage, name in STAGES.items()}
        return max(seconds, key=seconds.__getitem__) if any(seconds.values()) else ""

    @property
    def order(self) -> dict[str, Any] | None:
        """The order that began here, where the log has it."""
        return next((entry.order for entry in self.lineage if entry.order is not None), None)


STAGES = {"reading": "read_s", "decoding": "decode_s", "collating": "collate_s"}
"""Where the time of making a batch goes."""

COUNTS = ("num_bad", "num_bytes")
"""Counts since a process began, so they fall where another one has begun."""

CURVES = {
    "loss": "loss",
    "wait_fraction": "share of the time spent waiting for data, rank 0",
    "samples_per_s": "samples per second, all ranks",
    "num_bad": "bad samples since the last start, all ranks",
}


def run_page(request: Request) -> Response:
    """Return the loss, the waits, the bad samples and the resumes of a run."""
    run = request.app.state.content.run
    if run is None:
        raise ConfigError("there is no run: start `mmstream view` with --run FOLDER")
    of_ranks = [lines for path in log_files([run]) if (lines := read_metrics(path))]
    if not of_ranks:
        raise ConfigError(f"{run}: its metrics have no line yet")
    first_rank = of_ranks[0]
    starts = starts_of(first_rank)
    marks = [line.num_steps for line, _ in starts[1:]]
    curves = [curve_of(text, first_rank, name, marks) for name, text in CURVES.items()]
    validation = read_metrics(run / "validation-rank0.jsonl")
    if validation:
        curves.insert(1, curve_of("loss of validation", validation, "loss", marks))
    lines = [line for lines in of_ranks for line in lines]
    waits = sorted(lines, key=lambda line: -(line.wait_fraction or 0))[:MAX_WAITS]
    of_stages = {
        name: sum(getattr(line, field) for line in lines) for name, field in STAGES.items()
    }
    total = sum(of_stages.values())
    stages = {name: seconds / total for name, seconds in of_stages.items()} if total else {}
    return show(
        request,
        "run.html",
        run=str(run),
        last=first_rank[-1],
        starts=starts,
        curves=list(filter(None, curves)),
        waits=waits,
        stages=stages,
    )


def read_metrics(path: Path) -> list[Line]:
    """Return the lines of a file of metrics. A last line that is not whole is left out.

    Raises:
        ConfigError: Another line is not JSON, or no metrics.
    """
    if not path.exists():
        return []
    try:
        return [msgspec.convert(line, Line) for line in read_lines(path)]
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: not the metrics of a run ({error})") from None


def starts_of(lines: Sequence[Line]) -> list[tuple[Line, list[str]]]:
    """Return where each process of a run began, and what is other than before.

    It began where the log names its order, or where counts fall.
    """
    starts: list[tuple[Line, list[str]]] = [(lines[0], [])]
    order: Mapping[str, Any] = lines[0].order or {}
    for before, line in pairwise(lines):
        changes = []
        if line.world_size != before.world_size:
            changes.append(f"ranks: {before.world_size} before, {line.world_size} now")
        new_order = line.order
        if order and new_order:
            changes += [
                f"{name}: {order.get(name)} before, {new_order.get(name)} now"
                for name in differing_keys(order, new_order)
            ]
        falls = any(getattr(line, name) < getattr(before, name) for name in COUNTS)
        if changes or falls or new_order:
            starts.append((line, changes))
        order = new_order or order
    return starts


def curve_of(
    name: str, lines: Sequence[Line], field: str, marks: Sequence[int]
) -> dict[str, Any] | None:
    """Return the curve of a field over the steps, as the template of the page draws it.

    Args:
        name: What it shows, in words.
        lines: The metrics.
        field: Of `Line`.
        marks: Steps of resumes.

    Returns:
        None: it has no values but 0. Else its name, its points as SVG has them ("0,12.5 1,13"), its
        lowest and highest value, its first and last step, and its marks in pixels from the left.
    """
    values = [
        (line.num_steps, float(value))
        for line in lines
        if (value := getattr(line, field)) is not None
    ]
    if not any(value for _, value in values):
        return None
    values = values[:: -(-len(values) // MAX_POINTS)]
    low, high = min(value for _, value in values), max(value for _, value in values)
    first, last = values[0][0], values[-1][0]

    def x_of(num_steps: int) -> float:
        return round(WIDTH * (num_steps - first) / max(1, last - first), 1)

    points = " ".join(
        f"{x_of(num_steps)},{HEIGHT - HEIGHT * (value - low) / ((high - low) or 1):.1f}"
        for num_steps, value in values
    )
    return {
        "name": name,
        "points": points,
        "low": f"{low:.4g}",
        "high": f"{high:.4g}",
        "first": first,
        "last": last,
        "marks": [x_of(mark) for mark in marks],
    }
