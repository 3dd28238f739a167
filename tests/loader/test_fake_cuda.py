"""What a GPU would be told, checked without one: streams, memory, devices, and who waits for whom.

`FakeCuda` fails by itself where a kernel would read memory too early or memory could be given away.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmstream as mm
from mmstream.train import loop
from mmstream.train.config import TrainConfig
from mmstream.train.distributed import TrainProcess, process_group
from tests.helpers.fake_cuda import fake_cuda
from tests.helpers.fake_loader import FakeLoader

HALF = mm.Normalize(mean=0.5, std=0.5)


def test_batches_are_copied_from_pinned_memory_and_the_host_waits_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_cuda(monkeypatch) as cuda:
        batches = iter(mm.to_device(FakeLoader(num_steps=4), "cuda:1", normalize=HALF))
        next(batches)
        waits = len(cuda.host_waits)  # for the mean and the std
        num_copies = cuda.num_copies
        with torch.cuda.device(1):
            for batch in batches:
                assert batch["image"].device == torch.device("cuda", 1)
                (batch["image"].sum() + batch["labels"].sum()).mul_(2)  # on the user's stream
        assert cuda.num_copies > num_copies
        assert len(cuda.host_waits) == waits
        assert cuda.contexts == {1}


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        ("mmstream.loader.device", "_hand_over", "reads before it is written"),
        ("torch.Tensor", "record_stream", "memory may be given away"),
    ],
)
def test_a_batch_that_nobody_waits_for_or_keeps_is_noticed(
    owner: str, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_cuda(monkeypatch):
        monkeypatch.setattr(f"{owner}.{name}", lambda *_: None)
        batch = next(iter(mm.to_device(FakeLoader(), "cuda")))
        with pytest.raises(AssertionError, match=message):
            batch["image"].sum()


def test_the_stream_is_that_of_the_batchs_device_whatever_device_is_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_cuda(monkeypatch):
        batches = iter(mm.to_device(FakeLoader(), "cuda"))  # the current one, which is cuda:0
        next(batches)
        torch.cuda.set_device(1)
        assert next(batches)["image"].sum().device == torch.device("cuda", 0)


def test_the_loader_sees_the_device_as_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Loader(FakeLoader):
        def batch(self, epoch: int, step: int) -> dict[str, Any]:
            devices.append(torch.cuda.current_device())
            return super().batch(epoch, step)

    devices: list[int] = []
    with fake_cuda(monkeypatch) as cuda:
        stage = mm.to_device(Loader(), "cuda:1")
        assert len(list(stage)) == 4
        assert devices == [1] * 4
        assert torch.cuda.current_device() == 0
        assert cuda.contexts == {1}


def test_between_two_training_steps_the_host_does_not_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Loader(FakeLoader):
        def batch(self, epoch: int, step: int) -> dict[str, Any]:
            waits.append(len(cuda.host_waits))
            return super().batch(epoch, step)

    def step(*_: Any) -> Any:
        return torch.zeros((), device=device), torch.zeros((), device=device)

    waits: list[int] = []
    device = torch.device("cuda", 0)
    model = SimpleNamespace(weight_of=lambda batch: batch["__valid__"].sum())
    monkeypatch.setattr(loop, "prepare", lambda *_: SimpleNamespace(model=model))
    monkeypatch.setattr(loop, "train_step", step)
    config = TrainConfig(url="made-up", out=str(tmp_path), log_every=100)
    with fake_cuda(monkeypatch) as cuda:
        batches = mm.to_device(Loader(num_steps=6, fail_at=5), device, normalize=HALF)
        with pytest.raises(OSError, match="worker died at step 5"):
            loop.fit(config, model, batches, TrainProcess(device))  # type: ignore[arg-type]
        assert len(waits) == 5
        assert cuda.host_waits[waits[2] :] == []  # the first step waits: is there a signal?


@pytest.mark.parametrize("name", ["cuda:2", "cuda"])
def test_a_device_that_is_not_there_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with (
        fake_cuda(monkeypatch),
        pytest.raises(mm.ConfigError, match=r"^device='cuda:2': this process sees 2 CUDA devices"),
        process_group(name),
    ):
        pass


def test_a_device_for_batches_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        fake_cuda(monkeypatch),
        pytest.raises(mm.ConfigError, match="there is no cuda:2: this process sees 2 CUDA"),
    ):
        next(iter(mm.to_device(FakeLoader(), "cuda:2")))
