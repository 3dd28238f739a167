"""Whether a model keeps the documents of a flat batch apart.

    batch -> `check_packing`: logits of documents while others have other content

A model that does not know where a document begins trains without an error, and on other text than
the user thinks. So this is measured, with the model that is trained and its attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor

from mmstream.decoding.threaded_calls import resolve_vector_math
from mmstream.errors import ConfigError
from mmstream.families.qwen_vl import needs_mrope
from mmstream.families.registry import model_and_config
from mmstream.train.arguments import (
    Request,
    attention_of,
    has_state_layers,
    is_packed,
    model_arguments,
)
from mmstream.types import Batch

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""The largest changes of a document's logits that rounding explains, by dtype, in parts of their
root mean square. What a document sees of another one is 3e-3 to 1 in models without training."""


@dataclass(frozen=True)
class PackingCheck:
    """What `check_packing` has measured."""

    num_documents: int
    """How many documents were compared."""
    leak: float
    """The largest change of a document when others change, their text and their media. It is in
    parts of the root mean square of its logits; 0 means equal."""


def check_packing(
    model: Any,
    batch: Batch,
    prepare: Callable[[Batch], dict[str, Any]] | None = None,
    *,
    normalize: Any = None,
) -> PackingCheck:
    """Check that no document of a flat batch sees another one.

    Every second document gets another text, and other pictures, videos and recordings: the logits
    of the others must stay. Then the same the other way round.

    The model is run without gradients and in evaluation mode, with its own attention. It is not
    changed, nor are the random states. Take a small batch: memory for two copies of its logits is
    needed, and time for 3 forward passes. With sharded parameters, each rank must call it, as a
    forward pass waits for all of them.

    Args:
        model: A causal model of transformers.
        batch: A flat batch of a loader, or of `mm.to_device`, on the model's device.
        prepare: From a batch to the arguments of the model. None: what `model_inputs` returns. Give
            what your trainer uses, such as a collator of your own.
        normalize: As `model_inputs` takes it.

    Raises:
        ConfigError: Documents see each other. The message names the first one, and the argument
            that is wrong. Or it says that the model itself does not keep them apart. Or the batch
            is not flat.

    Examples:
        >>> from mmstream.train.check_packing import check_packing
        >>> from mmstream.train.tokenizer import byte_tokenizer
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> tokenizer = byte_tokenizer()
        >>> pipeline = mm.Pipeline(
        ...     mm.open_dataset("shards/"),
        ...     global_batch_size=8,
        ...     decode=mm.Decode(text=mm.TextDecoder(tokenizer)),
        ...     batching=mm.Flat(),
        ... )
        >>> config = LlamaConfig(
        ...     vocab_size=len(tokenizer),
        ...     hidden_size=32,
        ...     intermediate_size=64,
        ...     num_hidden_layers=2,
        ...     num_attention_heads=2,
        ... )
        >>> batch = next(iter(mm.Loader(pipeline)))
        >>> check_packing(LlamaForCausalLM(config), batch).leak
        0.0
    """
    inner, config = model_and_config(model)
    if inner is None:
        raise ConfigError("check_packing: give the model itself, as it is run")
    if not is_packed(batch):
        raise ConfigError(
            "check_packing: the batch has no cu_seq_lens_q; make it with Pipeline(batching=)"
        )
    prepare = prepare or partial(model_arguments, model_or_family=inner, request=Request(normalize))
    resolve_vector_math()
    inputs, leak = prepare(batch), 0.0
    documents = batch["document_ids"]
    if len(documents.unique()) < 2:
        raise ConfigError(
            "check_packing: the batch has one document, so nothing can leak: give a batch of two "
            "or more"
        )
    with _evaluating(inner):
        logits = _logits(inner, config, inputs, documents)
        for parity in (0, 1):
            changed_batch = with_other_content(batch, parity, special_ids(config))
            changed = _logits(inner, config, prepare(changed_batch), documents)
            for number in documents[documents % 2 != parity].unique().tolist():
                is_document = documents == number
                change = _distance(logits[is_document], changed[is_document])
                if not change <= _tolerance(inner, logits):
                    raise ConfigError(
                        f"check_packing: document {number} changes with the content of others, by "
                        f"{change:.1g} of its logits: {_cause(prepare(batch), batch, config)}"
                    )
                leak = max(leak, change)
    return PackingCheck(len(documents.unique()), leak)


def _logits(model: Any, config: Any, inputs: dict[str, Any], documents: Tensor) -> Tensor:
    """Return the logits of the tokens of a batch, [B, T, V]."""
    try:
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
    except ValueError as error:  # transformers itself refuses what its layers cannot keep apart
        raise ConfigError(
            f"check_packing: {config.model_type} does not run on this batch: {error}"
        ) from error
    logits: Tensor = outputs.logits[:, : documents.shape[1]]  # without a blank medium
    return logits


def _distance(values: Tensor, others: Tensor) -> float:
    """Return the root mean square of a difference, in parts of that of the values."""
    scale = values.float().square().mean().sqrt()
    distance = (values.float() - others.float()).square().mean().sqrt()
    return float(distance / scale.clamp(min=1e-30))


def _tolerance(model: Any, logits: Tensor) -> float:
    dtypes = {logits.dtype, getattr(model, "dtype", torch.float32)}
    if torch.is_autocast_enabled(logits.device.type):
        dtypes.add(torch.get_autocast_dtype(logits.device.type))
    return max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)


def _cause(inputs: dict[str, Any], batch: Batch, config: Any) -> str:
    """Return what is wrong with the arguments of a model, or that the model itself is."""
    positions: Any = inputs.get("position_ids")
    has_positions = positions is not None
    text_positions = positions[0] if has_positions and positions.ndim == 3 else positions
    boundaries = batch["cu_seq_lens_q"].long()
    starts = boundaries[:-1][boundaries.diff() > 0]
    faults = {
        "attention_mask is given, and with one models do not look for documents": (
            inputs.get("attention_mask") is not None
        ),
        "use_cache is not False, and with a cache models do not look for documents": (
            inputs.get("use_cache") is not False
        ),
        "position_ids are missing": not has_positions,
        f"position_ids of {config.model_type} need four rows: text, time, height and width": (
            has_positions and needs_mrope(config) and (positions.ndim == 2 or len(positions) != 4)
        ),
        "position_ids do not begin at 0 in each document": (
            has_positions
            and text_positions.shape == batch["input_ids"].shape
            and bool(text_positions.flatten()[starts].any())
        ),
        "seq_idx is missing": has_state_layers(config) and inputs.get("seq_idx") is None,
    }
    if any(faults.values()):
        return "; ".join(fault for fault, is_present in faults.items() if is_present)
    return (
        f"{config.model_type} with {attention_of(config)} attention does not keep documents apart "
        "by these arguments: leave batching= out, so that each row is one document"
    )


def special_ids(config: Any) -> set[int]:
    """Return the ids of tokens that a config names, such as ``image_token_id``."""
    ids: set[int] = set()
    for owner in (config, config.get_text_config()):
        for name, value in vars(owner).items():
            if name.endswith(("_token_id", "_token_index")):
                values = value if isinstance(value, list | tuple) else [value]
                ids |= {number for number in values if isinstance(number, int)}
    return ids


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Run a model without gradients and dropout. It stays as it was, and so do random states."""
    training = [module for module in model.modules() if module.training]
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


def with_other_content(batch: Batch, parity: int, special: set[int]) -> Batch:
    """Return a flat batch with other tokens, pixels and sounds in every second document.

    Args:
        batch: A flat batch.
        parity: 0 changes the documents 0, 2, 4 and so on, 1 the others.
        special: Ids of tokens that stand for media or have another meaning to the model. They stay.
    """
    ids: Tensor = batch["input_ids"]
    first, second = islice((number for number in count() if number not in special), 2)
    is_text = ~torch.isin(ids, torch.tensor(sorted(special), dtype=ids.dtype, device=ids.device))
    is_changed = is_text & (batch["document_ids"] % 2 == parity)
    replacement = torch.where(ids == first, second, first)
    changed = {**batch, "input_ids": torch.where(is_changed, replacement, ids)}
    for companion, documents in batch.items():  # such as image_document: of each picture
        name = companion.removesuffix("_document")
        if name == companion or not isinstance(documents, Tensor):
            continue
        for field in (name, f"{name}_features"):
            values, flags = batch.get(field), documents % 2 == parity
            if isinstance(values, Tensor) and f"{name}_frames" in batch:
                flags = flags.repeat_interleave(batch[f"{name}_frames"])
            if values is not None and len(flags):
                media = [
                    _inverted(medium) if flag else medium
                    for medium, flag in zip(values, flags.tolist(), strict=True)
                ]
                changed[field] = torch.stack(media) if isinstance(values, Tensor) else media
    return changed


def _inverted(values: Tensor) -> Tensor:
    return 255 - values if values.dtype == torch.uint8 else 0.5 - values
