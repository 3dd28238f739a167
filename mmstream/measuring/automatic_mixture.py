"""The packs of a mixture: a plan of each source, named or one that fits, and their shares.

Place in the flow: `Pipeline(mixture, batching=mm.Pack(8192, weights_of="samples"))` calls
`packs_of_mixture`. Each source has a measure and a plan beside its own index, as by itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmstream.batching.batching import Pack
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.mixture import Mixture
from mmstream.decoding.decode import Decode
from mmstream.decoding.substitute import Transform
from mmstream.errors import ConfigError
from mmstream.measuring.automatic import find_plan, plan_of_digest, plan_of_state
from mmstream.order.permute import stream_key
from mmstream.packing.mixture_order import MixturePackOrder
from mmstream.packing.mixture_plan import MixturePlan
from mmstream.packing.plan import PackPlan
from mmstream.world import resolve_world

__all__ = ["packs_of_mixture", "plan_or_plans_of_state"]

logger = logging.getLogger(__name__)


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
    mean. The log says which parts of all samples and tokens are expected.

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
            stream_key(seed, "source", name),  # the seed of its random draws
        )
        for name, dataset in mixture.datasets.items()
    }
    plan = _joined(mixture, plans)
    shares = plan.shares_by_step(mixture.weights, pack.weights_of or "samples")
    order = MixturePackOrder.from_plans(
        plan, mixture.corpora, shares, epoch_steps=mixture.epoch_steps, seed=seed, **settings
    )
    if resolve_world(None).rank == 0:
        _tell_shares(plan, shares)
    return order


def plan_or_plans_of_state(
    data: Dataset | Mixture, state: Mapping[str, Any]
) -> PackPlan | MixturePlan | None:
    """Return the plan, or the plans of a mixture, that a saved state is of. See `plan_of_state`."""
    if isinstance(data, Dataset):
        return plan_of_state(data, state)
    identity = state.get("order")
    sources = identity.get("sources", ()) if isinstance(identity, Mapping) else ()
    plans = {}
    for source in sources:
        dataset = data.datasets.get(source.get("name"))
        plan = None if dataset is None else plan_of_digest(dataset, source.get("plan"))
        if plan is None:
            return None
        plans[source["name"]] = plan
    return _joined(data, plans) if plans else None


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


def _tell_shares(plan: MixturePlan, shares: Mapping[int, Mapping[str, int]]) -> None:
    """Say how many packs of each source there are, and what that is in samples and tokens."""
    for step, of_step in shares.items():
        parts = [plan.expected(list(of_step.values()), kind) for kind in ("samples", "tokens")]
        words = [
            f"{share:,} of {name}, which are {samples:.1%} of the samples and {tokens:.1%} of the "
            f"tokens"
            for (name, share), samples, tokens in zip(
                of_step.items(), *(part.values() for part in parts), strict=True
            )
        ]
        logger.info(
            "%sof %d packs, in the mean: %s",
            f"from step {step:,}: " if step else "",
            sum(of_step.values()),
            "; ".join(words),
        )
