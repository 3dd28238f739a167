"""``mmstream takedown``: take samples out of all further training."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import click
import numpy as np

from mmstream.cli.shared import allow_foreign_urls, command, say
from mmstream.display.text import count_text
from mmstream.errors import escaped
from mmstream.types import SampleRef

if TYPE_CHECKING:
    from mmstream.dataset.dataset import Dataset


@command("mmstream takedown s3://bucket/corpus --keys-file keys.txt --reason 'request 17'")
@click.argument("url")
@click.option("--keys-file", required=True, metavar="FILE", help="Which samples: one key a line.")
@click.option("--by-id", is_flag=True, help="The lines are ids of rows, as the sidecars have them.")
@click.option("--reason", required=True, metavar="TEXT", help="Kept, and shown in messages.")
@click.option(
    "--allow-unknown", is_flag=True, help="Take down those that are there; count the others."
)
@click.option(
    "--erase",
    is_flag=True,
    help="Also overwrite them in the shards, once and for all. Runs must have ended.",
)
@click.option("--yes", is_flag=True, help="With --erase: do not ask.")
@allow_foreign_urls
def takedown(
    url: str,
    keys_file: str,
    by_id: bool,
    reason: str,
    allow_unknown: bool,
    erase: bool,
    yes: bool,
    allow_foreign_urls: bool,
) -> None:
    """Take samples of the dataset at URL down: no run shows them any more.

    That holds for runs that start or resume from now on; states of earlier runs go on. All samples
    with a key are taken down, in whatever shards they are. Their bytes stay in the shards, unless
    --erase overwrites them.
    """
    from mmstream.dataset.open import open_dataset
    from mmstream.dataset.removed import erased_keys, take_down
    from mmstream.dataset.select import having_keys

    if not reason.strip():
        raise click.UsageError("--reason: say why, such as 'request 17'")
    if yes and not erase:
        raise click.UsageError("--yes would do nothing here: it goes with --erase")
    dataset = open_dataset(url, bad_list=False, allow_foreign_urls=allow_foreign_urls)
    column: Literal["key", "id"] = "id" if by_id else "key"
    erased = erased_keys(dataset.index_store, column)
    view, unknown = having_keys(
        dataset, keys_file, column=column, allow_unknown=allow_unknown, erased=erased
    )
    refs = view.refs(np.arange(len(view)))
    digests = _digests(dataset, refs, yes) if erase else {}
    count = take_down(dataset, refs, reason, digests)
    if unknown:
        say(f"{count_text(len(unknown), 'line')} of {keys_file} are of no sample", err=True)
    earlier = f"; {len(refs) - count:,} were taken down before" * (count < len(refs))
    say(f"{count_text(count, 'sample')} taken down{earlier}: {escaped(reason)}")
    if erase:
        _erase(dataset)


def _digests(dataset: Dataset, refs: Sequence[SampleRef], yes: bool) -> dict[SampleRef, list[str]]:
    """Return what to keep of the keys of samples that can be erased, after asking."""
    from mmstream.converting.erase import digests_of, require_erasable

    require_erasable(dataset, refs)
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("--erase asks, and this is not a terminal: pass --yes")
        shards = count_text(len({shard for shard, _ in refs}), "shard")
        click.confirm(
            f"{count_text(len(refs), 'sample')} in {shards} of {escaped(dataset.store.url)} will "
            "be overwritten for ever. Have all runs that read them ended?",
            abort=True,
        )
    return digests_of(dataset, refs)


def _erase(dataset: Dataset) -> None:
    """Erase what is to be erased, and say what was done and what was not."""
    from mmstream.converting.erase import UNTOUCHED, erase

    shards = []
    for shard in erase(dataset):
        shards.append(shard)
        say(f"{shard.name}: {count_text(shard.num_samples, 'sample')} erased, sha256")
        say(f"  before {shard.before}")
        say(f"  after  {shard.after}")
    say(f"not touched: {UNTOUCHED}" if shards else "all of them were erased before")
