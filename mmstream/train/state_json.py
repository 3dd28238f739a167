"""The state of a loader as JSON: a file of its own, or a text in a checkpoint.

saved_state.read_state, checkpoint.resume_training -> `parse_state`, `loader_state`
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mmstream.errors import StateError, escaped

__all__ = ["loader_state", "parse_state"]


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


def loader_state(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the loader's state that a checkpoint holds.

    Raises:
        StateError: it holds none. The message begins with `source`.
    """
    try:
        return parse_state(content["loader"], source)
    except (KeyError, TypeError):
        raise StateError(f"{source}: a checkpoint without a loader's state") from None
