"""A line chart as inline SVG, for `report`. No script; the page's style sheet gives the colours."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Line", "line_chart", "ticks"]

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 920, 44, 12, 34, 34


class Line(NamedTuple):
    """One curve."""

    name: str
    """Of the legend; empty: not in it."""
    points: Sequence[tuple[float, float]]
    style: str
    """The CSS class of its stroke."""


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_name: str,
    marks: Mapping[float, str] | None = None,
    top: float | None = None,
    height: int = 300,
) -> str:
    """Return an ``<svg>`` element, both axes from zero.

    Args:
        lines: drawn in this order; points that are no finite numbers are left out.
        title: above the chart; says what is drawn, with its unit.
        x_name: what runs to the right.
        marks: names of vertical lines by their x.
        top: the y axis' end; None: the largest value's.
        height: in units of which the chart is 920 wide.
    """
    kept = [line._replace(points=[p for p in line.points if _finite(p)]) for line in lines]
    everything = [point for line in kept for point in line.points] or [(1.0, 1.0)]
    right_end = max(1.0, *(x for x, _ in everything))
    ys = ticks(top if top is not None else max(1e-9, *(y for _, y in everything)))
    floor, above = height - BOTTOM, ys[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / right_end * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(floor - y / above * (floor - TOP), 1)

    parts = [_text(0, 14, title)]
    for y in ys:
        at = place(0, y)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(_text(LEFT - 8, at + 4, f"{y:g}", "end"))
    xs = [x for x in ticks(right_end) if x <= right_end]
    parts += [_text(place(x, 0)[0], floor + 16, f"{x:g}", "middle") for x in xs]
    parts.append(_text(WIDTH - RIGHT, height - 2, x_name, "end"))
    for number, (x, name) in enumerate(sorted((marks or {}).items())):
        at = place(x, 0)[0]  # names to the left and right in turn: two marks may lie close
        parts.append(f'<line class="mark" x1="{at}" x2="{at}" y1="{TOP}" y2="{floor}"/>')
        parts.append(
            _text(at + (5 if number % 2 else -5), TOP + 10, name, "start" if number % 2 else "end")
        )
    for line in kept:
        points = " ".join(f"{x},{y}" for x, y in (place(*point) for point in line.points))
        parts.append(f'<polyline class="{html.escape(line.style)}" points="{points}"/>')
    named = [line for line in kept if line.name]
    for number, line in enumerate(named):
        y = floor - 12 - 20 * (len(named) - 1 - number)
        ends = f"{LEFT + 12},{y} {LEFT + 40},{y}"
        parts.append(f'<polyline class="{html.escape(line.style)}" points="{ends}"/>')
        parts.append(_text(LEFT + 48, y + 4, line.name))
    return (
        f'<svg role="img" viewBox="0 0 {WIDTH} {height}"><title>{html.escape(title)}</title>'
        f"{''.join(parts)}</svg>"
    )


def ticks(end: float) -> list[float]:
    """Return 4 to 8 round numbers from 0; the last is `end` or the first above it."""
    rough = end / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    return [round(i * step, 12) for i in range(math.ceil(end / step - 1e-9) + 1)]


def _finite(point: tuple[float, float]) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{html.escape(words)}</text>'
