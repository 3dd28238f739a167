"""Beside the flow: what a run was to deliver, and whether its logs say that it did.

training_log.py  sample lineage in training logs: written and read
check_log.py     logs against the plan; a disturbed run against an undisturbed one
replay.py        which samples any step delivers, from its state alone, and their keys
twice.py         `check_functions`: functions of the user that do not draw as their sample says
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmstream.audit.twice import check_functions as check_functions

__all__ = ["check_functions"]


def __getattr__(name: str) -> Any:
    """Import `check_functions` when it is first used: it needs torch."""
    if name != "check_functions":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mmstream.audit.twice import check_functions

    return check_functions
