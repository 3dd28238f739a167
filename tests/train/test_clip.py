"""One rank and two compute the same loss and the same gradients from the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mmstream.train.clip import ContrastiveClip, contrastive_loss, small_clip
from tests.helpers.fake_loader import FakeLoader
from tests.helpers.gloo_ranks import join_group, run_ranks

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


def two_ranks(rank: int, folder: str) -> None:
    """What each of the two processes does; rank 0 writes down what came out."""
    join_group(rank, Path(folder, "rendezvous"), 2)
    results: dict[str, Any] = {}
    for name, (num_rows, first, invalid) in CASES.items():
        model = DistributedDataParallel(ContrastiveClip(clip(), max(first, num_rows - first)))
        rows = slice(0, first) if rank == 0 else slice(first, num_rows)
        results[name] = loss_and_gradients(model, global_batch(num_rows, invalid), rows)
    torch.save(results, Path(folder, f"results-{rank}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def from_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(two_ranks, str(folder), num_ranks=2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_the_loss_and_gradients_of_one(from_two_ranks: Path, case: str) -> None:
    num_rows, _, invalid = CASES[case]
    alone = loss_and_gradients(
        ContrastiveClip(clip(), num_rows), global_batch(num_rows, invalid), slice(None)
    )
    largest = max(gradient.abs().max() for gradient in alone["gradients"].values())
    assert largest > 1e-2, "gradients this small would compare equal to anything"
    for rank in range(2):
        rank_results = torch.load(from_two_ranks / f"results-{rank}.pt", weights_only=True)[case]
        torch.testing.assert_close(rank_results["loss"], alone["loss"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            rank_results["gradients"], alone["gradients"], rtol=1e-5, atol=1e-6
        )


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


def test_padding_does_not_change_the_loss() -> None:
    model = ContrastiveClip(clip(), 6)
    batch = global_batch(6, [])
    short = loss_and_gradients(model, batch, slice(None))["loss"]
    for name in ("input_ids", "attention_mask"):
        batch[name] = torch.nn.functional.pad(batch[name], (0, 3))
    torch.testing.assert_close(loss_and_gradients(model, batch, slice(None))["loss"], short)


def test_the_first_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = clip().state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    torch.testing.assert_close(clip().state_dict(), first, rtol=0, atol=0)
    other = small_clip(image_size=32, vocab_size=64, max_length=8, seed=4).state_dict()
    assert not torch.equal(other["text_projection.weight"], first["text_projection.weight"])
