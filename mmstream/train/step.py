"""One optimizer step: from a group of batches to moved weights. The heart of the loop.

The gradient is that of the mean over the whole group on all ranks, whoever has how much of it:

- each rank counts the weight (rows, tokens) of its batches; summed over the ranks it is known
  before the first backward pass,
- each part's loss_sum is multiplied by W / weight, so that DDP's mean over the W ranks gives the
  sum of all loss_sum / weight,
- only the last part's backward communicates (`no_sync` before).

So neither the number of ranks, nor uneven shares, nor accumulation, nor micro-batches change the
step by more than rounding.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mmstream.batching.split import split_rows
from mmstream.errors import ConfigError
from mmstream.train.config import Precision, TrainConfig
from mmstream.train.distributed import TrainProcess
from mmstream.train.schedule import freeze_parameters, make_optimizer
from mmstream.types import Batch

__all__ = ["Trained", "autocast", "prepare", "seed_step", "tensors_of", "train_step"]


@dataclass(frozen=True)
class Trained:
    """What a step changes and a checkpoint holds."""

    model: Any
    """The module itself: `nn.Module` and `mmstream.train.models.Trainable`."""
    parallel: nn.Module
    """What is called: the module, in DDP where there are several ranks."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    precision: Precision

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and scaler for a checkpoint."""
        names = ("model", "optimizer", "scaler")
        return {name: getattr(self, name).state_dict() for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint; the weight decay stays that of now."""
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if state.get("scaler") and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay


def prepare(config: TrainConfig, model: nn.Module, process: TrainProcess) -> Trained:
    """Move a model to its device and put around it what `config` asks for.

    Raises:
        ConfigError: the model cannot be trained with these settings.
    """
    if not getattr(model, "separable", True) and max(config.accumulate, config.micro_batches) > 1:
        raise ConfigError(
            "train: this model's loss is over the whole global batch: set accumulate=1 and "
            "micro_batches=1; activation_checkpointing=True saves memory"
        )
    freeze_parameters(model, config.freeze)
    model = model.to(process.device).train()
    if config.activation_checkpointing:
        _checkpoint_activations(model)
    parallel = model
    if process.world_size > 1:
        # Inputs are on the device already, so DDP is told of no device to move them to.
        # The models' buffers are constants, so they are not sent around at each forward either.
        known = inspect.signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        settings: dict[str, Any] = {name: False}
        parallel = DistributedDataParallel(model, **settings)
    if config.compile:
        parallel.compile()
    precision = config.precision or ("bf16" if process.device.type == "cuda" else "fp32")
    return Trained(
        model,
        parallel,
        make_optimizer(model, weight_decay=config.weight_decay),
        torch.amp.GradScaler(process.device.type, enabled=precision == "fp16"),
        precision,
    )


def train_step(
    trained: Trained,
    group: list[Batch],
    total: Tensor,
    lr: float,
    config: TrainConfig,
    process: TrainProcess,
) -> tuple[Tensor, Tensor]:
    """Do one optimizer step.

    Args:
        trained: changed in process.
        group: this rank's batches of the step.
        total: weight of the step over all ranks, a scalar above 0.
        lr: learning rate.
        config: settings.
        process: this process among the ranks.

    Returns:
        This rank's part of the step's loss, which is the sum over the ranks, and the norm of the
        gradient before clipping; both on the device, so that nobody waits for it here. With fp16
        the weights do not move when that norm is not finite.
    """
    parts = [
        part for batch in group for part in split_rows(tensors_of(batch), config.micro_batches)
    ]
    factor = (process.world_size / total.clamp(min=1)).float()
    loss = torch.zeros((), device=process.device)
    trained.optimizer.zero_grad(set_to_none=True)
    for number, part in enumerate(parts, start=1):
        with _alone(trained.parallel) if number < len(parts) else nullcontext():
            with autocast(trained.precision, process.device):
                loss_sum, _ = trained.parallel(part)
            trained.scaler.scale(loss_sum * factor).backward()
        loss += loss_sum.detach() * factor / process.world_size
    trained.scaler.unscale_(trained.optimizer)  # the norm is of the true gradient
    moved = [p for group in trained.optimizer.param_groups for p in group["params"]]
    norm = nn.utils.get_total_norm([p.grad for p in moved if p.grad is not None])
    if config.max_grad_norm is not None:
        nn.utils.clip_grads_with_norm_(moved, config.max_grad_norm, norm)
    for parameters in trained.optimizer.param_groups:
        parameters["lr"] = lr
    trained.scaler.step(trained.optimizer)
    trained.scaler.update()
    return loss, norm


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Return the context in which a forward pass runs."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")


def tensors_of(batch: Batch) -> Batch:
    """Return what a model reads: tensors and lists of tensors.

    Keys and texts stay out, on which `torch.compile` would build each batch a program of its own.
    """
    return {
        name: value
        for name, value in batch.items()
        if isinstance(value, Tensor)
        or (isinstance(value, list) and all(isinstance(item, Tensor) for item in value))
    }


def seed_step(seed: int, num_steps: int, rank: int) -> None:
    """Seed torch for a step, so that what a model draws (dropout) needs no state to resume."""
    torch.manual_seed(((seed * 1_000_003 + num_steps) * 65_537 + rank) % 2**63)


def _alone(parallel: nn.Module) -> Any:
    """Return the context in which a backward pass keeps its gradients to this rank."""
    return parallel.no_sync() if isinstance(parallel, DistributedDataParallel) else nullcontext()


def _checkpoint_activations(model: nn.Module) -> None:
    # transformers 5 renamed it; both take the same options.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    switches: list[Any] = [
        getattr(module, next(name for name in names if hasattr(module, name)))
        for module in model.children()
        if any(hasattr(module, name) for name in names)
    ]
    if not switches:
        raise ConfigError("activation_checkpointing: this model has no transformers model in it")
    for switch in switches:
        switch({"use_reentrant": False})
