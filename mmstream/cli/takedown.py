"""``mmstream takedown``: take samples out of all further training."""

from __future__ import annotations

import click
import numpy as np

from mmstream.cli.shared import allow_foreign_urls, command, say
from mmstream.display.text import count_text
from mmstream.errors import escaped


@command("mmstream takedown s3://bucket/corpus --keys-file keys.txt --reason 'request 17'")
@click.argument("url")
@click.option("--keys-file", required=True, metavar="FILE", help="Which samples: one key a line.")
@click.option("--by-id", is_flag=True, help="The lines are ids of rows, as the sidecars have them.")
@click.option("--reason", required=True, metavar="TEXT", help="Kept, and shown in messages.")
@click.option(
    "--allow-unknown", is_flag=True, help="Take down those that are there; count the others."
)
@allow_foreign_urls
def takedown(
    url: str,
    keys_file: str,
    by_id: bool,
    reason: str,
    allow_unknown: bool,
    allow_foreign_urls: bool,
) -> None:
    """Take samples of the dataset at URL down: no run shows them any more.

    That holds for runs that start or resume from now on; states of earlier runs go on. All samples
    with a key are taken down, in whatever shards they are. Their bytes stay in the shards:
    `mmstream reshard` writes a dataset without them.
    """
    from mmstream.dataset.open import open_dataset
    from mmstream.dataset.removed import take_down
    from mmstream.dataset.select import having_keys

    if not reason.strip():
        raise click.UsageError("--reason: say why, such as 'request 17'")
    dataset = open_dataset(url, bad_list=False, allow_foreign_urls=allow_foreign_urls)
    view, unknown = having_keys(
        dataset, keys_file, column="id" if by_id else "key", allow_unknown=allow_unknown
    )
    refs = view.refs(np.arange(len(view)))
    count = take_down(dataset, refs, reason)
    if unknown:
        say(f"{count_text(len(unknown), 'line')} of {keys_file} are of no sample", err=True)
    earlier = f"; {len(refs) - count:,} were taken down before" * (count < len(refs))
    say(f"{count_text(count, 'sample')} taken down{earlier}: {escaped(reason)}")
