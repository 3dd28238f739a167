"""The last step of a conversion that was asked for duplicates: before the manifests are written.

    all shards of all splits -> DUPLICATES -> bad list, duplicates.jsonl -> manifest

The sidecars are complete then. So the answer does not depend on workers, and a call that was killed
here finds the same again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from mmstream.converting.destination import manifest_of
from mmstream.converting.outputs import Output
from mmstream.converting.quality.corpus import read_corpus
from mmstream.converting.quality.duplicates import (
    DUPLICATES_NAME,
    KINDS,
    Duplicates,
    drop_duplicates,
    find_duplicates,
    find_in,
    write_pairs,
)
from mmstream.converting.shard import ShardReport
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.manifest import Manifest
from mmstream.dataset.open import open_dataset
from mmstream.errors import escaped

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
    for kind in report.by_kind:
        if (count := report.across(kind).again.size) and kind != "media":  # `warn_of_leaks` says it
            logger.warning(
                "%s: %d pairs of samples of two splits; see %s", kind, count, DUPLICATES_NAME
            )
    return report.num_pairs, sum(dropped.values())


def warn_of_leaks(outputs: Sequence[Output], progress: bool) -> None:
    """Warn of media that two splits hold, by the hashes in their sidecars.

    Args:
        outputs: All splits, in order. Their manifests are written.
        progress: Show a progress bar (on a terminal only).
    """
    plan, states = outputs[0].plan, {output.state for output in outputs}
    is_range = outputs[0].work.shard_range is not None
    if is_range or len(outputs) == 1 or not plan["sidecar"] or states == {"finished"}:
        return
    datasets = {_name(output): open_dataset(output.store.url) for output in outputs}
    bad = {name: dataset.bad for name, dataset in datasets.items()}
    corpus = read_corpus(datasets, ["media"], bad, num_threads=1, progress=progress)
    leaks = Duplicates(corpus, {"media": find_in(corpus, "media")}).across("media")
    if not leaks.again.size:
        return
    is_by_media, came_so = plan.get("split_by_media"), plan["splits"][0][1] is None
    cure = (
        "they are equal bytes under different names; give them one name in the rows"
        if is_by_media
        else "the splits came with the rows; take these samples out of one of them"
        if came_so
        else "--split-by-media, mm.Splitting(by_media=True), keeps such rows in one split"
    )
    pair = [int(leaks.first[0]), int(leaks.again[0])]
    names = corpus.names_of(pair)
    logger.warning(
        "leak: %s media files of an earlier split are in a later one too, in %s of its samples, "
        "such as that of %s: %s",
        f"{leaks.again.size:,}",
        f"{np.unique(leaks.again).size:,}",
        " and ".join(f"{names[n].dataset}/{names[n].shard} {escaped(names[n].key)}" for n in pair),
        cure,
    )


def _name(output: Output) -> str:
    return output.split or ""


def _dataset(output: Output, reports: Mapping[str | None, Sequence[ShardReport]]) -> Dataset:
    if output.state == "finished":
        return Dataset(Manifest.read(output.store), output.store)
    return Dataset(manifest_of(output.plan, reports[output.split]), output.store)
