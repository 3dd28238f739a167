"""The training loop. Start reading here: `run` sets a run up, `fit` trains, helpers follow.

    loader -> device -> train: `run` -> `fit` -> `step.train_step`

All ranks do the same optimizer steps. Each rank computes its own rows of the same global batches.
A checkpoint holds the weights, the optimizer and the state of the loader. That is all a later run
needs to continue exactly, even on another number of ranks or workers.

In your own trainer, three lines belong to mmstream: ``mm.to_device(loader, device)``, and
``state_dict`` and ``load_state_dict`` of what it returns.
"""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmstream.audit.training_log import SampleLog
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.mixture import Mixture
from mmstream.device.to_device import DeviceLoader, to_device
from mmstream.errors import BadSampleLimitError, ConfigError, MMStreamError, escaped
from mmstream.storage import Store, join_url, open_store
from mmstream.train.checkpoint import require_writable, resume_training, save_training
from mmstream.train.config import TrainConfig, TrainResult
from mmstream.train.data import cost_of, open_loader, open_train_data
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
from mmstream.train.meter import Meter
from mmstream.train.metrics import StepLog
from mmstream.train.models import (
    build_model,
    choose_attention,
    decode_for,
    hint_at_model,
    normalize_for,
    open_model_tokenizer,
)
from mmstream.train.run_length import length_of, optimizer_steps
from mmstream.train.schedule import learning_rate_of
from mmstream.train.step import Trained, prepare, seed_step, train_step
from mmstream.train.tracing import deterministic, traced
from mmstream.train.validation import Validation

__all__ = ["fit", "run"]

logger = logging.getLogger(__name__)


def run(config: TrainConfig) -> TrainResult:
    """Join the other ranks, build the model, open the data and train.

    `mmstream.train.train` is this function, and documents its result and its errors.
    """
    if config.log_folder is not None and Path(config.log_folder).is_file():
        raise ConfigError(f"train: {config.log_folder} is a file; name a folder with out=")
    with leave_on_sigterm(), process_group(config.device) as process, ExitStack() as open_loaders:
        process.agree(config.rank_settings)
        share_threads(config.num_workers)
        tokenizer = open_model_tokenizer(config)
        model = build_model(config, tokenizer, process.world_size)
        choose_attention(model, config.attn_implementation)
        decode = decode_for(config, tokenizer, model)
        normalize = normalize_for(config)

        def open_batches(data: Dataset | Mixture, **settings: Any) -> DeviceLoader:
            loader = open_loader(config, data, decode, cost=cost_of(model), **settings)
            open_loaders.enter_context(closing(loader))  # ends its workers
            return to_device(loader, process.device, normalize=normalize)

        validation = None
        if config.validation is not None:
            data = open_train_data(config, config.validation, is_validation=True)
            validation = Validation(
                open_batches(data, shuffle=False, drop_last=False, log="validation")
            )
        data = open_train_data(config, config.url)
        try:
            result = fit(config, model, open_batches(data), process, validation)
        except (ConfigError, BadSampleLimitError) as error:
            hint = hint_at_model(config, data)
            if not hint:
                raise
            raise type(error)(f"{error}{hint}") from error
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


def fit(
    config: TrainConfig,
    model: nn.Module,
    batches: DeviceLoader,
    process: TrainProcess,
    validation: Validation | None = None,
) -> TrainResult:
    """Train from the newest good checkpoint, or from the start, until `config` says to end.

    Args:
        config: settings. Its `url` is not used: `batches` is the data.
        model: an `nn.Module` with the methods of `mmstream.train.models.Trainable`. Its weights are
            the same on every rank.
        batches: this rank's rows, on its device.
        process: this rank.
        validation: runs every ``config.validate_every`` steps and after the last step.

    Returns:
        The result of the run. After SIGTERM or Ctrl-C too: the last optimizer step is saved then.

    Raises:
        ConfigError: this model cannot be trained with these settings.
        StateError: these settings cannot continue from the checkpoint in ``config.out``.
        MMStreamError: the loss is not finite, or a step has no row with a label on any rank. The
            checkpoints stay as they are.
    """
    with ExitStack() as stack:
        stack.enter_context(deterministic(config.deterministic))
        trained = prepare(config, model, process)
        checkpoints = _open_checkpoints(config, process)
        resumed_from = resume_training(checkpoints, trained, batches, process)
        num_steps = saved_steps = resumed_from
        length = length_of(config, len(batches))
        log = StepLog(
            config.log_folder,
            rank=process.rank,
            world_size=process.world_size,
            num_steps=num_steps,
            last_step=length.last_step if config.progress else None,
        )
        stack.enter_context(log)
        trace_step = stack.enter_context(traced(config.profile, config.log_folder, process.rank))
        stop = stack.enter_context(note_signals())
        groups = optimizer_steps(batches, length, config.accumulate, num_steps)
        stack.enter_context(closing(groups))
        state = batches.state_dict()
        meter = Meter(batches.stats, process, _source_names(state), config.pack)
        sample_log = SampleLog(config.log_keys)
        loss = validation_loss = stopped_by = None
        empty_step = torch.zeros((), dtype=torch.int64, device=process.device)

        for group in groups:
            meter.arrived(group)

            # The ranks need the weight of the whole step before its first backward pass. The same
            # message tells them whether one of them has received a signal.
            group_weight = sum(trained.model.weight_of(batch) for batch in group)
            total_weight, *flags = process.sum_over_ranks(group_weight, *stop.flags())
            if num_steps == resumed_from or num_steps % config.log_every == 0:
                stopped_by = _received_signal(flags)
                if stopped_by is not None:
                    break
            # Read with the metrics, so that no step waits for the device because of it. All ranks
            # have the same sum, so all of them stop.
            empty_step = torch.where(
                (empty_step == 0) & (total_weight == 0), num_steps + 1, empty_step
            )
            sample_log.add(group, state.get("order"))

            seed_step(config.seed, num_steps, process.rank)
            lr = learning_rate_of(config, num_steps, length.planned_steps)
            rank_loss, grad_norm = train_step(trained, group, total_weight, lr, config, process)
            num_steps += 1
            state = batches.state_dict()

            is_last = length.is_reached(state["epoch"], num_steps)
            saves = is_last or num_steps % config.checkpoint_every == 0
            validates = is_last or num_steps % config.validate_every == 0
            if saves or num_steps % config.log_every == 0:
                line = meter.read(rank_loss, grad_norm, num_steps=num_steps, lr=lr)
                log.write(line | sample_log.take())
                _check_labels(int(empty_step.item()))
                loss = _check_finite(line["loss"], trained, num_steps)
            else:
                meter.stepped()
            trace_step()
            if saves:
                _save(checkpoints, trained, num_steps, state, config, process, stop)
                saved_steps = num_steps
            if validation is not None and validates:
                outcome = validation.run(trained, process, stop, config)
                if outcome is not None:
                    validation_loss = outcome["loss"]
                    log.write_validation({"num_steps": num_steps, **outcome})
            meter.start(paused=saves or validates)

        all_received = stopped_by is not None and received_by_all(stop, process)
        if num_steps > saved_steps:  # a signal ended the run between two checkpoints
            _save(checkpoints, trained, num_steps, state, config, process, stop)
        summary = meter.summary() if num_steps > resumed_from else None
    if process.rank == 0:
        _log_summary(summary)
    return TrainResult(
        num_steps,
        resumed_from,
        loss,
        state,
        validation_loss,
        stopped_by,
        all_received_signal=all_received,
        summary=summary,
    )


def _open_checkpoints(config: TrainConfig, process: TrainProcess) -> Store:
    """Return the store of the checkpoints. Rank 0 finds out at once what cannot be written."""
    checkpoints = open_store(join_url(config.out, "checkpoints"))
    if process.rank == 0:
        if config.log_folder is None:
            logger.warning(
                "no metrics are written: --out is no local folder; name one with --log-dir "
                "(log_dir=)"
            )
        require_writable(checkpoints)
    return checkpoints


def _save(
    checkpoints: Store,
    trained: Trained,
    num_steps: int,
    state: dict[str, Any],
    config: TrainConfig,
    process: TrainProcess,
    stop: StopRequest,
) -> None:
    """Save the run when the logs of all ranks have the step. A second signal waits for it."""
    process.wait_for_all()
    with stop.saving():
        save_training(checkpoints, trained, num_steps, state, config, process)


def _log_summary(summary: str | None) -> None:
    """Log each line of a summary as a line of its own: the command line escapes line breaks."""
    for number, line in enumerate((summary or "").splitlines()):
        logger.info("%s%s", "  " if number else "", line)


def _source_names(state: dict[str, Any]) -> list[str]:
    """Return the names of a mixture's sources from the loader's state; empty for one dataset."""
    return [source["name"] for source in state.get("order", {}).get("sources", ())]


def _received_signal(flags: list[Tensor]) -> str | None:
    """Return the signal that any rank has received. SIGINT wins, as SIGTERM may follow it."""
    terminated, interrupted = (flag.item() > 0 for flag in flags)
    if interrupted:
        return "SIGINT"
    return "SIGTERM" if terminated else None


def _check_labels(empty_step: int) -> None:
    """Raise if there was a step that trained nothing, on all ranks together. 0: there was none."""
    if empty_step:
        raise MMStreamError(
            f"step {empty_step} has nothing to train: no row of any rank is valid and has a label; "
            "look at the labels of its texts (mmstream replay names its samples), at max_length "
            "and at bad samples that are masked"
        )


def _check_finite(loss: float, trained: Trained, num_steps: int) -> float:
    """Return the loss, or raise when it is not finite.

    fp16 may overflow: its step was then not applied, and the loss scale is halved. A scale below 1
    means that steps still overflow after more than 16 halvings.
    """
    if math.isfinite(loss):
        return loss
    if trained.precision == "fp16" and trained.scaler.get_scale() >= 1:
        logger.warning("the loss of step %d is %s in fp16; the step was left out", num_steps, loss)
        return loss
    raise MMStreamError(
        f"the loss of step {num_steps} is {loss}; resume from the last checkpoint with a "
        "smaller lr or max_grad_norm, or a longer warm-up"
    )
