"""The size of this project is the one that was agreed on, and is counted rightly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tools import size


@pytest.mark.parametrize(
    ("folder", "agreed"),
    [("mmstream", size.PACKAGE_STATEMENTS), ("tests", size.TEST_STATEMENTS)],
)
def test_package_and_tests_have_the_size_that_is_written_down(folder, agreed):
    assert size.statements_in(ROOT / folder) == pytest.approx(agreed, rel=0.03), "tools/size.py"


def test_docstrings_and_longer_lines_do_not_count(tmp_path: Path):
    (tmp_path / "a.py").write_text('"""Words."""\nimport os\n\nX = [\n    1,\n]\n"""Why."""\n')
    (tmp_path / "b.py").write_text("def f():\n    '''Words.'''\n    if X: return 1; return 2\n")
    assert size.statements_in(tmp_path) == 2 + 4
