"""The cross entropy of tokens, added up: it can be cut into micro-batches and ranks.

Place in the flow: `LoaderTrainer` and the reference loop divide it by the labels of a whole step.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mmstream.types import IGNORED_LABEL


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
