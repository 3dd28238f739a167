"""Which videos the CPU has decoded though a GPU was asked for.

Place in the flow: a decoded sample carries a list of `CpuVideo` to the lineage of its batch. The
device adds those that the GPU refuses. The loader counts them by reason.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CPU_VIDEOS_FIELD", "CpuVideo"]

CPU_VIDEOS_FIELD = "__cpu_videos__"
"""The field of a decoded sample in which they travel to the lineage of the batch."""


class CpuVideo(NamedTuple):
    """A video that the CPU has decoded in place of a GPU."""

    address: str
    """``shard[index] key.field``."""
    reason: str
    """A few words, the same for all videos of one kind."""
