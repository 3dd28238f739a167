"""Rewrite a dataset in the order of its packs or buckets, so that reads are long ranges.

    dataset + measure + plan -> shuffle -> replan -> RESHARD -> shards, index, measure, plan
    dataset + buckets -> shuffle in each bucket      -> RESHARD -> shards of one bucket each, index

The bytes of samples stay as they are: a sample is copied with its headers and padding. Only those
of a union of folders get other keys, so their headers are rewritten. A shard is committed by its
report, as in a conversion, so a call that was killed goes on where it was.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from tqdm import tqdm

from mmstream.converting.outputs import LEFTOVERS
from mmstream.converting.report import (
    read_shard_report,
    remove_leftovers,
    remove_reports,
    report_name,
)
from mmstream.converting.shard import shard_sizes, write_tar, wrong_size
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.manifest import (
    MANIFEST_NAME,
    MARKER_NAME,
    Manifest,
    ShardInfo,
    json_lines,
    read_json,
)
from mmstream.dataset.open import open_dataset
from mmstream.dataset.select import bucket_selections
from mmstream.dataset.shard_indexes import commit
from mmstream.errors import ConfigError, ShardError, where
from mmstream.order.buckets import Buckets
from mmstream.order.permute import permutation
from mmstream.packing.plan import (
    PLAN_PREFIX,
    SELECTION,
    PackPlan,
    open_plan,
    plan_folder,
    require_plan_of,
    write_plan,
)
from mmstream.packing.planner import (
    Measure,
    make_plan,
    measure_folder,
    measure_of_shards,
    plan_in_order,
    read_lengths,
    write_measure,
)
from mmstream.processes.workers import run_in_processes
from mmstream.ranks import World
from mmstream.settings import (
    AnyInt,
    NonEmptyStr,
    NonNegativeInt,
    PositiveInt,
    arguments_gone,
    checked,
)
from mmstream.storage import Store, open_store, require_shared
from mmstream.storage.write_lock import WriteLock, write_lock
from mmstream.tar.samples import iter_members
from mmstream.tar.writer import TarWriter
from mmstream.types import IntArray, Sample

logger = logging.getLogger(__name__)

BATCH_BYTES = 64 << 20
"""Bytes of samples that a process reads at once, side by side, and holds."""

ALL_PACKS = 1 << 40
"""Packs that are packed again together: all of a group, as distance costs nothing here."""


@dataclass(frozen=True)
class _Job:
    """What a process needs to write one shard."""

    dataset: Dataset
    store: Store
    lock: WriteLock
    name: str
    positions: IntArray
    """Of the samples in `dataset`, in the order of the new shard."""


@checked({**arguments_gone("reshard"), "source": "give a folder, a URL, or mm.open_dataset(...)"})
def reshard(
    source: str | os.PathLike[str] | Dataset,
    dest: str | os.PathLike[str],
    *,
    plan: NonEmptyStr | None = None,
    buckets: Buckets | None = None,
    shuffle_seed: AnyInt | None = 0,
    samples_per_shard: PositiveInt | None = None,
    num_workers: NonNegativeInt = 1,
    progress: bool = True,
) -> Any:
    """Rewrite a dataset in the order of packs, so that each pack is one range of bytes.

    Samples are shuffled first and then packed by the settings of the plan. So neighbouring packs
    are not alike, and packs are a little fuller than those of `plan`. Samples that the plan
    leaves out are not written. The lengths and the plan are written too, under their names.

    Without a plan, the samples alone are written: of a view, those that are chosen, side by side.
    Those on the bad list are left out. With `buckets`, a shard has samples of one bucket, so that
    steps of a bucket are read in long ranges. A warning counts the samples that are in none, which
    are not written.

    Samples of a union of folders get the number of their folder before their key, such as
    ``2-000017``: folders may have the same keys.

    A call that was killed goes on where it was, when it is made again.

    Args:
        source: A dataset, a view of one, or what `open_dataset` takes.
        dest: Folder or URL of the new dataset. It must be empty.
        plan: Name of the plan, or its folder or URL. None: no packs.
        buckets: Those of training. Not together with `plan`.
        shuffle_seed: Seed of the shuffle. None: the packs of the plan, or the samples, in their
            order.
        samples_per_shard: Samples of a shard, or some more: a pack is not cut. None: as many as the
            shards of the dataset have on average.
        num_workers: Processes. The new dataset does not depend on their number.
        progress: Show a progress bar (on a terminal only).

    Returns:
        The plan of the new dataset, a `PackPlan`. None without `plan`.

    Raises:
        ConfigError: The plan is not of this dataset or view, there is no sample to write, the
            column of the buckets is not known, or `dest` holds something else.
        FileNotFoundError: There is no such plan, or its lengths are not beside it.
        ShardError: Two neighbours in a shard would have one key.
        LockedError: Another process writes there.
        ChecksumError, StorageError: A sample cannot be read.

    Examples:
        >>> from mmstream.train.tokenizer import byte_tokenizer
        >>> pipeline = mm.Pipeline(
        ...     mm.open_dataset("shards/"),
        ...     global_batch_size=2,
        ...     decode=mm.Decode(text=mm.TextDecoder(byte_tokenizer(), max_length=2048)),
        ...     batching=mm.Pack(2048),
        ... )
        >>> plan = mm.plan(pipeline, name="2k")
        >>> packs = mm.reshard("shards/", "packs/", plan="2k")
        >>> len(mm.open_dataset("packs/")) == packs.members.size
        True
    """
    if plan is not None and buckets is not None:
        raise ConfigError("reshard: packs have no buckets; give plan= or buckets=")
    dataset = source if isinstance(source, Dataset) else open_dataset(source)
    packs = None if plan is None else _plan_of(dataset, plan)
    mean_samples = -(-int(dataset.counts.sum()) // max(1, dataset.num_shards))
    per_shard = samples_per_shard or mean_samples
    if packs is None:
        positions, group_units = _without_packs(dataset, buckets, shuffle_seed)
        counts = np.ones_like(positions)
    else:
        measured = _measure_of(packs)
        positions, counts, group_units = _order(measured, packs, dataset, shuffle_seed, per_shard)
    if not counts.size:
        raise ConfigError(
            f"{packs.url}: the plan has no packs; see what `mmstream plan` leaves out"
            if packs
            else f"reshard: {dataset!r} has no samples to write: choose others"
        )
    recipe: dict[str, Any] = {
        "plan": packs and packs.digest,
        "packs": hashlib.sha256(positions.tobytes() + counts.tobytes()).hexdigest(),
        "sources": [[shard.name, shard.num_bytes] for shard in dataset.manifest.shards],
        "shuffle_seed": shuffle_seed,
        "samples_per_shard": per_shard,
    }
    if buckets is not None:
        recipe["buckets"] = group_units.tolist()
    store = open_store(dest)
    require_shared([dataset.store.url, store.url], num_workers)
    name = (plan or "").rstrip("/").rpartition("/")[2].removeprefix(PLAN_PREFIX)
    bounds, group_stops = _shard_bounds(counts, group_units, per_shard)
    with write_lock(store, "reshard") as lock:
        if _is_finished(store, recipe):
            return packs and open_plan(plan_folder(store.url, name))
        remove_leftovers(store, LEFTOVERS)
        if not store.exists(MARKER_NAME):
            store.write(MARKER_NAME, json_lines({"reshard": recipe}))
        shards = _write_shards(dataset, store, lock, positions, bounds, num_workers, progress)
        opened = None
        if packs is not None:
            columns = {name: column[positions] for name, column in measured.columns.items()}
            of_all = {key: value for key, value in measured.settings.items() if key != SELECTION}
            moved = Measure(shards, columns, of_all)
            planned = plan_in_order(moved, packs.settings, counts, group_stops)
            write_measure(moved, store.url)
            opened = write_plan(planned, plan_folder(store.url, name))
        _finish(store, dataset, shards, recipe)
    return opened


def _plan_of(dataset: Dataset, plan: str) -> PackPlan:
    folder = plan if "/" in plan else plan_folder(dataset.index_store.url, plan)
    packs = open_plan(folder)
    require_plan_of(dataset, packs)
    if len(packs.shards) < dataset.num_shards:
        raise ConfigError(f"{packs.url}: the plan is of fewer shards; run `mmstream plan` again")
    return packs


def _measure_of(plan: PackPlan) -> Measure:
    """Return the lengths that a plan was made of. They lie beside it."""
    root = str(plan.url).rpartition("/")[0]
    store = open_store(measure_folder(root, plan.lengths))
    lengths = [
        shard_lengths
        for shard_lengths in read_lengths(store, plan.shards)
        if shard_lengths is not None
    ]
    if len(lengths) < len(plan.shards):
        raise FileNotFoundError(
            f"{store.url}: the lengths of {plan.url} are not there; run `mmstream plan` again"
        )
    return measure_of_shards(plan.shards, lengths, plan.lengths)


def _order(
    measure: Measure, plan: PackPlan, dataset: Dataset, seed: int | None, per_shard: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the new order of samples.

    Returns:
        int64 [num_members], positions in the dataset of the samples of all packs; int64
        [num_units], samples of each pack; int64 [num_groups], packs of each group.
    """
    bad = np.zeros(measure.num_samples, dtype=bool)
    bad[_bad_positions(dataset)] = True
    if seed is None:
        is_good = ~bad[plan.members]
        counts = np.add.reduceat(is_good, plan.unit_rows[:, 0], dtype=np.int64)
        group_of_unit = np.repeat(np.arange(plan.counts.size), plan.counts)
        group_units = np.bincount(group_of_unit[counts > 0], minlength=plan.counts.size)
        return plan.members[is_good], counts[counts > 0], group_units
    shuffled = permutation(measure.num_samples, seed, "reshard")
    columns = {name: column[shuffled] for name, column in measure.columns.items()}
    columns["num_tokens"] = np.where(bad[shuffled], -1, columns["num_tokens"])
    sizes = np.diff([*range(0, measure.num_samples, per_shard), measure.num_samples])
    shards = tuple(ShardInfo(str(number), int(size), 0) for number, size in enumerate(sizes))
    packs = make_plan(
        Measure(shards, columns, measure.settings), plan.settings, block_packs=ALL_PACKS
    )
    counts = np.diff(np.append(packs.unit_rows[:, 0], packs.members.size))
    return shuffled[packs.members], counts, packs.counts


def _without_packs(
    dataset: Dataset, buckets: Buckets | None, seed: int | None
) -> tuple[IntArray, IntArray]:
    """Return the new order of samples without packs.

    Returns:
        int64 [num_written], positions in the dataset; int64 [num_groups], samples of each bucket,
        or of all.
    """
    groups = [_good_positions(dataset)]
    if buckets is not None:
        selections = bucket_selections(dataset, buckets, world=World())
        num_samples = groups[0].size
        groups = [_good_positions(dataset.with_selection(selection)) for selection in selections]
        num_outside = num_samples - sum(group.size for group in groups)
        if num_outside:
            logger.warning(
                "reshard: %s samples are in no bucket and not written", f"{num_outside:,}"
            )
    if seed is not None:
        groups = [group[permutation(group.size, seed, "reshard")] for group in groups]
    sizes = np.array([group.size for group in groups])
    return np.concatenate(groups), sizes[sizes > 0]


def _good_positions(dataset: Dataset) -> IntArray:
    """Return the positions of what a dataset or view shows, without those on the bad list."""
    starts = np.cumsum(dataset.counts) - dataset.counts
    chosen = [start + dataset.indexes_of(shard) for shard, start in enumerate(starts.tolist())]
    bad = _bad_positions(dataset)
    return np.setdiff1d(np.concatenate([bad[:0], *chosen]), bad, assume_unique=True)


def _bad_positions(dataset: Dataset) -> IntArray:
    """Return the positions of all that no epoch shows: on the bad list, or taken down."""
    starts = np.cumsum(dataset.counts) - dataset.counts
    return starts[dataset.bad[:, 0]] + dataset.bad[:, 1]


def _shard_bounds(
    counts: IntArray, group_units: IntArray, per_shard: int
) -> tuple[list[int], list[int]]:
    """Cut packs into shards. A shard ends with a pack, and a group with a shard.

    Returns:
        The bounds of all shards, in samples from 0 on; the stops of all groups, in shards.

    Examples:
        Packs of 3, 3, 2 and 1 samples, of which the last is a group, and 5 samples a shard.

        >>> _shard_bounds(np.array([3, 3, 2, 1]), np.array([3, 1]), 5)
        ([0, 6, 8, 9], [2, 3])
    """
    ends = np.cumsum(counts)
    bounds, stops = [0], []
    for stop in np.cumsum(group_units).tolist():
        group_end = int(ends[stop - 1]) if stop else 0
        while bounds[-1] < group_end:
            full = int(np.searchsorted(ends, bounds[-1] + per_shard))
            bounds.append(min(group_end, int(ends[min(full, ends.size - 1)])))
        stops.append(len(bounds) - 1)
    return bounds, [stop for before, stop in pairwise([0, *stops]) if stop > before]


def _is_finished(store: Store, recipe: dict[str, Any]) -> bool:
    """Tell whether an earlier call wrote the dataset.

    Raises:
        ConfigError: There is something else.
        ManifestError: What an earlier call wrote is damaged.
    """
    names = store.list().keys()
    if MARKER_NAME in names:
        if read_json(store, MARKER_NAME).get("reshard") == recipe:
            return False
    elif MANIFEST_NAME in names:
        if Manifest.read(store).source.get("reshard") == recipe:
            return True
    elif not names:
        return False
    raise ConfigError(f"{store.url}: holds something else; give an empty folder or prefix")


def _write_shards(
    dataset: Dataset,
    store: Store,
    lock: WriteLock,
    positions: IntArray,
    bounds: list[int],
    num_workers: int,
    progress: bool,
) -> tuple[ShardInfo, ...]:
    jobs = [
        _Job(dataset, store, lock, f"shard-{number:06d}.tar", positions[start:stop])
        for number, (start, stop) in enumerate(pairwise(bounds))
    ]
    written: dict[str, ShardInfo] = {}
    with tqdm(total=len(positions), unit=" samples", disable=None if progress else True) as bar:
        for job, info in run_in_processes(_write_shard, jobs, num_workers, command="reshard"):
            written[job.name] = info
            bar.update(info.num_samples)
    return tuple(written[job.name] for job in jobs)


def _write_shard(job: _Job) -> ShardInfo:
    """Write one shard, unless an earlier call did."""
    written = read_shard_report(job.store, job.name, ShardInfo)
    if written is not None and wrong_size(job.store, shard_sizes(written)) is None:
        return written
    info = write_tar(job.store, job.name, _samples(job), lambda _: job.lock.require())
    job.lock.require()
    job.store.write(report_name(job.name), msgspec.json.encode(info) + b"\n")
    return info


def _samples(job: _Job) -> Iterator[bytes]:
    """Yield the bytes of all samples of a shard, in order. `BATCH_BYTES` are in memory."""
    ends = np.cumsum(job.dataset.counts)
    shards = np.searchsorted(ends, job.positions, side="right")
    indexes = job.positions - (ends - job.dataset.counts)[shards]
    job.dataset.shards.indexes.load(sorted(set(shards.tolist())))
    sizes = np.empty(len(shards), dtype=np.int64)
    for shard in np.unique(shards).tolist():
        bounds = job.dataset.shards.bounds(shard, indexes[shards == shard])
        sizes[shards == shard] = bounds.stop - bounds.start
    batches = np.cumsum(sizes) // BATCH_BYTES
    last_key = ""
    for batch in np.unique(batches).tolist():
        refs = [(int(shards[i]), int(indexes[i])) for i in np.flatnonzero(batches == batch)]
        for ref, data in zip(refs, job.dataset.shards.read_bytes(refs), strict=True):
            sample = job.dataset.shards.parse(data, *ref)
            if job.dataset.folders:
                own, _ = job.dataset.own(ref[0])
                sample["__key__"] = f"{job.dataset.folders.index(own) + 1}-{sample['__key__']}"
                data = _written(sample)
            key = sample["__key__"]
            if key == last_key:  # readers of tars would take the two for one sample
                raise ShardError(
                    f"{where(job.dataset.name_of(ref[0]), ref[1], key)} has the key of the sample "
                    "before it in the new shard; give another shuffle_seed"
                )
            last_key = key
            yield _bytes_alone(sample, data)


def _bytes_alone(sample: Sample, data: bytes) -> bytes:
    """Return the bytes of a sample for another tar: without links, or zeros of joined tars."""
    members = list(iter_members(lambda start, stop: data[start:stop], len(data)))
    if members[-1].end == len(data) and all(member.link is None for member in members):
        return data
    return _written(sample)


def _written(sample: Sample) -> bytes:
    """Return the members of a sample, rewritten."""
    file = io.BytesIO()
    fields = {name: value for name, value in sample.items() if name[:2] != "__"}
    TarWriter(file).add(sample["__key__"], fields)
    return file.getvalue()


def _finish(
    store: Store, dataset: Dataset, shards: tuple[ShardInfo, ...], recipe: dict[str, Any]
) -> None:
    """Write the index and the manifest, which commits the dataset. Remove what is not needed."""
    num_samples = sum(shard.num_samples for shard in shards)
    is_whole = num_samples == int(dataset.counts.sum())
    manifest = Manifest(
        shards,
        fields=dataset.manifest.fields if is_whole else {},
        source={**dataset.manifest.source, "reshard": recipe},
        checksums="written",
    )
    commit(store, manifest)
    store.remove(MARKER_NAME)
    remove_reports(store, [report_name(shard.name) for shard in shards])
