"""The first flat batch of a model: whether it keeps documents apart, asked once and cheaply.

    inputs.model_inputs -> `check_once`

Three documents of a few tokens are run, six times. That is cheap for a model of any size, and
says what its family, its version and its attention do.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from mmstream.batching.batching import Flat
from mmstream.batching.flat import flatten
from mmstream.integrations.arguments import model_arguments
from mmstream.integrations.check_packing import check_packing, special_ids
from mmstream.types import Batch

logger = logging.getLogger(__name__)

LENGTHS_OF_PROBE = (5, 1, 7)

_checked: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The attention with which a model was checked. It holds no model."""


def check_once(model: Any, config: Any, device: torch.device) -> None:
    """Check with a few tokens that a model keeps documents apart, if it was not checked before.

    A model with parameters that are sharded or elsewhere is not run: a forward pass outside the
    training step waits for other ranks. The log says so.

    Args:
        model: The model, without what wraps it.
        config: Its config.
        device: Where the batch is.

    Raises:
        ConfigError: It does not keep them apart.
    """
    attention = str(getattr(config.get_text_config(), "_attn_implementation", None))
    if _checked.get(model) == attention:
        return
    reason = _why_not(model, device)
    if reason:
        _checked[model] = attention
        logger.warning(
            "model_inputs: %s: not checked whether it keeps documents apart, as %s; call "
            "mm.check_packing(model, batch) before you wrap the model",
            config.model_type,
            reason,
        )
        return
    # flex attention is not compiled for these few tokens, which would take half a minute.
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        check_packing(
            model,
            _probe(config, device),
            lambda batch: model_arguments(batch, model, blank_image=False),
        )
    _checked[model] = attention


def _probe(config: Any, device: torch.device) -> Batch:
    """Return a flat batch of three short documents without media."""
    special = special_ids(config)
    vocabulary = int(config.get_text_config().vocab_size)
    ids = [number for number in range(min(vocabulary, 1000)) if number not in special]
    samples = []
    start = 0
    for length in LENGTHS_OF_PROBE:
        own = [ids[(start + i) % len(ids)] for i in range(length)]
        samples.append({"input_ids": np.array(own)})
        start += length
    batch = flatten(samples, range(len(samples)), len(samples), Flat())
    batch["__valid__"] = torch.ones(len(samples), dtype=torch.bool)
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def _why_not(model: Any, device: torch.device) -> str:
    """Return why a model cannot be run outside the training step; empty: it can."""
    if torch.compiler.is_compiling():
        return "it is being compiled"
    for weight in model.parameters():
        is_sharded = (
            hasattr(weight, "placements")  # of FSDP2 and tensor parallelism
            or hasattr(weight, "ds_id")  # of DeepSpeed
            or type(weight).__name__ == "FlatParameter"
        )
        if is_sharded:
            return "its parameters are sharded"
        if weight.device != device:
            return "its parameters are not all on the device of the batch"
    return ""
