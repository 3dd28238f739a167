"""What the logs of a run of ``mmstream train --log-keys`` say, beside the plan of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mmstream as mm
from mmstream.audit import check_logs, read_history, steps_logged
from mmstream.cli.training import read_state
from mmstream.packing.plan import PackPlan
from mmstream.state import order_of_state


def metrics(out: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Return the complete lines of a rank's metrics so far."""
    path = out / f"metrics-rank{rank}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def require_exact(
    shards: str, out: Path, num_steps: int, plan: PackPlan | None = None
) -> list[dict[str, Any]]:
    """Require that a run has had the steps of its plan: each sample once, none lost.

    Returns:
        The line of each step, with the keys of all ranks.
    """
    order, _, _ = order_of_state(read_state(str(out)), mm.open_dataset(shards), plan)
    lines, rows = read_history(out)
    check = check_logs(order, rows, steps_logged(order, rows))
    assert check.holds, check.faults
    assert check.num_steps == num_steps
    in_order = [lines[step] for step in sorted(lines)]
    assert [line["num_steps"] for line in in_order] == list(range(1, num_steps + 1))
    return in_order
