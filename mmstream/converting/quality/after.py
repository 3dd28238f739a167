"""The last step of a conversion that was asked for duplicates: before the manifests are written.

    all shards of all splits -> DUPLICATES -> bad list, duplicates.jsonl -> manifest

The sidecars are complete then. So the answer does not depend on workers, and a call that was killed
here finds the same again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from mmstream.converting.destination import manifest_of
from mmstream.converting.outputs import Output
from mmstream.converting.quality.duplicates import (
    DUPLICATES_NAME,
    KINDS,
    drop_duplicates,
    find_duplicates,
    write_pairs,
)
from mmstream.converting.shard import ShardReport
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.manifest import Manifest

__all__ = ["mark_duplicates"]

logger = logging.getLogger(__name__)


def mark_duplicates(
    outputs: Sequence[Output], reports: Mapping[str | None, Sequence[ShardReport]], progress: bool
) -> tuple[dict[str, int], int]:
    """Find duplicates over all splits, and write what the plan asks for.

    Where one of the splits is finished already, its files stay as they are.

    Args:
        outputs: All splits, in order. Of two equal samples, the one in the earlier split stays.
        reports: Of the shards of each unfinished split.
        progress: Show a progress bar (on a terminal only).

    Returns:
        {kind: number of pairs}, and how many samples epochs leave out now. Empty and 0 if nothing
        was asked for, or all splits are finished.
    """
    exact, near = outputs[0].plan["duplicates"], outputs[0].plan["near_duplicates"]
    unfinished = [output for output in outputs if output.state != "finished"]
    if not (exact or near):
        return {}, 0
    if not unfinished:
        if outputs[0].work.rerun.retry_rejects:
            logger.warning(
                "the samples of retried rows are not looked at; run `mmstream duplicates`"
            )
        return {}, 0
    for output in unfinished:
        assert output.lock is not None
        output.lock.require()
    datasets = {_name(output): _dataset(output, reports) for output in outputs}
    report = find_duplicates(
        datasets, kinds=KINDS if exact else (), near=near is not None, progress=progress
    )
    names = [_name(output) for output in unfinished]
    kinds = ["pair"] * (exact == "drop") + ["near"] * (near == "drop")
    dropped = drop_duplicates(report, kinds, names) if kinds else {}
    write_pairs(report, names)
    for kind, count in report.num_across.items():
        if count:
            logger.warning(
                "%s: %d pairs of samples of two splits; see %s", kind, count, DUPLICATES_NAME
            )
    return report.num_pairs, sum(dropped.values())


def _name(output: Output) -> str:
    return output.split or ""


def _dataset(output: Output, reports: Mapping[str | None, Sequence[ShardReport]]) -> Dataset:
    if output.state == "finished":
        return Dataset(Manifest.read(output.store), output.store)
    return Dataset(manifest_of(output.plan, reports[output.split]), output.store)
