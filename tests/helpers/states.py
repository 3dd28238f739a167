"""States of loaders that a person has edited: without their checksum, which would refuse them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def edited(state: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """A state with other values."""
    return {name: value for name, value in state.items() if name != "crc32c"} | values
