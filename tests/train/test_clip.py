"""CLIP: what its loss depends on. On two ranks: test_ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mmstream.train.models import ContrastiveClip, contrastive_loss, small_clip
from tests.helpers.fake_loader import FakeLoader

CASES = {
    # name: (rows of the global batch, rows of rank 0, rows that are invalid)
    "even": (8, 4, []),
    "uneven": (5, 3, []),
    "invalid": (7, 4, [1, 6]),
    "nothing valid on one rank": (6, 3, [3, 4, 5]),
}


def clip() -> Any:
    return small_clip(image_size=32, vocab_size=64, max_length=8, seed=3)


def global_batch(num_rows: int, invalid: list[int]) -> dict[str, Any]:
    batch = FakeLoader(num_rows=num_rows).batch(0, 0)
    batch["__valid__"][invalid] = False
    return batch


def loss_and_gradients(model: Any, batch: dict[str, Any], rows: slice) -> dict[str, Any]:
    """As `mmstream.train.loop.train_step` does it: scaled by W / weight of all ranks."""
    names = ("image", "input_ids", "attention_mask", "__valid__")
    rank_batch = {name: batch[name][rows] for name in names}
    rank_batch["image"] = rank_batch["image"].float() / 255
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    loss_sum, weight = model(rank_batch)
    loss = loss_sum * (world_size / batch["__valid__"].sum())
    assert weight * world_size == batch["__valid__"].sum()
    loss.backward()
    gradients = {
        name.removeprefix("module."): parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    return {"loss": loss.detach(), "gradients": gradients}


def save_on_two_ranks(rank: int, folder: Path) -> None:
    """What each of two ranks does; `test_ranks` compares what came out with one rank."""
    results: dict[str, Any] = {}
    for name, (num_rows, first, invalid) in CASES.items():
        model = DistributedDataParallel(ContrastiveClip(clip(), max(first, num_rows - first)))
        rows = slice(0, first) if rank == 0 else slice(first, num_rows)
        results[name] = loss_and_gradients(model, global_batch(num_rows, invalid), rows)
    torch.save(results, folder / f"clip-{rank}.pt")


def test_invalid_rows_are_neither_asked_nor_offered() -> None:
    generator = torch.Generator().manual_seed(0)
    images, texts = torch.randn(2, 6, 8, generator=generator).requires_grad_().unbind()
    valid = torch.tensor([True, False, True, True, False, True])
    scale = torch.tensor(5.0)
    loss = contrastive_loss(images, texts, valid, scale)
    all_valid = torch.ones(4, dtype=torch.bool)
    torch.testing.assert_close(
        loss, contrastive_loss(images[valid], texts[valid], all_valid, scale)
    )
    for gradient in torch.autograd.grad(loss, (images, texts)):
        assert gradient[valid].abs().sum() > 0
        assert torch.equal(gradient[~valid], torch.zeros(2, 8))
