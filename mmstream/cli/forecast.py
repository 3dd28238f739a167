"""``mmstream info --plan G``: what a run asks of storage, before it starts.

Only --pipeline imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from mmstream.cli.shared import AT_LEAST_0, AT_LEAST_1, load_pipeline, say

if TYPE_CHECKING:
    from mmstream.dataset.dataset import Dataset
    from mmstream.dataset.mixture import Mixture
    from mmstream.forecast.reads import LargeReads, MeasuredReads
    from mmstream.forecast.run import RunForecast
    from mmstream.order import AnyOrder
    from mmstream.packing.plan import PackPlan

__all__ = ["OPTIONS", "PlannedRun", "forecast_options", "show_forecast"]

F = TypeVar("F", bound=Callable[..., None])

MORE_THAN_0 = click.FloatRange(min=0, min_open=True)

LARGE_BYTES = 8 << 20
"""Samples of this size are read by ranges, where a decoder can: `Decode(min_lazy_bytes=)`."""

_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    (
        "--plan",
        {
            "type": AT_LEAST_1,
            "metavar": "G",
            "help": "Instead, say what a run with batches of G rows over all ranks asks of object "
            "storage. Without URL: over a corpus of --samples samples of --mean-bytes bytes.",
        },
    ),
    ("--ranks", {"type": AT_LEAST_1, "default": 1, "help": "Ranks of the run: its GPUs."}),
    ("--ranks-per-node", {"type": AT_LEAST_1, "default": 8, "help": "Ranks of a machine."}),
    ("--epochs", {"type": AT_LEAST_1, "default": 1, "help": "Epochs of the run."}),
    (
        "--mean-bytes",
        {
            "type": AT_LEAST_1,
            "help": "Without URL: bytes of a sample in its tar, with headers and padding.",
        },
    ),
    (
        "--pack-plan",
        {
            "metavar": "NAME",
            "help": "Rows are packs of this plan: its name beside the index, or its folder or URL. "
            "Of a mixture: the name that the plans of all sources have.",
        },
    ),
    (
        "--weights-of",
        {
            "type": click.Choice(["samples", "tokens"]),
            "default": "samples",
            "help": "With packs of a mixture: what its weights are proportions of.",
        },
    ),
    (
        "--window-bytes",
        {
            "type": AT_LEAST_1,
            "help": "Bytes of all windows together.  [default: 2 MiB a row, within 2 to 8 GiB]",
        },
    ),
    (
        "--pipeline",
        {
            "metavar": "MODULE:OBJECT",
            "help": "The pipeline of training. Some samples of 8 MiB or more are decoded, to see "
            "what its decoders read of them.  [default: all]",
        },
    ),
    (
        "--ranged-bytes",
        {
            "type": AT_LEAST_0,
            "help": "In place of --pipeline: bytes that a decoder reads of a sample of 8 MiB or "
            "more, beside its first 64 KiB.",
        },
    ),
    (
        "--ranged-requests",
        {"type": AT_LEAST_0, "help": "Requests in which it reads them. Goes with --ranged-bytes."},
    ),
    ("--samples-per-second", {"type": MORE_THAN_0, "help": "Speed of all ranks together."}),
    (
        "--request-price",
        {"type": click.FloatRange(min=0), "metavar": "PRICE", "help": "Price of 1,000 requests."},
    ),
    (
        "--egress-price",
        {
            "type": click.FloatRange(min=0),
            "metavar": "PRICE",
            "help": "Price of 1e9 bytes that leave the store.",
        },
    ),
    (
        "--memory-bytes",
        {
            "type": AT_LEAST_1,
            "help": "Memory of a machine: windows that take more than a quarter are not held.",
        },
    ),
    (
        "--cache-bytes",
        {"type": AT_LEAST_0, "help": "Node cache of each machine, for the epochs after the first."},
    ),
    (
        "--reshuffle",
        {
            "type": click.Choice(["global", "lanes"]),
            "help": "As mm.Pipeline(reshuffle=).  [default: lanes with --cache-bytes]",
        },
    ),
]

OPTIONS = [name for name, _ in _OPTIONS]
"""Names of the options."""


@dataclass(frozen=True)
class PlannedRun:
    """The options of a planned run."""

    plan: int
    """G."""
    ranks: int = 1
    ranks_per_node: int = 8
    epochs: int = 1
    mean_bytes: int | None = None
    pack_plan: str | None = None
    weights_of: Literal["samples", "tokens"] = "samples"
    window_bytes: int | None = None
    pipeline: str | None = None
    ranged_bytes: int | None = None
    ranged_requests: int | None = None
    samples_per_second: float | None = None
    request_price: float | None = None
    egress_price: float | None = None
    memory_bytes: int | None = None
    cache_bytes: int | None = None
    reshuffle: str | None = None

    @property
    def ranks_of_node(self) -> int:
        """Ranks of the fullest machine."""
        return min(self.ranks, self.ranks_per_node)


def forecast_options(function: F) -> F:
    """Add the options of a planned run to a command."""
    for name, settings in reversed(_OPTIONS):
        shows_default = settings.get("default") is not None
        function = click.option(name, show_default=shows_default, **settings)(function)
    return function


def show_forecast(
    url: str | None,
    run: PlannedRun,
    *,
    num_samples: int | None,
    seed: int,
    allow_foreign_urls: bool,
    as_json: bool,
) -> None:
    """Print what a run asks of storage."""
    from mmstream.dataset.mixture_file import open_data
    from mmstream.forecast.equal_samples import equal_samples
    from mmstream.forecast.reads import forecast_reads
    from mmstream.forecast.run import forecast_run
    from mmstream.world import World, rows_of_rank

    if (run.ranged_bytes is None) != (run.ranged_requests is None):
        raise click.UsageError("--ranged-bytes and --ranged-requests go together")
    if run.pipeline is not None and (url is None or run.ranged_bytes is not None):
        raise click.UsageError("--pipeline decodes samples: give URL, and no --ranged-bytes")
    source: Dataset | Mixture
    if url is not None:
        if run.mean_bytes is not None:
            raise click.UsageError("--mean-bytes is for a corpus without URL")
        source = open_data(url, allow_foreign_urls=allow_foreign_urls)
    elif num_samples is None or run.mean_bytes is None:
        raise click.UsageError("give URL, or --samples and --mean-bytes of a corpus")
    else:
        source = equal_samples(num_samples, run.mean_bytes)
    order = _order(source, run, seed)
    starts = [
        rows_of_rank(run.plan, World(rank, run.ranks), "balanced")[0] for rank in range(run.ranks)
    ]
    row_bounds = [*starts, run.plan]
    measured = _measured_reads(source, order, run)
    reads = forecast_reads(
        source,
        order,
        row_bounds,
        large=measured.large,
        single_samples=_reads_single_samples(source, order, run, measured.large),
        uses_index=url is not None,
    )
    forecast = forecast_run(
        source,
        order,
        reads,
        row_bounds,
        ranks_per_node=run.ranks_per_node,
        num_epochs=run.epochs,
        cache_bytes=run.cache_bytes or 0,
    )
    if as_json:
        say(json.dumps(_as_json(run, order, forecast, measured)))
        return
    for line in _lines(run, order, forecast):
        say(line)
    if run.pipeline is not None:
        say(_large_line(measured))


def _order(source: Dataset | Mixture, run: PlannedRun, seed: int) -> AnyOrder:
    """Return the order of the run."""
    from mmstream.dataset.mixture import Mixture
    from mmstream.packing.mixture_order import MixturePackOrder
    from mmstream.packing.mixture_plan import MixturePlan
    from mmstream.packing.order import PackOrder

    settings: dict[str, Any] = {
        "global_batch_size": run.plan,
        "seed": seed,
        "window_bytes": run.window_bytes,
        "reshuffle": run.reshuffle,
        "has_cache": bool(run.cache_bytes),
    }
    if run.pack_plan is None:
        return source.plan_order(**settings)
    if not isinstance(source, Mixture):
        plan = _plan_of(source, run.pack_plan)
        return PackOrder.from_plan(plan, source.corpus, **settings)
    if "/" in run.pack_plan:
        raise click.UsageError(
            "--pack-plan of a mixture is a name: each source has a plan of this name beside its "
            "index"
        )
    plans = {name: _plan_of(dataset, run.pack_plan) for name, dataset in source.datasets.items()}
    joined = MixturePlan(plans, [dataset.num_shards for dataset in source.datasets.values()])
    shares = joined.shares_by_step(source.weights, run.weights_of)
    return MixturePackOrder.from_plans(
        joined, source.corpora, shares, epoch_steps=source.epoch_steps, **settings
    )


def _plan_of(dataset: Dataset, name: str) -> PackPlan:
    """Return the plan of a dataset from a folder, or from a name beside the index."""
    from mmstream.packing.plan_file import open_plan, plan_folder, require_plan_of

    plan = open_plan(name if "/" in name else plan_folder(dataset.index_store.url, name))
    require_plan_of(dataset, plan)
    return plan


def _reads_single_samples(
    source: Dataset | Mixture, order: AnyOrder, run: PlannedRun, large: LargeReads | None
) -> bool:
    """Tell whether the windows are too large for the machines; ConfigError as in training."""
    from mmstream.reading.window_memory import needs_single_samples

    if run.memory_bytes is None:
        return False
    num_rows = -(-run.plan // run.ranks)
    return needs_single_samples(
        source,
        order,
        num_rows,
        run.memory_bytes,
        num_ranks=run.ranks_of_node,
        least_large_bytes=None if large is None else large.least_bytes,
    )


def _measured_reads(source: Dataset | Mixture, order: AnyOrder, run: PlannedRun) -> MeasuredReads:
    """Return what is read of large samples. Without a decoder for ranges, only huge ones count."""
    from mmstream.forecast.reads import LargeReads, MeasuredReads, Reads
    from mmstream.reading.large_samples import HUGE_SAMPLE_BYTES

    if run.pipeline is not None:
        from mmstream.forecast.large_reads import measure_large_reads

        return measure_large_reads(load_pipeline(run.pipeline, source), order)
    if run.ranged_bytes is None or run.ranged_requests is None:
        return MeasuredReads(LargeReads(HUGE_SAMPLE_BYTES), 0)
    return MeasuredReads(LargeReads(LARGE_BYTES, Reads(run.ranged_requests, run.ranged_bytes)), 0)


def _large_line(measured: MeasuredReads) -> str:
    """Return what the decoders of a pipeline read of large samples."""
    from mmstream.display.markup import size_text

    if measured.large is None or measured.large.reads is None:
        return "large samples: none was found of which the decoders read a part"
    reads = measured.large.reads
    return (
        f"large samples: the decoders read {size_text(reads.num_bytes)} of each, in "
        f"{reads.num_requests:,.1f} requests beside that for its first bytes; so it was with "
        f"{measured.num_samples} samples, in the mean"
    )


def _more(difference: float, text: Callable[[float], str]) -> str:
    """Return a difference for people. A start may read less: single samples have no gaps."""
    return f"{text(abs(difference))} {'less' if difference < 0 else 'more'}"


def _lines(run: PlannedRun, order: AnyOrder, forecast: RunForecast) -> Iterator[str]:
    """Yield what a terminal shows."""
    yield from _request_lines(run, order, forecast)
    yield from _machine_lines(run, forecast)
    yield from _rate_lines(run, forecast)
    if (price := _price(run, forecast)) is not None:
        yield "price: " + "; ".join(
            f"{price[key]:,.2f} {words}"
            for key, words in (
                ("epoch", "for the requests and the egress of an epoch"),
                ("run", "for the whole run"),
            )
        )


def _request_lines(run: PlannedRun, order: AnyOrder, forecast: RunForecast) -> Iterator[str]:
    """Yield what an epoch and the run ask of storage."""
    from mmstream.display.markup import count_text, size_text

    reads = forecast.reads
    identity = order.identity()
    about = "" if reads.is_exact else "about "
    yield (
        f"plan: {count_text(reads.num_steps, 'step')} of {count_text(run.plan, 'row')} per epoch, "
        f"{about}{reads.num_samples:,.0f} samples; grid {tuple(identity['grid'])}, "
        f"{count_text(run.ranks, 'rank')} on {count_text(forecast.num_nodes, 'machine')}"
    )
    yield (
        f"requests: {about}{reads.epoch.num_requests:,.0f} an epoch, "
        f"{reads.requests_per_gb:,.0f} a GB; "
        f"{_more(reads.start.num_requests, '{:,.0f}'.format)} at each start, "
        f"and {forecast.opening.num_requests:,.0f} to open the data"
    )
    over = reads.epoch.num_bytes / max(1.0, reads.num_sample_bytes)
    yield (
        f"egress: {about}{size_text(reads.epoch.num_bytes)} an epoch, {over:.2f} times its "
        f"samples; {_more(reads.start.num_bytes, size_text)} at each start, and "
        f"{size_text(forecast.opening.num_bytes)} to open the data"
    )
    if run.cache_bytes is not None:
        yield (
            f"node cache: {size_text(run.cache_bytes)} a machine hold "
            f"{forecast.hit_rate:.0%} of each later epoch, which reads "
            f"{size_text(forecast.later_epoch.num_bytes)}"
        )
    if run.epochs > 1:
        yield (
            f"run: {run.epochs:,} epochs read {size_text(forecast.total.num_bytes)} in "
            f"{forecast.total.num_requests:,.0f} requests"
        )


def _machine_lines(run: PlannedRun, forecast: RunForecast) -> Iterator[str]:
    """Yield what a machine needs of memory and disk."""
    from mmstream.display.markup import size_text
    from mmstream.reading.rank_reader import HORIZON_BYTES

    reads = forecast.reads
    held = reads.window_bytes + HORIZON_BYTES + reads.step_bytes
    yield (
        f"memory: {size_text(reads.window_bytes)} of windows a rank, up to "
        f"{size_text(HORIZON_BYTES)} read ahead, {size_text(reads.step_bytes)} a step; up to "
        f"{size_text(held * run.ranks_of_node)} a machine, beside batches"
    )
    yield (
        f"disk of a machine: {size_text(reads.index.num_bytes)} of index; a node cache of "
        f"{size_text(reads.epoch.num_bytes / forecast.num_nodes)} would hold its part of an epoch"
    )


def _rate_lines(run: PlannedRun, forecast: RunForecast) -> Iterator[str]:
    """Yield how fast storage is asked, and how fast a prefix answers."""
    from mmstream.display.markup import size_text, time_text
    from mmstream.storage.transfer_limits import MAX_PREFIX_RATE

    reads = forecast.reads
    if run.samples_per_second is not None:
        rate = reads.rate(run.samples_per_second)
        epoch = time_text(reads.num_samples / run.samples_per_second)
        yield (
            f"at {run.samples_per_second:,.0f} samples/s: {rate.num_requests:,.1f} requests/s, "
            f"{rate.num_requests * reads.busiest_prefix:,.1f} of the busiest of "
            f"{reads.num_prefixes:,} prefixes; {size_text(rate.num_bytes)}/s, "
            f"{size_text(rate.num_bytes / forecast.num_nodes)}/s a machine; {epoch} an epoch"
        )
    if reads.start.num_requests * reads.busiest_prefix > MAX_PREFIX_RATE:
        seconds = reads.start.num_requests * reads.busiest_prefix / MAX_PREFIX_RATE
        yield f"start: its requests take a prefix of S3 {seconds:,.1f} s or more"
    yield (
        f"S3: a prefix answers {MAX_PREFIX_RATE:,} GET/s, which is {reads.max_samples_per_s:,.0f} "
        "samples/s of this run"
    )
    if (run.samples_per_second or 0) > reads.max_samples_per_s:
        yield (
            "warning: the busiest prefix would get more requests than S3 promises to answer: "
            "lay the shards into several folders, or plan larger windows or fewer ranks that "
            "share lanes"
        )


def _price(run: PlannedRun, forecast: RunForecast) -> dict[str, float] | None:
    """Return what an epoch and the run cost. None: no price is given."""
    from mmstream.forecast.run import price

    if run.request_price is None and run.egress_price is None:
        return None
    prices = run.request_price or 0.0, run.egress_price or 0.0
    return {
        "epoch": price(forecast.reads.epoch, *prices),
        "run": price(forecast.total, *prices),
    }


def _as_json(
    run: PlannedRun, order: AnyOrder, forecast: RunForecast, measured: MeasuredReads
) -> dict[str, Any]:
    """Return what `--json` prints."""
    from mmstream.reading.rank_reader import HORIZON_BYTES

    reads = forecast.reads
    identity = order.identity()
    rate = None if run.samples_per_second is None else reads.rate(run.samples_per_second)
    return {
        "global_batch_size": run.plan,
        "grid": identity["grid"],
        "num_nodes": forecast.num_nodes,
        **asdict(reads),
        "requests_per_gb": reads.requests_per_gb,
        "max_samples_per_s": reads.max_samples_per_s,
        "read_ahead_bytes": HORIZON_BYTES,
        "opening": asdict(forecast.opening),
        "num_epochs": forecast.num_epochs,
        "hit_rate": forecast.hit_rate,
        "later_epoch": asdict(forecast.later_epoch),
        "total": asdict(forecast.total),
        "per_second": None if rate is None else asdict(rate),
        "price": _price(run, forecast),
        "large_samples": None if measured.large is None else asdict(measured.large),
    }
