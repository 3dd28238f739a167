"""The order over the packs of a mixture: which packs of which source make each step.

It is `PackOrder` over a `MixtureOrder`. To that, a *group* of shards is a shard and a *unit* (a
pack) is a sample, and each source has groups and units of its own. A pack holds samples of one
source::

    (step, row)  --mixture order-->  (source, group, unit)  --plan-->  the unit's samples

A source comes round in epochs of its own, each of its packs once in each. Weights say how many
samples or tokens a source gives, so they become shares of packs: those weights over what a pack of
the source holds in the mean. They are kept in the mean of many packs, since packs differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmstream.errors import StateError
from mmstream.order import Corpus, MixtureOrder, Recipe, Stop
from mmstream.order.corpus import DATASET, dataset_identity, differing_keys
from mmstream.order.mixture.recipe import binding
from mmstream.packing.order import PackOrder, bad_units
from mmstream.packing.plan import MixturePlan


class MixturePackOrder(PackOrder):
    """The order over the packs of a mixture. Build it with `from_plans`.

    Attributes:
        inner: the order over the groups and units of all sources.
        plan: what the packs are.
        num_units: rows of an epoch of the mixture.
    """

    inner: MixtureOrder
    plan: MixturePlan

    def __init__(
        self, inner: MixtureOrder, plan: MixturePlan, corpora: Mapping[str, Corpus]
    ) -> None:
        super().__init__(inner, plan, _end_to_end(corpora, plan))
        self._corpora = corpora

    @classmethod
    def from_plans(
        cls,
        plan: MixturePlan,
        corpora: Mapping[str, Corpus],
        shares: Mapping[int, Mapping[str, int]],
        *,
        epoch_steps: int | Stop,
        drop_last: bool = True,
        **settings: Any,
    ) -> MixturePackOrder:
        """Build the order over the packs of a mixture.

        Args:
            plan: the packs.
            corpora: of the sources, with their bad lists: these samples are left out of their
                packs. Shards behind those of a plan are ignored.
            shares: of packs, by source, by the step of the run from which they hold.
            epoch_steps: steps of an epoch, or when an epoch ends.
            drop_last: has no effect, since no step is partial.
            settings: `global_batch_size`, `seed` and others of `Recipe.from_weights`. They count
                packs.

        Raises:
            ConfigError: impossible settings, or a source without packs.
        """
        del drop_last
        corpora = _planned(corpora, plan)
        recipe = Recipe.from_weights(
            _units(corpora, plan),
            shares,
            epoch_steps=epoch_steps,
            row_shape=plan.row_shape(shares[0]),
            **settings,
        )
        return cls(MixtureOrder(recipe), plan, corpora)

    @classmethod
    def from_mixture_identity(
        cls, identity: Mapping[str, Any], plan: MixturePlan, corpora: Mapping[str, Corpus]
    ) -> MixturePackOrder:
        """Rebuild the order of a saved state. It knows the shares.

        Args:
            identity: ``state["order"]``.
            plan: the packs of the sources now.
            corpora: of the sources now.

        Raises:
            StateError: `identity` is malformed, or of other sources or plans.
        """
        names = list(corpora)
        corpora = _planned(corpora, plan)
        inner = MixtureOrder(Recipe.from_identity(identity, _units(corpora, plan)))
        for source in identity["sources"]:
            name = source["name"]
            if source.get("plan") != plan.plans[name].digest:
                raise StateError(
                    f"the packs of source {name!r} of the state are of plan "
                    f"{source.get('plan')!r}, these of plan {plan.plans[name].digest!r}: give the "
                    "plan of the state, mm.Pack(plan={name: plan})"
                )
            differing = differing_keys(dataset_identity(source), corpora[name].identity())
            if differing:
                raise StateError(
                    f"the shards of source {name!r} are not those of the state, in "
                    f"{', '.join(differing)}: resume on the old ones, or start anew"
                )
        saved_names = list(inner.recipe.corpora)
        if saved_names != names[: len(saved_names)]:  # groups are numbered in this order
            raise StateError(
                f"the state's sources are {saved_names}, and here {names}: put them in the state's "
                "order, new ones at the end"
            )
        return cls(inner, plan, corpora)

    def identity(self) -> dict[str, Any]:
        """Return everything the order depends on, in plain JSON types. States contain it.

        It has the keys of the inner order, where ``corpus`` and the others of a source are about
        groups and units. Each source has the digest of its ``plan``, and ``dataset corpus`` and so
        on of its shards.
        """
        identity = self.inner.identity()
        sources = [
            {
                **source,
                "plan": self.plan.plans[source["name"]].digest,
                **{
                    f"{DATASET} {key}": value
                    for key, value in self._corpora[source["name"]].identity().items()
                },
            }
            for source in identity["sources"]
        ]
        return {**identity, "sources": sources, "plan": self.plan.digest}

    binding = staticmethod(binding)


def _planned(corpora: Mapping[str, Corpus], plan: MixturePlan) -> dict[str, Corpus]:
    """Return the shards of each source that its plan has."""
    return {
        name: corpora[name].first_shards(len(of_source.shards))
        for name, of_source in plan.plans.items()
    }


def _units(corpora: Mapping[str, Corpus], plan: MixturePlan) -> dict[str, Corpus]:
    """Return the groups and units of each source, as shards and samples."""
    return {
        name: Corpus(
            of_source.counts,
            of_source.group_names,
            bad=bad_units(of_source, corpora[name].bad),
            sizes=of_source.group_bytes,
            checksums=of_source.group_digests,
        )
        for name, of_source in plan.plans.items()
    }


def _end_to_end(corpora: Mapping[str, Corpus], plan: MixturePlan) -> Corpus:
    """Return the shards of all sources as one corpus, numbered as in the mixture."""
    counts, bad, first_shard = [], [], 0
    for corpus, num_shards in zip(corpora.values(), plan.num_shards, strict=True):
        counts.append(np.pad(corpus.counts, (0, num_shards - corpus.counts.size)))
        bad.append(corpus.bad + np.array([first_shard, 0]))
        first_shard += num_shards
    return Corpus(np.concatenate(counts), bad=np.concatenate(bad))
