"""Line charts of the report, as inline SVG. The style sheet of the page gives the colours."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Line", "line_chart", "ticks"]

WIDTH = 920
"""Width of a chart in SVG units. The next four are its margins."""
LEFT = 44
RIGHT = 12
TOP = 34
BOTTOM = 34


class Line(NamedTuple):
    """One curve."""

    name: str
    """Name in the legend. Empty: the line is not in it."""
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
    """Return an ``<svg>`` element. Both axes start at zero.

    Args:
        lines: Drawn in this order. Points that are not finite numbers are left out.
        title: Shown above the chart: what it shows, with its unit.
        x_name: Name of the x axis.
        marks: {x: name} of vertical lines.
        top: End of the y axis. Default: the largest value.
        height: Height of the chart, in units of which it is 920 wide.
    """
    lines = [line._replace(points=[p for p in line.points if _is_finite(p)]) for line in lines]
    points = [point for line in lines for point in line.points] or [(1.0, 1.0)]
    max_x = max(1.0, *(x for x, _ in points))
    y_ticks = ticks(top if top is not None else max(1e-9, *(y for _, y in points)))
    max_y = y_ticks[-1]
    bottom = height - BOTTOM

    def to_svg(x: float, y: float) -> tuple[float, float]:
        svg_x = LEFT + x / max_x * (WIDTH - LEFT - RIGHT)
        return round(svg_x, 1), round(bottom - y / max_y * (bottom - TOP), 1)

    elements = [_text(0, 14, title)]
    for y in y_ticks:
        svg_y = to_svg(0, y)[1]
        elements.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{svg_y}" y2="{svg_y}"/>'
        )
        elements.append(_text(LEFT - 8, svg_y + 4, f"{y:g}", "end"))
    x_ticks = [x for x in ticks(max_x) if x <= max_x]
    elements += [_text(to_svg(x, 0)[0], bottom + 16, f"{x:g}", "middle") for x in x_ticks]
    elements.append(_text(WIDTH - RIGHT, height - 2, x_name, "end"))
    for number, (x, name) in enumerate(sorted((marks or {}).items())):
        svg_x = to_svg(x, 0)[0]
        elements.append(f'<line class="mark" x1="{svg_x}" x2="{svg_x}" y1="{TOP}" y2="{bottom}"/>')
        # Names stand to the left and to the right by turns, because two marks may be close.
        offset, anchor = (5, "start") if number % 2 else (-5, "end")
        elements.append(_text(svg_x + offset, TOP + 10, name, anchor))
    for line in lines:
        elements.append(_polyline(line.style, [to_svg(*point) for point in line.points]))
    elements += _legend([line for line in lines if line.name], bottom)
    return (
        f'<svg role="img" viewBox="0 0 {WIDTH} {height}"><title>{html.escape(title)}</title>'
        f"{''.join(elements)}</svg>"
    )


def _legend(lines: Sequence[Line], bottom: float) -> list[str]:
    """Return a short stroke and the name of each line, from the last one upward."""
    elements = []
    for number, line in enumerate(lines):
        y = bottom - 12 - 20 * (len(lines) - 1 - number)
        elements.append(_polyline(line.style, [(LEFT + 12, y), (LEFT + 40, y)]))
        elements.append(_text(LEFT + 48, y + 4, line.name))
    return elements


def _polyline(style: str, points: Sequence[tuple[float, float]]) -> str:
    coordinates = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline class="{html.escape(style)}" points="{coordinates}"/>'


def ticks(end: float) -> list[float]:
    """Return 4 to 8 round numbers from 0 on. The last one is `end`, or the first above it.

    Examples:
        >>> ticks(7.3)
        [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    rough = end / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    return [round(i * step, 12) for i in range(math.ceil(end / step - 1e-9) + 1)]


def _is_finite(point: tuple[float, float]) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{html.escape(words)}</text>'
