"""Conditions over columns: what they select, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from mmstream.errors import ConfigError
from mmstream.packing.settings import columns_in, evaluate

COLUMNS = {"width": np.array([0, 100, 300, 640]), "height": np.array([0, 400, 300, 0])}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("width >= 300", [0, 0, 1, 1]),
        ("100 <= width < 640", [0, 1, 1, 0]),
        ("width == 0 or height == 0", [1, 0, 0, 1]),
        ("not width == 0 and height > 0", [0, 1, 1, 0]),
        ("width * height > 2 * (10_000 + 1)", [0, 1, 1, 0]),
        ("width / height < 3", [0, 1, 1, 0]),
        ("width / height >= 0", [0, 1, 1, 0]),
        ("width != -height", [0, 1, 1, 1]),
        ("width - height > -300.5", [1, 1, 1, 1]),
    ],
)
def test_a_condition_selects_samples(condition: str, expected: list[int]) -> None:
    assert evaluate(condition, COLUMNS.__getitem__).astype(int).tolist() == expected


@pytest.mark.parametrize(
    "condition",
    [
        "width",
        "width > ",
        "1 < 2",
        "width > 'a'",
        "width > True",
        "width.real > 1",
        "print(width) > 1",
        "__import__('os').system('true') > 1",
        "[width > 1 for width in (1, 2)]",
        "width ** 999999 > 1",
        "width in (1, 2)",
        "width > 1 and height",
        "width > 9" + "9" * 400,
        "(" * 500,
        "-" * 1900 + "width > 1",
        "width > 1" + " " * 3000,
        "",
    ],
)
def test_everything_else_is_refused(condition: str) -> None:
    with pytest.raises(ConfigError, match='write it as "width >= 200'):
        columns_in(condition)
