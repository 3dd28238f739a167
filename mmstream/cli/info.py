"""``mmstream info``: what a dataset or a mixture holds. It does not import torch."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import click

from mmstream.cli.shared import AT_LEAST_0, allow_foreign_urls, command, say
from mmstream.errors import SampleError, escaped

__all__ = ["info"]


@command("mmstream info s3://bucket/corpus")
@click.argument("url")
@click.option(
    "--keys",
    "num_keys",
    type=AT_LEAST_0,
    default=5,
    show_default=True,
    help="Number of first keys to show.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@allow_foreign_urls
def info(url: str, num_keys: int, as_json: bool, allow_foreign_urls: bool) -> None:
    """Show what the dataset at URL holds: shards, samples, fields, bytes, first keys.

    If URL is the JSON file of a mixture: its weights, the end of an epoch, and the same of each
    source.
    """
    from mmstream.dataset.mixture import Mixture
    from mmstream.dataset.mixture_file import open_data

    data = open_data(url, allow_foreign_urls=allow_foreign_urls)
    if not isinstance(data, Mixture):
        about = _about(data, num_keys)
        if as_json:
            say(json.dumps(about))
        else:
            _print_dataset(data, about)
        return
    sources = {name: _about(dataset, num_keys) for name, dataset in data.datasets.items()}
    if as_json:
        epoch = "stop" if isinstance(data.epoch_steps, str) else "epoch_steps"
        sizes = {"num_samples": len(data), "num_shards": data.num_shards}
        settings = {epoch: data.epoch_steps, "weights": data.weights}
        say(json.dumps({**sizes, **settings, "sources": sources}))
        return
    say(f"mixture of {len(sources)} sources, {len(data):,} samples; {data.epoch_text}")
    for step, fractions in data.fractions.items():
        weights = ", ".join(f"{name} {fraction:.4g}" for name, fraction in fractions.items())
        say(f"  {f'from step {step:,}' if step else 'weights'}: {weights}")
    for name, dataset in data.datasets.items():
        say(f"{name}: ", nl=False)
        _print_dataset(dataset, sources[name])


def _about(dataset: Any, num_keys: int) -> dict[str, Any]:
    """Return what `--json` prints for a dataset."""
    manifest = dataset.manifest
    samples = _first_samples(dataset, num_keys)
    names = dict.fromkeys(name for sample in samples for name in sample if name[:2] != "__")
    return {
        "url": dataset.store.url,
        "num_samples": len(dataset),
        "num_bad": len(dataset.bad),
        "num_shards": dataset.num_shards,
        "num_bytes": manifest.num_bytes,
        "checksums": manifest.checksums,
        "fields": manifest.fields or names,
        "keys": [sample["__key__"] for sample in samples],
        "source": manifest.source,
    }


def _print_dataset(dataset: Any, about: dict[str, Any]) -> None:
    say(dataset)
    if dataset.num_shards:
        sizes = dataset.counts
        say(f"  samples per shard: {sizes.min():,} to {sizes.max():,}")
    say(f"  checksums of samples: {about['checksums'] or 'none'}")
    if about["num_bad"]:
        say(f"  on the bad list, left out of every epoch: {about['num_bad']:,} samples")
    if not dataset.manifest.fields and dataset.num_shards:
        say(f"  fields of the first {len(about['keys'])} samples:")
    for name, count in about["fields"].items():
        say(f"  .{escaped(name)}" + (f": {count:,}" if count is not None else ""))
    say(f"  first keys: {', '.join(map(escaped, about['keys']))}")
    for name, value in about["source"].items():
        if value is not None:
            say(f"  {escaped(name)}: {escaped(value)}")


def _first_samples(dataset: Any, count: int) -> list[dict[str, Any]]:
    """Return the first samples. Print those that are bad."""
    samples = []
    for index in islice(range(len(dataset)), count):
        try:
            samples.append(dataset[index])
        except SampleError as error:
            say(f"bad: {error}", err=True)
    return samples
