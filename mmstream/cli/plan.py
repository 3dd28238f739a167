"""``mmstream plan``: which samples form packs, and how full these are."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, get_args

import click

from mmstream.cli.shared import AT_LEAST_0, AT_LEAST_1, allow_foreign_urls, command, say
from mmstream.packing.settings import Overlong

__all__ = ["plan"]


@command("mmstream plan s3://bucket/corpus --max-tokens 8192")
@click.argument("url")
@click.option("--max-tokens", type=AT_LEAST_1, required=True, help="Tokens of a pack.")
@click.option(
    "--measure",
    metavar="NAME",
    default="default",
    show_default=True,
    help="Name of the measure, or its folder or URL.",
)
@click.option("--name", metavar="NAME", help="Name of the plan.  [default: measure and max-tokens]")
@click.option(
    "--output",
    "folder",
    metavar="FOLDER",
    help="Folder or URL of the plan.  [default: mmstream.plan.NAME beside the index]",
)
@click.option("--max-documents", type=AT_LEAST_1, help="Documents of a pack.")
@click.option("--max-images", type=AT_LEAST_1, help="Images of a pack.")
@click.option(
    "--max-patches", type=AT_LEAST_1, help="Patches of all pictures and frames of a pack."
)
@click.option("--max-seconds", type=AT_LEAST_1, help="Seconds of sound of a pack.")
@click.option(
    "--document-multiple-of",
    type=AT_LEAST_1,
    default=1,
    show_default=True,
    help="Each document takes a multiple of so many tokens: 2 * CP * TP with context parallelism.",
)
@click.option(
    "--where",
    metavar="CONDITION",
    default="",
    help='Pack only these samples: "width >= 200 and num_label_tokens > 8". Names are columns of '
    "the measure.",
)
@click.option(
    "--overlong",
    type=click.Choice(get_args(Overlong)),
    default="reject",
    show_default=True,
    help="Leave out samples that are longer than a pack, or cut plain text.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Plan all shards anew. Without it, packs of an earlier plan stay, and appended shards "
    "form new ones.",
)
@click.option(
    "--num-workers",
    type=AT_LEAST_0,
    help="Processes.  [default: one for each million samples, at most one for each core]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@allow_foreign_urls
def plan(
    url: str, max_tokens: int, as_json: bool, allow_foreign_urls: bool, **options: Any
) -> None:
    """Decide which samples of the dataset at URL form packs of at most --max-tokens tokens.

    `mmstream measure` must have counted the lengths of all samples before. The plan is written
    beside the index. The lines say how full the packs are, how full they could be, what is left
    out, and what other lengths of packs would give.
    """
    from mmstream.dataset.open import open_dataset
    from mmstream.packing.plan_packs import measure_of, plan_packs
    from mmstream.packing.plan_report import plan_report

    dataset = open_dataset(url, allow_foreign_urls=allow_foreign_urls)
    packs = plan_packs(dataset, max_tokens, **options)
    report = plan_report(packs, measure_of(dataset, options["measure"]), dataset.bad)
    if as_json:
        say(json.dumps({"folder": packs.url, **asdict(report)}))
        return
    for line in report.lines(max_tokens):
        say(line)
    say(f"plan: {packs.url}")
