"""The loss of texts, as a sum over their tokens: it can be cut into micro-batches and ranks.

Place in the flow: the models of `vlm.py`, `chat.py` and `speech.py` call it in their forward pass.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mmstream.batching.valid import invalid_tokens
from mmstream.types import IGNORED_LABEL, Batch

__all__ = ["next_tokens", "num_label_tokens", "summed_loss"]


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of all targets but -100, added up in float32: a scalar.

    Args:
        logits: floating [B, T, V].
        targets: int64 [B, T].
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )


def next_tokens(batch: Batch) -> Tensor:
    """Return the next token of each position but the last, int64 [B, T - 1]; -100: not in the loss.

    For example, the labels [-100, 7, 8] give the targets [7, 8] for positions 0 and 1. The first
    token of a row never counts: no token before it could predict it. In a batch without padding the
    same holds for each document, whose first label is -100.
    """
    targets: Tensor = batch["labels"][:, 1:]
    return targets.masked_fill(invalid_tokens(batch)[:, 1:], IGNORED_LABEL)


def num_label_tokens(batch: Batch) -> Tensor:
    """Return the number of tokens in the loss of a batch, a float32 scalar."""
    return (next_tokens(batch) != IGNORED_LABEL).sum().float()
