"""The example rows of the documentation: one or more of each format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from tests.helpers.paths import DOCS


def rows_by_format() -> Iterator[tuple[str, dict[str, object]]]:
    """Yield (format, row) of each example on the page about formats of rows."""
    format = ""
    for line in (DOCS / "row-formats.md").read_text().splitlines():
        if heading := re.fullmatch(r"### `([a-z0-9-]+)`.*", line):
            format = heading[1]
        elif line.startswith("{"):
            yield format, json.loads(line)


def example_rows() -> list[dict[str, object]]:
    """Return the rows of all examples."""
    return [row for _, row in rows_by_format()]
