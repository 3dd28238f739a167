"""Whether a model keeps the documents of a flat batch apart.

    batch -> `check_packing`: packed against alone, and with other content in the neighbours

A model that does not know where a document begins trains without an error, and on other text than
the user thinks. So this is measured, with the model that is trained and its attention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from mmstream._vector_math import resolve_vector_math
from mmstream.errors import ConfigError
from mmstream.families.qwen_vl import needs_mrope
from mmstream.families.registry import model_and_config
from mmstream.train.arguments import Request, model_arguments
from mmstream.train.packed_text import LENGTHS, has_state_layers, is_flash, is_packed
from mmstream.types import Batch

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""The largest differences of a document's logits that rounding explains, by dtype, in parts of
their root mean square. What a document sees of another one is 3e-3 to 1 in models without
training."""


@dataclass(frozen=True)
class PackingCheck:
    """What `check_packing` has measured, in parts of the root mean square of a document's logits.

    Zero means equal.
    """

    num_documents: int
    """How many documents were compared."""
    difference: float
    """The largest difference between a document in the batch and alone."""
    leak: float
    """The largest change of a document when others change, their text or their media."""


def check_packing(
    model: Any,
    batch: Batch,
    prepare: Callable[[Batch], dict[str, Any]] | None = None,
    *,
    normalize: Any = None,
) -> PackingCheck:
    """Check that a model treats each document of a flat batch as if it stood alone.

    Each document is run alone, and its logits are compared with those in the batch. Then the text
    of every second document is changed, and that of the others, and so are their pictures, videos
    and recordings: no other document may change.

    The model is run without gradients and in evaluation mode, with its own attention. It is not
    changed, nor are the random states. Take a small batch: memory for two copies of its logits is
    needed, and time for 4 to 6 forward passes. With sharded parameters, each rank must call it, as
    a forward pass waits for all of them.

    Args:
        model: A causal model of transformers.
        batch: A flat batch of a loader, or of `mm.to_device`, on the model's device.
        prepare: From a batch to the arguments of the model. None: what `model_inputs` returns. Give
            what your trainer uses, such as a collator of your own.
        normalize: As `model_inputs` takes it.

    Raises:
        ConfigError: Documents differ, or see each other. The message names the first one, and the
            field that is wrong. Or it says that the model itself does not keep them apart. Or the
            batch is not flat.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from mmstream.train.tokenizer import byte_tokenizer
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
        >>> mm.check_packing(LlamaForCausalLM(config), batch).leak
        0.0
    """
    inner, config = model_and_config(model)
    if inner is None:
        raise ConfigError("check_packing: give the model itself, as it is run")
    if not is_packed(batch):
        raise ConfigError(
            "check_packing: the batch has no cu_seq_lens_q; make it with Pipeline(batching=)"
        )
    if prepare is None:

        def prepare(given: Batch) -> dict[str, Any]:
            return model_arguments(given, inner, Request(normalize))

    resolve_vector_math()
    run = _Runs(inner, config, batch, prepare)
    with _evaluating(inner):
        packed = run.packed(batch)
        difference = run.largest_difference(packed)
        leak = run.largest_leak(packed)
    return PackingCheck(len(run.documents), difference, leak)


class _Runs:
    """Runs of a model on a batch, and what they say about its documents."""

    def __init__(
        self,
        model: Any,
        config: Any,
        batch: Batch,
        prepare: Callable[[Batch], dict[str, Any]],
    ) -> None:
        self.model = model
        self.config = config
        self.batch = batch
        self.prepare = prepare
        self.borders = document_borders(batch)
        self.documents = [n for n, (start, stop) in enumerate(self.borders) if stop > start]

    def packed(self, batch: Batch) -> list[Tensor]:
        """Return the logits of each document, [L, V], in a batch."""
        width = batch["input_ids"].shape[1]
        logits = self._logits(self.prepare(batch))[:, :width]  # a blank medium stands behind
        flat = logits.reshape(-1, logits.shape[-1])
        return [flat[start:stop] for start, stop in self.borders]

    def alone(self, number: int) -> Tensor:
        """Return the logits of a document alone. The model itself counts its positions."""
        inputs = dict(self.prepare(one_document(self.batch, number)))
        start, stop = self.borders[number]
        for name in ("position_ids", "seq_idx", *LENGTHS):
            inputs.pop(name, None)
        return self._logits(inputs)[0, : stop - start]  # a blank medium stands behind

    def largest_difference(self, packed: list[Tensor]) -> float:
        """Return the largest difference between a document in the batch and alone."""
        largest = 0.0
        for number in self.documents:
            difference = _distance(packed[number], self.alone(number))
            if not difference <= self._tolerance(packed):
                raise ConfigError(
                    f"check_packing: document {number} differs from itself alone, by "
                    f"{difference:.1g} of its logits: {self._reason()}"
                )
            largest = max(largest, difference)
        return largest

    def largest_leak(self, packed: list[Tensor]) -> float:
        """Return the largest change of a document while others have another content."""
        special = special_ids(self.config)
        largest = 0.0
        for kind in ("texts", "media") if has_media(self.batch) else ("texts",):
            for first in range(2):
                chosen = self.documents[first::2]
                if kind == "texts":
                    batch = with_other_texts(self.batch, chosen, special)
                else:
                    batch = with_other_media(self.batch, chosen)
                changed = self.packed(batch)
                for number in self.documents[1 - first :: 2]:
                    leak = _distance(packed[number], changed[number])
                    if not leak <= self._tolerance(packed):
                        raise ConfigError(
                            f"check_packing: document {number} changes with the {kind} of others, "
                            f"by {leak:.1g} of its logits: {self._reason()}"
                        )
                    largest = max(largest, leak)
        return largest

    def _logits(self, inputs: dict[str, Any]) -> Tensor:
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        try:
            logits: Tensor = self.model(**inputs).logits
        except ValueError as error:  # transformers itself refuses what its layers cannot keep apart
            raise ConfigError(
                f"check_packing: {self.config.model_type} does not run on this batch: {error}"
            ) from error
        return logits

    def _tolerance(self, packed: list[Tensor]) -> float:
        dtypes = {packed[0].dtype, getattr(self.model, "dtype", torch.float32)}
        device = packed[0].device.type
        if torch.is_autocast_enabled(device):
            dtypes.add(torch.get_autocast_dtype(device))
        return max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)

    def _reason(self) -> str:
        faults = list(_faults(self.prepare(self.batch), self.batch, self.config))
        if faults:
            return "; ".join(faults)
        attention = getattr(self.config.get_text_config(), "_attn_implementation", None)
        states = " Its layers with a state need kernels that take cu_seq_lens_q and seq_idx, "
        states += "such as those of causal-conv1d and flash-linear-attention on CUDA."
        return (
            f"its fields are right, and {self.config.model_type} with {attention} attention does "
            "not keep documents apart: leave batching= out, so that each row is one document."
            + (states if has_state_layers(self.config) else "")
        )


def _faults(inputs: dict[str, Any], batch: Batch, config: Any) -> Iterator[str]:
    """Yield what is wrong with the arguments of a model, the likeliest first."""
    if inputs.get("attention_mask") is not None:
        yield "attention_mask is given, and with one models do not look for documents"
    if inputs.get("use_cache") is not False:
        yield "use_cache is not False, and with a cache models do not look for documents"
    yield from _faults_of_positions(inputs, batch, config)
    given = [name for name in LENGTHS if inputs.get(name) is not None]
    missing = [name for name in LENGTHS if name not in given]
    wanted = is_flash(config) or has_state_layers(config)
    if missing and (given or wanted):
        yield f"{missing[0]} is missing: the lengths of documents are all four, or none"
    for name in given:
        yield from _faults_of_lengths(name, inputs[name], inputs, batch)
    if has_state_layers(config) and inputs.get("seq_idx") is None:
        yield "seq_idx is missing"


def _faults_of_positions(inputs: dict[str, Any], batch: Batch, config: Any) -> Iterator[str]:
    positions = inputs.get("position_ids")
    if positions is None:
        yield "position_ids are missing"
        return
    if needs_mrope(config) and (positions.ndim == 2 or len(positions) != 4):
        rows = 1 if positions.ndim == 2 else len(positions)
        yield (
            f"position_ids have {rows} {'row' if rows == 1 else 'rows'}; {config.model_type} needs "
            "four: text, time, height and width"
        )
        positions = positions[None] if positions.ndim == 2 else positions
    text = positions[0] if positions.ndim == 3 else positions
    if text.shape != inputs["input_ids"].shape:
        yield f"position_ids are {list(text.shape)}, input_ids {list(inputs['input_ids'].shape)}"
        return
    flat = text[:, : batch["input_ids"].shape[1]].flatten().tolist()
    for number, (start, stop) in enumerate(document_borders(batch)):
        if flat[start:stop] != list(range(stop - start)):
            yield f"position_ids of document {number} do not count its tokens from 0"
            return


def _faults_of_lengths(
    name: str, value: Any, inputs: dict[str, Any], batch: Batch
) -> Iterator[str]:
    if name.startswith("max_length"):
        longest = max(stop - start for start, stop in document_borders(batch))
        if not isinstance(value, int) or value < longest:
            yield f"{name} is {value!r}, and the longest document has {longest} tokens"
        return
    if value.dtype != torch.int32:
        yield f"{name} is {value.dtype}, not torch.int32"
    num_tokens = inputs["input_ids"].numel()
    borders = value.tolist()
    if borders[0] != 0 or borders[-1] != num_tokens or borders != sorted(borders):
        yield f"{name} does not rise from 0 to the {num_tokens} tokens of the batch"
    elif num_tokens == batch["input_ids"].numel() and borders != batch[name].tolist():
        yield f"{name} has other borders than the documents of the batch"


def _distance(values: Tensor, others: Tensor) -> float:
    """Return the root mean square of a difference, in parts of that of the values."""
    scale = values.float().square().mean().sqrt()
    distance = (values.float() - others.float()).square().mean().sqrt()
    return float(distance / scale.clamp(min=1e-30))


def special_ids(config: Any) -> set[int]:
    """Return the ids of tokens that a config names, such as ``image_token_id``."""
    ids: set[int] = set()
    for owner in (config, config.get_text_config()):
        for name, value in vars(owner).items():
            if name.endswith(("_token_id", "_token_index")):
                ids |= {number for number in _listed(value) if isinstance(number, int)}
    return ids


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


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


# -- a flat batch with one of its documents, or with other content in some of them ----------------

_TOKEN_FIELDS = ("input_ids", "labels", "label_weights", "document_ids", "position_ids")


def document_borders(batch: Batch) -> list[tuple[int, int]]:
    """Return where each document begins and ends, in tokens of all rows one behind the other."""
    borders = batch["cu_seq_lens_q"].tolist()
    return list(pairwise(borders))


def has_media(batch: Batch) -> bool:
    """Tell whether a batch has pictures, videos or recordings."""
    return any(len(batch[companion]) for companion in _companions(batch))


def one_document(batch: Batch, number: int) -> Batch:
    """Return a flat batch of one document.

    Args:
        batch: A flat batch.
        number: Of the document, those of padding counted.
    """
    start, stop = document_borders(batch)[number]
    length = stop - start
    alone: dict[str, Any] = {
        name: _tokens(batch[name], start, stop) for name in _TOKEN_FIELDS if name in batch
    }
    borders = batch["cu_seq_lens_q"].new_tensor([0, length])
    longest = 1 << (length - 1).bit_length()
    alone |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
    alone |= {"max_length_q": longest, "max_length_k": longest}
    alone["document_ids"] = torch.zeros_like(alone["document_ids"])
    alone["document_row"] = torch.zeros_like(batch["document_row"][:1])
    alone["__valid__"] = torch.ones(1, dtype=torch.bool)
    for companion in _companions(batch):
        alone |= _media_of(batch, companion, number)
    for name, values in batch.items():  # lists with an entry per document that is no padding
        if isinstance(values, list) and name not in alone and "document_sample" in batch:
            is_entry = (batch["document_sample"] >= 0).tolist()
            entry = sum(is_entry[:number])
            alone[name] = values[entry : entry + is_entry[number]]
    return alone


def with_other_texts(batch: Batch, documents: Collection[int], special: Collection[int]) -> Batch:
    """Return a batch with other tokens in some documents. Special tokens stay what they are.

    Args:
        batch: A flat batch.
        documents: Numbers of the documents.
        special: Ids of tokens that stand for media or have another meaning to the model.
    """
    ids: Tensor = batch["input_ids"].flatten()
    texts = sorted(set(ids.tolist()) - set(special))
    if len(texts) < 2:
        texts = [number for number in range(2 + len(special)) if number not in special]
    following = dict(zip(texts, texts[1:] + texts[:1], strict=True))
    changed = ids.clone()
    borders = document_borders(batch)
    for number in documents:
        start, stop = borders[number]
        others = [following.get(token, token) for token in ids[start:stop].tolist()]
        changed[start:stop] = torch.tensor(others, dtype=ids.dtype, device=ids.device)
    return {**batch, "input_ids": changed.view(batch["input_ids"].shape)}


def with_other_media(batch: Batch, documents: Collection[int]) -> Batch:
    """Return a batch with other pixels and sounds in some documents.

    Args:
        batch: A flat batch.
        documents: Numbers of the documents.
    """
    changed = dict(batch)
    for companion in _companions(batch):
        name = companion.removesuffix("_document")
        is_chosen = [number in documents for number in batch[companion].tolist()]
        for field in (name, f"{name}_features"):
            values = batch.get(field)
            if values is None:
                continue
            flags = is_chosen
            if isinstance(values, Tensor) and f"{name}_frames" in batch:
                counts = batch[f"{name}_frames"].tolist()
                flags = [f for f, n in zip(is_chosen, counts, strict=True) for _ in range(n)]
            others = [_other(v) if f else v for v, f in zip(values, flags, strict=True)]
            changed[field] = torch.stack(others) if isinstance(values, Tensor) else others
    return changed


def _other(values: Tensor) -> Tensor:
    return 255 - values if values.dtype == torch.uint8 else 0.5 - values


def _companions(batch: Batch) -> list[str]:
    """Return the fields that say the document of each medium, such as ``image_document``."""
    return [
        name
        for name, value in batch.items()
        if name.endswith("_document") and isinstance(value, Tensor)
    ]


def _tokens(values: Tensor, start: int, stop: int) -> Tensor:
    """Return the tokens of a document, [1, L], or [R, 1, L] of positions with R rows."""
    rows = values.reshape(*values.shape[:-2], 1, -1)
    return rows[..., start:stop]


def _media_of(batch: Batch, companion: str, number: int) -> dict[str, Any]:
    """Return the media of a document, with what belongs to them."""
    name = companion.removesuffix("_document")
    documents = batch[companion].tolist()
    start = sum(document < number for document in documents)
    stop = start + documents.count(number)
    own: dict[str, Any] = {
        companion: torch.zeros_like(batch[companion][start:stop]),
        f"{name}_row": torch.zeros_like(batch[f"{name}_row"][start:stop]),
    }
    lengths = (name, f"{name}_features", f"{name}_features_length", f"{name}_length")
    rates = (f"{name}_fps", f"{name}_requested_fps")
    for field in (*lengths, *rates, f"{name}_frames"):
        if field in batch:
            own[field] = batch[field][start:stop]
    if f"{name}_frames" in batch:
        ends = list(accumulate(batch[f"{name}_frames"].tolist(), initial=0))
        frames = slice(ends[start], ends[stop])
        own[f"{name}_pts_s"] = batch[f"{name}_pts_s"][frames]
        if isinstance(batch[name], Tensor):
            own[name] = batch[name][frames]
    return own
