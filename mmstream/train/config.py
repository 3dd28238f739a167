"""The settings of a training run, and its result. Importing this module does not import torch.

`TrainConfig` -> train -> `TrainResult`
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from mmstream.errors import ConfigError
from mmstream.settings import (
    AnyInt,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    arguments_gone,
    checked,
)
from mmstream.storage import is_remote
from mmstream.storage.store import local_path

Logger: TypeAlias = Literal["tensorboard", "wandb", "prometheus"]
"""Where metrics go beside the files of metrics."""

Precision: TypeAlias = Literal["fp32", "bf16"]

SMALL_MODELS = ("clip", "vlm")
"""Models with random weights. Every other `TrainConfig.model` is a folder."""

_OF_EACH_RANK = (
    "url",
    "out",
    "log_dir",
    "micro_batches",
    "num_workers",
    "activation_checkpointing",
    "log_keys",
    "device",
    "keys_file",
)
"""Settings that may differ between ranks: paths, what a rank logs, and how it computes."""


@checked(arguments_gone("TrainConfig"))
@dataclass(frozen=True)
class TrainConfig:
    """Settings of `mmstream.train.train`. The defaults learn 100 captions in 60 steps on a CPU.

    A resumed run may change them, except those that fix the shapes of the weights (`model`,
    `image_size`, `max_length`). Changes to the order of the data in the middle of an epoch are
    governed by `on_change`.

    Attributes:
        url: the dataset: anything that `mmstream.open_dataset` opens. Or the file of a mixture,
            which ends in ``.json`` (see `mmstream.Mixture.open`).
        allow_foreign_urls: as of `mmstream.open_dataset`, for `url` and `validation`.
        out: folder or ``s3://`` prefix that gets ``checkpoints/``. Every rank must be able to read
            it.
        log_dir: local folder of ``metrics-rank{r}.jsonl`` and records of bad samples. None: `out`
            when that is local; with a remote `out`, no such files.
        model: "clip" or "vlm": a small model with random weights. Or a local folder to which
            `transformers` saved a CLIP, a Llava-style model, a Qwen-VL or a Whisper.
        image_size: side of the square images of "clip" and "vlm" in pixels, a multiple of 16. None:
            64. A folder says its own.
        max_length: longest text in tokens, those of images and videos included. None: 64 for CLIP,
            512 for a VLM, 4,096 for a Qwen-VL, and as many as the model has for a Whisper.
        epochs: passes over the data since the first start. For a mixture: epochs as the mixture
            defines them. None: as many as `max_steps` needs, or 1 without `max_steps`.
        max_steps: optimizer steps since the first start, after which the run ends. With `epochs`
            too, the run ends at whichever comes first.
        global_batch_size: samples per loader step, over all ranks.
        accumulate: loader steps per optimizer step. The last optimizer step of an epoch may have
            fewer. The batches of one optimizer step are in memory together.
        micro_batches: number of pieces into which each rank cuts its batches, to save memory on the
            device. It changes the result by rounding errors only.
        rows_per_rank: rows of each rank in a loader step, for devices of different size. None:
            equal shares, which may differ by one row.
        num_workers: loader processes per rank; 0: none.
        on_change: what happens when a run resumes in the middle of an epoch with other data or
            other settings of the order. "refuse": StateError. "finish_epoch": that epoch ends as it
            was planned, and the changes apply from the next one (see `mmstream.Loader`).
        seed: fixes the order of the data, the first weights, and the random numbers of each step.
        lr: learning rate of AdamW after the warm-up.
        warmup_steps: optimizer steps in which the learning rate rises to `lr`.
        precision: "bf16" under autocast, or "fp32". None: bf16 on CUDA, fp32 on a CPU.
        activation_checkpointing: compute activations again in the backward pass. It needs less
            memory and about a third more time.
        checkpoint_every: optimizer steps between two checkpoints. The last step is always saved.
        validation: a second dataset. Its mean loss is computed with each checkpoint. None: no
            validation.
        log_every: optimizer steps between two lines of metrics. At each line the host waits for the
            device. Only then does the run look at signals to stop.
        log: what else gets the metrics, in files below `log_dir`: "tensorboard" and "wandb"
            (rank 0), and "prometheus" (each rank). See `mmstream.train.TensorBoard`, `WandB` and
            `Prometheus`.
        log_keys: write keys and lineage of each step's samples into the metrics, for
            ``mmstream replay --check``.
        device: "cpu", "cuda" or "cuda:N". None: CUDA if there is a device. Under torchrun "cuda" is
            the device of the process's LOCAL_RANK.
        select: name of a stored selection: train on its samples (see `mmstream.Dataset.select`).
        keys_file: file with the keys of the samples to train on, one a line.
        where: condition on the samples to train on (see `mmstream.Dataset.where`).
        sample: share of the samples to train on, drawn with seed 0.
        limit: train on so many samples, the first ones. `select`, `keys_file`, `where`, `sample`
            and `limit` choose one after the other, and are not for a mixture.

    Raises:
        ConfigError: a setting is out of its range, or settings do not fit together.

    Examples:
        >>> config = TrainConfig(url="shards/", out="run/", model="vlm", warmup_steps=10)
        >>> config.global_batch_size
        16
    """

    url: str
    out: str
    allow_foreign_urls: bool = False
    log_dir: str | None = None
    model: str = "clip"
    image_size: PositiveInt | None = None
    max_length: PositiveInt | None = None

    epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    global_batch_size: PositiveInt = 16
    accumulate: PositiveInt = 1
    micro_batches: PositiveInt = 1
    rows_per_rank: tuple[PositiveInt, ...] | None = None
    num_workers: NonNegativeInt = 1
    on_change: Literal["refuse", "finish_epoch"] = "refuse"
    seed: AnyInt = 0

    lr: NonNegativeFloat = 3e-4
    warmup_steps: NonNegativeInt = 0
    precision: Precision | None = None
    activation_checkpointing: bool = False

    checkpoint_every: PositiveInt = 20
    validation: str | None = None
    log_every: PositiveInt = 1
    log: tuple[Logger, ...] = ()
    log_keys: bool = False
    device: str | None = None

    select: str | None = None
    keys_file: str | None = None
    where: str | None = None
    sample: Fraction | None = None
    limit: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.image_size is not None and self.model not in SMALL_MODELS:
            raise ConfigError("train: image_size is for clip and vlm; a folder says its own")
        if self.image_size is not None and self.image_size % 16:
            raise ConfigError(
                f"train: image_size is {self.image_size}; it must be a multiple of 16"
            )
        if self.log_dir is not None and is_remote(self.log_dir):
            raise ConfigError(f"train: log_dir is {self.log_dir}; it must be a local folder")
        for name in ("log", "log_keys"):
            if getattr(self, name) and self.log_folder is None:
                raise ConfigError(f"train: {name} needs a local log_dir when out is remote")

    @property
    def num_epochs(self) -> int | None:
        """The number of epochs after which a run ends; None: `max_steps` alone ends it."""
        return 1 if self.epochs is None and self.max_steps is None else self.epochs

    @property
    def log_folder(self) -> str | None:
        """Local folder of metrics and logs; None when `out` is remote and `log_dir` is not set."""
        if self.log_dir is None and is_remote(self.out):
            return None
        return self.log_dir or local_path(self.out)

    @property
    def choice(self) -> dict[str, Any]:
        """What chooses samples."""
        names = ("select", "keys_file", "where", "sample", "limit")
        return {name: getattr(self, name) for name in names}

    @property
    def rank_settings(self) -> dict[str, str]:
        """What must be the same on all ranks, as texts by name.

        Folders of data and of models may lie elsewhere on another machine. The loaders compare
        datasets and tokenizers by content, and rank 0 gives its weights to all ranks.
        """
        settings = {
            field.name: repr(getattr(self, field.name))
            for field in fields(self)
            if field.name not in _OF_EACH_RANK
        }
        if self.model not in SMALL_MODELS:
            settings["model"] = "a folder"
        settings["validation"] = "no" if self.validation is None else "yes"
        return settings


@dataclass(frozen=True)
class TrainResult:
    """The result of a run. It is the same on every rank.

    Attributes:
        num_steps: optimizer steps since the first start.
        resumed_from: optimizer steps of the checkpoint from which this run resumed; 0 without one.
        final_loss: loss of the last line of metrics; None when no step was left to do.
        state: state of the loader after the last optimizer step.
        validation_loss: loss of the last validation pass of this run; None without one.
        stopped_by: "SIGTERM" or "SIGINT" when a signal to any rank ended the run early, else None.
        all_received_signal: whether every rank received a signal. Where one did not, the run should
            go on: start all ranks again.
    """

    num_steps: int
    resumed_from: int
    final_loss: float | None
    state: dict[str, Any]
    validation_loss: float | None = None
    stopped_by: str | None = None
    all_received_signal: bool = False
