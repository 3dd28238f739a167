"""The loss of texts, as a sum over their tokens: it can be cut into micro-batches and ranks.

Place in the flow: the models of `vlm.py`, `chat.py` and `speech.py` call it in their forward pass.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mmstream.batching.valid import invalid_tokens
from mmstream.types import IGNORED_LABEL, Batch

__all__ = ["next_tokens", "summed_loss", "target_weights", "weight_of_labels"]


def summed_loss(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the cross entropy of all targets but -100, added up in float32: a scalar.

    Args:
        logits: floating [B, T, V].
        targets: int64 [B, T].
        weights: float32 [N], of the N targets that are not -100, in their order. None: all are 1.
    """
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum" if weights is None else "none",
    )
    if weights is None:
        return losses
    return (losses[targets.flatten() != IGNORED_LABEL] * weights).sum()


def target_weights(batch: Batch) -> Tensor | None:
    """Return the weights of the targets that are not -100, float32 [N]; None: all are 1.

    Padding and blank pictures, which a model's inputs may have beside, do not change the order of
    targets. So these weights fit the targets of the inputs too.
    """
    weights = batch.get("label_weights")
    if not isinstance(weights, Tensor):
        return None
    return weights[:, 1:][next_tokens(batch) != IGNORED_LABEL]


def next_tokens(batch: Batch) -> Tensor:
    """Return the next token of each position but the last, int64 [B, T - 1]; -100: not in the loss.

    For example, the labels [-100, 7, 8] give the targets [7, 8] for positions 0 and 1. The first
    token of a row never counts: no token before it could predict it. In a batch without padding the
    same holds for each document, whose first label is -100.
    """
    targets: Tensor = batch["labels"][:, 1:]
    return targets.masked_fill(invalid_tokens(batch)[:, 1:], IGNORED_LABEL)


def weight_of_labels(batch: Batch) -> Tensor:
    """Return the number of tokens in the loss of a batch, or the sum of their weights: float32."""
    weights = target_weights(batch)
    if weights is not None:
        return weights.sum()
    return (next_tokens(batch) != IGNORED_LABEL).sum().float()
