"""States of loaders: where they go on, and how a person edits them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmstream.errors import StateError
from mmstream.order import AnyOrder
from mmstream.state import _misfit, read_state  # what every case of `resume` goes by


def edited(state: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """A state with other values, and without its checksum, which would refuse them."""
    return {name: value for name, value in state.items() if name != "crc32c"} | values


def load_state(order: AnyOrder, state: Mapping[str, Any]) -> tuple[int, int]:
    """The (epoch, step) of a state that fits an order, without the cases that `resume` tries."""
    saved = read_state(state)
    if (misfit := _misfit(order, saved)) is not None:
        raise StateError(misfit)
    return saved.epoch, saved.step
