"""`mm.finalize`: from the shards of several ranges to one finished dataset.

    ranges of shards, on any machines -> FINALIZE -> rejects, index, manifest

It needs neither rows nor media. The marker at the destination has the plan, and so tells how many
shards there must be. The report of each shard says what its files are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import msgspec

from mmstream.converting.convert import (
    ConvertReport,
    check_max_rejects,
    report_of,
    require_samples,
    total_of,
    warn_of_rejects,
)
from mmstream.converting.destination import read_marker
from mmstream.converting.locks import lock_all
from mmstream.converting.outputs import Output, Work, finish_output
from mmstream.converting.plan import num_shards, shard_name
from mmstream.converting.quality.after import mark_duplicates, warn_of_leaks
from mmstream.converting.report import REPORTS, report_name
from mmstream.converting.shard import ShardReport, files_of
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME, Manifest
from mmstream.errors import ConfigError, MMStreamError
from mmstream.storage import Store, join_url, open_store
from mmstream.storage.store import map_requests
from mmstream.storage.urls import require_no_secret
from mmstream.wrong_arguments import NonNegativeFloat, checked

MAX_NAMED = 20
"""Ranges of missing shards that a message names."""


@checked()
def finalize(
    dest: str | os.PathLike[str],
    *,
    splits: Sequence[str] | None = None,
    max_rejects: NonNegativeFloat = 0.01,
) -> ConvertReport:
    """Make a dataset of the shards that `convert` wrote with ``shard_range=``.

    All shards of the plan must be there. Then ``rejects.jsonl``, the index and the manifest are
    written, as a conversion without ranges writes them. No range may be written meanwhile.

    If it was interrupted, make the same call again. On a finished dataset it does nothing.

    Args:
        dest: The folder or URL prefix that the ranges were written to.
        splits: Names of all splits, if the conversion has some.
        max_rejects: As in `convert`.

    Returns:
        Counts and bytes of the dataset.

    Raises:
        ConfigError: `dest` holds no conversion, or a process still writes there.
        MMStreamError: Shards are missing or damaged, and the message names them. Or no row became
            a sample. No dataset was written.
        StorageError: Storage failed after retries.

    Examples:
        Two machines write half of the shards each.

        >>> for shard_range in ((0, 1), (1, 2)):
        ...     _ = mm.convert(
        ...         "rows.jsonl", "both/", media_root="media/", samples_per_shard=240,
        ...         shard_range=shard_range, progress=False,
        ...     )
        >>> mm.finalize("both/").num_samples
        480
    """
    started = time.monotonic()
    dest = os.fspath(dest)
    require_no_secret(dest)
    check_max_rejects(max_rejects)
    if splits is not None and (not splits or _has_twins(splits)):
        raise ConfigError(f"splits={splits!r}: name all of them with splits=, each once")
    store = open_store(dest)
    with ExitStack() as locks:
        outputs: list[Output] = []
        names: Sequence[str | None] = splits or [None]
        for split in names:
            split_store = store if split is None else open_store(join_url(store.url, split))
            outputs.append(_output(split_store, split, locks))
        outputs = _in_order(outputs)
        reports = {output.split: _reports(output) for output in outputs}
        _require_all(outputs, reports)
        written = {
            split: [report for report in shards.values() if report is not None]
            for split, shards in reports.items()
        }
        require_samples(outputs, written, None)
        num_pairs, num_dropped = mark_duplicates(outputs, written, progress=False)
        results: dict[str | None, ConvertReport] = {}
        for output in outputs:
            finish_output(output, written[output.split])
            seconds = time.monotonic() - started
            results[output.split] = report_of(output, [], seconds)
    warn_of_leaks(outputs, progress=False)
    report = results[None] if splits is None else total_of(results, started)
    report = replace(report, num_pairs=num_pairs, num_dropped=num_dropped)
    warn_of_rejects(report, max_rejects, dest)
    return report


def _has_twins(names: Sequence[str]) -> bool:
    return len(set(names)) != len(names)


def _output(store: Store, split: str | None, locks: ExitStack) -> Output:
    """Return the dataset that a marker or a manifest describes. An unfinished one is locked."""
    if not store.exists(MARKER_NAME):
        if not store.exists(MANIFEST_NAME):
            hint = "" if split else "; if it has splits, name all of them with splits="
            raise ConfigError(f"{store.url}: no shard range was converted to here{hint}")
        plan = Manifest.read(store).source
        if "num_rows" not in plan:
            raise ConfigError(f"{store.url}: holds a dataset that no conversion wrote")
        return Output(split, store, range(plan["num_rows"]), plan, "finished", Work())
    lock = lock_all(store, "finalize", locks)
    marker = read_marker(store)
    if marker.get("clearing"):
        raise ConfigError(
            f"{store.url}: an overwrite was interrupted here; run it again to its end"
        )
    plan = marker["plan"]
    return Output(split, store, range(plan["num_rows"]), plan, "unfinished", Work(), lock=lock)


def _in_order(outputs: list[Output]) -> list[Output]:
    """Return splits in the order of the plan, with the number of the first shard of each.

    Raises:
        ConfigError: The splits are not those of the plan.
    """
    by_split = {output.split: output for output in outputs}
    planned = outputs[0].plan["splits"]
    names = [None] if planned is None else [name for name, _ in planned]
    if set(names) != set(by_split):
        raise ConfigError(
            f"splits={[output.split for output in outputs]}: the conversion has {names}"
        )
    ordered: list[Output] = []
    for name in names:
        first_shard = sum(num_shards(output.plan) for output in ordered)
        ordered.append(by_split[name]._replace(first_shard=first_shard))
    return ordered


def _reports(output: Output) -> dict[int, ShardReport | None]:
    """Return {shard: report} of an unfinished dataset. None: it is not written, or is damaged."""
    if output.lock is None:
        return {}
    sizes = {name: file.size for name, file in output.store.list().items()}
    for name, file in open_store(output.store.url_of(REPORTS)).list().items():
        sizes[f"{REPORTS}/{name}"] = file.size

    def read(index: int) -> ShardReport | None:
        name = shard_name(index)
        if report_name(name) not in sizes:
            return None
        try:
            report = msgspec.json.decode(output.store.read(report_name(name)), type=ShardReport)
        except msgspec.MsgspecError:
            return None
        return report if files_of(report).items() <= sizes.items() else None

    shards = output.shards
    return dict(zip(shards, map_requests(output.store, read, shards), strict=True))


def _require_all(
    outputs: list[Output], reports: dict[str | None, dict[int, ShardReport | None]]
) -> None:
    """Raise an MMStreamError that names the shards that are missing, counted over all splits."""
    missing = [
        output.first_shard + index
        for output in outputs
        for index, report in reports[output.split].items()
        if report is None
    ]
    if not missing:
        return
    ranges: list[list[int]] = []
    for shard in missing:
        if ranges and ranges[-1][1] == shard:
            ranges[-1][1] += 1
        else:
            ranges.append([shard, shard + 1])
    names = [f"{start}:{stop}" for start, stop in ranges[:MAX_NAMED]]
    num_all = sum(num_shards(output.plan) for output in outputs)
    raise MMStreamError(
        f"{len(missing):,} of {num_all:,} shards are missing or damaged: {', '.join(names)}"
        f"{', ...' * (len(ranges) > MAX_NAMED)}; write them with shard_range=, then finalize again"
    )
