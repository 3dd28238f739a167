"""A token model of a few hundred weights, whose loss is a mean over tokens, and runs of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmstream as mm
from mmstream.train import TrainConfig, TrainResult
from mmstream.train.distributed import TrainProcess
from mmstream.train.loop import fit
from tests.helpers.fake_loader import FakeLoader, RaggedLoader

VOCAB, WIDTH = 48, 8
HALF = mm.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
PROCESS = TrainProcess(torch.device("cpu"))


class TinyModel(nn.Module):
    """Guesses each label from its token and the mean colour of its row's images, if there are any.

    Takes one image a row, or `image_row` with any number.
    """

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)
            self.vision = nn.Linear(3, WIDTH)
            self.head = nn.Linear(WIDTH, VOCAB)
        self.dropout = nn.Dropout(dropout)
        self.asked_rows: list[int] = []

    def weight_of(self, batch: dict[str, Any]) -> Tensor:
        return (self._labels(batch) != -100).sum()

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        ids = batch["input_ids"] % VOCAB
        self.asked_rows.append(len(ids))
        colours = self._colours(batch.get("image"), batch.get("image_row"), len(ids))
        seen = self.embed(ids) + self.vision(colours)[:, None]
        logits = self.head(self.dropout(self.norm(seen))).float()
        labels = self._labels(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def _labels(self, batch: dict[str, Any]) -> Tensor:
        labels: Tensor = batch["labels"] % VOCAB
        kept = (batch["attention_mask"] > 0) & batch["__valid__"][:, None]
        return labels.masked_fill(~kept, -100)

    def _colours(self, images: Any, rows: Tensor | None, num_rows: int) -> Tensor:
        if images is None or len(images) == 0:
            return torch.zeros(num_rows, 3)
        means = torch.stack([image.float().mean(dim=(1, 2)) for image in images])
        if rows is None:
            return means
        return torch.zeros(num_rows, 3).index_add(0, rows, means)


def config_of(out: Path | str = "run", **settings: Any) -> TrainConfig:
    """Settings of two epochs, with a checkpoint after every third step."""
    usual = {"epochs": 2, "checkpoint_every": 3, "lr": 1e-2, "precision": "fp32", "log_keys": True}
    return TrainConfig(url="made-up", out=str(out), **{**usual, **settings})


def train_tiny(
    out: Path | str,
    loader: FakeLoader | None = None,
    model: nn.Module | None = None,
    validation: Any = None,
    hooks: Sequence[Any] = (),
    **settings: Any,
) -> TrainResult:
    """Train a model on made-up rows: a `TinyModel` and 4 steps an epoch, if nothing is given."""
    batches = mm.to_device(loader or RaggedLoader(num_rows=6), "cpu", normalize=HALF)
    model = model or TinyModel()
    return fit(config_of(out, **settings), model, batches, PROCESS, validation, hooks)
