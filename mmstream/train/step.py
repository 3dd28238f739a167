"""One optimizer step: a group of batches goes in, the weights change.

    loop.fit -> train_step

The loss of a step is the mean over all rows (or tokens) of the group on all W ranks:

- Each rank counts the weight (rows or tokens) of its batches. `total_weight` is the sum over the
  ranks. It is known before the first backward pass.
- The loss_sum of each micro-batch is multiplied by W / total_weight. DDP then takes the mean of the
  gradients over the W ranks, which cancels the W.
- Only the backward pass of the last micro-batch communicates. DDP's `no_sync` stops the others.

For example, rank 0 has 3 rows and rank 1 has 1 row, so W = 2 and total_weight = 4. Each loss_sum is
multiplied by 2 / 4. DDP's mean over 2 ranks gives (loss_sum of rank 0 + loss_sum of rank 1) / 4.

So the number of ranks, uneven ranks, accumulation and micro-batches change a step by rounding
errors only.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mmstream._vector_math import resolve_vector_math
from mmstream.batching.split import split_rows
from mmstream.batching.valid import is_flat
from mmstream.errors import ConfigError
from mmstream.train.config import Precision, TrainConfig
from mmstream.train.distributed import TrainProcess
from mmstream.train.schedule import freeze_parameters, make_optimizer
from mmstream.types import Batch

__all__ = ["Trained", "autocast", "micro_batches_of", "prepare", "seed_step", "train_step"]

_LENGTHS = ("max_length_q", "max_length_k")
"""Numbers that models read of a batch without padding. They are powers of two, so they are few."""

MAX_COMPARED_TOKENS = 4096
"""Tokens of a micro-batch without padding where attention compares all of its tokens."""


@dataclass(frozen=True)
class Trained:
    """The training state besides the data: what a step changes and a checkpoint holds."""

    model: Any
    """The bare module: an `nn.Module` with the methods of `mmstream.train.models.Trainable`."""
    parallel: nn.Module
    """The module to call in training: `model`, wrapped in DDP when there are several ranks."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    precision: Precision

    def state_dict(self) -> dict[str, Any]:
        """Return the states of model, optimizer and scaler, for a checkpoint."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint. The weight decay stays as the present settings say."""
        weight_decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if state.get("scaler") and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        for group, weight_decay in zip(self.optimizer.param_groups, weight_decays, strict=True):
            group["weight_decay"] = weight_decay


def prepare(config: TrainConfig, model: nn.Module, process: TrainProcess) -> Trained:
    """Move a model to the device, wrap it in DDP, and make its optimizer and loss scaler.

    It also freezes parameters, checkpoints activations and compiles, as `config` says.

    Raises:
        ConfigError: the model cannot be trained with these settings.
    """
    if not getattr(model, "separable", True) and max(config.accumulate, config.micro_batches) > 1:
        raise ConfigError(
            "train: this model computes its loss over the whole global batch: set accumulate=1 and "
            "micro_batches=1; activation_checkpointing=True saves memory"
        )
    if config.is_flat and not getattr(model, "takes_flat", True):
        raise ConfigError(
            f"train: padding_free and pack are for models that learn texts; {type(model).__name__} "
            "takes whole rows: leave them out"
        )
    resolve_vector_math()
    freeze_parameters(model, config.freeze)
    model = model.to(process.device).train()
    if config.activation_checkpointing:
        _checkpoint_activations(model)
    parallel = model
    if process.world_size > 1:
        # Inputs are on the device already, so DDP gets no device to move them to. The buffers of
        # the models are constants, so DDP need not send them at each forward pass. The name of that
        # setting depends on the version of torch.
        parameters = inspect.signature(DistributedDataParallel).parameters
        is_renamed = "forward_sync_buffers" in parameters
        sync_buffers = "forward_sync_buffers" if is_renamed else "broadcast_buffers"
        settings: dict[str, Any] = {sync_buffers: False}
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
    total_weight: Tensor,
    lr: float,
    config: TrainConfig,
    process: TrainProcess,
) -> tuple[Tensor, Tensor]:
    """Do one optimizer step.

    Args:
        trained: model and optimizer, changed in place.
        group: this rank's batches of the step, on its device.
        total_weight: weight of the step over all ranks, a scalar above 0.
        lr: learning rate.
        config: settings.
        process: this rank.

    Returns:
        This rank's share of the loss, whose sum over the ranks is the loss of the step, and the
        norm of the gradient before clipping. Both are scalars on the device, so the host does not
        wait here. With fp16 the weights do not change when the norm is not finite.
    """
    micro_batches = [
        piece for batch in group for piece in micro_batches_of(batch, config, trained.model)
    ]
    factor = (process.world_size / total_weight.clamp(min=1)).float()
    rank_loss = torch.zeros((), device=process.device)
    trained.optimizer.zero_grad(set_to_none=True)
    for number, micro_batch in enumerate(micro_batches, start=1):
        is_last = number == len(micro_batches)
        with nullcontext() if is_last else _no_sync(trained.parallel):
            with autocast(trained.precision, process.device):
                loss_sum, _ = trained.parallel(micro_batch)
            trained.scaler.scale(loss_sum * factor).backward()
        rank_loss += loss_sum.detach() * factor / process.world_size

    trained.scaler.unscale_(trained.optimizer)  # else the norm would include the loss scale
    param_groups = trained.optimizer.param_groups
    parameters = [parameter for param_group in param_groups for parameter in param_group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    grad_norm = nn.utils.get_total_norm(gradients)
    if config.max_grad_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, config.max_grad_norm, grad_norm)

    for param_group in param_groups:
        param_group["lr"] = lr
    trained.scaler.step(trained.optimizer)
    trained.scaler.update()
    return rank_loss, grad_norm


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Return the autocast context of a forward pass; it does nothing for fp32."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")


def micro_batches_of(batch: Batch, config: TrainConfig, model: Any) -> list[Batch]:
    """Return the micro-batches of a batch. Ranks may have different numbers of them."""
    fields = _fields_of(batch)
    max_tokens = config.micro_batch_tokens
    if is_flat(batch) and config.micro_batches == 1 and _compares_all_tokens(model):
        max_tokens = max_tokens or config.pack or MAX_COMPARED_TOKENS
    if max_tokens is not None:
        return split_rows(fields, max_tokens=max_tokens)
    return [fields] if config.micro_batches == 1 else split_rows(fields, config.micro_batches)


def _compares_all_tokens(model: Any) -> bool:
    """Tell whether a model's attention takes time and memory for all pairs of tokens of a batch.

    The kernels of FlashAttention and flex attention leave out pairs of different documents.
    """
    config = getattr(getattr(model, "vlm", None), "config", None)
    return getattr(config, "_attn_implementation", None) in ("sdpa", "eager")


def _fields_of(batch: Batch) -> Batch:
    """Return the fields of a batch that a model reads: tensors, lists of tensors, and lengths.

    Keys and texts are left out: `torch.compile` would compile the model anew for each new value.
    """
    return {
        name: value
        for name, value in batch.items()
        if isinstance(value, Tensor)
        or name in _LENGTHS
        or (isinstance(value, list) and all(isinstance(item, Tensor) for item in value))
    }


def seed_step(seed: int, num_steps: int, rank: int) -> None:
    """Seed torch for one step, so that random numbers (dropout) need no saved state to resume."""
    torch.manual_seed(((seed * 1_000_003 + num_steps) * 65_537 + rank) % 2**63)


def _no_sync(parallel: nn.Module) -> Any:
    """Return the context in which a backward pass does not average gradients over the ranks."""
    return parallel.no_sync() if isinstance(parallel, DistributedDataParallel) else nullcontext()


def _checkpoint_activations(model: nn.Module) -> None:
    """Switch activation checkpointing on in the `transformers` models inside `model`."""
    # transformers 5 renamed the method; both names take the same options.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    switches: list[Any] = [
        getattr(module, next(name for name in names if hasattr(module, name)))
        for module in model.children()
        if any(hasattr(module, name) for name in names)
    ]
    if not switches:
        raise ConfigError("activation_checkpointing: there is no transformers model in this model")
    for switch in switches:
        switch({"use_reentrant": False})
