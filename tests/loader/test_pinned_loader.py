"""A loader with workers whose batches are pinned, as with a GPU: torch then adds a thread."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch

import mmstream as mm


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Let torch pin batches without a GPU. Gives the tensors that were pinned."""
    tensors: list[torch.Tensor] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor.clone())
        return tensors[-1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return tensors


def make_loader(url: str, num_workers: int) -> mm.Loader:
    decode = mm.Decode(image=mm.ImageDecoder(size=16))
    pipeline = mm.Pipeline(mm.open_dataset(url), global_batch_size=4, seed=1, decode=decode)
    return mm.Loader(pipeline, num_workers=num_workers, world=mm.World(0, 1))


def contents(batches: Any) -> list[Any]:
    return [(batch["__key__"], batch["image"].tolist()) for batch in batches]


@pytest.mark.slow
def test_pinned_batches_are_the_same_and_go_on_after_a_break(
    corpus: str, pinned: list[torch.Tensor]
) -> None:
    expected = contents(make_loader(corpus, 0))
    with closing(make_loader(corpus, 1)) as loader:
        first = next(iter(loader))
        assert any(first["image"] is tensor for tensor in pinned)
        loader.load_state_dict(loader.state_dict())
        assert contents([first]) + contents(loader) == expected
        assert loader.state_dict()["epoch"] == 1
