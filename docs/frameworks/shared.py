"""Shared by the examples of this folder: a pipeline, and a model of two layers."""

from typing import Any

import torch
from torch import Tensor, nn

import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer


def make_pipeline(shards: str) -> mm.Pipeline:
    """Return a pipeline of captions as tokens: 16 rows per step, over all ranks."""
    text = mm.TextDecoder(byte_tokenizer(), max_length=32)
    return mm.Pipeline(
        mm.open_dataset(shards), global_batch_size=16, seed=0, decode=mm.Decode(text=text)
    )


class Model(nn.Module):
    """Predicts the next byte from the last one. Takes a whole batch and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 16)
        self.head = nn.Linear(16, 512)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the mean loss over the tokens of all valid rows."""
        labels = batch["labels"].masked_fill(~batch["__valid__"][:, None], -100)
        logits = self.head(self.embed(batch["input_ids"]))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW, whose state must be saved too."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
