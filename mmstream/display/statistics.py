"""Statistics of a dataset as a table and bars, for notebooks, pages and terminals.

`mmstream info --stats`, `Statistics` in a notebook -> statistics.py -> html.py
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.display.contents import uncounted
from mmstream.display.html import page, render
from mmstream.display.text import size_text
from mmstream.errors import escaped

MAX_BINS = 14
"""Bars of one histogram."""

MAX_CLASSES = 12
"""Classes that are named, the most frequent first."""

MAX_FIELDS = 16
"""Fields that are named, the most frequent first."""

BAR_CHARACTERS = 40
"""Longest bar in a terminal."""

HEAD = ("", "count", "min", "5 %", "median", "mean", "95 %", "max")


class Bin(NamedTuple):
    """One bar: how many values lie in [low, high)."""

    low: float
    high: float
    """Infinite: all that are as large or larger."""
    num_values: int


def bins(values: Sequence[float] | npt.NDArray[np.float64]) -> list[Bin]:
    """Cut values into at most `MAX_BINS` bins of a round width.

    Where there are outliers, the last bin holds them all, so that they leave the others their room.

    Examples:
        >>> [(b.low, b.high, b.num_values) for b in bins([1, 1, 2, 4])]
        [(1.0, 2.0, 2), (2.0, 3.0, 1), (3.0, 4.0, 0), (4.0, 5.0, 1)]
    """
    array = np.asarray(values, dtype=np.float64)
    low, high = float(array.min()), float(np.quantile(array, 0.99))
    step = _round_step((high - low) / (MAX_BINS - 2))
    if np.array_equal(array, np.floor(array)):
        step = max(1.0, step)
    first = math.floor(low / step)
    num_bins = math.floor(float(array.max()) / step) - first + 1
    if num_bins > MAX_BINS:
        num_bins = min(MAX_BINS, math.floor(high / step) - first + 1)
    numbers = np.minimum(np.floor(array / step) - first, num_bins)
    counts = np.bincount(numbers.astype(np.int64), minlength=num_bins + 1).tolist()
    cut = [
        Bin((first + i) * step, (first + i + 1) * step, count)
        for i, count in enumerate(counts[:num_bins])
    ]
    return [*cut, Bin((first + num_bins) * step, math.inf, counts[-1])] if counts[-1] else cut


def _round_step(width: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... and of 0.5, 0.2, ... that is as large."""
    if width <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(width))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= width * 0.999999)


def statistics_lines(stats: Any) -> Iterator[str]:
    """Yield `Statistics` for a terminal: what was read, a table, and bars."""
    yield _summary(stats)
    yield from (f"  bad: {reason}" for reason in stats.reasons)
    rows = [HEAD, *_rows(stats)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        numbers = "  ".join(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))
        yield f"  {name.ljust(widths[0])}  {numbers}"
    yield from (f"  {line}" for line in _notes(stats))
    for name, bars in _histograms(stats):
        yield ""
        yield f"  {name}"
        label_width = max(len(label) for label, _ in bars)
        most = max(count for _, count in bars)
        for label, count in bars:
            bar = "#" * math.ceil(BAR_CHARACTERS * count / most)
            yield f"    {label.rjust(label_width)}  {bar.ljust(BAR_CHARACTERS)} {count:,}"


def statistics_html(stats: Any) -> str:
    """Return `Statistics` for a notebook or a page: what was read, a table, and bars."""
    tables = render(
        "statistics.html",
        summary=_summary(stats),
        reasons=stats.reasons,
        head=HEAD,
        rows=_rows(stats),
        notes=list(_notes(stats)),
        charts=list(_histograms(stats)),
    )
    return page(tables)


def _summary(stats: Any) -> str:
    text = f"{stats.num_measured:,} of {stats.num_samples:,} samples measured, spread over all"
    return text + (f"; {stats.num_bad:,} bad" if stats.num_bad else "")


def _notes(stats: Any) -> Iterator[str]:
    """Yield how many samples have each field, the hours of media, and what has no tokens."""
    if stats.fields:
        counts = [f"{escaped(name)} {n:,}" for name, n in islice(stats.fields.items(), MAX_FIELDS)]
        num_more = len(stats.fields) - len(counts)
        more = f", {num_more:,} more" if num_more else ""
        yield f"samples with each field: {', '.join(counts)}{more}"
    if stats.uncounted_media:
        yield uncounted(stats.uncounted_media)
    for kind, hours in stats.hours.items():
        line = f"hours of {kind}: {_number_text('hours', hours)}"
        if stats.num_measured < stats.num_samples:
            in_all = _number_text("hours", hours * stats.num_samples / stats.num_measured)
            line += f" in the samples measured, about {in_all} in all"
        yield line


def _rows(stats: Any) -> list[list[str]]:
    """Return the rows of the table, below `HEAD`."""
    rows = []
    for name, values in stats.values.items():
        low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
        numbers = (values.min(), low, middle, values.mean(), high, values.max())
        cells = [_number_text(name, number) for number in numbers]
        rows.append([_named(name), f"{len(values):,}", *cells])
    return rows


def _histograms(stats: Any) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yield a name and its bars: a label and a count each."""
    for name, values in stats.values.items():
        if values.min() < values.max():
            is_whole = bool(np.array_equal(values, np.floor(values)))
            bars: Counter[str] = Counter()  # of nearly equal bytes, several have one label
            for value_bin in bins(values):
                bars[_label(name, value_bin, is_whole)] += value_bin.num_values
            yield _named(name), list(bars.items())
    if stats.classes:
        most = list(islice(stats.classes.items(), MAX_CLASSES))
        num_more = len(stats.classes) - len(most)
        remaining_count = sum(stats.classes.values()) - sum(count for _, count in most)
        rest_bar = [(f"{num_more:,} more", remaining_count)] if num_more else []
        yield f"classes ({len(stats.classes):,})", [*most, *rest_bar]


def _label(name: str, value_bin: Bin, is_whole: bool) -> str:
    low = _number_text(name, value_bin.low)
    if value_bin.high == math.inf:
        return f"{low} or more"
    if is_whole and value_bin.high - value_bin.low == 1:
        return low
    high = _number_text(name, value_bin.high)
    return low if low == high else f"{low} to {high}"


_UNITS = {
    "image width": "pixels",
    "image height": "pixels",
    "video width": "pixels",
    "video height": "pixels",
    "audio sample rate": "Hz",
}


def _named(name: str) -> str:
    return f"{name} ({_UNITS[name]})" if name in _UNITS else name


def _number_text(name: str, number: float) -> str:
    if name.endswith("bytes"):
        return size_text(number)
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"
