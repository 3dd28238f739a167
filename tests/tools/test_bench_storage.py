"""The figures of tools.bench.storage, from batches whose moments are known."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest

from tests.helpers.http_fault_proxy import RATES, Counts
from tools.bench.storage.report import print_table
from tools.bench.storage.rows import all_rows
from tools.bench.storage.runs import figures_of
from tools.bench.storage.scenarios import SCENARIOS

COUNTS = Counts(
    num_requests=60,
    num_gets=50,
    num_bytes=1_280_000,
    num_connections=9,
    num_in_flight=0,
    max_in_flight=7,
    faults={**dict.fromkeys(RATES, 0), "reset": 2},
    gets_by_suffix={"tar": 50},
    bytes_by_suffix={"tar": 1_280_000},
)


def run_of(row: str, sample_bytes: int = 1000):
    """100 batches of 10 samples: the first after 1 s, the others each 0.1 s."""
    figures = {
        "arrivals": [1 + 0.1 * number for number in range(100)],
        "waits": [1.0] + [0.01] * 98 + [0.5],
        "counts": [10] * 100,
        "cpu": [(1 + 0.1 * number, 0.2 * number, 10 * (number + 1)) for number in range(100)],
    }
    return figures_of(all_rows([])[row], figures, COUNTS, 5_000_000, sample_bytes)


def test_the_figures_of_a_run_are_those_of_its_late_part() -> None:
    run = run_of("mmstream")
    assert run.late == pytest.approx(100)
    assert run.first == {1: 1.0, 10: pytest.approx(1.9), 100: pytest.approx(10.9)}
    assert (run.wait_p50, run.wait_p99, run.longest_s) == (0.01, 0.5, 0.5)
    assert run.cpu_s_per_gb == pytest.approx(0.2 / 10_000 * 1e9)
    assert run.gets_per_gb == pytest.approx(50 / 0.00128)
    assert run.read_per_used == pytest.approx(1.28)
    assert run.faults == 2


def test_a_raw_client_counts_by_its_bytes() -> None:
    assert run_of("obstore").late == pytest.approx(0.1)


def test_the_table_has_ratios_and_failed_rows() -> None:
    rows = [all_rows([])[name] for name in ("obstore", "mmstream", "webdataset, curl", "litdata")]
    runs = {row.name: [run_of(row.name)] for row in rows[:3]}
    with redirect_stdout(io.StringIO()) as out:
        print_table(SCENARIOS["50/40"], rows, runs, 1000)
    table = {line.split(" | ")[0]: line.split(" | ") for line in out.getvalue().splitlines()}
    assert table["| mmstream"][3:5] == ["1000.00", "1.00"]
    assert "failed" in table["| litdata"][1]
