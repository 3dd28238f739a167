"""The state of a run: ``{epoch, step}`` and the identity of the order that gives them meaning.

Resume is a start at `step`: nothing is replayed, whatever the ranks and workers are now. A state
holds nothing about where shards lie or who reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmstream.errors import StateError
from mmstream.order import AnyOrder

__all__ = ["load_state", "make_state"]

STATE_VERSION = 1


def make_state(order: AnyOrder, epoch: int, step: int) -> dict[str, Any]:
    """Return the state of a run that has delivered all steps before (epoch, step).

    Plain JSON types. The step after an epoch's last is step 0 of the next epoch.
    """
    if step >= order.steps_per_epoch:
        epoch, step = epoch + 1, 0
    return {"version": STATE_VERSION, "epoch": epoch, "step": step, "order": order.identity()}


def load_state(order: AnyOrder, state: Mapping[str, Any]) -> tuple[int, int]:
    """Return the (epoch, step) at which a run continues.

    At step 0 everything but corpus and seed may have changed: no epoch is cut in two orders. Of a
    mixture, what has begun binds, at step 0 too (see `order.recipe.binding`).

    Raises:
        StateError: malformed, of another version, or of an order that this run does not follow;
            names what differs, with the saved and the current value.
    """
    try:
        version, epoch, step = state["version"], state["epoch"], state["step"]
        saved = dict(state["order"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"not a state of a Loader: {type(error).__name__}: {error}") from None
    if version != STATE_VERSION:
        raise StateError(
            f"state version {version}, this mmstream reads {STATE_VERSION}: "
            "resume with the version that saved it"
        )
    if not (type(epoch) is int and type(step) is int and epoch >= 0 and step >= 0):
        raise StateError(f"epoch {epoch!r}, step {step!r}: must be integers from 0")
    current = order.identity()
    if ("sources" in saved) != ("sources" in current):
        kinds = {True: "a mixture", False: "one dataset"}
        raise StateError(
            f"the state is of {kinds['sources' in saved]}, this run of "
            f"{kinds['sources' in current]}: they have no order in common"
        )
    try:
        was, now = order.binding(saved, epoch, step), order.binding(current, epoch, step)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"not an order of a state: {type(error).__name__}: {error}") from None
    differing = [
        f"{name} was {was.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name)
    ]
    if differing:
        raise StateError(
            f"the state of epoch {epoch} step {step} does not fit this run: "
            f"{'; '.join(differing)}. {_advice(differing, step, mixed='sources' in current)}"
        )
    if step >= order.steps_per_epoch:
        raise StateError(f"step {step}: an epoch has {order.steps_per_epoch} steps")
    return epoch, step


def _advice(differing: list[str], step: int, *, mixed: bool) -> str:
    if any(item.startswith("version ") for item in differing):
        return "Resume with the mmstream that saved it: another one plans another order."
    if mixed:
        advice = (
            "Sources of a mixture come round in epochs of their own, so what has begun goes on: "
            "only weights that begin later, and sources not drawn from yet, may change."
        )
        if any(" bad was " in item for item in differing):
            advice += (
                " Bad lists that came later are for new runs: put back mmstream.bad.previous.json, "
                "or move mmstream.bad.json away where there was none."
            )
        return advice
    finish = 'Loader(on_change="finish_epoch") ends this epoch as it was planned, then changes'
    if any(item.startswith("corpus") for item in differing):
        return (
            "Shards were added, removed or changed: resume on the old ones, or start anew; where "
            f"they were only added at the end, {finish}."
        )
    if any(item.startswith("bad ") for item in differing):
        return (
            "The list of bad samples has changed: put back the one that this epoch began with "
            "(mmstream.bad.previous.json is the one before the last change); where it began with "
            f"none, {finish}."
        )
    if step:
        return f"Resume with the saved values; they may change where an epoch begins: {finish}."
    return "Resume with the saved values, or start anew."
