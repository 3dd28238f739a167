"""The plan of a pipeline that packs: opened by its name or by a digest, and checked.

Place in the flow: `Pipeline.order` calls `find_plan`, or `packs_of_mixture` for the plans of all
sources. Without a name, ``mm.Pack(8192)`` looks beside the index for the name that `mm.plan` gives:
a digest of the decoders' settings and the limits. States and replay look for the digest of a plan.

Whoever opens a plan by a name counts a few of its samples anew. A plan of other lengths is refused.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from mmstream.batching.batching import Pack
from mmstream.batching.lengths import LengthCounter, differing_settings
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.mixture import Mixture
from mmstream.decoding.decode import Decode
from mmstream.decoding.rows import Transform
from mmstream.errors import ConfigError, ManifestError
from mmstream.order.permute import stream_key
from mmstream.packing.measure_file import settings_digest
from mmstream.packing.order import MixturePackOrder
from mmstream.packing.plan import (
    FORMAT_VERSION,
    LEFT_OUT_REASONS,
    OVER_A_LIMIT,
    PLAN_NAME,
    PLAN_PREFIX,
    TOO_LONG,
    UNUSABLE,
    MixturePlan,
    PackPlan,
    UnitSums,
    open_plan,
    plan_folder,
    require_plan_of,
)
from mmstream.packing.plan_report import left_out_of
from mmstream.packing.settings import PackLimits
from mmstream.world import resolve_world

logger = logging.getLogger(__name__)

NOT_ON_PURPOSE = tuple(LEFT_OUT_REASONS[i] for i in (UNUSABLE, TOO_LONG, OVER_A_LIMIT))
"""Why samples are in no pack, where nobody has asked for it by a condition or a bad list."""


class _Draws(msgspec.Struct):
    """How the samples of a plan were counted, beside the decoders."""

    seed: int | None = None
    epochs: tuple[int, ...] | None = None
    room: int = 0
    patch_size: int = 14


def plan_name(limits: PackLimits, settings: Mapping[str, Any]) -> str:
    """Return the name of a plan: T, and a digest of the limits and the decoders.

    Args:
        limits: What a pack may hold.
        settings: `LengthCounter.settings`. Random draws do not count.
    """
    decoders = {name: settings[name] for name in settings.keys() - {*_Draws.__struct_fields__}}
    digest = settings_digest({"limits": limits.as_json(), "decoders": decoders})
    return f"{limits.max_tokens}-{digest[:12]}"


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
        ConfigError: There is no plan of these decoders and limits, or it does not fit: it is of
            other shards or lengths. The message has the command.
        FileNotFoundError: There is no plan of this name.
        ManifestError: It is damaged.
        ShardError, StorageError: The dataset cannot be read.
    """
    counter = None
    if decode is not None and decode.text is not None:
        counter = LengthCounter(dataset, decode, tuple(before), seed)
    if pack.plan is None:
        plan = _plan_of_decoders(dataset, pack, counter)
    elif isinstance(pack.plan, PackPlan):
        plan = pack.plan
    else:
        address = os.fspath(pack.plan)
        plan = open_plan(
            address if "/" in address else plan_folder(dataset.index_store.url, address)
        )
    name = plan.url or "the plan"
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
    require_plan_of(dataset, plan)
    if counter is not None and not isinstance(pack.plan, PackPlan):
        _require_lengths(counter, plan)
    if resolve_world(None).rank == 0:
        _tell_what_is_left_out(dataset, plan)
    return plan


def _plan_of_decoders(dataset: Dataset, pack: Pack, counter: LengthCounter | None) -> PackPlan:
    """Return the plan that has the digest of these decoders and limits for its name."""
    if counter is None:
        raise ConfigError(
            "mm.Pack: no decoder makes the tokens of texts, so nobody can count them: give it a "
            "plan, mm.Pack(..., plan=folder)"
        )
    url, limits = dataset.index_store.url, pack.limits or PackLimits(pack.max_tokens)
    try:
        plan = open_plan(plan_folder(url, plan_name(limits, counter.settings)))
    except FileNotFoundError:
        raise ConfigError(
            f"mm.Pack({pack.max_tokens}): no plan of these decoders and limits is beside {url}: "
            f"{_cure(url, limits)}"
        ) from None
    if len(plan.shards) < dataset.num_shards:
        raise ConfigError(
            f"{plan.url}: is of the first {len(plan.shards)} of {dataset.num_shards} shards: "
            f"{_cure(url, limits)}"
        )
    return plan


def _cure(url: str, limits: PackLimits, *more: str) -> str:
    """Return the command that makes a plan, and the call."""
    words = ["mmstream", "plan", url]
    defaults = PackLimits(limits.max_tokens).as_json() | {"max_tokens": None}
    for name, value in limits.as_json().items():
        if value != defaults[name]:
            words += [f"--{name.replace('_', '-')}", str(value)]
    command = shlex.join([*words, *more, "--pipeline", "MODULE:OBJECT"])
    return f"run `{command}` once, or mm.plan(pipeline)"


def _require_lengths(counter: LengthCounter, plan: PackPlan) -> None:
    """Raise a ConfigError where a few samples have other lengths than in a plan; see `misfit`."""
    difference = misfit(counter, plan)
    if difference is None:
        return
    cure = _cure(counter.dataset.index_store.url, plan.settings, "--overwrite")
    raise ConfigError(
        f"{plan.url}: its lengths are not those of this pipeline: {difference}: {cure}"
    )


def misfit(counter: LengthCounter, plan: PackPlan) -> str | None:
    """Count a few samples of a plan. Return how its lengths are others than those of a pipeline.

    Raises:
        ManifestError: The plan is damaged.
        ShardError, StorageError: The dataset cannot be read.
    """
    try:
        draws = msgspec.convert(plan.lengths, _Draws)
    except msgspec.ValidationError:
        raise ManifestError(
            f"{plan.url}: is damaged; run `mmstream plan` with --overwrite"
        ) from None
    if draws.epochs and draws.seed != counter.seed:
        return f"it has those of the random draws of seed {draws.seed}, not of {counter.seed}"
    counter = replace(counter, epochs=draws.epochs, room=draws.room, patch_size=draws.patch_size)
    patches = plan.unit_rows[:, 1 + UnitSums._fields.index("patches")]
    largest = [int(plan.unit_rows[patches.argmax(), 0])] if plan.num_units else []
    max_tokens = plan.settings.max_tokens if plan.settings.overlong == "truncate" else None
    of_sample = counter.difference(
        plan.shard_ends, plan.members, plan.member_tokens, "in the plan", largest, max_tokens
    )
    if of_sample is None:
        return None
    names = differing_settings(plan.lengths, counter.settings)
    settings = ", ".join(names[:4]) or "no setting, so a function or a library"
    return f"{of_sample}; what differs: {settings}"


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
            "%r: is of the first %d of %d shards, and the others are not read; run `mmstream plan` "
            "again",
            plan,
            len(plan.shards),
            dataset.num_shards,
        )


class _PlanHead(msgspec.Struct):
    """What of a plan says whether it is the one of a state."""

    digest: str
    shards: list[object]
    version: int = 1


def plan_of_digest(dataset: Dataset, digest: str) -> PackPlan | None:
    """Return the plan of a digest with the most shards, from beside the index.

    One that this version cannot open is taken only where there is no other, for its message.
    """
    root = dataset.index_store
    urls = {}
    for folder in root.folders():
        if not folder.startswith(PLAN_PREFIX):
            continue
        with suppress(FileNotFoundError, msgspec.MsgspecError):
            head = msgspec.json.decode(root.read(f"{folder}/{PLAN_NAME}"), type=_PlanHead)
            if head.digest == digest:
                is_current = head.version == FORMAT_VERSION
                urls[is_current, len(head.shards)] = root.url_of(folder)
    return open_plan(urls[max(urls)]) if urls else None


def plan_or_plans_of_state(
    data: Dataset | Mixture, state: Mapping[str, Any]
) -> PackPlan | MixturePlan | None:
    """Return the plan, or the plans of a mixture, that a saved state is of.

    Args:
        data: What is packed.
        state: ``loader.state_dict()``.

    Returns:
        None: a plan is not beside its index, or the state is not of packs.
    """
    identity = state.get("order")
    if not isinstance(identity, Mapping):
        return None
    if isinstance(data, Dataset):
        return plan_of_digest(data, identity["plan"]) if "plan" in identity else None
    plans = {}
    for source in identity.get("sources", ()):
        dataset = data.datasets.get(source.get("name"))
        plan = None if dataset is None else plan_of_digest(dataset, source.get("plan"))
        if plan is None:
            return None
        plans[source["name"]] = plan
    return _joined(data, plans) if plans else None


# -- mixtures -------------------------------------------------------------------------------------


def seed_of_source(seed: int, name: str) -> int:
    """Return the seed of the random draws of a source of a mixture."""
    return stream_key(seed, "source", name)


def packs_of_mixture(
    mixture: Mixture,
    pack: Pack,
    decode: Decode | None,
    before: Sequence[Transform] = (),
    seed: int = 0,
    **settings: Any,
) -> MixturePackOrder:
    """Return the order over the packs of a mixture.

    The weights become shares of packs: those weights over what a pack of the source holds in the
    mean. The log says them.

    Args:
        mixture: What is packed. Each of its sources needs a plan with the same limits.
        pack: The settings of packs. Its `plan` is None, a name that the plans of all sources have,
            or a dict of plans by source.
        decode: The decoders of the pipeline.
        before: Its functions before decoding.
        seed: Of the mixture.
        settings: Of the order.

    Raises:
        ConfigError: As `find_plan`, or the plans do not go together.
    """
    plans = {
        name: find_plan(
            dataset,
            replace(pack, plan=_plan_of_source(pack.plan, name, mixture)),
            decode,
            before,
            seed_of_source(seed, name),
        )
        for name, dataset in mixture.datasets.items()
    }
    plan = _joined(mixture, plans)
    shares = plan.shares_by_step(mixture.weights, pack.weights_of or "samples")
    order = MixturePackOrder.from_plans(
        plan, mixture.corpora, shares, epoch_steps=mixture.epoch_steps, seed=seed, **settings
    )
    if resolve_world(None).rank == 0:
        for step, of_step in shares.items():
            parts = ", ".join(f"{share:,} of {name}" for name, share in of_step.items())
            total = sum(of_step.values())
            logger.info("from step %s: of %d packs, in the mean: %s", f"{step:,}", total, parts)
    return order


def _joined(mixture: Mixture, plans: Mapping[str, PackPlan]) -> MixturePlan:
    return MixturePlan(plans, [mixture.datasets[name].num_shards for name in plans])


def _plan_of_source(plan: Any, name: str, mixture: Mixture) -> Any:
    """Return the plan that a source is given, or None."""
    if plan is None:
        return None
    if isinstance(plan, Mapping):
        if plan.keys() != mixture.datasets.keys():
            raise ConfigError(
                f"mm.Pack(plan=): names {sorted(plan)}, the sources are {sorted(mixture.datasets)}"
            )
        return plan[name]
    if isinstance(plan, str | os.PathLike) and "/" not in os.fspath(plan):
        return plan
    raise ConfigError(
        "mm.Pack(plan=...): each source of a mixture has a plan of its own: give the name that all "
        "of them have, or {source: plan}"
    )
