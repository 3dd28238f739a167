"""The training loop. Start reading here: `run` sets a run up, `fit` trains, helpers follow.

    loader -> device -> train: `run` -> `fit` -> `train_step`

All ranks do the same optimizer steps. Each rank computes its own rows of the same global batches.
A checkpoint holds the weights, the optimizer and the state of the loader. That is all a later run
needs to continue exactly, even on another number of ranks or workers.

The loss of a step is the mean over all rows (or tokens) of its batches on all W ranks:

- Each rank counts the weight (rows or tokens) of its batches. `total_weight` is the sum over the
  ranks. It is known before the first backward pass.
- The loss_sum of each micro-batch is multiplied by W / total_weight. DDP then takes the mean of the
  gradients over the W ranks, which cancels the W.
- Only the backward pass of the last micro-batch communicates. DDP's `no_sync` stops the others.

For example, rank 0 has 3 rows and rank 1 has 1 row, so W = 2 and total_weight = 4. Each loss_sum is
multiplied by 2 / 4. DDP's mean over 2 ranks gives (loss_sum of rank 0 + loss_sum of rank 1) / 4.
So the number of ranks, uneven ranks, accumulation and micro-batches change a step by rounding
errors only.

In your own trainer, three lines belong to mmstream: ``mm.to_device(loader, device)``, and
``state_dict`` and ``load_state_dict`` of what it returns.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mmstream.audit import SampleLog
from mmstream.batching.split import split_rows
from mmstream.batching.valid import is_flat
from mmstream.dataset.mixture import open_data
from mmstream.dataset.open import open_dataset
from mmstream.dataset.select import chosen
from mmstream.decoding.threaded_calls import resolve_vector_math
from mmstream.errors import BadSampleLimitError, ConfigError, MMStreamError, escaped
from mmstream.loader.device import DeviceLoader, to_device
from mmstream.loader.loader import Loader
from mmstream.pipeline import Pipeline
from mmstream.storage import Store, join_url, open_store
from mmstream.train.checkpoint import (
    Trained,
    checkpoint_name,
    require_writable,
    resume_training,
    save_training,
)
from mmstream.train.config import Precision, TrainConfig, TrainResult
from mmstream.train.distributed import (
    StopRequest,
    TrainProcess,
    is_of_lost_rank,
    leave_on_sigterm,
    note_signals,
    process_group,
    received_by_all,
    share_threads,
)
from mmstream.train.metrics import Meter, StepLog, check_hooks, logger_hook
from mmstream.train.models import (
    checkpoint_activations,
    open_model,
    pipeline_for,
    pipeline_of_model,
    validation_pipeline,
)
from mmstream.types import Batch

logger = logging.getLogger(__name__)

WEIGHT_DECAY = 0.1
"""Of matrices and kernels; biases, norms and other vectors have none."""

MAX_GRAD_NORM = 1.0
"""A longer gradient is scaled down to this norm."""

MAX_COMPARED_TOKENS = 4096
"""Tokens of a micro-batch without padding where attention compares all of its tokens."""

_LENGTHS = ("max_length_q", "max_length_k")
"""Numbers that models read of a batch without padding. They are powers of two, so they are few."""


def run(
    config: TrainConfig, user_pipeline: Any, model: Any, hooks: Sequence[Any] = ()
) -> TrainResult:
    """Join the other ranks, open the data, build the model and train.

    `mmstream.train.train` is this function, and documents its arguments, result and errors.
    """
    if config.log_folder is not None and Path(config.log_folder).is_file():
        raise ConfigError(f"train: {config.log_folder} is a file; name a folder with out=")
    hooks = check_hooks(hooks)
    if config.log_folder is not None:
        hooks += [logger_hook(name, config.log_folder) for name in config.log]
    with leave_on_sigterm(), process_group(config.device) as process, ExitStack() as open_loaders:
        names = [type(hook).__name__ for hook in hooks]
        process.check_consistency({**config.rank_settings, "hooks": repr(names)})
        share_threads(config.num_workers)
        data = open_data(config.url, allow_foreign_urls=config.allow_foreign_urls)
        data = chosen(data, **config.choice)
        model, pipeline = _model_and_pipeline(config, data, model, user_pipeline, process)

        def open_batches(pipeline: Pipeline) -> DeviceLoader:
            loader = Loader(
                pipeline,
                num_workers=config.num_workers,
                rows_per_rank=config.rows_per_rank or "balanced",
                on_change=config.on_change,
            )
            open_loaders.enter_context(closing(loader))  # ends its workers
            normalize = getattr(model, "normalize", None)
            return to_device(loader, process.device, normalize=normalize)

        batches, validation = open_batches(pipeline), None
        if config.validation is not None:
            data = open_dataset(config.validation, allow_foreign_urls=config.allow_foreign_urls)
            validation = open_batches(validation_pipeline(pipeline, data))
        try:
            result = fit(config, model, batches, process, validation, hooks)
        except BadSampleLimitError as error:
            takes = getattr(model, "takes", None)  # what a sample must have; None: not known
            advice = "" if takes is None else f"; {type(model).__name__} takes {takes}"
            raise BadSampleLimitError(f"{error}{advice}") from error
        except RuntimeError as error:
            if not is_of_lost_rank(error):
                raise
            raise MMStreamError(
                "another rank has ended, or did not answer in time; its own log says why. The same "
                f"command continues from the newest checkpoint ({escaped(error, 200)})"
            ) from error
    if result.stopped_by == "SIGINT":
        raise KeyboardInterrupt
    return result


def _model_and_pipeline(
    config: TrainConfig, data: Any, model: Any, user_pipeline: Any, process: TrainProcess
) -> tuple[Any, Pipeline]:
    """Return the user's model and pipeline, and in the place of a missing one that of `config`."""
    pipeline, num_rows = None, config.global_batch_size
    if user_pipeline is not None:
        pipeline = pipeline_for(user_pipeline, data, config.log_folder)
        num_rows = pipeline.global_batch_size
    if model is None:
        most_rows = max(config.rows_per_rank or [-(-num_rows // process.world_size)])
        model, decode = open_model(config, most_rows)
        pipeline = pipeline or pipeline_of_model(config, data, decode)
    elif pipeline is None:
        raise ConfigError("train: model= needs pipeline=, with the decoders of the model")
    return model, pipeline


def fit(
    config: TrainConfig,
    model: nn.Module,
    batches: DeviceLoader,
    process: TrainProcess,
    validation: DeviceLoader | None = None,
    hooks: Sequence[Any] = (),
) -> TrainResult:
    """Train from the newest good checkpoint, or from the start, until `config` says to end.

    Args:
        config: settings. Its `url` is not used: `batches` is the data.
        model: as `mmstream.train.train` takes it. Its weights are the same on every rank.
        batches: this rank's rows, on its device.
        process: this rank.
        validation: data that are not shuffled, with ``drop_last=False``. A pass over them runs with
            each checkpoint.
        hooks: as `mmstream.train.train` takes them, of the same classes on every rank.

    The result and the errors are those of `mmstream.train.train`.
    """
    trained = prepare(config, model, process)
    checkpoints = _open_checkpoints(config, process)
    resumed_from = resume_training(checkpoints, trained, batches, process)
    num_steps = saved_steps = resumed_from
    state = batches.state_dict()
    validation_start = {} if validation is None else validation.state_dict()
    log = StepLog(config.log_folder, process, num_steps, hooks)
    meter = Meter(batches, process)
    sample_log = SampleLog(config.log_keys)
    loss = validation_loss = stopped_by = None
    empty_step = torch.zeros((), dtype=torch.int64, device=process.device)  # 0: there was none
    groups = optimizer_steps(batches, config, num_steps)
    with note_signals() as stop, closing(groups):
        for group in groups:
            meter.arrived(group)

            # The ranks need the weight of the whole step before its first backward pass. The same
            # message tells them whether one of them has received a signal, or a hook has failed.
            group_weight = sum(trained.model.weight_of(batch) for batch in group)
            total_weight, *flags = process.sum_over_ranks(
                group_weight, *stop.flags(), log.has_failed
            )
            if num_steps == resumed_from or num_steps % config.log_every == 0:
                stopped_by = _stop_reason(flags)
                if stopped_by is not None:
                    break
            # Read with the metrics, so that no step waits for the device because of it.
            is_first_empty = (empty_step == 0) & (total_weight == 0)
            empty_step = torch.where(is_first_empty, num_steps + 1, empty_step)
            sample_log.add(group, state.get("order"))

            seed_step(config.seed, num_steps, process.rank)
            lr = learning_rate(config, num_steps)
            rank_loss, grad_norm = train_step(trained, group, total_weight, lr, config, process)
            num_steps += 1
            state = batches.state_dict()
            meter.stepped()

            is_last = _is_done(config, state["epoch"], num_steps)
            saves = is_last or num_steps % config.checkpoint_every == 0
            if saves or num_steps % config.log_every == 0:
                line = meter.read(rank_loss, grad_norm, num_steps=num_steps, lr=lr)
                line |= sample_log.take()
                log.write(line)
                _check_labels(int(empty_step.item()))
                loss = _check_finite(line["loss"], num_steps)
            if saves:
                _save(checkpoints, trained, num_steps, state, process, stop, log)
                saved_steps = num_steps
            if saves and validation is not None:
                measured = validate(trained, validation, validation_start, config, process, stop)
                if measured is not None:
                    validation_loss = measured["loss"]
                    log.write_validation({"num_steps": num_steps, **measured})
            meter.start()

        all_received = stopped_by is not None and received_by_all(stop, process)
        if num_steps > saved_steps:  # a signal or a hook ended it between two checkpoints
            _save(checkpoints, trained, num_steps, state, process, stop, log)
        log.end()
    return TrainResult(
        num_steps, resumed_from, loss, state, validation_loss, stopped_by, all_received
    )


def prepare(config: TrainConfig, model: nn.Module, process: TrainProcess) -> Trained:
    """Move a model to the device, wrap it in DDP, and make its optimizer.

    Raises:
        ConfigError: the model cannot be trained with these settings.
    """
    if not getattr(model, "separable", True) and max(config.accumulate, config.micro_batches) > 1:
        raise ConfigError(
            "train: this model computes its loss over the whole global batch: set accumulate=1 and "
            "micro_batches=1; activation_checkpointing=True saves memory"
        )
    resolve_vector_math()
    model = model.to(process.device).train()
    if config.activation_checkpointing:
        checkpoint_activations(model)
    parallel = model
    if process.world_size > 1:
        # Inputs are on the device already, so DDP gets no device to move them to. The buffers of
        # the models are constants, so DDP need not send them at each forward pass. The name of that
        # setting depends on the version of torch.
        is_renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if is_renamed else "broadcast_buffers"
        settings: dict[str, Any] = {name: False}
        parallel = DistributedDataParallel(model, **settings)
    precision = config.precision or ("bf16" if process.device.type == "cuda" else "fp32")
    return Trained(model, parallel, make_optimizer(model), precision)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW over the parameters that need a gradient. `train_step` sets its learning rate.

    Weight decay applies to matrices and kernels, not to biases, norms and other vectors.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((matrices, WEIGHT_DECAY), (vectors, 0.0))
        if parameters
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98))


def learning_rate(config: TrainConfig, num_steps: int) -> float:
    """Return the learning rate of the step that follows `num_steps` others.

    It rises linearly over `warmup_steps` steps and stays. No state holds it: it depends on the
    number of steps alone, so a resumed run uses the same ones. For a decay, change this function.
    """
    return config.lr * min(1.0, (num_steps + 1) / max(1, config.warmup_steps))


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
        wait here.
    """
    pieces = [
        piece
        for batch in group
        for piece in micro_batches_of(batch, config.micro_batches, trained.model)
    ]
    factor = (process.world_size / total_weight.clamp(min=1)).float()
    rank_loss = torch.zeros((), device=process.device)
    trained.optimizer.zero_grad(set_to_none=True)
    for number, micro_batch in enumerate(pieces, start=1):
        is_last = number == len(pieces)
        waits = not is_last and trained.parallel is not trained.model  # gradients are not averaged
        with trained.parallel.no_sync() if waits else nullcontext():
            with _autocast(trained.precision, process.device):
                loss_sum, _ = trained.parallel(micro_batch)
            (loss_sum * factor).backward()
        rank_loss += loss_sum.detach() * factor / process.world_size

    param_groups = trained.optimizer.param_groups
    parameters = [parameter for param_group in param_groups for parameter in param_group["params"]]
    grad_norm = nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
    for param_group in param_groups:
        param_group["lr"] = lr
    trained.optimizer.step()
    return rank_loss, grad_norm


def micro_batches_of(batch: Batch, micro_batches: int, model: Any) -> list[Batch]:
    """Return the micro-batches of a batch, with the fields that a model reads.

    Ranks may have different numbers of them. A batch without padding is cut into pieces of 4,096
    tokens, or single rows, where attention takes time for all pairs of its tokens. The kernels of
    FlashAttention and flex attention leave out pairs of different documents.

    Keys and texts are left out: `torch.compile` would recompile the model for each new value.
    """
    fields = {
        name: value
        for name, value in batch.items()
        if isinstance(value, Tensor)
        or name in _LENGTHS
        or (isinstance(value, list) and all(isinstance(item, Tensor) for item in value))
    }
    if micro_batches > 1:
        return split_rows(fields, micro_batches)
    config = getattr(getattr(model, "vlm", None), "config", None)
    compares_all = getattr(config, "_attn_implementation", None) in ("sdpa", "eager")
    if is_flat(batch) and compares_all:
        return split_rows(fields, max_tokens=MAX_COMPARED_TOKENS)
    return [fields]


def validate(
    trained: Trained,
    batches: DeviceLoader,
    start: dict[str, Any],
    config: TrainConfig,
    process: TrainProcess,
    stop: StopRequest,
) -> dict[str, float] | None:
    """Run one pass over the validation data from the state `start`, so that all passes are alike.

    Returns:
        A dict, the same on every rank; None if a signal to any rank ended the pass.

        - loss: sum of loss_sum over sum of weight, over all valid rows of all ranks. A contrastive
          loss belongs to a whole batch: then it is the mean of the losses of the batches, weighted
          by their rows.
        - weight: those rows or tokens.
        - seconds: time that the pass took.

    Raises:
        MMStreamError: no row is valid and has a label, so there is no loss.
    """
    started = time.perf_counter()
    loss_sum = weight = torch.zeros((), dtype=torch.float64, device=process.device)
    batches.load_state_dict(start)
    trained.model.eval()
    try:
        for batch in batches:
            if process.sum_over_ranks(sum(stop.flags())).item():
                return None
            with torch.no_grad(), _autocast(trained.precision, process.device):
                for piece in micro_batches_of(batch, config.micro_batches, trained.model):
                    piece_loss, piece_weight = trained.model(piece)
                    loss_sum, weight = loss_sum + piece_loss, weight + piece_weight
    finally:
        trained.model.train()
    total_loss, total_weight = process.sum_over_ranks(loss_sum, weight).tolist()
    if not total_weight:
        raise MMStreamError(
            "validation: no row is valid and has a label; look at the labels of its texts, at "
            "max_length and at its bad samples"
        )
    seconds = time.perf_counter() - started
    return {"loss": total_loss / total_weight, "weight": total_weight, "seconds": seconds}


def optimizer_steps(
    batches: DeviceLoader, config: TrainConfig, num_steps: int
) -> Generator[list[Batch], None, None]:
    """Yield the batches of each optimizer step that follows `num_steps` others.

    The last group of an epoch may be smaller, so an epoch is a whole number of optimizer steps:
    5 loader steps with ``accumulate=2`` give groups of 2, 2 and 1. After the last step of the run
    no further batch is fetched.
    """
    while not _is_done(config, batches.state_dict()["epoch"], num_steps):
        group: list[Batch] = []
        for batch in batches:
            group.append(batch)
            is_end_of_epoch = batches.state_dict()["step"] == 0
            if len(group) < config.accumulate and not is_end_of_epoch:
                continue
            yield group
            group = []
            num_steps += 1
            if num_steps == config.max_steps:
                return


def seed_step(seed: int, num_steps: int, rank: int) -> None:
    """Seed torch for one step, so that random numbers (dropout) need no saved state to resume."""
    torch.manual_seed(((seed * 1_000_003 + num_steps) * 65_537 + rank) % 2**63)


def _is_done(config: TrainConfig, epoch: int, num_steps: int) -> bool:
    """Tell whether nothing is left to do, after `num_steps` optimizer steps and in `epoch`."""
    return epoch >= (config.num_epochs or math.inf) or num_steps >= (config.max_steps or math.inf)


def _open_checkpoints(config: TrainConfig, process: TrainProcess) -> Store:
    """Return the store of the checkpoints. Rank 0 finds out at once what cannot be written."""
    checkpoints = open_store(join_url(config.out, "checkpoints"))
    if process.rank == 0:
        if config.log_folder is None:
            logger.warning(
                "no metrics are written: --out is not a local folder; name one with --log-dir "
                "(log_dir=)"
            )
        require_writable(checkpoints)
    return checkpoints


def _save(
    checkpoints: Store,
    trained: Trained,
    num_steps: int,
    state: dict[str, Any],
    process: TrainProcess,
    stop: StopRequest,
    log: StepLog,
) -> None:
    """Save the run when the logs of all ranks have the step. A second signal waits for it."""
    process.wait_for_all()
    with stop.saving():
        save_training(checkpoints, trained, num_steps, state, process)
    log.saved(checkpoints.url_of(checkpoint_name(num_steps)))


def _stop_reason(flags: list[Tensor]) -> str | None:
    """Return the signal that any rank has received, or "hook" where a hook of one has failed.

    SIGINT wins over SIGTERM, which may follow it.
    """
    counts = dict(zip(("SIGTERM", "SIGINT", "hook"), flags, strict=True))
    return next((name for name in ("SIGINT", "SIGTERM", "hook") if counts[name].item() > 0), None)


def _check_labels(empty_step: int) -> None:
    """Raise if there was a step that trained nothing, on all ranks together. 0: there was none."""
    if empty_step:
        raise MMStreamError(
            f"step {empty_step} has nothing to train: no row of any rank is valid and has a label; "
            "look at the labels of its texts (mmstream replay names its samples), at max_length "
            "and at bad samples that are masked"
        )


def _check_finite(loss: float, num_steps: int) -> float:
    """Return the loss, or raise when it is not finite."""
    if not math.isfinite(loss):
        raise MMStreamError(
            f"the loss of step {num_steps} is {loss}; resume from the last checkpoint with a "
            "smaller lr, or a longer warm-up"
        )
    return loss


def _autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Return the autocast context of a forward pass; it does nothing for fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")
