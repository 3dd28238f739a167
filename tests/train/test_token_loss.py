"""The weights of labels in the loss, and that they find their targets again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.batching.flat import flatten
from mmstream.batching.valid import next_tokens, summed_loss, target_weights
from mmstream.train.chat import ChatModel

SAMPLES = [
    {
        "input_ids": np.array([1, 2, 3]),
        "labels": np.array([-100, 2, 3]),
        "label_weights": np.array([0, 0.5, 2], np.float32),
    },
    {"input_ids": np.array([4, 5]), "labels": np.array([4, 5])},
]


@pytest.mark.parametrize("kind", ["padded", "flat", "rows"])
def test_each_target_counts_by_its_weight(kind: str) -> None:
    if kind == "padded":
        batch = mm.collate(SAMPLES)
    else:
        layout = "rows" if kind == "rows" else "flat"
        batch = flatten(SAMPLES, [0, 1], 2, mm.Flat(layout=layout, pad_to_multiple_of=4))
    batch["__valid__"] = torch.ones(len(batch["input_ids"]) if kind == "padded" else 2) > 0
    targets = next_tokens(batch)
    logits = torch.randn(*targets.shape, 8, generator=torch.Generator().manual_seed(0))
    weight_of = {2: 0.5, 3: 2.0, 5: 1.0}
    losses = -logits.log_softmax(-1)
    expected = sum(
        weight * losses[targets == token][:, token].sum() for token, weight in weight_of.items()
    )
    assert summed_loss(logits, targets, target_weights(batch)).item() == pytest.approx(
        float(expected), rel=1e-6
    )
    assert ChatModel(None).weight_of(batch) == 3.5
    # Inputs of a model may have padding and blank pictures between.
    more = torch.cat((targets, torch.full_like(targets, -100)), dim=1)
    spread = summed_loss(torch.cat((logits, logits), dim=1), more, target_weights(batch))
    assert spread.item() == pytest.approx(float(expected), rel=1e-6)


def test_labels_without_weights_count_the_same() -> None:
    batch = flatten(SAMPLES[1:], [0], 1, mm.Flat())
    batch["__valid__"] = torch.tensor([True])
    assert target_weights(batch) is None
    assert ChatModel(None).weight_of(batch) == 1
