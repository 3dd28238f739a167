"""``mmstream info``: what a dataset or a mixture holds; without torch."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import click

from mmstream.cli.command import AT_LEAST_0, command
from mmstream.errors import SampleError

__all__ = ["info"]


@command("mmstream info s3://bucket/corpus")
@click.argument("url")
@click.option(
    "--keys", "num_keys", type=AT_LEAST_0, default=5, show_default=True, help="First keys to show."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(url: str, num_keys: int, as_json: bool) -> None:
    """Say what the dataset at URL holds: shards, samples, fields, bytes, first keys.

    Of a mixture's JSON file: its weights, what ends an epoch, and so of each source.
    """
    from mmstream.dataset.mixture import Mixture
    from mmstream.dataset.mixture_file import open_data

    data = open_data(url)
    if not isinstance(data, Mixture):
        about = _about(data, num_keys)
        if as_json:
            click.echo(json.dumps(about))
        else:
            _tell(data, about)
        return
    sources = {name: _about(dataset, num_keys) for name, dataset in data.datasets.items()}
    if as_json:
        epoch = "stop" if isinstance(data.epoch_steps, str) else "epoch_steps"
        sizes = {"num_samples": len(data), "num_shards": data.num_shards}
        whole = {**sizes, epoch: data.epoch_steps, "weights": data.weights, "sources": sources}
        click.echo(json.dumps(whole))
        return
    click.echo(f"mixture of {len(sources)} sources, {len(data):,} samples; {data.epoch_text}")
    for step, fractions in data.fractions.items():
        parts = ", ".join(f"{name} {fraction:.4g}" for name, fraction in fractions.items())
        click.echo(f"  {f'from step {step:,}' if step else 'weights'}: {parts}")
    for name, dataset in data.datasets.items():
        click.echo(f"{name}: ", nl=False)
        _tell(dataset, sources[name])


def _about(dataset: Any, num_keys: int) -> dict[str, Any]:
    manifest = dataset.manifest
    first = _first_samples(dataset, num_keys)
    seen = dict.fromkeys(name for sample in first for name in sample if name[:2] != "__")
    return {
        "url": dataset.store.url,
        "num_samples": len(dataset),
        "num_bad": len(dataset.bad),
        "num_shards": dataset.num_shards,
        "num_bytes": manifest.num_bytes,
        "fields": manifest.fields or seen,
        "keys": [sample["__key__"] for sample in first],
        "source": manifest.source,
    }


def _tell(dataset: Any, about: dict[str, Any]) -> None:
    click.echo(dataset)
    if dataset.num_shards:
        sizes = dataset.counts
        click.echo(f"  samples a shard: {sizes.min():,} to {sizes.max():,}")
    if about["num_bad"]:
        click.echo(f"  on the bad list, left out of every epoch: {about['num_bad']:,} samples")
    if not dataset.manifest.fields and dataset.num_shards:
        click.echo(f"  fields of the first {len(about['keys'])} samples:")
    for name, count in about["fields"].items():
        click.echo(f"  .{name}" + (f": {count:,}" if count is not None else ""))
    keys = (key if key.isprintable() else repr(key) for key in about["keys"])
    click.echo(f"  first keys: {', '.join(keys)}")
    for name, value in about["source"].items():
        if value is not None:
            click.echo(f"  {name}: {value}")


def _first_samples(dataset: Any, count: int) -> list[dict[str, Any]]:
    found = []
    for sample in islice(range(len(dataset)), count):
        try:
            found.append(dataset[sample])
        except SampleError as error:
            click.echo(f"bad: {error}", err=True)
    return found
