"""Where a run goes on: the state ``{epoch, step}``, and the order that gives it meaning.

A resume starts at `step`. Nothing is replayed, whatever the ranks and workers are now. A state says
nothing about where shards lie or who reads them.

A state ends with a checksum, ``crc32c``. Settings that were left to defaults are taken from it, so
a damaged one could begin another order mid-epoch. If you edit a state by hand, delete its
``crc32c``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from copy import copy
from typing import Any, Literal, TypeAlias

import crc32c

from mmstream.dataset.dataset import Dataset, ShardSource
from mmstream.dataset.mixture import Mixture
from mmstream.errors import ConfigError, StateError, escaped
from mmstream.order import AnyOrder, BucketOrder, Order, without_buckets
from mmstream.order.corpus import (
    CONTENT_KEYS,
    DATASET,
    SavedOrder,
    check_identity,
    differing_keys,
    making,
)
from mmstream.packing.order import MixturePackOrder, PackOrder
from mmstream.packing.plan import MixturePlan, PackPlan

logger = logging.getLogger(__name__)

STATE_VERSION = 1

MAX_EPOCH = 1 << 40
"""Largest epoch of a state."""

_SEAL = "crc32c"
"""The key of a state's checksum."""

OnChange: TypeAlias = Literal["refuse", "finish_epoch"]
"""How a state of mid-epoch is treated that does not fit the present order."""


def resume_hint(step: int) -> str:
    """Return the end of an error's message: where the state is, and how to resume from it."""
    return (
        f"the state is at step {step}: to resume from it, call "
        "loader.load_state_dict(loader.state_dict()) and begin a new loop"
    )


def make_state(order: AnyOrder, epoch: int, step: int) -> dict[str, Any]:
    """Return the state of a run that has delivered all steps before (epoch, step).

    It has plain JSON types only. The step after the last one of an epoch is step 0 of the next.
    """
    epoch, step = position_after(order, epoch, step)
    state = {"version": STATE_VERSION, "epoch": epoch, "step": step, "order": order.identity()}
    return {**state, _SEAL: _checksum(state)}


def state_at(state: Mapping[str, Any], epoch: int, step: int) -> dict[str, Any]:
    """Return a state of the same run at another position."""
    moved = {**state, "epoch": epoch, "step": step}
    return {**moved, _SEAL: _checksum(moved)}


def position_after(order: AnyOrder, epoch: int, step: int) -> tuple[int, int]:
    """Return where a run stands before (epoch, step); after the last step begins an epoch."""
    return (epoch + 1, 0) if step >= order.steps_per_epoch else (epoch, step)


def read_state(state: Mapping[str, Any]) -> SavedOrder:
    """Return what a state says, whether or not it fits a run.

    Raises:
        StateError: malformed, damaged, or of another version.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("order"), Mapping):
        raise StateError("not a state of a Loader: it holds no order")
    try:
        version, epoch, step = state["version"], state["epoch"], state["step"]
    except KeyError as error:
        raise StateError(f"not a state of a Loader: it has no {error}") from None
    if type(version) is not int or version != STATE_VERSION:
        raise StateError(
            f"state version {_shown(version)}, this mmstream reads {STATE_VERSION}: "
            "resume with the version that saved it"
        )
    if not (type(epoch) is int and type(step) is int and epoch >= 0 and step >= 0):
        raise StateError(f"epoch {_shown(epoch)}, step {_shown(step)}: must be integers, 0 or more")
    if epoch > MAX_EPOCH:
        raise StateError(f"epoch {_shown(epoch)}: at most {MAX_EPOCH:,}")
    _check_seal(state)
    saved = SavedOrder.parse(state["order"], epoch, step)
    with making("an order of a state"):
        for identity in (saved.dataset, *saved.keys.get("sources", ())):
            check_identity(identity)
    return saved


# -- where a run goes on ---------------------------------------------------------------------------
#
# Cases, in the order in which they are tried:
#
#     same data       the state fits the run, with its own values where the run has defaults; where
#                     an epoch begins, all but dataset and seed may be others
#     only grown      it fits a run of the shards that it had; others were appended
#     finish epoch    more has changed, and the user said on_change="finish_epoch"
#
# In mid-epoch each gives the order that ends the epoch as planned. Where an epoch begins it is the
# present order. In no other case is there a resume.


def resume(
    source: ShardSource, order: AnyOrder, state: Mapping[str, Any], on_change: OnChange
) -> tuple[int, int, AnyOrder]:
    """Return where a run goes on: epoch, step, and the order of that epoch.

    Settings that were left to defaults are those of the state in the middle of an epoch, and the
    present defaults where an epoch begins: an upgrade may change them. A mixture keeps those of the
    state.

    With "refuse" all else is that of `order`. With "finish_epoch" it may be the order of the state,
    which finishes the epoch exactly as planned: the state holds all settings, and a dataset that
    has grown begins with the shards that it had. The next epoch then has `order`. The sources of a
    mixture do not end where its epochs do, so there "finish_epoch" acts as "refuse".

    Shards that were appended to a dataset are not a change of this kind: if all else is the same,
    the epoch is finished with the shards that it began with, also with "refuse".

    Raises:
        StateError: the state cannot be applied exactly. With "finish_epoch" the dataset is another
            one, not the same with shards appended.
    """
    saved = read_state(state)
    for case in (_same_data, _only_grown):
        if (resumed := case(order, saved)) is not None:
            return saved.epoch, saved.step, resumed
    if on_change == "refuse" or not source.can_finish_epoch:
        raise StateError(_misfit(_with_saved_defaults(order, saved), saved))
    return saved.epoch, saved.step, _finish_epoch(order, saved, source)


def _same_data(order: AnyOrder, saved: SavedOrder) -> AnyOrder | None:
    """Return the order of a run whose state fits as it is, with the defaults of the state."""
    kept = _with_saved_defaults(order, saved)
    if _misfit(kept, saved) is not None:
        return None
    _log_selections(saved, kept)
    return kept


def _only_grown(order: AnyOrder, saved: SavedOrder) -> AnyOrder | None:
    """Return the order of a run whose dataset has grown since, and nothing else has changed.

    A state of 3 shards goes on with a dataset of 4 if it fits a run of the first 3.
    """
    num_shards = saved.dataset.get("num_shards")
    if not isinstance(order, Order | BucketOrder) or type(num_shards) is not int:
        return None
    if not 0 < num_shards < order.corpus.counts.size:
        return None
    earlier: Any = copy(order)  # its dataset is all that counts where an epoch begins
    earlier.corpus = order.corpus.first_shards(num_shards)
    if saved.step:
        try:
            earlier = _with_saved_defaults(order.with_corpus(earlier.corpus), saved)
        except ConfigError:  # they do not fill a step
            return None
    if _misfit(earlier, saved) is not None:
        return None
    logger.info(
        "the dataset has grown from %d to %d shards: epoch %d begins with %s samples%s",
        num_shards,
        order.corpus.counts.size,
        saved.epoch + bool(saved.step),
        f"{order.num_samples:,}",
        f"; epoch {saved.epoch} ends with its {earlier.num_samples:,}" if saved.step else "",
    )
    if earlier.corpus.identity().get("selection") != saved.dataset.get("selection"):
        _log_selections(saved, order)
    return earlier if saved.step else order


def _finish_epoch(order: AnyOrder, saved: SavedOrder, source: ShardSource) -> AnyOrder:
    """Return the order of the state mid-epoch, and the present one where an epoch begins.

    Raises:
        StateError: the dataset is another one, not the same with shards appended.
    """
    plan = order.plan if isinstance(order, PackOrder) else None
    began = _order_of(saved if saved.step else _without_choices(saved), source, plan)
    if not saved.step:
        _log_selections(saved, order)
        return order
    logger.info(
        "steps %d to %d of epoch %d follow the saved settings, %d rows each; then the present "
        "settings begin",
        saved.step,
        began.steps_per_epoch - 1,
        saved.epoch,
        began.global_batch_size * began.repeat,
    )
    return began


def _with_saved_defaults(order: AnyOrder, saved: SavedOrder) -> AnyOrder:
    """Return an order with the settings that were left to defaults as a state has them.

    In mid-epoch, samples that were taken down since are planned as in the state, too. A state that
    is malformed, or of another run, changes nothing: `_misfit` says what it is.
    """
    try:
        if saved.has_begun and isinstance(order, Order | BucketOrder | PackOrder):
            corpus = order.corpus.as_of(saved.dataset.get("bad"))
            order = order if corpus is order.corpus else order.with_corpus(corpus)
        return order.with_saved_defaults(saved)
    except (ConfigError, AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return order


def order_of_state(
    state: Mapping[str, Any],
    source: ShardSource,
    plan: PackPlan | MixturePlan | None = None,
) -> tuple[AnyOrder, int, int]:
    """Return the order that a state was saved with, and the epoch and step of the state.

    Every epoch of a run has this order, unless its settings were changed between two epochs.

    Args:
        state: ``loader.state_dict()``.
        source: the dataset or mixture of the run. A dataset may have grown by shards at its end.
        plan: the plan of the run, where the state is of packs. None: it has none.

    Raises:
        StateError: not a state of a Loader, or one of another source or plan.
    """
    saved = read_state(state)
    return _order_of(saved, source, plan), saved.epoch, saved.step


def _without_choices(saved: SavedOrder) -> SavedOrder:
    """Return a state without what may change at step 0: its bad list, selection and buckets."""
    identity = without_buckets(saved.keys) if "buckets" in saved.keys else saved.keys
    selections = "selection", f"{DATASET} selection"
    kept = {key: value for key, value in identity.items() if key not in selections}
    return SavedOrder.parse({**kept, "bad": None, f"{DATASET} bad": None}, saved.epoch, saved.step)


def _order_of(
    saved: SavedOrder, source: ShardSource, plan: PackPlan | MixturePlan | None
) -> AnyOrder:
    identity, is_mixture = saved.keys, saved.is_mixture
    order: AnyOrder
    if "plan" not in identity:
        order = source.order_from_identity(identity)
    elif plan is None:
        raise StateError(
            "the state is of packs (batching=mm.Pack), and this run has no plan of them: "
            "bring the plan's folder back beside the index, or give mm.Pack(plan=)"
        )
    elif isinstance(plan, MixturePlan) and isinstance(source, Mixture) and is_mixture:
        order = MixturePackOrder.from_mixture_identity(identity, plan, source.corpora)
    elif isinstance(plan, PackPlan) and isinstance(source, Dataset) and not is_mixture:
        order = PackOrder.from_identity(identity, plan, source.corpus)
    else:
        kinds = {True: "a mixture", False: "one dataset"}
        raise StateError(
            f"the state is of packs of {kinds[is_mixture]}, this run of "
            f"{kinds[isinstance(source, Mixture)]}: they have no order in common"
        )
    if (misfit := _misfit(order, saved)) is not None:
        raise StateError(misfit)
    return order


def _misfit(order: AnyOrder, saved: SavedOrder) -> str | None:
    """Return why a state does not fit an order, and what to do. None: it fits.

    At step 0 everything but dataset and seed may have changed, because each epoch is still in one
    order. In a mixture, sources already in use stay fixed even at step 0 (see
    ``order/mixture/order.py``). Sizes and checksums of the shards are compared where both sides
    know them.
    """
    present = SavedOrder.parse(order.identity(), saved.epoch, saved.step)
    if (other_kind := _other_kind(saved, present)) is not None:
        return other_kind
    try:
        was, now = saved.binding(), present.binding()
    except (KeyError, TypeError, ValueError) as error:
        return f"not an order of a state: {type(error).__name__}: {error}"
    names = differing_keys(was, now)
    if "reshuffle" in names:  # the version says only that
        names = [name for name in names if name != "version"]
    differences = {
        name: f"{escaped(name)} was {_shown_of(was, name)} and is {_shown_of(now, name)}"
        for name in names
    }
    if differences:
        advice = (
            _mixture_advice(differences)
            if present.is_mixture
            else _advice(differences, saved.step, is_packed="plan" in present.keys)
        )
        return (
            f"the state of epoch {saved.epoch} step {saved.step} does not fit this run: "
            f"{'; '.join(differences.values())}. {advice}"
        )
    if saved.step >= order.steps_per_epoch:
        return f"step {saved.step}: an epoch has {order.steps_per_epoch} steps"
    datasets = [SavedOrder.parse(of).dataset for of in saved.keys.get("sources", (saved.keys,))]
    if missing := [key for dataset in datasets for key in CONTENT_KEYS if key not in dataset]:
        return (
            f"the state has no {missing[0]!r}, so it does not tell which shards it is of: an "
            "early version of mmstream saved it; start over"
        )
    return None


def _log_selections(saved: SavedOrder, order: AnyOrder) -> None:
    """Say where an epoch begins with other samples than those of the state."""
    present = SavedOrder.parse(order.identity())
    was, now = (each.dataset.get("selection") for each in (saved, present))
    if was != now:
        num_was, num_is = (
            "all" if chosen is None else f"{chosen['num_samples']:,} chosen"
            for chosen in (was, now)
        )
        logger.info(
            "epoch %d begins with %s samples; before, %s took part", saved.epoch, num_is, num_was
        )


def _checksum(state: Mapping[str, Any]) -> str:
    """Return the checksum of a state's values. Spaces and the order of keys play no part.

    Raises:
        KeyError: it lacks one of its keys.
        TypeError, ValueError, RecursionError: it holds what is not JSON.
    """
    content = [state[name] for name in ("version", "epoch", "step", "order")]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"{crc32c.crc32c(text.encode(), 0, 0):08x}"


def _check_seal(state: Mapping[str, Any]) -> None:
    """Raise StateError where a state is not the one that was saved. Without a checksum, it is."""
    if _SEAL not in state:
        return
    try:
        is_intact = state[_SEAL] == _checksum(state)
    except KeyError:  # whoever needs the key says so
        return
    except (TypeError, ValueError, RecursionError):
        is_intact = False
    if not is_intact:
        raise StateError(
            "the state was edited or damaged after it was saved (crc32c differs): take another "
            'copy, or remove its "crc32c" to accept it as it is'
        )


def _other_kind(saved: SavedOrder, present: SavedOrder) -> str | None:
    """Return why a state and a run have no order in common, whatever its settings. None: it may."""
    if saved.is_mixture != present.is_mixture:
        kinds = {True: "a mixture", False: "one dataset"}
        return (
            f"the state is of {kinds[saved.is_mixture]}, this run of "
            f"{kinds[present.is_mixture]}: they have no order in common"
        )
    was, now = _kind_of_rows(saved), _kind_of_rows(present)
    if saved.has_begun and was != now:
        what = "packs" if "plan" in {**saved.keys, **present.keys} else "buckets"
        return (
            f"the state of epoch {saved.epoch} step {saved.step} is of {was}, this run of {now}: "
            f"{what} begin or end where an epoch does, so finish this epoch as it began"
        )
    return None


def _kind_of_rows(order: SavedOrder) -> str:
    if "plan" in order.keys:
        return "packs (batching=mm.Pack)"
    return "buckets (batching=mm.Buckets)" if "buckets" in order.keys else "single samples"


def _shown_of(binding: Mapping[str, Any], name: str) -> str:
    """Return the value of a key, for a message."""
    value: Any = binding.get(name)
    if name == "buckets":
        return _shown_buckets(value)
    if name.rpartition(" ")[2] != "selection":
        return _shown(value)
    try:
        return f"{value['num_samples']:,} samples ({escaped(value['digest'], 8)})"
    except (KeyError, TypeError, ValueError):
        return "all samples" if value is None else _shown(value)


def _shown_buckets(value: Any) -> str:
    try:
        samples = ", ".join(
            f"{part['num_samples']:,} up to {part['edge']}" for part in value["parts"]
        )
        return escaped(f"of {value['column']} with {samples} samples")
    except (KeyError, TypeError, ValueError):
        return _shown(value)


def _shown(value: Any) -> str:
    """Return a value of a saved state for a message."""
    try:
        return escaped(repr(value))
    except (ValueError, RecursionError):  # an integer of thousands of digits, a deep list
        return f"a {type(value).__name__} that is too long to show"


_OTHER_VERSION = "Resume with the mmstream that saved it: another version plans another order."


def _other_content(subject: str, differences: Mapping[str, str]) -> str:
    """Return what to do where shards have other bytes than those of the state."""
    is_hashed = any(name.endswith("sha256") for name in differences)
    return (
        f"The {'bytes (sha256)' if is_hashed else 'sizes'} of {subject} are not those of the "
        "state, though names and sample counts are: another conversion, or replaced. Resume on the "
        "old shards, or start over."
    )


def _advice(differences: Mapping[str, str], step: int, *, is_packed: bool) -> str:
    """Return what to do about a state that does not fit a dataset."""
    if "version" in differences:
        return _OTHER_VERSION
    finish = 'Loader(on_change="finish_epoch") ends this epoch as it was planned, then changes'
    is_of_dataset = any(name.startswith(f"{DATASET} ") for name in differences)
    if "plan" in differences or (is_packed and "corpus" in differences and not is_of_dataset):
        return (
            "These are other packs than those of the state: give the plan that this epoch began "
            "with, mm.Pack(..., plan=...); another plan may begin where an epoch does."
        )
    differences = {name.removeprefix(f"{DATASET} "): text for name, text in differences.items()}
    if "corpus" in differences:
        return (
            "Shards were added, removed or changed: resume on the old ones, or start over; where "
            f"they were only added at the end, {finish}."
        )
    if not differences.keys().isdisjoint(CONTENT_KEYS):
        return _other_content("the shards", differences)
    if "bad" in differences:
        return (
            "The list of bad samples has changed: put back the one that this epoch began with "
            "(mmstream.bad.previous.json is the one before the last change); where it began with "
            f"none, {finish}. Either way the rest of this epoch still shows samples that only the "
            "new list names: to show none of them, resume from a state of step 0, or start over."
        )
    if "buckets" in differences:
        return (
            "Edges, or the column of some samples, have changed: give the edges that this epoch "
            f"began with. Others may begin where an epoch does: {finish}."
        )
    if "selection" in differences:
        return (
            "Other samples were chosen: open the dataset with the selection that this epoch began "
            f"with. Another one may begin where an epoch does: {finish}."
        )
    if step:
        return f"Resume with the saved values; they may change where an epoch begins: {finish}."
    return "Resume with the saved values, or start over."


def _mixture_advice(differences: Mapping[str, str]) -> str:
    """Return what to do about a state that does not fit a mixture."""
    if "version" in differences:
        return _OTHER_VERSION
    if any(name.startswith("source ") and name.endswith(" plan") for name in differences):
        return (
            "These are other packs than those of the state: give the plans that this run began "
            "with, mm.Pack(..., plan={source: plan})."
        )
    sources = {name.rpartition(" ")[0] for name in differences if name.endswith(CONTENT_KEYS)}
    sources = {source for source in sources if f"{source} corpus" not in differences}
    if sources:
        return _other_content(", ".join(sorted(sources)), differences)
    advice = (
        "Sources of a mixture have epochs of their own, so what has begun goes on: only weights "
        "that begin later, and sources not drawn from yet, may change."
    )
    if any(" bad was " in text for text in differences.values()):
        advice += (
            " Bad lists that came later are for new runs: put back mmstream.bad.previous.json, "
            "or move mmstream.bad.json away where there was none. This run then still shows "
            "samples that only the new lists name."
        )
    return advice


def parse_state(text: str | bytes, source: str) -> dict[str, Any]:
    """Return the state that is saved as JSON in `text`.

    Raises:
        StateError: it is not a state. The message begins with `source`.
    """
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{source}: not the JSON of a state: {escaped(error)}") from None
    if not isinstance(state, dict):
        raise StateError(f"{source}: not a state of a Loader")
    return state
