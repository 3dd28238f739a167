"""``mmstream bench``: how fast data becomes batches on this machine. It imports torch."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import click

from mmstream.cli.select import choosing, open_chosen
from mmstream.cli.shared import AT_LEAST_1, allow_foreign_urls, command, load_pipeline, say
from mmstream.display.text import count_text, size_text
from mmstream.errors import SampleError, escaped
from mmstream.media.fields import image_fields, undecoded_media

IMAGE_SIZE, BATCH_SIZE = 224, 64

NUM_TRIES = 10
"""Samples that are read, at most, to see which fields a dataset has."""

WARM_UP_SHARE = 0.3
"""Share of the seconds before the count begins. Workers and reader process read ahead meanwhile."""

MAX_WINDOW_BYTES = 128 << 20
"""Most bytes of the windows of a measurement: larger ones would take most of the time to fill."""

ABOUT_EQUAL = 0.9
"""Share of the highest speed from which a setting counts as equally fast."""


class _Speed(NamedTuple):
    """How fast a loader was with one setting."""

    num_workers: int
    num_threads: int
    samples_per_s: float
    batch_s: float
    """Seconds that a batch takes."""
    mb_per_s: float
    """10^6 bytes a second that were read from storage."""
    cores: float
    """CPU seconds a second of all its processes."""
    memory_bytes: int


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
    help="Without --pipeline: samples of a step.  "
    f"[default: {BATCH_SIZE}, or those of a small dataset]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=30.0,
    show_default=True,
    help="Of all measurements together. The starts of processes come on top.",
)
@choosing()
@allow_foreign_urls
def bench(
    url: str,
    pipeline_name: str | None,
    image_size: int | None,
    global_batch_size: int | None,
    seconds: float,
    allow_foreign_urls: bool,
    **choice: Any,
) -> None:
    """Measure how fast the data at URL becomes batches here, and say which settings to use.

    The loader runs with a few numbers of workers and threads, on one rank with all rows. The best
    one runs once more without decoding, which is the speed of reading alone.

    URL may also be the JSON file of a mixture.
    """
    from mmstream.batching.collate import collate

    if pipeline_name is not None and (image_size, global_batch_size) != (None, None):
        raise click.UsageError("--image-size and --global-batch-size go without --pipeline")
    data = open_chosen(url, allow_foreign_urls, choice)
    note = "--pipeline was measured"
    if pipeline_name is not None:
        pipeline = load_pipeline(pipeline_name, data)
    else:
        pipeline, note = _pipeline(data, image_size, global_batch_size)
    pipeline = _without_traces(pipeline)
    say(
        f"{escaped(url)}: {count_text(pipeline.order.steps_per_epoch, 'step')} of "
        f"{pipeline.global_batch_size:,} rows an epoch; {note}"
    )
    say("workers x threads  samples/s      MB/s  cores    memory")
    settings = _settings(pipeline)
    speeds = []
    for setting in settings:
        speeds.append(_measure(pipeline, *setting, seconds / (len(settings) + 1)))
        say(_line(f"{setting[0]} x {setting[1]}", speeds[-1]))
    best = _recommended(speeds)
    undecoded = replace(
        pipeline, decode=None, before=(), transforms=(), batching=None, collate=collate
    )
    reading = _measure(undecoded, *best[:2], seconds / (len(settings) + 1))
    say(_line("reading alone", reading))
    say(f"limit: {_limit(best, reading)}")
    say(
        f"use: num_workers={best.num_workers}, num_threads={best.num_threads}; a training step "
        f"that takes {1000 * best.batch_s:,.1f} ms or longer does not wait"
    )


def _pipeline(data: Any, image_size: int | None, batch_size: int | None) -> tuple[Any, str]:
    """Return a pipeline that decodes pictures, if there are any, and a note of what it does."""
    from mmstream.dataset.source import datasets_of
    from mmstream.decoding.decode import Decode
    from mmstream.decoding.image.decoder import ImageDecoder
    from mmstream.decoding.stored import baked_content
    from mmstream.pipeline import Pipeline

    fields: dict[str, int | None] = {}
    for dataset in datasets_of(data):
        fields |= dataset.manifest.fields or dict.fromkeys(_first_good_sample(dataset))
    decode, note = None, "nothing was decoded"
    if all(baked_content(dataset) is not None for dataset in datasets_of(data)):
        decode, note = Decode.baked(), "fields were read as they were baked"
    elif image_fields(fields):
        size = image_size or IMAGE_SIZE
        decode, note = (
            Decode(image=ImageDecoder(size=size)),
            f"pictures were decoded to {size}x{size}",
        )
    elif image_size is not None:
        raise click.UsageError("--image-size: the samples have no pictures")
    if media := undecoded_media(fields):
        note += f"; videos and recordings stayed as they are: {media}"
    if batch_size is None:
        batch_size = max(1, min(BATCH_SIZE, len(data)))
    pipeline = Pipeline(data, global_batch_size=batch_size, decode=decode)
    return pipeline, f"{note}; --pipeline measures your own"


def _first_good_sample(dataset: Any) -> Mapping[str, Any]:
    """Return the first sample that can be read; an empty one where many cannot."""
    for index in range(min(NUM_TRIES, len(dataset))):
        with suppress(SampleError):
            sample: Mapping[str, Any] = dataset[index]
            return sample
    return {}


def _without_traces(pipeline: Any) -> Any:
    """Return a pipeline that writes nothing, with windows that fill in time."""
    from mmstream.reading.plan import window_bytes
    from mmstream.reading.process import needs_reader_process

    policy = replace(pipeline.bad_samples, quarantine=None)
    pipeline = replace(pipeline, bad_samples=policy, cache_dir=None, max_cache_bytes=None)
    if pipeline.window or pipeline.grid or not needs_reader_process(pipeline.dataset):
        return pipeline
    num_bytes = window_bytes(pipeline.dataset, pipeline.order, pipeline.order.global_batch_size)
    return (
        replace(pipeline, window_bytes=MAX_WINDOW_BYTES)
        if num_bytes > MAX_WINDOW_BYTES
        else pipeline
    )


def _settings(pipeline: Any) -> list[tuple[int, int]]:
    """Return the (num_workers, num_threads) to try on the cores of this process."""
    from mmstream.pipeline import needs_one_thread
    from mmstream.processes.machine import cpu_limit

    if pipeline.zero_copy:
        return [(0, 1)]
    cores = max(1, int(cpu_limit()))
    settings = [(cores, 1), (max(1, cores // 2), 2), (0, min(4, cores))]
    if needs_one_thread(pipeline):
        settings = [(num_workers, 1) for num_workers, _ in settings]
    return list(dict.fromkeys(settings))


def _measure(pipeline: Any, num_workers: int, num_threads: int, seconds: float) -> _Speed:
    """Run a loader for some seconds, and return its speed after the first part of them."""
    from mmstream.loader.loader import Loader
    from mmstream.ranks import World

    loader = Loader(pipeline, num_workers=num_workers, num_threads=num_threads, world=World(0, 1))
    try:
        with closing(_endless(loader)) as batches:
            next(batches)
            _take(batches, WARM_UP_SHARE * seconds)
            stats = loader.stats
            num_steps, num_samples, num_bytes = stats.num_steps, stats.num_samples, stats.num_bytes
            cpu_s = sum(loader.cpu_seconds().values())
            took_s = _take(batches, (1 - WARM_UP_SHARE) * seconds)
            return _Speed(
                num_workers,
                num_threads,
                (stats.num_samples - num_samples) / took_s,
                took_s / (stats.num_steps - num_steps),
                (stats.num_bytes - num_bytes) / 1e6 / took_s,
                (sum(loader.cpu_seconds().values()) - cpu_s) / took_s,
                loader.memory_bytes(),
            )
    finally:
        loader.close()


def _endless(loader: Any) -> Generator[Any, None, None]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from loader


def _take(batches: Iterator[Any], seconds: float) -> float:
    """Take batches for some seconds, one at least. Return the seconds that it took."""
    began = time.perf_counter()
    for _ in batches:
        if time.perf_counter() - began >= seconds:
            break
    return time.perf_counter() - began


def _recommended(speeds: list[_Speed]) -> _Speed:
    """Return the setting to use: of about the fastest ones, the one with the fewest processes.

    One without workers is left out where another is about as fast: it makes batches in the time of
    the training loop, and not beside it.
    """
    fastest = max(speed.samples_per_s for speed in speeds)
    equal = [speed for speed in speeds if speed.samples_per_s >= ABOUT_EQUAL * fastest]
    beside = [speed for speed in equal if speed.num_workers]
    return min(beside or equal, key=lambda speed: speed.num_workers)


def _limit(best: _Speed, reading: _Speed) -> str:
    """Say in words what a loader waits for."""
    from mmstream.processes.machine import cpu_limit

    if best.samples_per_s >= ABOUT_EQUAL * reading.samples_per_s:
        return "reading: batches come about as fast without decoding"
    if best.cores >= ABOUT_EQUAL * cpu_limit():
        return f"the {cpu_limit():g} cores of this machine"
    return "waiting: neither reading nor the cores are full"


def _line(name: str, speed: _Speed) -> str:
    return (
        f"{name:17} {speed.samples_per_s:10,.0f} {speed.mb_per_s:9,.1f} {speed.cores:6.1f} "
        f"{size_text(speed.memory_bytes):>9}"
    )
