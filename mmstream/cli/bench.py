"""``mmstream bench``: how fast storage, decoding and loader are here. It imports torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mmstream.cli.shared import (
    AT_LEAST_1,
    allow_foreign_urls,
    command,
    load_pipeline,
    say,
)
from mmstream.decoding.fields import image_fields, undecoded_media
from mmstream.display.markup import count_text, size_text, time_text
from mmstream.errors import SampleError, escaped

if TYPE_CHECKING:
    from mmstream.forecast.speed import SpeedForecast

__all__ = ["bench"]

IMAGE_SIZE, BATCH_SIZE = 224, 64

BUSY_SHARE = 0.1
"""Share of the cores that other programs take, from which the report says so."""

NUM_TRIES = 10
"""Samples that are read, at most, to see which fields a dataset has."""

_LIMITS = {
    "storage": "storage: it gives no more bytes a second",
    "cpu": "the cores of this machine",
    "workers": "the workers, and cores are free: more of them are faster",
    "main process": "the main process, which runs on one core",
    "reader process": "the reader process, which runs on one core",
    "none": "waiting: neither storage nor the cores are full",
}


@command("mmstream bench s3://bucket/corpus --image-size 224 --global-batch-size 256")
@click.argument("url")
@click.option(
    "--pipeline",
    "pipeline_name",
    metavar="MODULE:OBJECT",
    help="The pipeline of training: a mm.Pipeline, or a function that takes the dataset and "
    "returns one.",
)
@click.option(
    "--image-size",
    type=AT_LEAST_1,
    metavar="PIXELS",
    help=f"Without --pipeline: side of the decoded pictures.  [default: {IMAGE_SIZE}]",
)
@click.option(
    "--global-batch-size",
    type=AT_LEAST_1,
    help="Without --pipeline: samples of a step, over all ranks.  "
    f"[default: {BATCH_SIZE}, or those of a small dataset]",
)
@click.option(
    "--ranks",
    "num_ranks",
    type=AT_LEAST_1,
    default=1,
    show_default=True,
    help="Ranks of the run. Rank 0 is measured, alone.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=30.0,
    show_default=True,
    help="Of all measurements together. The starts of processes come on top.",
)
@click.option(
    "--cold",
    is_flag=True,
    help="Have a local disk read everything again, in place of the page cache.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@allow_foreign_urls
def bench(
    url: str,
    pipeline_name: str | None,
    image_size: int | None,
    global_batch_size: int | None,
    as_json: bool,
    allow_foreign_urls: bool,
    **options: Any,
) -> None:
    """Measure how fast the data at URL becomes batches here, and predict the speed of a run.

    Storage alone is read with 1 to 64 connections. Then the loader runs with a few numbers of
    workers and threads. The report says what limits it, which settings to use, and how many samples
    a second a run will get with them.

    URL may also be the JSON file of a mixture.
    """
    from mmstream.dataset.mixture_file import open_data
    from mmstream.forecast.bench import bench as run

    if pipeline_name is not None and (image_size, global_batch_size) != (None, None):
        raise click.UsageError("--image-size and --global-batch-size go without --pipeline")
    data = open_data(url, allow_foreign_urls=allow_foreign_urls)
    notes: list[str] = []
    if pipeline_name is not None:
        pipeline = load_pipeline(pipeline_name, data)
    else:
        pipeline = _pipeline(data, image_size, global_batch_size, notes)
    forecast = run(pipeline, progress=True, **options)
    if as_json:
        say(json.dumps(_as_json(forecast)))
        return
    for line in _lines(forecast, cold=options["cold"]):
        say(line)
    for note in notes:
        say(note)


def _pipeline(data: Any, image_size: int | None, batch_size: int | None, notes: list[str]) -> Any:
    """Return a pipeline that decodes pictures, if there are any. Note what it leaves out."""
    from mmstream.dataset.source import datasets_of
    from mmstream.decoding.decode import Decode
    from mmstream.decoding.image.decoder import ImageDecoder
    from mmstream.decoding.stored import baked_content
    from mmstream.pipeline import Pipeline

    fields: dict[str, int | None] = {}
    for dataset in datasets_of(data):
        fields |= dataset.manifest.fields or dict.fromkeys(_first_good_sample(dataset))
    decode = None
    if all(baked_content(dataset) is not None for dataset in datasets_of(data)):
        decode = Decode.baked()
        notes.append("fields were read as they were baked")
    elif image_fields(fields):
        size = image_size or IMAGE_SIZE
        decode = Decode(image=ImageDecoder(size=size))
        notes.append(f"pictures were decoded to {size}x{size}")
    elif image_size is not None:
        raise click.UsageError("--image-size: the samples have no pictures")
    else:
        notes.append("nothing was decoded")
    if media := undecoded_media(fields):
        notes.append(f"videos and recordings stayed as they are: {media}")
    if decode is None or not decode.is_baked:
        notes[-1] += ". Texts were not tokenized"
    notes[:] = [f"{'; '.join(notes)}. --pipeline measures your own."]
    if batch_size is None:
        batch_size = max(1, min(BATCH_SIZE, len(data)))
        if batch_size < BATCH_SIZE:
            notes.append(
                f"the dataset has fewer than {BATCH_SIZE} samples, so a step has {batch_size}: "
                "figures of a larger dataset differ"
            )
    return Pipeline(data, global_batch_size=batch_size, decode=decode)


def _first_good_sample(dataset: Any) -> Mapping[str, Any]:
    """Return the first sample that can be read; an empty one where many cannot."""
    for index in range(min(NUM_TRIES, len(dataset))):
        with suppress(SampleError):
            sample: Mapping[str, Any] = dataset[index]
            return sample
    return {}


def _as_json(forecast: SpeedForecast) -> dict[str, Any]:
    predicted = {"samples_per_s": forecast.samples_per_s, "epoch_s": forecast.epoch_s}
    return asdict(forecast) | predicted


def _lines(forecast: SpeedForecast, *, cold: bool) -> Iterator[str]:
    """Yield the lines of the report."""
    load = os.getloadavg()[0]
    yield (
        f"{escaped(forecast.url)}: {forecast.num_samples:,} samples an epoch, "
        f"{size_text(forecast.mean_sample_bytes)} each; "
        f"{count_text(forecast.num_steps, 'step')}; {forecast.cpu_limit:g} cores, load {load:.1f}"
    )
    if forecast.cached_share is not None:
        words = "the disk was read, as --cold asks" if cold else "--cold measures the disk"
        yield f"page cache: it had {forecast.cached_share:.0%} of the bytes; {words}"
    yield ""
    yield from _connection_lines(forecast)
    yield ""
    yield from _loader_lines(forecast)
    yield ""
    yield from _stage_lines(forecast)
    yield from _advice_lines(forecast)


def _connection_lines(forecast: SpeedForecast) -> Iterator[str]:
    yield f"storage alone, in ranges of {size_text(forecast.mean_range_bytes)}:"
    yield "  connections      MB/s   first byte: p50      p95      p99 ms"
    for speed in forecast.connections:
        times = (speed.first_byte_p50_s, speed.first_byte_p95_s, speed.first_byte_p99_s)
        words = "".join(f"{1000 * one_time:9.2f}" for one_time in times)
        troubles = [
            f"{speed.num_throttled} answers asked for fewer requests" * bool(speed.num_throttled),
            f"{speed.num_failed} requests failed" * bool(speed.num_failed),
        ]
        line = f"  {speed.num_connections:11} {speed.mb_per_s:9,.0f}      {words}"
        yield "  ".join(filter(None, [line, *troubles]))


def _loader_lines(forecast: SpeedForecast) -> Iterator[str]:
    yield "loader, workers x threads:"
    yield "                samples/s       of 8 in 10 rounds   MB/s  cores    memory  limited by"
    rows = [
        *((f"{speed.num_workers} x {speed.num_threads}", speed) for speed in forecast.settings),
        ("undecoded", forecast.raw),
        ("once more", forecast.chosen),
    ]
    for name, speed in rows:
        spread = f"{speed.low_samples_per_s:,.0f} to {speed.high_samples_per_s:,.0f}"
        yield (
            f"  {name:12} {speed.samples_per_s:10,.0f} {spread:>23} {speed.mb_per_s:6,.0f} "
            f"{speed.cores:6.1f} {size_text(speed.memory_bytes):>9}  {speed.limit}"
        )


def _stage_lines(forecast: SpeedForecast) -> Iterator[str]:
    """Yield the CPU time of a sample, and what limits the loader."""
    parts = ", ".join(
        f"{stage} {1e6 * seconds:,.0f}"
        for stage, seconds in forecast.stage_s.items()
        if seconds >= 0.5e-6
    )
    yield f"CPU time of a sample, in microseconds: {parts}"
    chosen = forecast.chosen
    words = _LIMITS[chosen.limit]
    if chosen.limit == "cpu":
        words += f", most of it in {max(forecast.stage_s, key=forecast.stage_s.__getitem__)}"
    yield f"limit: {words}"


def _advice_lines(forecast: SpeedForecast) -> Iterator[str]:
    """Yield the settings to use, and the prediction."""
    chosen = forecast.chosen
    yield f"use: num_workers={chosen.num_workers}, num_threads={chosen.num_threads}"
    if chosen.mean_in_flight:
        yield (
            f"connections: the reader process finds their number by itself; it had "
            f"{chosen.mean_in_flight:.0f} requests in flight"
        )
        size = size_text(forecast.full_window_bytes)
        yield (
            f"windows: {size} on this rank when they are full, which fits in memory"
            if forecast.window_bytes is None
            else f"windows: {size} on this rank are more than a quarter of the memory; "
            f"window_bytes={forecast.window_bytes} is not"
        )
    if chosen.num_throttled:
        yield f"the storage asked {chosen.num_throttled} times for fewer requests"
    yield (
        f"prediction: {forecast.samples_per_s:,.0f} samples/s on this rank, an epoch in "
        f"{time_text(forecast.epoch_s)}; a training step of {forecast.batch_size} rows that takes "
        f"{1000 * forecast.batch_s:,.1f} ms or longer does not wait"
    )
    if chosen.other_cores > BUSY_SHARE * forecast.cpu_limit:
        yield (
            f"other programs took {chosen.other_cores:.1f} cores meanwhile: a run without them is "
            "faster"
        )
