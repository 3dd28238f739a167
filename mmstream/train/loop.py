"""The training loop: read it from `run` down; the optimizer step itself is `step.train_step`.

Every rank does the same steps on its rows of the same global batches. What is saved after an
optimizer step (weights, optimizer, the loader's state) is all that a run on another number of
ranks or workers needs to go on as if nothing had happened.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmstream.audit.training_log import SampleLog
from mmstream.bad_samples.policy import BadSamplePolicy
from mmstream.dataset.mixture_file import open_data
from mmstream.dataset.open import open_dataset
from mmstream.device.to_device import DeviceLoader, to_device
from mmstream.errors import BadSampleLimitError, ConfigError, MMStreamError
from mmstream.loader.loader import Loader
from mmstream.pipeline import Pipeline
from mmstream.storage import join_url, open_store
from mmstream.train.checkpoint import resume_training, save_training
from mmstream.train.config import Precision, TrainConfig, TrainResult
from mmstream.train.distributed import (
    TrainProcess,
    leave_on_sigterm,
    note_signals,
    process_group,
    share_threads,
)
from mmstream.train.meter import Meter
from mmstream.train.metrics import StepLog
from mmstream.train.models import (
    build_model,
    decode_for,
    hint_at_model,
    normalize_for,
    open_model_tokenizer,
)
from mmstream.train.schedule import learning_rate_of
from mmstream.train.step import prepare, seed_step, train_step
from mmstream.train.tracing import deterministic, traced
from mmstream.train.validation import Validation
from mmstream.types import Batch

__all__ = ["fit", "run"]

logger = logging.getLogger(__name__)


def run(config: TrainConfig) -> TrainResult:
    """Open the data, join the other ranks and train: what `mmstream.train.train` calls."""
    if config.log_folder is not None and Path(config.log_folder).is_file():
        raise ConfigError(f"train: {config.log_folder} is a file, and out= a folder")
    with leave_on_sigterm(), process_group(config.device) as process, ExitStack() as loaders:
        share_threads(config.num_workers)
        tokenizer = open_model_tokenizer(config)
        model = build_model(config, tokenizer, process.world_size)
        decode, normalize = decode_for(config, tokenizer, model), normalize_for(config)

        def open_batches(url: str, **settings: Any) -> DeviceLoader:
            loader = _open_loader(config, url, decode, **settings)
            loaders.enter_context(closing(loader))  # ends its workers
            return to_device(loader, process.device, normalize=normalize)

        validation = None
        if config.validation is not None:
            validation = Validation(
                open_batches(config.validation, shuffle=False, drop_last=False, log="validation")
            )
        try:
            result = fit(config, model, open_batches(config.url), process, validation)
        except (ConfigError, BadSampleLimitError) as error:
            hint = hint_at_model(config, open_data(config.url))
            if not hint:
                raise
            raise type(error)(f"{error}{hint}") from error
    if result.stopped_by == "SIGINT":
        raise KeyboardInterrupt
    return result


def _open_loader(config: TrainConfig, url: str, decode: Any, *, log: str = "", **order: Any) -> Any:
    folder = config.log_folder
    pipeline = Pipeline(
        open_dataset(url) if log else open_data(url),
        global_batch_size=config.global_batch_size,
        seed=config.seed,
        decode=decode,
        bad_samples=BadSamplePolicy(
            action="mask" if log and config.bad_samples == "substitute" else config.bad_samples,
            max_fraction=config.max_bad_fraction,
            shards=config.substitute_bad_shards,
            quarantine=None if folder is None else str(Path(folder, log)),
        ),
        **order,
    )
    return Loader(
        pipeline,
        num_workers=config.num_workers,
        rows_per_rank=config.rows_per_rank or "balanced",
        on_change=config.on_change,
    )


def fit(
    config: TrainConfig,
    model: nn.Module,
    batches: DeviceLoader,
    process: TrainProcess,
    validation: Validation | None = None,
) -> TrainResult:
    """Train from the newest good checkpoint, or from the start, to the end of `config`.

    Args:
        config: settings; its `url` is not looked at.
        model: as `mmstream.train.models.Trainable`, the same on every rank.
        batches: this rank's rows, on its device.
        process: this process among the ranks.
        validation: what to do every ``config.validate_every`` steps.

    Returns:
        What was done, also when SIGTERM or Ctrl-C ended it: saved as of the last optimizer step.

    Raises:
        ConfigError: this model cannot be trained with these settings.
        StateError: a checkpoint is there that these settings cannot go on from.
        MMStreamError: the loss is not finite; the checkpoints stay as they are.
    """
    with ExitStack() as around:
        around.enter_context(deterministic(config.deterministic))
        trained = prepare(config, model, process)
        store = open_store(join_url(config.out, "checkpoints"))
        num_steps = resumed_from = resume_training(store, trained, batches, process)
        planned = config.epochs * math.ceil(len(batches) / config.accumulate)
        log = StepLog(
            config.log_folder,
            rank=process.rank,
            world_size=process.world_size,
            num_steps=num_steps,
            last_step=(config.max_steps or planned) if config.progress else None,
        )
        around.enter_context(log)
        trace = around.enter_context(traced(config.profile, config.log_folder, process.rank))
        stop = around.enter_context(note_signals())
        groups = around.enter_context(closing(_groups(batches, config, num_steps)))
        state, saved = batches.state_dict(), num_steps
        meter, samples = Meter(batches.stats, process, _sources(state)), SampleLog(config.log_keys)
        loss = validation_loss = stopped_by = None
        for group in groups:
            meter.arrived(group)
            total, *flags = process.sum_over_ranks(
                sum(trained.model.weight_of(b) for b in group), *stop.flags()
            )
            if num_steps == resumed_from or num_steps % config.log_every == 0:
                stopped_by = _signal_of(flags)
                if stopped_by is not None:
                    break
            samples.add(group, state.get("order"))
            seed_step(config.seed, num_steps, process.rank)
            lr = learning_rate_of(config, num_steps, planned)
            part, norm = train_step(trained, group, total, lr, config, process)
            num_steps, state = num_steps + 1, batches.state_dict()
            last = state["epoch"] >= config.epochs or num_steps == config.max_steps
            saves = last or num_steps % config.checkpoint_every == 0
            if saves or num_steps % config.log_every == 0:
                line = meter.read(part, norm, num_steps=num_steps, lr=lr)
                log.write(line | samples.take())
                loss = _finite(line["loss"], trained.precision, num_steps)
            else:
                meter.stepped()
            trace()
            if saves:
                save_training(store, trained, num_steps, state, config, process)
                saved = num_steps
            validates = last or num_steps % config.validate_every == 0
            if validation is not None and validates:
                found = validation.run(trained, process, stop, config.micro_batches)
                if found is not None:
                    validation_loss = found["loss"]
                    log.write_validation({"num_steps": num_steps, **found})
            meter.start(paused=saves or validates)
        if num_steps > saved:
            save_training(store, trained, num_steps, state, config, process)
        summary = meter.summary() if num_steps > resumed_from else None
    if process.rank == 0 and summary is not None:
        logger.info("%s", summary)
    return TrainResult(num_steps, resumed_from, loss, state, validation_loss, stopped_by, summary)


def _groups(
    batches: DeviceLoader, config: TrainConfig, num_steps: int
) -> Generator[list[Batch], None, None]:
    """Yield the batches of each step that is left; those after the last are not even asked for.

    A group ends with its epoch, so that an epoch is a whole number of steps.
    """
    limit = math.inf if config.max_steps is None else config.max_steps
    while batches.state_dict()["epoch"] < config.epochs and num_steps < limit:
        group: list[Batch] = []
        for batch in batches:
            group.append(batch)
            epoch_is_done = batches.state_dict()["step"] == 0
            if len(group) < config.accumulate and not epoch_is_done:
                continue
            yield group
            group, num_steps = [], num_steps + 1
            if num_steps == limit:
                return


def _sources(state: dict[str, Any]) -> list[str]:
    """Return the names of a mixture's sources, from the loader's state; of one dataset, none."""
    return [source["name"] for source in state.get("order", {}).get("sources", ())]


def _signal_of(flags: list[Tensor]) -> str | None:
    """Return the signal that some rank has noted; Ctrl-C before SIGTERM, which may follow it."""
    terminated, interrupted = (flag.item() > 0 for flag in flags)
    return "SIGINT" if interrupted else "SIGTERM" if terminated else None


def _finite(loss: float, precision: Precision, num_steps: int) -> float:
    """Return the loss; what fp16 overflows is not applied, everything else would spoil the run."""
    if not math.isfinite(loss) and precision != "fp16":
        raise MMStreamError(
            f"the loss of step {num_steps} is {loss}; go on from the last checkpoint with a "
            "smaller lr or max_grad_norm, or a longer warm-up"
        )
    return loss
