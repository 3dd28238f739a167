"""One optimizer step: the same, however the global batch is cut, and what is done around it."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mmstream as mm
from mmstream.train import loop
from mmstream.train.loop import learning_rate, make_optimizer, prepare, train_step
from mmstream.train.models import ContrastiveClip, small_clip
from tests.helpers.fake_loader import FakeLoader, RaggedLoader
from tests.helpers.logged_runs import metrics
from tests.helpers.tiny_model import HALF, PROCESS, TinyModel, config_of, train_tiny


def gradients(loader: FakeLoader, **settings: Any) -> dict[str, torch.Tensor]:
    """The gradient of one step over a loader's first epoch, accumulated into one group."""
    config = config_of(**settings)
    trained = prepare(config, TinyModel(), PROCESS)
    group = list(mm.to_device(loader, "cpu", normalize=HALF))
    total = sum(trained.model.weight_of(batch) for batch in group)
    loss, norm = train_step(trained, group, total, 1e-3, config, PROCESS)
    measured = {name: p.grad.clone() for name, p in trained.model.named_parameters()}
    return {**measured, "loss": loss, "norm": norm}


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder)]


@pytest.mark.parametrize("kind", [FakeLoader, RaggedLoader])
@pytest.mark.parametrize(("num_batches", "micro_batches"), [(2, 5), (3, 1), (6, 2)])
def test_accumulated_micro_batches_give_the_gradient_of_one_large_batch(
    kind: type[FakeLoader], num_batches: int, micro_batches: int
) -> None:
    whole = gradients(kind(num_steps=1, num_rows=24))
    parts = gradients(
        kind(num_steps=num_batches, num_rows=24 // num_batches), micro_batches=micro_batches
    )
    assert whole["norm"] > 0.1
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-7)


def test_the_last_group_of_an_epoch_counts_for_what_it_has(tmp_path: Path) -> None:
    result = train_tiny(tmp_path, RaggedLoader(num_steps=5, num_rows=4), accumulate=3)
    assert [(line["epoch"], line["step"]) for line in metrics(tmp_path)] == [
        (0, 2), (0, 4), (1, 2), (1, 4),
    ]  # fmt: skip
    assert result.state == {"epoch": 2, "step": 0}


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_an_accumulating_run_resumes_at_the_last_optimizer_step(tmp_path: Path, stop: int) -> None:
    def run(name: str, **settings: Any) -> Any:
        loader = RaggedLoader(num_steps=5, num_rows=4)
        return train_tiny(tmp_path / name, loader, accumulate=2, warmup_steps=3, **settings)

    run("whole")
    assert run("parts", max_steps=stop).state == {"epoch": stop // 3, "step": 2 * (stop % 3)}
    run("parts")
    for name in ("keys", "loss", "lr", "grad_norm"):
        measured = [line[name] for line in metrics(tmp_path / "parts")]
        assert measured == [line[name] for line in metrics(tmp_path / "whole")]


def test_a_contrastive_loss_is_neither_accumulated_nor_cut() -> None:
    clip = ContrastiveClip(small_clip(image_size=32, vocab_size=64, max_length=8, seed=0), 4)
    for name in ("accumulate", "micro_batches"):
        with pytest.raises(mm.ConfigError, match="over the whole global batch"):
            prepare(config_of(**{name: 2}), clip, PROCESS)


def test_mixed_precision_follows_float32(tmp_path: Path) -> None:
    for name in ("fp32", "bf16"):
        train_tiny(tmp_path / name, epochs=5, precision=name)
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "fp32"), rel=0.02)
    assert losses(tmp_path / "bf16") != losses(tmp_path / "fp32")
    newest = torch.load(sorted((tmp_path / "bf16" / "checkpoints").iterdir())[-1])
    assert newest["model"]["head.weight"].dtype == torch.float32


class Exploding(TinyModel):
    """At the second step the loss is infinite."""

    def forward(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        loss, weight = super().forward(batch)
        return loss * (math.inf if len(self.asked_rows) == 2 else 1.0), weight


def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(mm.MMStreamError, match="loss of step 2 is"):
        train_tiny(tmp_path, model=Exploding(), checkpoint_every=1)
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert names == ["step-00000001.pt"]


class Unlabeled(FakeLoader):
    """At the third step of an epoch, no row has a label; or at any step."""

    steps = range(2, 3)

    def batch(self, epoch: int, step: int) -> dict[str, Any]:
        batch = super().batch(epoch, step)
        return batch | {"__valid__": batch["__valid__"] & (step not in self.steps)}


@pytest.mark.parametrize("log_every", [1, 3, 100])
def test_a_step_without_a_label_stops_the_run_before_it_is_saved(
    tmp_path: Path, log_every: int
) -> None:
    with pytest.raises(mm.MMStreamError, match=r"^step 3 has nothing to train: no row of any rank"):
        train_tiny(tmp_path, Unlabeled(num_steps=8), checkpoint_every=2, log_every=log_every)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002.pt"]


def test_validation_without_a_label_is_an_error_not_a_loss_of_zero(tmp_path: Path) -> None:
    class NoLabels(Unlabeled):
        steps = range(99)

    validation = mm.to_device(NoLabels(), "cpu", normalize=HALF)
    with pytest.raises(mm.MMStreamError, match=r"^validation: no row is valid and has a label"):
        train_tiny(tmp_path, validation=validation, checkpoint_every=2)


def test_a_long_gradient_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    loose = gradients(RaggedLoader(num_rows=8))
    monkeypatch.setattr(loop, "MAX_GRAD_NORM", 0.05)
    clipped = gradients(RaggedLoader(num_rows=8))
    torch.testing.assert_close(clipped["norm"], loose["norm"])
    assert 0.1 < clipped["norm"] < 1
    norms = [value.norm() for name, value in clipped.items() if name not in ("loss", "norm")]
    assert torch.stack(norms).norm().item() == pytest.approx(0.05, rel=1e-3)


def test_the_learning_rate_warms_up_and_stays() -> None:
    config = config_of(lr=2.0, warmup_steps=4)
    rates = [learning_rate(config, step) for step in range(6)]
    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert learning_rate(config_of(lr=1.0), 0) == 1.0


def test_only_matrices_decay() -> None:
    model = TinyModel()
    decays = {
        id(p): group["weight_decay"]
        for group in make_optimizer(model).param_groups
        for p in group["params"]
    }
    measured = {name: decays[id(p)] for name, p in model.named_parameters()}
    assert {name for name, decay in measured.items() if decay} == {
        "embed.weight", "vision.weight", "head.weight",
    }  # fmt: skip
    assert len(measured) == 7


def test_what_needs_no_gradient_stays_as_it_was(tmp_path: Path) -> None:
    model = TinyModel()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.vision.requires_grad_(False)
    train_tiny(tmp_path, model=model)
    moved = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert moved == before.keys() - {"vision.weight", "vision.bias"}


def _note(passes: list[Any], module: Any, inputs: Any) -> None:
    passes.append(module)


def test_activation_checkpointing_changes_no_gradient() -> None:
    batch = next(iter(mm.to_device(FakeLoader(), "cpu", normalize=HALF)))
    measured = []
    for checkpointing in (False, True):
        clip = ContrastiveClip(small_clip(image_size=32, vocab_size=64, max_length=8, seed=0), 4)
        config = config_of(activation_checkpointing=checkpointing)
        trained = prepare(config, clip, PROCESS)
        passes: list[Any] = []
        layer = clip.clip.text_model.encoder.layers[0].mlp
        layer.register_forward_pre_hook(partial(_note, passes))
        train_step(trained, [batch], torch.tensor(4), 1e-3, config, PROCESS)
        assert len(passes) == (2 if checkpointing else 1)
        measured.append({name: p.grad for name, p in clip.named_parameters()})
    torch.testing.assert_close(measured[1], measured[0])
    with pytest.raises(mm.ConfigError, match="no transformers model"):
        prepare(config_of(activation_checkpointing=True), TinyModel(), PROCESS)
