"""``mmstream bench | plan | bake``: what a pipeline does with a whole dataset. They import torch.

`bench`: how fast data becomes batches on this machine. `plan`: lengths of all samples, which form
packs, and how full these are. `bake`: what the pipeline makes of them, as a dataset.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import click

from mmstream.cli.select import choosing, open_chosen
from mmstream.cli.shared import (
    AT_LEAST_0,
    AT_LEAST_1,
    allow_foreign_urls,
    command,
    load_pipeline,
    open_tokenizer,
    refuse_given,
    say,
    shows_infos_of,
)
from mmstream.display.text import count_text, size_text
from mmstream.errors import ConfigError, SampleError, escaped
from mmstream.media.fields import image_fields, undecoded_media
from mmstream.packing.plan import Overlong, PackLimits

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
    from mmstream.dataset.dataset import datasets_of
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


# -- plan and bake ---------------------------------------------------------------------------------

PACK_LIMITS = (
    "max_documents",
    "max_images",
    "max_patches",
    "max_seconds",
    "document_multiple_of",
    "where",
    "overlong",
)
"""Options that are settings of `PackLimits`."""


@command("mmstream plan s3://bucket/corpus --max-tokens 8192 --pipeline train:pipeline")
@click.argument("url")
@click.option("--max-tokens", type=AT_LEAST_1, required=True, help="Tokens of a pack.")
@click.option(
    "--pipeline",
    "pipeline_name",
    metavar="MODULE:OBJECT",
    help="The pipeline of training: a Pipeline, or a function from a dataset to one. Its decoders, "
    "functions before decoding and seed count.",
)
@click.option(
    "--processor",
    metavar="FOLDER",
    help="Instead: the folder of a Qwen-VL model with its tokenizer and processor.",
)
@click.option(
    "--tokenizer",
    metavar="FOLDER",
    help="Instead, for text alone: the folder of a tokenizer. `bytes` is one of one token per "
    "byte.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="Name of the plan.  [default: a digest, which mm.Pack finds by itself]",
)
@click.option(
    "--output",
    "folder",
    metavar="FOLDER",
    help="Folder or URL that gets the folders of lengths and plan.  [default: beside the index]",
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
    help='Pack only these samples: "num_tokens >= 16 and num_label_tokens > 8".',
)
@click.option(
    "--overlong",
    type=click.Choice(get_args(Overlong)),
    default="reject",
    show_default=True,
    help="Leave out samples that are longer than a pack, or cut plain text.",
)
@click.option(
    "--epochs",
    metavar="A-B",
    help="Where lengths depend on random draws: the epochs that are measured, such as 0-2. The "
    "longest length counts.",
)
@click.option(
    "--room",
    type=AT_LEAST_0,
    default=0,
    show_default=True,
    help="Tokens that each sample gets more, in place of --epochs.",
)
@click.option(
    "--patch-size",
    type=AT_LEAST_1,
    default=14,
    show_default=True,
    metavar="PIXELS",
    help="Side of a patch of the vision tower.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Plan all shards again, and measure them again where lengths have changed. Without it, "
    "packs of an earlier plan stay, and appended shards form new ones.",
)
@click.option(
    "--num-workers",
    type=AT_LEAST_0,
    help="Processes. The plan is the same for any number.  [default: one per core, or one for "
    "little work]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@allow_foreign_urls
def plan(
    url: str,
    max_tokens: int,
    pipeline_name: str | None,
    processor: str | None,
    tokenizer: str | None,
    epochs: str | None,
    as_json: bool,
    allow_foreign_urls: bool,
    **options: Any,
) -> None:
    """Measure all samples of the dataset at URL, and plan packs of at most --max-tokens tokens.

    URL may be a mixture's file: each source is planned by itself.

    The samples go through the decoders of training up to the tokenizer. No pixel is decoded. To
    continue an interrupted call, run the same command again. Samples are not measured again for
    other limits.

    The lines say how full the packs are, and what is left out.
    """
    from mmstream.dataset.mixture import open_data
    from mmstream.measuring.plan import plan_sources
    from mmstream.packing.planner import plan_report
    from mmstream.pipeline import Pipeline

    if sum(option is not None for option in (pipeline_name, processor, tokenizer)) != 1:
        raise click.UsageError("give one of --pipeline, --processor and --tokenizer")
    limits = PackLimits(max_tokens, **{limit: options.pop(limit) for limit in PACK_LIMITS})
    measured_epochs = None if epochs is None else _epochs(epochs)
    data = open_data(url, allow_foreign_urls=allow_foreign_urls)
    if pipeline_name is not None:
        pipeline = load_pipeline(pipeline_name, data)
    else:
        decode = _of_tokenizer(str(tokenizer)) if processor is None else _of_processor(processor)
        pipeline = Pipeline(data, global_batch_size=1, decode=decode)
    with shows_infos_of("mmstream.measuring.plan"):  # how much is read
        for source in plan_sources(pipeline, limits, epochs=measured_epochs, **options):
            assert source.plan is not None
            report = plan_report(source.plan)
            if as_json:
                name = {"source": source.name} if source.name else {}
                say(json.dumps({**name, "folder": source.plan.url, **asdict(report)}))
                continue
            for line in report.lines(limits.max_tokens):
                say(line)
            say(f"plan: {source.plan.url}")


def _of_processor(folder: str) -> Any:
    """Return the decoders of a model's folder."""
    from mmstream.train import tokenizer
    from mmstream.train.models import CHAT_FAMILIES, chat_decode
    from mmstream.train.tokenizer import read_json

    family = read_json(Path(folder, "config.json")).get("model_type")
    if family not in CHAT_FAMILIES:
        raise ConfigError(
            f"{folder}: is a model of {family}, and --processor knows {', '.join(CHAT_FAMILIES)}: "
            "give --pipeline module:object"
        )
    return chat_decode(tokenizer.open_tokenizer(folder, chat=True), folder, 1 << 20)


def _of_tokenizer(folder: str) -> Any:
    """Return the decoders of a tokenizer."""
    from mmstream.decoding.decode import Decode
    from mmstream.decoding.text.decoder import TextDecoder

    return Decode(text=TextDecoder(open_tokenizer(folder)))


def _epochs(text: str) -> list[int]:
    """Return the epochs of ``A-B``, both included, or of one number."""
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) < int(first):
        raise click.UsageError(f"--epochs {text}: give numbers such as 0-2, or one such as 0")
    return list(range(int(first), int(last or first) + 1))


@command("mmstream bake s3://bucket/corpus s3://bucket/baked --pipeline train:pipeline")
@click.argument("source")
@click.argument("dest")
@click.option(
    "--pipeline",
    "pipeline_name",
    metavar="MODULE:OBJECT",
    required=True,
    help="The pipeline of training, without random augmentation: a Pipeline, or a function from a "
    "dataset to one. It gets the dataset SOURCE.",
)
@click.option(
    "--batch-function",
    "batch_name",
    metavar="MODULE:FUNCTION",
    help="A function from a list of samples and a torch.device to as many samples, such as one "
    "that makes latents on a GPU.",
)
@click.option(
    "--batch-size",
    type=AT_LEAST_1,
    default=64,
    show_default=True,
    help="Samples of its calls. The last call of a shard gets fewer.",
)
@click.option("--device", default="cpu", show_default=True, help="The device that it gets.")
@click.option(
    "--epoch-of-draws",
    type=AT_LEAST_0,
    help="Where something draws at random: keep the draws of this epoch for all epochs.  [default: "
    "refuse it]",
)
@click.option(
    "--num-workers",
    type=AT_LEAST_0,
    default=1,
    show_default=True,
    help="Worker processes. The result is the same for any number.",
)
@click.option(
    "--dry-run",
    type=AT_LEAST_1,
    metavar="N",
    help="Only try N samples: show the fields and the size of the result. Nothing is written.",
)
@choosing()
@allow_foreign_urls
def bake(
    source: str,
    dest: str,
    pipeline_name: str,
    batch_name: str | None,
    batch_size: int,
    device: str,
    epoch_of_draws: int | None,
    num_workers: int,
    dry_run: int | None,
    allow_foreign_urls: bool,
    **choice: Any,
) -> None:
    """Write what a pipeline makes of the dataset SOURCE to DEST, once for all epochs.

    Keys, shards and bad samples stay. Read DEST with decode=mm.Decode.baked(): the steps and the
    batches are those of the pipeline. A call that was killed goes on when it is made again.
    """
    if batch_name is None:
        refuse_given(["batch_size", "device"], "with --batch-function")
    from mmstream.baking.bake import bake_into, baker_of, estimate
    from mmstream.converting.formats.formats import load_function

    dataset = open_chosen(source, allow_foreign_urls, choice)
    pipeline = load_pipeline(pipeline_name, dataset)
    function: Any = None if batch_name is None else load_function(batch_name)
    baker = baker_of(pipeline, function, batch_size, device, epoch_of_draws)
    if dry_run is not None:
        for line in estimate(baker, dry_run, num_workers):
            say(line)
        return
    with shows_infos_of("mmstream.baking.bake"):  # how large the result will be
        report = bake_into(baker, dest, num_workers, True)
    if report.was_finished:
        say(f"{dest}: was finished already")
    say(report.summary())
    num_bad = report.num_bad - report.num_left_out
    if num_bad:
        say(f"{num_bad:,} of them are bad, as in the source; the first: {report.first_reason}")
    if report.num_left_out:
        say(f"{report.num_left_out:,} of them are left out by a filter, as in the source")
