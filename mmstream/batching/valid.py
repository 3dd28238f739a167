"""Which tokens of a batch count in a loss: not those of padding, masked and unfilled rows.

Place in the flow: batching and the device mask labels by it, and so do losses. Padded batches have
one row of tokens per row; flat ones have documents, which say their rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmstream.types import IGNORED_LABEL, Batch


def is_flat(batch: Batch) -> bool:
    """Tell whether a batch is one of documents, as `mm.Flat` and `mm.Pack` make it."""
    return "document_row" in batch


def invalid_tokens(batch: Batch) -> torch.Tensor:
    """Return which tokens a loss leaves out because their rows are not valid.

    Args:
        batch: A batch with ``input_ids`` and ``__valid__``, padded or flat.

    Returns:
        bool, of the shape of ``input_ids`` and on its device.

    Examples:
        >>> batch = {"input_ids": torch.zeros(2, 3), "__valid__": torch.tensor([True, False])}
        >>> invalid_tokens(batch).tolist()
        [[False, False, False], [True, True, True]]
    """
    ids: torch.Tensor = batch["input_ids"]
    invalid: torch.Tensor = ~batch["__valid__"].to(ids.device)
    if not is_flat(batch):
        return invalid[:, None].expand(ids.shape)
    # Documents of no row have -1, which is the last entry here.
    invalid = torch.cat((invalid, invalid.new_ones(1)))
    return invalid[batch["document_row"].to(ids.device)[batch["document_ids"].long()]]


def valid_labels(batch: Batch) -> torch.Tensor:
    """Return the token labels of a batch, int64 [B, T], with -100 in rows that are not valid."""
    labels: torch.Tensor = batch["labels"]
    return labels.masked_fill(invalid_tokens(batch), IGNORED_LABEL)


def next_tokens(batch: Batch) -> torch.Tensor:
    """Return the next token of each position but the last, int64 [B, T - 1]; -100: not in the loss.

    For example, the labels [-100, 7, 8] give the targets [7, 8] for positions 0 and 1. The first
    token of a row never counts: no token before it could predict it. In a batch without padding the
    same holds for each document, whose first label is -100.
    """
    return valid_labels(batch)[:, 1:]


def target_weights(batch: Batch) -> torch.Tensor | None:
    """Return the weights of the targets that are not -100, float32 [N]; None: all are 1.

    Padding and blank pictures, which a model's inputs may have beside, do not change the order of
    targets. So these weights fit the targets of the inputs too.
    """
    weights = batch.get("label_weights")
    if not isinstance(weights, torch.Tensor):
        return None
    return weights[:, 1:][next_tokens(batch) != IGNORED_LABEL]


def mask_labels(batch: Batch) -> None:
    """Set the token labels of invalid rows to -100, in place."""
    if not has_token_labels(batch):
        return
    invalid = invalid_tokens(batch)
    batch["labels"] = batch["labels"].masked_fill(invalid, IGNORED_LABEL)
    weights = batch.get("label_weights")
    if isinstance(weights, torch.Tensor) and weights.shape == invalid.shape:
        batch["label_weights"] = weights.masked_fill(invalid, 0)
    if "num_label_tokens" in batch:
        batch["num_label_tokens"] = int((batch["labels"] != IGNORED_LABEL).sum())


def has_token_labels(batch: Batch) -> bool:
    """Tell whether a batch has one label per token, as language models do."""
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if not (isinstance(ids, torch.Tensor) and isinstance(labels, torch.Tensor)):
        return False
    return labels.shape == ids.shape and labels.ndim == 2 and labels.dtype == torch.int64


# -- the loss of tokens, added up ------------------------------------------------------------------


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
