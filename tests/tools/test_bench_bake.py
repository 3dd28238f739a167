"""The benchmark of baked epochs runs, and compares what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench import bake


def test_each_row_reads_its_dataset_and_is_compared_with_raw_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bake.bake_corpus(tmp_path, num_samples=64, size=16)
    runs = {(row, 0): [bake.run(row, tmp_path, 0, size=16, seconds=0.01)] for row in bake.ROWS}
    assert all(run["samples/s"] > 0 for (run,) in runs.values())
    (baked,), (raw,) = runs["baked", 0], runs["raw", 0]
    assert baked["bytes"] == raw["bytes"] > 16 * 16 * 3
    raw = {"samples/s": 100.0, "CPU us": 50.0, "bytes": 1.0}
    bake.report({("baked", 0): [{**raw, "samples/s": 200.0}], ("raw", 0): [raw]})
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert [row.split(" | ")[3] for row in rows] == ["2.00x", "1.00x"]
