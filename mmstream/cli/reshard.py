"""``mmstream reshard``: a dataset anew, in the order of its packs."""

from __future__ import annotations

from typing import Any

import click

from mmstream.cli.shared import AT_LEAST_0, AT_LEAST_1, allow_foreign_urls, command, say


@command("mmstream reshard s3://bucket/corpus s3://bucket/packs --plan 8192-3f0a9c51e2b7")
@click.argument("source")
@click.argument("dest")
@click.option("--plan", metavar="NAME", required=True, help="Name of the plan, or its folder.")
@click.option(
    "--shuffle-seed",
    type=int,
    default=0,
    show_default=True,
    help="Shuffle all samples by this seed, then pack them.",
)
@click.option("--no-shuffle", is_flag=True, help="Keep the packs of the plan, in its order.")
@click.option(
    "--samples-per-shard",
    type=AT_LEAST_1,
    help="Samples of a shard, or some more.  [default: as in SOURCE]",
)
@click.option(
    "--num-workers", type=AT_LEAST_0, default=1, show_default=True, help="Worker processes."
)
@allow_foreign_urls
def reshard(
    source: str,
    dest: str,
    shuffle_seed: int,
    no_shuffle: bool,
    allow_foreign_urls: bool,
    **options: Any,
) -> None:
    """Write the dataset SOURCE anew to DEST, so that each pack is one range of a shard.

    The bytes of samples stay as they are. The lengths and the plan are written too. Samples that
    the plan leaves out are not written. A call that was killed goes on when it is made again.
    """
    from mmstream.converting.reshard import reshard as run
    from mmstream.dataset.open import open_dataset

    dataset = open_dataset(source, allow_foreign_urls=allow_foreign_urls)
    seed = None if no_shuffle else shuffle_seed
    plan = run(dataset, dest, shuffle_seed=seed, **options)
    say(
        f"{plan.members.size:,} samples in {plan.num_units:,} packs, {plan.fill:.1%} full, in "
        f"{len(plan.shards):,} shards"
    )
    if plan.members.size < len(dataset):
        say(f"{len(dataset) - plan.members.size:,} samples that the plan leaves out stayed behind")
    say(f"plan: {plan.url}")
