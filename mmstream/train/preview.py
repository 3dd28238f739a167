"""The batch of one step of a run, without training: for people who look at it first.

``mmstream show --pack`` -> `step_batch` -> display
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from mmstream.state import state_at
from mmstream.train.config import TrainConfig
from mmstream.train.data import open_loader, open_train_data
from mmstream.train.models import build_model, decode_for, needs_model, open_model_tokenizer
from mmstream.types import Batch
from mmstream.world import World

__all__ = ["step_batch"]


def step_batch(
    config: TrainConfig,
    *,
    epoch: int,
    step: int,
    world: World,
    state: Mapping[str, Any] | None = None,
) -> tuple[Batch, Any]:
    """Return the batch that a run would train on, and the tokenizer of its texts.

    It is read and decoded in this process. No record of bad samples is written.

    Args:
        config: settings of the run.
        epoch: epoch of the batch.
        step: loader step in the epoch.
        world: the rank whose rows they are, and the number of ranks.
        state: a saved state of the run. None: the run has the default window and grid.

    Raises:
        ConfigError: the settings cannot work, or the epoch has no such step.
        StateError: `state` is of another dataset or of other settings.
    """
    tokenizer = open_model_tokenizer(config)
    model = build_model(config, tokenizer) if needs_model(config) else None
    decode = decode_for(config, tokenizer, model)
    config = replace(config, num_workers=0)
    data = open_train_data(config, config.url)
    with closing(open_loader(config, data, decode, world=world)) as loader:
        if state is not None:
            loader.load_state_dict(dict(state))
        loader.load_state_dict(state_at(loader.state_dict(), epoch, step))
        return next(iter(loader)), tokenizer
