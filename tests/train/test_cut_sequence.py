"""A tiny packed Llama under context parallelism has the losses of one rank.

The parts of all ranks go through the model side by side, as rows of one batch. Nothing but the
attention sees more than one of them: it gathers the keys and values of all, as on real ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mmstream as mm
from tests.batching.test_sequence import SCHEMES, made_batch, parts_of
from tests.helpers.families import transformers
from tests.helpers.packs import llama

LENGTHS = [[5, 11, 3], [17], [], [9, 2, 24]]


def gathering_attention(index: torch.Tensor, document_ids: torch.Tensor) -> str:
    """Register attention over all parts; `index` [ranks, t] is the place of each token."""
    places = index.flatten()
    documents = document_ids[0]
    seen = documents[places][:, None] == documents[places][None]
    seen &= places[:, None] >= places[None]

    def gathered(values: torch.Tensor) -> torch.Tensor:
        return values.transpose(0, 1).flatten(1, 2)  # [H, ranks * t, D]

    def attend(module: Any, q: Any, k: Any, v: Any, *_: Any, **kwargs: Any) -> Any:
        groups = module.num_key_value_groups
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = gathered(q) @ gathered(k).mT * kwargs["scaling"]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        parts = (weights @ gathered(v)).unflatten(1, index.shape)  # [H, ranks, t, D]
        return parts.permute(1, 2, 0, 3), None

    transformers.AttentionInterface.register("gathering", attend)
    transformers.AttentionMaskInterface.register("gathering", lambda *_, **__: None)
    return "gathering"


def losses_of_tokens(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_losses_and_gradients_of_two_parts_are_those_of_the_whole(scheme: str) -> None:
    batch = made_batch(LENGTHS, 4)
    whole = mm.shift_labels(batch)
    model = llama()
    model.set_attn_implementation("eager")
    logits = model(whole["input_ids"], position_ids=whole["position_ids"], use_cache=False).logits
    expected = losses_of_tokens(logits, whole["shift_labels"])
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))

    parts = parts_of(batch, 2, scheme)
    ids, positions, targets, index = (
        torch.cat([part[name] for part in parts])
        for name in ("input_ids", "position_ids", "shift_labels", "sequence_index")
    )
    model.set_attn_implementation(gathering_attention(index, batch["document_ids"]))
    logits = model(ids, position_ids=positions, use_cache=False).logits
    losses = losses_of_tokens(logits, targets)
    torch.testing.assert_close(losses, expected[index.flatten()], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(
        torch.autograd.grad(losses.sum(), list(model.parameters())), gradients, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    num_targets = sum(int((part["shift_labels"] != -100).sum()) for part in parts)
    assert num_targets == batch["num_label_tokens"] == parts[0]["num_label_tokens"]
