"""The report of ``mmstream demo``: an HTML page, and a table in Markdown.

The page is one file that needs nothing else: images are data URLs, charts are SVG, there is no
script. Its content security policy forbids the browser to load anything.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from mmstream.demo.charts import Line, line_chart
from mmstream.display import batch_sheet

if TYPE_CHECKING:
    from mmstream.audit.compare_runs import Proof
    from mmstream.converting.convert import ConvertReport

__all__ = ["Evidence", "Fact", "facts", "html_report", "markdown_report"]

MetricsLines = Mapping[tuple[int, int], Mapping[str, Any]]


@dataclass(frozen=True)
class Evidence:
    """The results of the demo, from which the report is made."""

    report: ConvertReport
    proof: Proof
    undisturbed: MetricsLines
    """(epoch, step) -> line of the metrics, of the undisturbed run."""
    killed: MetricsLines
    """The same of the disturbed run, up to the kill."""
    disturbed: MetricsLines
    """The same of the disturbed run after its resume, from the first step to the last."""
    batch: Mapping[str, Any]
    """A batch of the corpus, with images."""


class Fact(NamedTuple):
    """One line of the report's table."""

    name: str
    value: str
    good: bool | None = None
    """Whether it is as promised. None: nothing was promised."""


def facts(evidence: Evidence) -> list[Fact]:
    """Return the lines of the table: what happened, and what was proven."""
    report = evidence.report
    proof = evidence.proof
    world_sizes = [line["world_size"] for _, line in sorted(evidence.disturbed.items())]
    epochs = sorted({epoch for epoch, _ in evidence.disturbed})
    batch_size = len(next(iter(evidence.undisturbed.values()))["keys"])
    first_loss = _mean_loss(evidence.disturbed, epochs[0])
    last_loss = _mean_loss(evidence.disturbed, epochs[-1])
    speed = median(line["samples_per_s"] for line in evidence.undisturbed.values())
    wait = median(line["wait_fraction"] for line in evidence.undisturbed.values())
    return [
        Fact(
            "corpus",
            f"{report.num_rows} rows -> {report.num_samples} samples, "
            f"{report.num_shards} shards, {report.num_bytes / 1e6:.1f} MB, "
            f"{report.num_rejects} rejected",
        ),
        Fact("steps", f"{proof.num_steps} of {batch_size} samples, {len(epochs)} epochs"),
        Fact(
            "disturbed run",
            f"two processes, one of them killed at step {len(evidence.killed)}; "
            f"resumed with one process from the checkpoint of step {world_sizes.count(2)}",
        ),
        Fact(
            "samples lost / repeated per epoch",
            f"{proof.lost} / {proof.repeated}",
            proof.lost + proof.repeated == 0,
        ),
        Fact(
            "global batches unlike the plan / the undisturbed run",
            f"{proof.unplanned} / {proof.different}",
            proof.unplanned + proof.different == 0,
        ),
        Fact(
            "loss of the two runs",
            f"largest relative difference of a step {proof.loss_difference:.1e}",
            proof.loss_difference < proof.max_loss_difference,
        ),
        Fact("mean loss of the first and the last epoch", f"{first_loss:.3f}, {last_loss:.3f}"),
        Fact(
            "speed of the undisturbed run",
            f"{speed:.0f} samples/s, {100 * wait:.0f} % of a step waiting for data (medians)",
        ),
    ]


def markdown_report(evidence: Evidence) -> str:
    """Return the table as Markdown, for a terminal."""
    verdict = "holds" if evidence.proof.holds else "DOES NOT HOLD"
    lines = [f"# mmstream demo: the proof {verdict}", "", "| | |", "|---|---|"]
    lines += [f"| {fact.name} | {fact.value} |" for fact in facts(evidence)]
    return "\n".join(lines) + "\n"


def html_report(evidence: Evidence) -> str:
    """Return the HTML page."""
    holds = evidence.proof.holds
    verdict = "The proof holds" if holds else "The proof does not hold"
    body = [
        f'<p class="verdict {"good" if holds else "bad"}">{verdict}</p>',
        "<p>A small CLIP was trained twice on the same corpus. The first run was undisturbed, in "
        "one process. The second run had two processes. One of them was killed with "
        "<code>kill -9</code>, and the run was resumed with one process. The training logs of both "
        "runs were compared with each other, and with the order that was computed before any data "
        "was read.</p>",
        _table(facts(evidence)),
        "<h2>Loss of both runs</h2>",
        _loss_chart(evidence),
        "<p>The resumed run starts at the newest checkpoint. It repeats the steps that were lost "
        "with the process, on the same samples. Then it continues as the undisturbed run did.</p>",
        "<h2>Waiting for data</h2>",
        _wait_chart(evidence.undisturbed),
        "<p>How much of each step's time training waited for the next batch, in the undisturbed "
        "run. The first step waits until the loader has started and read its first samples.</p>",
        "<h2>A batch as training gets it</h2>",
        batch_sheet(evidence.batch),
        "<p class='quiet'>Photographs and captions: COCO 2017, scaled down. Authors and licences "
        "are listed in mmstream's <code>corpus/ATTRIBUTION.md</code>.</p>",
    ]
    return _PAGE.format(title="mmstream demo", body="\n".join(body))


def _table(rows: Iterable[Fact]) -> str:
    marks = {True: '<td class="good">&#10003;</td>', False: '<td class="bad">&#10007;</td>'}
    lines = [
        f"<tr>{marks.get(fact.good, '<td></td>')}<th>{html.escape(fact.name)}</th>"  # type: ignore[arg-type]
        f"<td>{html.escape(fact.value)}</td></tr>"
        for fact in rows
    ]
    return f"<table>{''.join(lines)}</table>"


def _loss_chart(evidence: Evidence) -> str:
    world_sizes = [line["world_size"] for _, line in sorted(evidence.disturbed.items())]
    resume_step = world_sizes.count(2)
    killed = _series(evidence.killed, "loss")
    lines = [
        Line("undisturbed, one process", _series(evidence.undisturbed, "loss"), "wide"),
        Line(
            "resumed with one process", _series(evidence.disturbed, "loss")[resume_step:], "second"
        ),
        Line("disturbed, with two processes until the kill", killed, "first"),
    ]
    marks: dict[float, str] = {len(killed): "kill -9", resume_step: "checkpoint"}
    return line_chart(lines, title="loss of each step", x_name="step", marks=marks)


def _wait_chart(undisturbed: MetricsLines) -> str:
    percent = [(x, 100 * y) for x, y in _series(undisturbed, "wait_fraction")]
    title = "% of a step's time spent waiting for data"
    return line_chart([Line("", percent, "thin")], title=title, x_name="step", top=100, height=150)


def _series(steps: MetricsLines, name: str) -> list[tuple[float, float]]:
    """Return (step since the start of the run, value) for each step."""
    return [
        (number, float(line[name])) for number, (_, line) in enumerate(sorted(steps.items()), 1)
    ]


def _mean_loss(steps: MetricsLines, epoch: int) -> float:
    losses = [line["loss"] for step, line in steps.items() if step[0] == epoch]
    return float(sum(losses) / max(1, len(losses)))


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ --ink: #1c2430; --quiet: #6b7685; --line: #dde2e8; --paper: #fff; --first: #d1495b;
  --second: #2a6fbb; --wide: #c3cad3; --good: #1d8348; --bad: #c0392b; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e4e8ee; --quiet: #93a0b0; --line: #333c48;
  --paper: #14181e; --first: #ff7b8b; --second: #6cb0ff; --wide: #4a5563; --good: #58d68d;
  --bad: #ff7b6b; }} }}
body {{ max-width: 960px; margin: 2.5rem auto; padding: 0 1.2rem; color: var(--ink);
  background: var(--paper); font: 15px/1.55 system-ui, sans-serif; }}
h1 {{ font-size: 1.7rem; margin: 0 0 .8rem; }}
h2 {{ font-size: 1.15rem; margin: 2.4rem 0 .6rem; }}
p {{ max-width: 46rem; }}
.verdict {{ display: inline-block; margin: 0 0 .4rem; padding: .25rem .9rem; border-radius: 99px;
  font-weight: 600; border: 1.5px solid currentColor; }}
.good {{ color: var(--good); }} .bad {{ color: var(--bad); }} .quiet {{ color: var(--quiet); }}
table {{ border-collapse: collapse; width: 100%; margin: 1rem 0; }}
tr {{ border-top: 1px solid var(--line); }}
tr:last-child {{ border-bottom: 1px solid var(--line); }}
th {{ text-align: left; font-weight: 500; width: 24rem; }}
td, th {{ padding: .42rem .8rem .42rem 0; vertical-align: top; }}
td:first-child {{ width: 1.2rem; font-weight: 700; }}
svg {{ width: 100%; height: auto; display: block; }}
svg text {{ fill: var(--quiet); font: 12px system-ui, sans-serif; }}
svg .grid {{ stroke: var(--line); }}
svg polyline {{ fill: none; stroke-width: 1.6; stroke-linejoin: round; }}
svg .wide {{ stroke: var(--wide); stroke-width: 7; }} svg .first {{ stroke: var(--first); }}
svg .second {{ stroke: var(--second); stroke-width: 3.4; }} svg .thin {{ stroke: var(--second); }}
svg .mark {{ stroke: var(--quiet); stroke-dasharray: 3 4; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
