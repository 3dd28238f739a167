"""``mmstream info --plan G``: what a run asks of storage, before it starts.

    info -> `show_forecast` -> forecast_text

Only --pipeline imports torch.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from mmstream.cli.forecast_options import PlannedRun
from mmstream.cli.forecast_text import forecast_json, forecast_lines
from mmstream.cli.shared import load_pipeline, say

if TYPE_CHECKING:
    from mmstream.dataset.dataset import Dataset
    from mmstream.dataset.mixture import Mixture
    from mmstream.forecast.reads import LargeReads, MeasuredReads
    from mmstream.order import AnyOrder
    from mmstream.packing.plan import PackPlan

__all__ = ["show_forecast"]

LARGE_BYTES = 8 << 20
"""Samples of this size are read by ranges, where a decoder can: `Decode(min_lazy_bytes=)`."""


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
        say(json.dumps(forecast_json(run, order, forecast, measured)))
        return
    for line in forecast_lines(run, order, forecast, measured):
        say(line)


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
