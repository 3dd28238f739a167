"""What a training run is told, and what it gives back: two plain descriptions, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mmstream.errors import ConfigError
from mmstream.storage import is_remote

__all__ = ["Precision", "TrainConfig", "TrainResult"]

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]

_FROM_ONE = (
    "epochs",
    "max_steps",
    "global_batch_size",
    "accumulate",
    "micro_batches",
    "decay_steps",
    "image_size",
    "max_length",
    "checkpoint_every",
    "keep_checkpoints",
    "validate_every",
    "log_every",
)
_FROM_ZERO = ("num_workers", "warmup_steps", "profile", "lr", "weight_decay", "final_lr_fraction")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of `mmstream.train.train`. The defaults learn 100 captions in 60 steps on a CPU.

    Attributes:
        url: the dataset: whatever `mmstream.open_dataset` opens, or a mixture's file, which ends in
            ``.json`` (see `mmstream.open_mixture`).
        out: folder or ``s3://`` prefix that gets ``checkpoints/``; every rank must see it.
        log_dir: local folder for ``metrics-rank{r}.jsonl`` and what else a run writes for people.
            None: `out` where that is local; with a remote `out` nothing of it is then written.
        model: "clip" or "vlm", small and with random weights, or a local folder that
            `transformers` has saved a CLIP or a Llava-style model to.
        tokenizer: folder of a `transformers` tokenizer; None: the model folder's own, and one token
            a byte for the small models.
        image_size: side of the square images in pixels; None: what the model's folder says. For the
            small models a multiple of 16; None: 64.
        max_length: longest text in tokens, those of images included; None: 64 for CLIP, 512 for a
            VLM.
        freeze: patterns as of a shell (``clip.vision_model.*``); parameters whose names match one
            are not trained.

        epochs: passes over the data, counted from the very first start; of a mixture what it calls
            an epoch.
        max_steps: stop after this many optimizer steps, counted likewise. None: after `epochs`.
        global_batch_size: samples of a loader step, over all ranks.
        accumulate: loader steps that make one optimizer step; an epoch's last group may be smaller.
            The batches of a group are held in memory together.
        micro_batches: parts that each rank cuts its batches into, for a device that cannot take
            them at once. Changes memory and time, nothing else.
        rows_per_rank: rows of a loader step for each rank, for devices of different size. None:
            equal ones, give or take a row.
        num_workers: loader processes of each rank.
        bad_samples: what happens to the row of a bad sample: "substitute", "mask" or "raise" (see
            `mmstream.BadSamplePolicy`). Validation masks where training
            substitutes, so that no sample counts twice.
        max_bad_fraction: bad samples over all samples of a rank, from the 1,000th on, that end a
            run when there are more.
        substitute_bad_shards: whether the samples of an unreadable shard count as bad samples.
            False: such a shard ends the run.
        on_change: what to do when the data's settings or the corpus are others than those of the
            checkpoint, in mid-epoch: "refuse", or "finish_epoch" as it was planned and change then
            (see `mmstream.Loader`). The cosine's end counts epochs of the length at the start.
        seed: of the data's order, of the first weights and of what a model draws in a step.

        lr: AdamW's highest learning rate; a resumed run takes the settings given then.
        lr_schedule: "constant" or "cosine", after the warm-up.
        warmup_steps: optimizer steps of linear warm-up.
        decay_steps: optimizer steps until the cosine has reached its end, the warm-up's among them.
            None: those of all `epochs`, whatever `max_steps` is.
        final_lr_fraction: learning rate at the cosine's end, as a share of `lr`.
        weight_decay: AdamW's; biases, norms and other vectors have none.
        max_grad_norm: longer gradients are scaled down to this norm; None: never.
        precision: "bf16" or "fp16" (with loss scaling) under autocast, or "fp32". None: bf16 on
            CUDA, fp32 on a CPU.
        activation_checkpointing: compute activations anew in the backward pass: less memory, a
            third more time.
        compile: run the model through ``torch.compile``.
        deterministic: only deterministic algorithms; one that has none is an error of torch.

        checkpoint_every: optimizer steps between two checkpoints; the last step makes one too.
        keep_checkpoints: newest ones that are kept. Two survive damage to the newest.
        validation: a second dataset, gone through in its own order every `validate_every` steps and
            at the end; None: none.
        validate_every: optimizer steps between two validation passes.
        log_every: optimizer steps between two lines of metrics. Each makes the host wait for the
            device, and only then is a signal to stop looked at.
        log_keys: write keys and lineage (planned, shown) of each step's samples into the metrics.
        progress: a bar on rank 0, where it runs in a terminal.
        profile: optimizer steps to trace with torch.profiler, after two others; 0: none.
        device: "cpu", "cuda" or "cuda:N"; None: CUDA where there is one. Under torchrun "cuda"
            is the process's own.
    """

    url: str
    out: str
    log_dir: str | None = None
    model: str = "clip"
    tokenizer: str | None = None
    image_size: int | None = None
    max_length: int | None = None
    freeze: tuple[str, ...] = ()

    epochs: int = 1
    max_steps: int | None = None
    global_batch_size: int = 16
    accumulate: int = 1
    micro_batches: int = 1
    rows_per_rank: tuple[int, ...] | None = None
    num_workers: int = 1
    bad_samples: Literal["substitute", "mask", "raise"] = "substitute"
    max_bad_fraction: float = 0.01
    substitute_bad_shards: bool = False
    on_change: Literal["refuse", "finish_epoch"] = "refuse"
    seed: int = 0

    lr: float = 3e-4
    lr_schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    final_lr_fraction: float = 0.0
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0
    precision: Precision | None = None
    activation_checkpointing: bool = False
    compile: bool = False
    deterministic: bool = False

    checkpoint_every: int = 20
    keep_checkpoints: int = 2
    validation: str | None = None
    validate_every: int = 100
    log_every: int = 1
    log_keys: bool = False
    progress: bool = True
    profile: int = 0
    device: str | None = None

    def __post_init__(self) -> None:
        for least, names in ((1, _FROM_ONE), (0, _FROM_ZERO)):
            for name in names:
                value = getattr(self, name)
                if value is not None and value < least:
                    raise ConfigError(f"train: {name} is {value}; it must be {least} or more")
        self._check_model_and_step()
        if self.log_dir is not None and is_remote(self.log_dir):
            raise ConfigError(f"train: log_dir is {self.log_dir}; it must be a local folder")
        for name in ("log_keys", "profile"):
            if getattr(self, name) and self.log_folder is None:
                raise ConfigError(f"train: {name} with a remote out also needs a local log_dir")

    def _check_model_and_step(self) -> None:
        if self.model in ("clip", "vlm") and self.image_size and self.image_size % 16:
            raise ConfigError(f"train: image_size is {self.image_size}, no multiple of 16")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"train: max_grad_norm is {self.max_grad_norm}; it must be above 0")
        if self.precision not in (None, "fp32", "bf16", "fp16"):
            raise ConfigError(f"train: precision is {self.precision}; fp32, bf16 or fp16")
        if self.lr_schedule not in ("constant", "cosine"):
            raise ConfigError(f"train: lr_schedule is {self.lr_schedule}; constant or cosine")
        rows = self.rows_per_rank
        if rows is not None and (min(rows) < 1 or sum(rows) != self.global_batch_size):
            raise ConfigError(
                f"train: rows_per_rank {rows} must be positive and sum to global_batch_size "
                f"{self.global_batch_size}"
            )

    @property
    def log_folder(self) -> str | None:
        """The local folder of the metrics, or None when there is none."""
        if self.log_dir is None and is_remote(self.out):
            return None
        return self.log_dir or self.out.removeprefix("file://")

    def most_rows(self, world_size: int) -> int:
        """Return the rows of the rank that has most."""
        return max(self.rows_per_rank or [-(-self.global_batch_size // world_size)])


@dataclass(frozen=True)
class TrainResult:
    """What a run gives back.

    Attributes:
        num_steps: optimizer steps since the very first start.
        resumed_from: of these, the steps that were already in the checkpoint.
        final_loss: loss of the last step; None when nothing was left to do.
        state: the loader's state after the last optimizer step.
        validation_loss: of the last validation pass of this run; None without one.
        stopped_by: "SIGTERM" or "SIGINT" when a signal ended the run before its end.
        summary: where the time went and what to change, in words; None when nothing was done.
    """

    num_steps: int
    resumed_from: int
    final_loss: float | None
    state: dict[str, Any]
    validation_loss: float | None = None
    stopped_by: str | None = None
    summary: str | None = None
