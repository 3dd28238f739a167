"""What ``mmstream info --plan G`` prints: lines for people, or JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mmstream.cli.forecast_options import PlannedRun

if TYPE_CHECKING:
    from mmstream.forecast.reads import MeasuredReads
    from mmstream.forecast.run import RunForecast
    from mmstream.order import AnyOrder

__all__ = ["forecast_json", "forecast_lines"]


def forecast_lines(
    run: PlannedRun, order: AnyOrder, forecast: RunForecast, measured: MeasuredReads
) -> Iterator[str]:
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
    if run.pipeline is not None:
        yield _large_line(measured)


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


def forecast_json(
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
