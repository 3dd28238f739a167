"""Limits of time that no busy machine reaches: each request is sent once, and has minutes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from mmstream.storage import transfers
from mmstream.storage.transfers import TransferLimits

FAR_S = 500.0


def far_limits(**others: Any) -> TransferLimits:
    """Return limits that no request passes, with some settings of their own."""
    far: dict[str, Any] = {
        "stall_s": FAR_S,
        "max_stall_s": FAR_S,
        "late_burst": 0,
        "late_share": 0.0,
        "memory_s": FAR_S,
    }
    return TransferLimits(**(far | others))


def set_far_limits(monkeypatch: pytest.MonkeyPatch, **others: Any) -> None:
    """Have the readers of this process go by them."""
    monkeypatch.setattr(transfers, "TransferLimits", partial(far_limits, **others))
