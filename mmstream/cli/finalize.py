"""``mmstream finalize``: from the shards of several ranges to one dataset, without torch."""

from __future__ import annotations

import click

from mmstream.cli.convert_report import max_rejects_of, max_rejects_option, show_end
from mmstream.cli.shared import command


@command("mmstream finalize s3://bucket/corpus", splits="--split", shard_range="--shard-range")
@click.argument("dest")
@click.option(
    "--split",
    "split",
    metavar="NAME,...",
    help="Names of all splits, if there are some. The option of convert works, too.",
)
@max_rejects_option
def finalize(dest: str, split: str | None, max_rejects: str) -> None:
    """Make a dataset of the shards at DEST that `mmstream convert --shard-range` wrote.

    All shards must be there. The exit code is that of `mmstream convert`.
    """
    from mmstream.converting.convert import finalize as run

    max_rejects_of(max_rejects)  # a wrong one is refused before the dataset is finished
    names = [name.partition("=")[0].strip() for name in split.split(",")] if split else None
    show_end(run(dest, splits=names, max_rejects=1.0), dest, max_rejects)
