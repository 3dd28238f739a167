"""The loss of texts, as a sum over their tokens: it can be cut into micro-batches and ranks.

Place in the flow: the models of `vlm.py`, `chat.py` and `speech.py` call it in their forward pass.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmstream.batching.valid import next_tokens, target_weights
from mmstream.integrations import model_inputs
from mmstream.integrations.summed_loss import summed_loss
from mmstream.types import IGNORED_LABEL, Batch

__all__ = ["text_loss", "weight_of_labels"]


def text_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a batch's label tokens, and their number or weight.

    Args:
        model: a `transformers` model whose inputs `model_inputs` makes.
        batch: ids, labels and normalised media, as `mm.to_device` returns them.

    Raises:
        ConfigError: the media do not fit the model.
    """
    inputs = model_inputs(batch, model)
    targets = inputs.pop("labels")[:, 1:]
    logits = model(**{**inputs, "use_cache": False}).logits[:, :-1]
    return summed_loss(logits, targets, target_weights(batch)), weight_of_labels(batch)


def weight_of_labels(batch: Batch) -> Tensor:
    """Return the number of tokens in the loss of a batch, or the sum of their weights: float32."""
    weights = target_weights(batch)
    if weights is not None:
        return weights.sum()
    return (next_tokens(batch) != IGNORED_LABEL).sum().float()
