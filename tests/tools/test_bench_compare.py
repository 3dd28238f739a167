"""Two checkouts are measured by the same rows, and one command prints how they compare."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tools.bench.compare import Run, main, print_table


@pytest.mark.slow
@pytest.mark.s3
def test_a_row_is_measured_with_both_checkouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.bench.compare.NUM_PHOTOS", 64)
    (tmp_path / "mmstream").symlink_to(ROOT / "mmstream")
    main([str(tmp_path), "--rounds", "1", "--seconds", "0.01", "--rows", "raw, local"])
    row = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"\| raw, local \| samples/s \| [\d,.]+ \| [\d,.]+ \| \d+\.\d+ \(", row)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{absent}"], "no folder mmstream/ in it"),
        ([str(ROOT), "--rows", "neither", "nor"], "no row has neither or nor; the rows are deco"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_to_give(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([argument.format(absent=tmp_path) for argument in arguments])
    assert message in capsys.readouterr().err


def test_a_gain_is_above_one_where_this_checkout_is_faster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def runs(*values: float) -> list[Run]:
        return [Run(value, 1.0, 2e6) for value in values]

    table = {
        ("convert", "this"): runs(150, 120, 200),
        ("convert", "other"): runs(100, 100, 100),
        ("first batch, 2 workers", "this"): runs(1, 2, 2),
        ("first batch, 2 workers", "other"): runs(4, 4, 4),
    }
    print_table(["convert", "first batch, 2 workers"], table)
    speed, wait = capsys.readouterr().out.splitlines()[-2:]
    assert "| 150 | 100 | 1.500 (1.20-2.00) |" in speed
    assert "| 2 | 4 | 2.000 (2.00-4.00) |" in wait
