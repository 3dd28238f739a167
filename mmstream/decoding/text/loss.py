"""What a text has lost on its way to the model: cut off by `max_length`, or dropped.

Place in the flow: a decoded sample carries its `TextLoss` to the lineage of its batch.
"""

from __future__ import annotations

from typing import NamedTuple

LOSS_FIELD = "__text_loss__"
"""The field of a decoded sample in which its `TextLoss` travels to the lineage of the batch."""


class TextLoss(NamedTuple):
    """What a text has lost on its way to the model."""

    reason: str
    """``shard[index] key.field: `` and what was lost."""
    is_cut: bool
    """Whether `max_length` has cut its end."""
    num_dropped_parts: int
    """Parts of the conversation that its text lacks, see `TextDecoder.undecoded_parts`."""
