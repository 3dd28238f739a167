"""The plan of a pipeline that packs: one that fits, or a new one where that is quick.

Place in the flow: `Pipeline(batching=mm.Pack(8192))` calls `find_plan`. It looks beside the index,
and then in the user's cache::

    mmstream.measure.NAME  --its probes count alike-->  mmstream.plan.NAME  --its limits-->  plan

Where no measure fits, and one process runs, and measuring takes less than two minutes, the corpus
is measured and planned there and then. Otherwise an error says which command does it, and how long
that will take: the ranks of a run must not wait for one of them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from mmstream.batching.batching import Pack
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index_cache import cache_folder
from mmstream.decoding.decode import Decode
from mmstream.decoding.substitute import Transform
from mmstream.display.markup import time_text
from mmstream.errors import ConfigError, ManifestError
from mmstream.measuring.lengths import Counter
from mmstream.measuring.measure import Work, estimate, measure_into
from mmstream.measuring.probes import difference
from mmstream.packing.measure_file import (
    MeasureHead,
    is_same_shard,
    measure_folder,
    open_measure_head,
)
from mmstream.packing.plan import (
    LEFT_OUT_REASONS,
    OVER_A_LIMIT,
    TOO_LONG,
    UNUSABLE,
    PackPlan,
)
from mmstream.packing.plan_file import PLAN_NAME, open_plan, plan_folder, require_plan_of
from mmstream.packing.plan_packs import default_plan_name, plan_packs
from mmstream.packing.plan_report import left_out_of
from mmstream.packing.planner import plan_digest
from mmstream.packing.settings import PackLimits
from mmstream.storage import Store, open_store
from mmstream.world import resolve_world

__all__ = ["find_plan", "plan_of_digest", "plan_of_state"]

logger = logging.getLogger(__name__)

MAX_SECONDS = 120.0
"""Longest measuring that a pipeline does by itself."""

NOT_ON_PURPOSE = tuple(LEFT_OUT_REASONS[i] for i in (UNUSABLE, TOO_LONG, OVER_A_LIMIT))
"""Why samples are in no pack, where nobody has asked for it by a condition or a bad list."""

MEASURES = "mmstream.measure."
PLANS = "mmstream.plan."


class _Candidate(NamedTuple):
    """A measure, and where it lies."""

    root: Store
    """The folder that has the folders of measures and plans."""
    name: str
    measure: MeasureHead

    @property
    def url(self) -> str:
        return self.root.url_of(f"{MEASURES}{self.name}")


def find_plan(
    dataset: Dataset,
    pack: Pack,
    decode: Decode | None,
    before: Sequence[Transform] = (),
    seed: int = 0,
) -> PackPlan:
    """Return the plan of a pipeline.

    Args:
        dataset: What is packed.
        pack: The length of rows, their limits, and the plan if one is named.
        decode: The decoders of the pipeline. Without one of texts, lengths cannot be counted, and a
            plan must be named.
        before: Its functions before decoding.
        seed: Of its random draws.

    Raises:
        ConfigError: The plan or measure that is named does not fit these decoders; the message says
            the first difference. Or the plan is of other shards. Or none is there, and this process
            should not make one.
        FileNotFoundError: There is no plan of this name.
        ManifestError: It is damaged.
        ShardError, StorageError: The dataset cannot be read.
    """
    plan = _fitting_plan(dataset, pack, decode, before, seed)
    require_plan_of(dataset, plan)
    if resolve_world(None).rank == 0:
        _tell_what_is_left_out(dataset, plan)
    return plan


def _fitting_plan(
    dataset: Dataset, pack: Pack, decode: Decode | None, before: Sequence[Transform], seed: int
) -> PackPlan:
    if isinstance(pack.plan, PackPlan):
        return _with_length(pack.plan, pack, "the plan")
    has_text = decode is not None and decode.text is not None
    if pack.plan is not None:
        return _named_plan(dataset, pack, decode if has_text else None, before, seed)
    if decode is None or not has_text:
        raise ConfigError(
            "mm.Pack: no decoder makes the tokens of texts, so nobody can count them: give it a "
            "plan, mm.Pack(..., plan=folder)"
        )
    limits = pack.limits or PackLimits(pack.max_tokens)
    misfits = []
    for candidate in _measures(dataset):
        words = _difference(candidate.measure, decode, before, seed)
        if words is None:
            return _plan_of(dataset, candidate, limits)
        misfits.append(f"{candidate.url} does not fit: {words}")
    return _new_plan(dataset, limits, decode, before, seed, misfits)


def _tell_what_is_left_out(dataset: Dataset, plan: PackPlan) -> None:
    """Warn of samples that no epoch will show, but for those that were left out on purpose."""
    left_out = [entry for entry in left_out_of(plan) if entry.reason in NOT_ON_PURPOSE]
    if left_out:
        logger.warning(
            "%r: no epoch shows the samples that are in no pack: %s",
            plan,
            ", ".join(f"{entry.num_samples:,} {entry.reason}" for entry in left_out),
        )
    if len(plan.shards) < dataset.num_shards:
        logger.warning(
            "%r: is of the first %d of %d shards, and the others are not read; run `mmstream "
            "measure` and `mmstream plan` again",
            plan,
            len(plan.shards),
            dataset.num_shards,
        )


def plan_of_state(dataset: Dataset, state: Mapping[str, Any]) -> PackPlan | None:
    """Return the plan that a saved state is of, if it lies beside the index or in the cache.

    Args:
        dataset: What is packed.
        state: ``loader.state_dict()``.

    Returns:
        The plan of the most shards, if there are several. None: there is none, or the state is not
        of packs.
    """
    identity = state.get("order")
    digest = identity.get("plan") if isinstance(identity, Mapping) else None
    return None if digest is None else plan_of_digest(dataset, digest)


def plan_of_digest(dataset: Dataset, digest: str) -> PackPlan | None:
    """Return the plan of a digest with the most shards, from beside the index or the cache."""
    urls = {len(head.shards): url for url, head in _plans(dataset) if head.digest == digest}
    return open_plan(urls[max(urls)]) if urls else None


def _named_plan(
    dataset: Dataset, pack: Pack, decode: Decode | None, before: Sequence[Transform], seed: int
) -> PackPlan:
    """Return the plan that a pipeline names, if the measure that it was made of still fits."""
    address = os.fspath(pack.plan)
    folder = address if "/" in address else plan_folder(dataset.index_store.url, address)
    plan = _with_length(open_plan(folder), pack, folder)
    for candidate in [] if decode is None else _measures(dataset, is_whole=False):
        assert decode is not None
        if plan_digest(plan.settings, candidate.measure.digest) != plan.digest:
            continue
        words = _difference(candidate.measure, decode, before, seed)
        if words is not None:
            raise ConfigError(
                f"{folder}: its lengths are not those of this pipeline: {words}; measure again "
                f"with these decoders, then plan: mm.measure(..., name=...), mm.plan_packs(...)"
            )
        return plan
    logger.warning(
        "%s: its measure is not beside the index, so nobody checks that this pipeline still counts "
        "as the plan does",
        folder,
    )
    return plan


def _with_length(plan: PackPlan, pack: Pack, name: str) -> PackPlan:
    """Refuse a plan of other packs than those of the settings."""
    if plan.settings.max_tokens != pack.max_tokens:
        raise ConfigError(
            f"mm.Pack({pack.max_tokens}): {name} has packs of {plan.settings.max_tokens} tokens: "
            "give another plan, or its max_tokens"
        )
    if pack.limits not in (None, plan.settings):
        raise ConfigError(
            f"mm.Pack(limits=): {name} has other limits: give another plan, or leave out one of "
            "the two"
        )
    return plan


def _difference(
    measure: MeasureHead, decode: Decode, before: Sequence[Transform], seed: int
) -> str | None:
    """Return the first difference between a measure and what a pipeline counts, or None."""
    settings = measure.settings
    if settings.get("epochs") and settings.get("seed") != seed:
        return f"it measured the random draws of seed {settings.get('seed')}, not of {seed}"
    counter = Counter(decode, tuple(before), int(settings.get("patch_size", 14)))
    return difference(measure, counter)


def _roots(dataset: Dataset) -> Iterator[Store]:
    """Yield where measures and plans of a dataset may lie: beside its index, in the cache."""
    yield dataset.index_store
    cache = _cache_root(dataset)
    if cache is not None:
        yield cache


def _measures(dataset: Dataset, *, is_whole: bool = True) -> Iterator[_Candidate]:
    """Yield the measures of the shards of a dataset.

    Args:
        dataset: The dataset.
        is_whole: Whether they must be of all its shards.
    """
    shards = dataset.manifest.shards
    for root in _roots(dataset):
        for folder in root.folders():
            if not folder.startswith(MEASURES):
                continue
            try:
                measure = open_measure_head(root.url_of(folder))
            except FileNotFoundError:  # it is not finished
                continue
            except ManifestError as error:
                logger.warning("%s", error)
                continue
            num_shards = len(measure.shards)
            is_of_dataset = num_shards <= len(shards) and all(
                map(is_same_shard, measure.shards, shards)
            )
            if is_of_dataset and (num_shards == len(shards) or not is_whole):
                yield _Candidate(root, folder.removeprefix(MEASURES), measure)
            elif is_of_dataset:
                logger.warning(
                    "%s: is of the first %d of %d shards; run `mmstream measure` again",
                    root.url_of(folder),
                    num_shards,
                    len(shards),
                )


class _PlanHead(msgspec.Struct):
    digest: str
    shards: list[object]


def _plans(dataset: Dataset) -> Iterator[tuple[str, _PlanHead]]:
    """Yield the URL and the head of each plan that lies where plans of a dataset may lie."""
    for root in _roots(dataset):
        for folder in root.folders():
            if not folder.startswith(PLANS):
                continue
            try:
                head = msgspec.json.decode(root.read(f"{folder}/{PLAN_NAME}"), type=_PlanHead)
            except (FileNotFoundError, msgspec.MsgspecError):
                continue
            yield root.url_of(folder), head


def _plan_of(dataset: Dataset, candidate: _Candidate, limits: PackLimits) -> PackPlan:
    """Return the plan of a measure with these limits. Make it if there is none."""
    digest = plan_digest(limits, candidate.measure.digest)
    for url, head in _plans(dataset):
        if head.digest == digest and len(head.shards) == dataset.num_shards:
            return open_plan(url)
    if resolve_world(None).world_size > 1:
        command = _plan_command(dataset, candidate.name, limits)
        raise ConfigError(
            f"mm.Pack({limits.max_tokens}): no plan of these limits is beside the index, and the "
            f"ranks of a run must not wait for one of them: run `{command}` once"
        )
    return _make_plan(dataset, candidate.url, candidate.name, limits)


def _plan_command(dataset: Dataset, measure: str, limits: PackLimits) -> str:
    """Return the command that makes a plan."""
    words = ["mmstream", "plan", dataset.index_store.url, "--measure", measure]
    defaults = PackLimits(limits.max_tokens).as_json() | {"max_tokens": None}
    for name, value in limits.as_json().items():
        if value != defaults[name]:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _make_plan(dataset: Dataset, measure: str, name: str, limits: PackLimits) -> PackPlan:
    """Plan the packs of a dataset, and write the plan beside the index or into the cache."""
    for root in _writable_roots(dataset):
        plan = plan_packs(
            dataset,
            limits.max_tokens,
            measure=measure,
            folder=plan_folder(root, default_plan_name(limits, name)),
            **{key: value for key, value in limits.as_json().items() if key != "max_tokens"},
        )
        logger.info("%r", plan)
        return plan
    raise _no_folder(dataset)


def _new_plan(
    dataset: Dataset,
    limits: PackLimits,
    decode: Decode,
    before: Sequence[Transform],
    seed: int,
    misfits: Sequence[str],
) -> PackPlan:
    """Measure and plan a dataset, if that is quick and one process runs.

    Raises:
        ConfigError: It is not quick, or there are other ranks; the message has the command.
    """
    misfit = f"; {misfits[0]}" if misfits else ""
    command = shlex.join(["mmstream", "measure", dataset.index_store.url])
    hint = f"run `{command} --decode module:object`, or mm.measure, once"
    if resolve_world(None).world_size > 1:
        raise ConfigError(
            f"mm.Pack({limits.max_tokens}): no measure of this dataset fits these decoders, and "
            f"the ranks of a run must not wait for one of them: {hint}{misfit}"
        )
    work = Work(dataset, Counter(decode, tuple(before)), seed)
    expected = estimate(work, range(dataset.num_shards))
    if expected.seconds > MAX_SECONDS:
        raise ConfigError(
            f"mm.Pack({limits.max_tokens}): no measure of this dataset fits these decoders, and "
            f"measuring takes about {time_text(expected.seconds)} here: {hint}{misfit}"
        )
    for misfit in misfits:
        logger.warning("%s; the dataset is measured anew", misfit)
    digest = hashlib.sha256(msgspec.json.encode(work.settings, order="sorted")).hexdigest()[:8]
    name = f"auto-{digest}"
    for root in _writable_roots(dataset):
        folder = measure_folder(root, name)
        measure_into(work, folder, num_workers=1)
        return _make_plan(dataset, folder, name, limits)
    raise _no_folder(dataset)


def _writable_roots(dataset: Dataset) -> Iterator[str]:
    """Yield where a new plan may be written: beside a local index, else in the cache."""
    path = dataset.index_store.local_path("")
    if path is not None and os.access(path, os.W_OK):
        yield path
    cache = _cache_root(dataset)
    if cache is not None:
        yield cache.url


def _no_folder(dataset: Dataset) -> ConfigError:
    return ConfigError(
        f"{dataset.index_store.url}: no folder for a plan can be written, neither there nor in the "
        "user's cache, whose folders only you may change; set XDG_CACHE_HOME, or name a plan, "
        "mm.Pack(..., plan=folder)"
    )


def _cache_root(dataset: Dataset) -> Store | None:
    """Return the folder of this user for the plans of a dataset. None: there is none."""
    name = hashlib.sha256(dataset.index_store.url.encode()).hexdigest()[:16]
    folder = cache_folder("plans", name)
    return None if folder is None else open_store(str(folder))
