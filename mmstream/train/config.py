"""The settings of a training run, and its result. Importing this module does not import torch.

`TrainConfig` -> train -> `TrainResult`
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from mmstream.errors import ConfigError
from mmstream.storage import is_remote

__all__ = ["Precision", "TrainConfig", "TrainResult"]

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]

_AT_LEAST_ONE = (
    "epochs",
    "max_steps",
    "global_batch_size",
    "accumulate",
    "micro_batches",
    "micro_batch_tokens",
    "pack",
    "decay_steps",
    "image_size",
    "max_length",
    "checkpoint_every",
    "keep_checkpoints",
    "validate_every",
    "log_every",
)
_AT_LEAST_ZERO = (
    "num_workers",
    "warmup_steps",
    "profile",
    "lr",
    "weight_decay",
    "final_lr_fraction",
)

_OF_EACH_RANK = (
    "url",
    "out",
    "log_dir",
    "tokenizer",
    "plan",
    "micro_batches",
    "micro_batch_tokens",
    "num_workers",
    "activation_checkpointing",
    "compile",
    "keep_checkpoints",
    "log_keys",
    "progress",
    "profile",
    "device",
)
"""Settings that may differ between ranks: paths, what a rank saves, and how it computes."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of `mmstream.train.train`. The defaults learn 100 captions in 60 steps on a CPU.

    A resumed run may change them, except those that fix the shapes of the weights (`model`,
    `image_size`, `max_length`, `tokenizer`) and `freeze`. Changes to the order of the data in the
    middle of an epoch are governed by `on_change`.

    Attributes:
        url: the dataset: anything that `mmstream.open_dataset` opens. Or the file of a mixture,
            which ends in ``.json`` (see `mmstream.open_mixture`).
        allow_foreign_urls: as of `mmstream.open_dataset`, for `url` and `validation`.
        out: folder or ``s3://`` prefix that gets ``checkpoints/``. Every rank must be able to read
            it.
        log_dir: local folder of ``metrics-rank{r}.jsonl``, TensorBoard files, traces and records of
            bad samples. None: `out` when that is local; with a remote `out`, no such files.
        model: "clip" or "vlm": a small model with random weights. Or a local folder to which
            `transformers` saved a CLIP, a Llava-style model, a Qwen-VL or a Whisper.
        tokenizer: folder of a `transformers` tokenizer. None: that of the model's folder, or one
            token per byte for the small models.
        image_size: side of the square images in pixels; a multiple of 16 for the small models.
            None: as the model's folder says, or 64 for the small models. The processor of a Qwen-VL
            says how each image and video is resized; with an `image_size`, it gets squares of that
            size, and no videos.
        max_length: longest text in tokens, those of images and videos included. None: 64 for CLIP,
            512 for a VLM, 4,096 for a Qwen-VL with its processor, and as many as the model has for
            a Whisper.
        text_field: where the text is, as ``field`` of `mmstream.TextDecoder`, such as
            "json.caption". None: messages, else ``txt``.
        freeze: shell patterns such as ``clip.vision_model.*``. Parameters whose name matches one
            are not trained.

        epochs: passes over the data since the first start. For a mixture: epochs as the mixture
            defines them. None: as many as `max_steps` needs, or 1 without `max_steps`.
        max_steps: optimizer steps since the first start, after which the run ends. With `epochs`
            too, the run ends at whichever comes first.
        global_batch_size: samples per loader step, over all ranks; with `pack`, rows of samples.
        accumulate: loader steps per optimizer step. The last optimizer step of an epoch may have
            fewer. The batches of one optimizer step are in memory together.
        micro_batches: number of pieces into which each rank cuts its batches, to save memory on the
            device. It changes the result by rounding errors only.
        padding_free: lay the rows of a rank one behind the other, without padding. The loss and its
            gradient are those of padded rows; attention ends where a document ends. For models of
            texts, not for CLIP and Whisper. See `mmstream.Flat`.
        pack: fill rows of at most this many tokens with whole samples, by a plan, and lay them one
            behind the other without padding. `global_batch_size` then counts such rows, and
            `max_length` is `pack` unless it is set. See `mmstream.Pack`.
        plan: name of the plan beside the index, or its folder or URL. None: the one that fits
            `pack`. With a mixture, the name that the plans of all sources have.
        weights_of: of a mixture with `pack`: "samples" or "tokens", what its weights are
            proportions of. Required there.
        micro_batch_tokens: most tokens of a micro-batch, in place of `micro_batches`. A longer row
            is one by itself. It needs `padding_free` or `pack`. None: all tokens of a rank at once;
            with "sdpa" or "eager" attention `pack` tokens, or 4,096.
        attn_implementation: attention of the model, as `transformers` names it, such as
            "flash_attention_2" or "flex_attention". None: the model's own, "sdpa".
        rows_per_rank: rows of each rank in a loader step, for devices of different size. None:
            equal shares, which may differ by one row.
        num_workers: loader processes per rank; 0: none.
        bad_samples: what happens to the row of a bad sample: "substitute", "mask" or "raise" (see
            `mmstream.BadSamplePolicy`). Validation uses "mask" in place of "substitute", so that no
            sample counts twice.
        max_bad_fraction: share of bad samples among all samples of a rank, 0 to 1. A larger share
            ends the run, from the 1,000th sample on.
        substitute_bad_shards: True: each sample of an unreadable shard is a bad sample. False: an
            unreadable shard ends the run.
        on_change: what happens when a run resumes in the middle of an epoch with other data or
            other settings of the order. "refuse": StateError. "finish_epoch": that epoch ends as it
            was planned, and the changes apply from the next one (see `mmstream.Loader`). The end
            of the cosine stays where the length of the epochs at the start puts it.
        reshuffle: "global": each epoch may put a sample anywhere. "lanes": it stays with the ranks
            that had it, see `mmstream.Pipeline`. None: "lanes" with `cache_dir`, else "global".
        cache_dir: local folder in which this node keeps samples of object storage for the next
            epochs (see `mmstream.Pipeline`). None: nothing is kept.
        max_cache_bytes: most bytes in `cache_dir`. None: 80 % of what is free.
        seed: fixes the order of the data, the first weights, and the random numbers of each step.

        lr: highest learning rate of AdamW.
        lr_schedule: "constant" or "cosine", after the warm-up.
        warmup_steps: optimizer steps of linear warm-up.
        decay_steps: optimizer steps after which the cosine ends, warm-up included. None: the steps
            of all `epochs`, whatever `max_steps` is. Without `epochs`: `max_steps`.
        final_lr_fraction: learning rate after the cosine, as a share of `lr`.
        weight_decay: weight decay of matrices and kernels; biases, norms and other vectors have
            none.
        max_grad_norm: a longer gradient is scaled down to this norm. None: never.
        precision: "bf16" or "fp16" (with loss scaling) under autocast, or "fp32". None: bf16 on
            CUDA, fp32 on a CPU.
        activation_checkpointing: compute activations again in the backward pass. It needs less
            memory and about a third more time.
        compile: compile the model with ``torch.compile``.
        deterministic: use deterministic algorithms only. torch raises RuntimeError for an operation
            that has none.

        checkpoint_every: optimizer steps between two checkpoints. The last step is always saved.
        keep_checkpoints: number of newest checkpoints to keep. With two, a run survives damage to
            the newest.
        validation: a second dataset. Its mean loss is computed every `validate_every` steps and at
            the end. None: no validation.
        validate_every: optimizer steps between two validation passes.
        log_every: optimizer steps between two lines of metrics. At each line the host waits for the
            device. Only then does the run look at signals to stop.
        log_keys: write keys and lineage of each step's samples into the metrics, for
            ``mmstream replay --check``.
        progress: show a progress bar on rank 0 when it runs in a terminal.
        profile: optimizer steps to trace with torch.profiler, after the first two; 0: none.
        device: "cpu", "cuda" or "cuda:N". None: CUDA if there is a device. Under torchrun "cuda" is
            the device of the process's LOCAL_RANK.

    Raises:
        ConfigError: a setting is out of its range, or settings do not fit together.

    Examples:
        >>> config = TrainConfig(url="shards/", out="run/", model="vlm", lr_schedule="cosine")
        >>> config.global_batch_size
        16
    """

    url: str
    out: str
    allow_foreign_urls: bool = False
    log_dir: str | None = None
    model: str = "clip"
    tokenizer: str | None = None
    image_size: int | None = None
    max_length: int | None = None
    text_field: str | None = None
    freeze: tuple[str, ...] = ()

    epochs: int | None = None
    max_steps: int | None = None
    global_batch_size: int = 16
    accumulate: int = 1
    micro_batches: int = 1
    padding_free: bool = False
    pack: int | None = None
    plan: str | None = None
    weights_of: Literal["samples", "tokens"] | None = None
    micro_batch_tokens: int | None = None
    attn_implementation: str | None = None
    rows_per_rank: tuple[int, ...] | None = None
    num_workers: int = 1
    bad_samples: Literal["substitute", "mask", "raise"] = "substitute"
    max_bad_fraction: float = 0.01
    substitute_bad_shards: bool = False
    on_change: Literal["refuse", "finish_epoch"] = "refuse"
    reshuffle: Literal["global", "lanes"] | None = None
    cache_dir: str | None = None
    max_cache_bytes: int | None = None
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
        for least, names in ((1, _AT_LEAST_ONE), (0, _AT_LEAST_ZERO)):
            for name in names:
                value = getattr(self, name)
                if value is not None and value < least:
                    raise ConfigError(f"train: {name} is {value}; it must be {least} or more")
        self._check_model_and_step()
        self._check_batching()
        if self.log_dir is not None and is_remote(self.log_dir):
            raise ConfigError(f"train: log_dir is {self.log_dir}; it must be a local folder")
        for name in ("log_keys", "profile"):
            if getattr(self, name) and self.log_folder is None:
                raise ConfigError(f"train: {name} needs a local log_dir when out is remote")

    def _check_model_and_step(self) -> None:
        if self.model in ("clip", "vlm") and self.image_size and self.image_size % 16:
            raise ConfigError(
                f"train: image_size is {self.image_size}; it must be a multiple of 16"
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"train: max_grad_norm is {self.max_grad_norm}; it must be above 0")
        if self.precision not in (None, "fp32", "bf16", "fp16"):
            raise ConfigError(f"train: precision is {self.precision}; give fp32, bf16 or fp16")
        if self.lr_schedule not in ("constant", "cosine"):
            raise ConfigError(f"train: lr_schedule is {self.lr_schedule}; give constant or cosine")
        rows = self.rows_per_rank
        if rows is not None and (min(rows) < 1 or sum(rows) != self.global_batch_size):
            raise ConfigError(
                f"train: rows_per_rank {rows} must be positive and sum to global_batch_size "
                f"{self.global_batch_size}"
            )

    def _check_batching(self) -> None:
        if self.is_flat and self.model == "clip":
            raise ConfigError(
                "train: padding_free and pack are for models that learn texts, and clip compares "
                'whole rows: give model="vlm" or the folder of a chat model, or leave them out'
            )
        if self.plan is not None and self.pack is None:
            raise ConfigError("train: plan needs pack, the tokens of a row")
        if self.weights_of is not None and self.pack is None:
            raise ConfigError("train: weights_of needs pack, the tokens of a row")
        if self.micro_batch_tokens is None:
            return
        if not self.is_flat:
            raise ConfigError("train: micro_batch_tokens needs padding_free or pack")
        if self.micro_batches > 1:
            raise ConfigError("train: give micro_batches or micro_batch_tokens, not both")

    @property
    def is_flat(self) -> bool:
        """Whether the rows of a batch lie one behind the other, without padding."""
        return self.padding_free or self.pack is not None

    @property
    def num_epochs(self) -> int | None:
        """The number of epochs after which a run ends; None: `max_steps` alone ends it."""
        return 1 if self.epochs is None and self.max_steps is None else self.epochs

    @property
    def log_folder(self) -> str | None:
        """Local folder of metrics and logs; None when `out` is remote and `log_dir` is not set."""
        if self.log_dir is None and is_remote(self.out):
            return None
        return self.log_dir or self.out.removeprefix("file://")

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
        if self.model not in ("clip", "vlm"):
            settings["model"] = "a folder"
        settings["validation"] = "no" if self.validation is None else "yes"
        return settings

    def most_rows(self, world_size: int) -> int:
        """Return the number of rows of the rank that has the most."""
        return max(self.rows_per_rank or [-(-self.global_batch_size // world_size)])


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
        summary: where the time went and what would make it faster, as text; None when no step was
            done.
    """

    num_steps: int
    resumed_from: int
    final_loss: float | None
    state: dict[str, Any]
    validation_loss: float | None = None
    stopped_by: str | None = None
    all_received_signal: bool = False
    summary: str | None = None
