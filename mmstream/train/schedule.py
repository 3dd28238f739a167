"""The optimizer, the frozen parameters, and the learning rate of each step.

    loop.fit -> step.prepare -> `freeze_parameters`, `make_optimizer`
    loop.fit -> `learning_rate_of` -> step.train_step

The learning rate depends only on the settings and the number of steps done. So no state holds it: a
resumed run uses the same learning rates as an undisturbed one, on any number of ranks.
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
    """Return the learning rate of the step that follows `num_steps` others.

    It rises linearly over `warmup_steps` steps: the first has ``lr / warmup_steps``, the last `lr`.
    With "constant" it stays there. With "cosine" it then falls along half a cosine (Loshchilov and
    Hutter, 2017, without restarts). It reaches ``final_fraction * lr`` at step `decay_steps` and
    stays there.

    For example, ``lr=1.0, warmup_steps=2, decay_steps=6, final_fraction=0.0`` and "cosine" give
    0.5, 1.0, 1.0, 0.85, 0.5, 0.15 and then 0.0.
    """
    if num_steps < warmup_steps:
        return lr * (num_steps + 1) / warmup_steps
    if schedule == "constant":
        return lr
    progress = min(1.0, (num_steps - warmup_steps) / max(1, decay_steps - warmup_steps))
    return lr * (final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * progress)) / 2)


def learning_rate_of(config: TrainConfig, num_steps: int, planned_steps: int) -> float:
    """Return the learning rate of a run's next step. Its cosine ends at `planned_steps`."""
    return learning_rate(
        num_steps,
        lr=config.lr,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps or planned_steps,
        final_fraction=config.final_lr_fraction,
        schedule=config.lr_schedule,
    )


def freeze_parameters(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze the parameters whose names match a shell pattern such as ``clip.vision_model.*``.

    Raises:
        ConfigError: a pattern matches no parameter, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"freeze: no parameter matches {pattern!r}; one of the names is {names[0]!r}"
            )
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("freeze: nothing is left to train")


def make_optimizer(model: nn.Module, *, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW over the parameters that are not frozen. `train_step` sets its learning rate.

    Weight decay applies to matrices and kernels, not to biases, norms and other vectors.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for parameter in trained if parameter.ndim >= 2],
            "weight_decay": weight_decay,
        },
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98))
