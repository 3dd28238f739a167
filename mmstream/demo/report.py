"""The report of ``mmstream demo``: what happened and what was proven, as a table in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmstream.audit.compare_runs import Proof
    from mmstream.converting.convert import ConvertReport

MetricsLines = Mapping[tuple[int, int], Mapping[str, Any]]
"""(epoch, step) -> line of the metrics."""


def markdown_report(
    report: ConvertReport,
    proof: Proof,
    undisturbed: MetricsLines,
    killed: MetricsLines,
    disturbed: MetricsLines,
) -> str:
    """Return the table, for a terminal and ``report.md``.

    Args:
        report: of the conversion.
        proof: what comparing the logs has shown.
        undisturbed: the metrics of the undisturbed run.
        killed: those of the disturbed run, up to the kill.
        disturbed: those of the disturbed run after its resume, from the first step to the last.
    """
    world_sizes = [line["world_size"] for _, line in sorted(disturbed.items())]
    epochs = sorted({epoch for epoch, _ in disturbed})
    batch_size = len(next(iter(undisturbed.values()))["keys"])
    first_loss, last_loss = (_mean_loss(disturbed, epoch) for epoch in (epochs[0], epochs[-1]))
    speed = median(line["samples_per_s"] for line in undisturbed.values())
    wait = median(line["wait_fraction"] for line in undisturbed.values())
    facts = {
        "corpus": f"{report.num_rows} rows -> {report.num_samples} samples, "
        f"{report.num_shards} shards, {report.num_bytes / 1e6:.1f} MB, "
        f"{report.num_rejects} rejected",
        "steps": f"{proof.num_steps} of {batch_size} samples, {len(epochs)} epochs",
        "disturbed run": f"two processes, one of them killed at step {len(killed)}; "
        f"resumed with one process from the checkpoint of step {world_sizes.count(2)}",
        "samples lost / repeated per epoch": f"{proof.lost} / {proof.repeated}",
        "global batches unlike the plan / the undisturbed run": f"{proof.unplanned} / "
        f"{proof.different}",
        "loss of the two runs": "largest relative difference of a step "
        f"{proof.loss_difference:.1e}",
        "mean loss of the first and the last epoch": f"{first_loss:.3f}, {last_loss:.3f}",
        "speed of the undisturbed run": f"{speed:.0f} samples/s, {100 * wait:.0f} % of a step "
        "waiting for data (medians)",
    }
    verdict = "holds" if proof.holds else "DOES NOT HOLD"
    lines = [f"# mmstream demo: the proof {verdict}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    return "\n".join(lines) + "\n"


def _mean_loss(steps: MetricsLines, epoch: int) -> float:
    losses = [line["loss"] for step, line in steps.items() if step[0] == epoch]
    return float(sum(losses) / max(1, len(losses)))
