"""Storage: the numbers that the transfers of a reader process go by."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TransferLimits"]


@dataclass(frozen=True)
class TransferLimits:
    """The numbers behind requests in flight, time-outs and hedges."""

    start_in_flight: int = 64
    """Requests in flight of all ranks of a node as they start: enough for 1 GB/s at 200 ms."""
