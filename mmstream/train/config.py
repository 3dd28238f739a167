"""What a training run is told, and what it gives back: two plain descriptions, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmstream.errors import ConfigError
from mmstream.storage import is_remote

__all__ = ["TrainConfig", "TrainResult"]


@dataclass(frozen=True)
class TrainConfig:
    """Settings of `mmstream.train.train`. The defaults learn 100 captions in 60 steps on a CPU.

    Attributes:
        url: the dataset: whatever `mmstream.open_dataset` opens.
        out: folder or ``s3://`` prefix that gets ``checkpoints/``; every rank must see it.
        log_dir: local folder for ``metrics-rank{r}.jsonl``. None: `out` where that is local;
            with a remote `out` no metrics are then written.
        epochs: passes over the data, counted from the very first start.
        max_steps: stop after this many optimizer steps, counted likewise. None: after `epochs`.
        global_batch_size: samples a step, over all ranks.
        num_workers: loader processes of each rank.
        lr: AdamW's learning rate; a resumed run takes the one given then.
        weight_decay: AdamW's.
        seed: of the data's order and of the first weights.
        image_size: side of the square images in pixels, a multiple of 16.
        max_length: longest text in tokens.
        tokenizer: folder of a `transformers` tokenizer; None: one token a byte.
        checkpoint_every: optimizer steps between two checkpoints; the last step makes one too.
        keep_checkpoints: newest ones that are kept. Two survive damage to the newest.
        log_keys: write each step's sample keys into the metrics.
        device: "cpu", "cuda" or "cuda:N"; None: CUDA where there is one. Under torchrun "cuda"
            is the process's own.
    """

    url: str
    out: str
    log_dir: str | None = None
    epochs: int = 1
    max_steps: int | None = None
    global_batch_size: int = 16
    num_workers: int = 1
    lr: float = 3e-4
    weight_decay: float = 0.1
    seed: int = 0
    image_size: int = 64
    max_length: int = 64
    tokenizer: str | None = None
    checkpoint_every: int = 20
    keep_checkpoints: int = 2
    log_keys: bool = False
    device: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "epochs", "max_steps", "global_batch_size", "max_length", "checkpoint_every",
            "keep_checkpoints",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"train: {name} is {value}; it must be 1 or more")
        if self.image_size < 16 or self.image_size % 16:
            raise ConfigError(f"train: image_size is {self.image_size}, no multiple of 16")
        if self.log_dir is not None and is_remote(self.log_dir):
            raise ConfigError(f"train: log_dir is {self.log_dir}; it must be a local folder")
        if self.log_keys and self.log_folder is None:
            raise ConfigError("train: log_keys with a remote out also needs a local log_dir")

    @property
    def log_folder(self) -> str | None:
        """The local folder of the metrics, or None when there is none."""
        if self.log_dir is None and is_remote(self.out):
            return None
        return self.log_dir or self.out.removeprefix("file://")


@dataclass(frozen=True)
class TrainResult:
    """What a run gives back.

    Attributes:
        num_steps: optimizer steps since the very first start.
        resumed_from: of these, the steps that were already in the checkpoint.
        final_loss: loss of the last step; None when nothing was left to do.
        state: the loader's state after the last step.
    """

    num_steps: int
    resumed_from: int
    final_loss: float | None
    state: dict[str, Any]
