"""What the optimizer is told: which parameters it moves, and how far at each step.

The learning rate is a pure function of the number of steps done, so the place in the schedule is in
no state: a run that resumes, on however many ranks, is where the undisturbed one would be.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn

from mmstream.errors import ConfigError
from mmstream.train.config import TrainConfig

__all__ = ["freeze_parameters", "learning_rate", "learning_rate_of", "make_optimizer"]


def learning_rate(
    num_steps: int,
    *,
    lr: float,
    warmup_steps: int,
    decay_steps: int,
    final_fraction: float,
    schedule: Literal["constant", "cosine"],
) -> float:
    """Return the learning rate of the step after `num_steps` others.

    Rises in a line over `warmup_steps` steps, the first of which has ``lr / warmup_steps`` and the
    last `lr`. With "cosine" it then falls along half a cosine (Loshchilov and Hutter, 2017, without
    restarts) to ``final_fraction * lr``, where it stays from `decay_steps` on.
    """
    if num_steps < warmup_steps:
        return lr * (num_steps + 1) / warmup_steps
    if schedule == "constant":
        return lr
    way = min(1.0, (num_steps - warmup_steps) / max(1, decay_steps - warmup_steps))
    return lr * (final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * way)) / 2)


def learning_rate_of(config: TrainConfig, num_steps: int, planned_steps: int) -> float:
    """Return a run's learning rate; `planned_steps` are those of all its epochs."""
    return learning_rate(
        num_steps,
        lr=config.lr,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps or planned_steps,
        final_fraction=config.final_lr_fraction,
        schedule=config.lr_schedule,
    )


def freeze_parameters(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Exclude the parameters whose names match a pattern (``*`` and ``?``) from training.

    Raises:
        ConfigError: a pattern matches no parameter, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"freeze: no parameter matches {pattern!r}; there is {names[0]!r}")
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("freeze: nothing is left to train")


def make_optimizer(model: nn.Module, *, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW over the trained parameters; its learning rate is set before each step.

    Matrices and kernels decay; biases, norms and other vectors and scalars do not.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=(0.9, 0.98))
