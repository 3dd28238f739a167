"""The figures of tools.bench.storage, from batches whose moments are known."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.helpers.http_fault_proxy import RATES, Counts
from tools.bench.peers.environments import ROOT
from tools.bench.peers.runners.stored import Settings, Stamp, serve
from tools.bench.storage.report import SHORT, print_table
from tools.bench.storage.rows import all_rows
from tools.bench.storage.runs import copy_with_defaults, figures_of
from tools.bench.storage.scenarios import SCENARIOS


def counts_of(share: float) -> Counts:
    """What a proxy did in a share of the run."""
    return Counts(
        num_requests=60,
        num_gets=int(50 * share),
        num_bytes=int(1_280_000 * share),
        num_connections=9,
        num_in_flight=0,
        max_in_flight=7,
        faults={**dict.fromkeys(RATES, 0), "reset": 2},
        gets_by_suffix={"tar": 50},
        bytes_by_suffix={"tar": 1_280_000},
    )


def run_of(row: str, sample_bytes: int = 1000, num_batches: int = 100, ended: float = 10.9):
    """100 batches of 10 samples: the first after 1 s, the others each 0.1 s."""
    figures = {
        "began": 1000.0,
        "start_s": 2.5,
        "ended": ended,
        "arrivals": [1 + 0.1 * number for number in range(num_batches)],
        "waits": ([1.0] + [0.01] * 98 + [0.5])[:num_batches],
        "pending_s": None if num_batches == 100 else ended - 1,
        "counts": [10] * num_batches,
        "cpu": [(1 + 0.1 * number, 0.2 * number, 10 * (number + 1)) for number in range(100)],
    }
    moments = [(1000 + number / 10, counts_of(number / 100)) for number in range(110)]
    return figures_of(all_rows([])[row], figures, moments, 5_000_000, sample_bytes)


def test_the_figures_of_a_run_are_those_of_its_late_part() -> None:
    run = run_of("mmstream")
    assert run.late == pytest.approx(100)
    assert run.first == {1: 1.0, 10: pytest.approx(1.9), 100: pytest.approx(10.9)}
    assert (run.wait_p50, run.wait_p99, run.longest_s) == (0.01, 0.5, 0.5)
    assert run.cpu_s_per_gb == pytest.approx(0.2 / 10_000 * 1e9)
    assert run.gets_per_gb == pytest.approx(50 / 0.00128, rel=0.02)
    assert run.read_per_used == pytest.approx(1.28, rel=0.02)
    assert (run.start_s, run.seconds) == (2.5, 10.9)
    assert run.faults == 2


def test_a_raw_client_counts_by_its_bytes() -> None:
    assert run_of("obstore").late == pytest.approx(0.1)


def test_the_table_has_ratios_and_failed_rows_and_says_what_was_not_reached() -> None:
    known = all_rows([])
    rows = [known[name] for name in ("obstore", "mmstream", "webdataset, curl", "litdata")]
    runs = {row.name: [run_of(row.name)] for row in rows[:3]}
    slow = known["energon"]
    runs[slow.name] = [run_of(slow.name, num_batches=1, ended=15.0)]
    with redirect_stdout(io.StringIO()) as out:
        print_table(SCENARIOS["50/40"], [*rows, slow], runs, 1000)
    table = {line.split(" | ")[0]: line.split(" | ") for line in out.getvalue().splitlines()}
    assert table["| mmstream"][3:6] == ["1000.00", "1.00", "2.5"]
    assert "failed" in table["| litdata"][1]
    assert table["| energon"][1] == "did not reach batch 10 in 15 s"
    assert table["| energon"][6:9] == ["1.00", "> 15.00", "> 15.00"]
    assert f"- energon: {slow.note}" in out.getvalue()
    with redirect_stdout(io.StringIO()) as out:
        print_table(SCENARIOS["50/40"], rows[1:2], runs, 1000, SHORT)
    cells = out.getvalue().splitlines()[5].split(" | ")
    assert (len(cells), cells[2:4], cells[6]) == (len(SHORT), ["2.5", "1.00"], "500")


def test_limits_of_a_row_are_defaults_of_a_copy_of_the_package(tmp_path: Path) -> None:
    limits, package = all_rows([])["mmstream, 32 in flight"].limits, ROOT / "mmstream"
    path = "storage/transfer_limits.py"
    copy_with_defaults(package, tmp_path / "copy", {path: limits})
    for name in limits:
        assert f"    {name}: int = 32\n" in (tmp_path / "copy" / path).read_text()
    with pytest.raises(RuntimeError, match="no number absent"):
        copy_with_defaults(package, tmp_path / "again", {path: {"absent": 1}})


class Stuck:
    """Batches of which the third never comes."""

    def __init__(self, settings: Settings) -> None:
        Stamp(settings.scratch).stamp()

    def __iter__(self) -> Iterator[list[int]]:
        yield [1, 2]
        yield [3]
        time.sleep(100)


def test_a_run_ends_in_its_time_while_it_waits_for_a_batch(tmp_path: Path) -> None:
    settings = {"bucket": "", "prefix": "", "num_names": 1, "seconds": 2, "num_workers": 1}
    words = json.dumps({**settings, "scratch": str(tmp_path)})
    program = (
        f"from {__name__} import Stuck; from {serve.__module__} import serve; serve(None, Stuck)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "run", words], cwd=ROOT, capture_output=True, timeout=500
    )
    figures = json.loads(done.stdout)
    assert figures["counts"] == [2, 1]
    assert figures["pending_s"] > 0.2
    assert figures["ended"] < 60
