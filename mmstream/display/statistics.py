"""Statistics of a dataset as a table, for notebooks, pages and terminals.

`mmstream info --stats`, `Statistics` in a notebook -> statistics.py -> html.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from mmstream.display.contents import uncounted
from mmstream.display.html import cut, element, page
from mmstream.display.text import size_text
from mmstream.errors import escaped

MAX_NAMES = 16
"""Fields, and classes, that are named, the most frequent first."""

HEAD = ("", "count", "min", "5 %", "median", "mean", "95 %", "max")


def statistics_lines(stats: Any) -> Iterator[str]:
    """Yield `Statistics` for a terminal: what was read, and a table."""
    yield _summary(stats)
    yield from (f"  bad: {reason}" for reason in stats.reasons)
    rows = [HEAD, *_rows(stats)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        numbers = "  ".join(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))
        yield f"  {name.ljust(widths[0])}  {numbers}"
    yield from (f"  {line}" for line in _notes(stats))


def statistics_html(stats: Any) -> str:
    """Return `Statistics` for a notebook or a page: what was read, and a table."""
    return page(
        element("head", "Statistics", [_summary(stats)]),
        *(element("problem", reason, 500) for reason in stats.reasons),
        element("table", _rows(stats), HEAD),
        element("table", [(cut(note, 2000),) for note in _notes(stats)]),
    )


def _summary(stats: Any) -> str:
    text = f"{stats.num_measured:,} of {stats.num_samples:,} samples measured, spread over all"
    return text + (f"; {stats.num_bad:,} bad" if stats.num_bad else "")


def _notes(stats: Any) -> Iterator[str]:
    """Yield how many samples have each field and class, and what the table does not say."""
    if stats.fields:
        yield f"samples with each field: {_counts_text(stats.fields)}"
    if stats.classes:
        yield f"classes ({len(stats.classes):,}): {_counts_text(stats.classes)}"
    if stats.uncounted_media:
        yield uncounted(stats.uncounted_media)
    for kind, hours in stats.hours.items():
        line = f"hours of {kind}: {_number_text('hours', hours)}"
        if stats.num_measured < stats.num_samples:
            in_all = _number_text("hours", hours * stats.num_samples / stats.num_measured)
            line += f" in the samples measured, about {in_all} in all"
        yield line


def _counts_text(counts: Mapping[str, int]) -> str:
    texts = [f"{escaped(name)} {count:,}" for name, count in islice(counts.items(), MAX_NAMES)]
    if len(counts) > MAX_NAMES:
        texts.append(f"{len(counts) - MAX_NAMES:,} more")
    return ", ".join(texts)


def _rows(stats: Any) -> list[list[str]]:
    """Return the rows of the table, below `HEAD`."""
    rows = []
    for name, numbers in stats.summary()["values"].items():
        count, *others = numbers.values()
        rows.append([_named(name), f"{count:,}", *(_number_text(name, n) for n in others)])
    return rows


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
