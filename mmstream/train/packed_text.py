"""The text of a flat batch as models take it: documents that are closed to each other.

    arguments.model_arguments -> `packed_text` -> `with_padding_document` -> `packed_arguments`

A flat batch has documents one behind the other, and no attention mask. Models of transformers see
where a document begins by its positions, FlashAttention by the lengths of documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmstream.batching.valid import valid_labels
from mmstream.errors import ConfigError
from mmstream.types import IGNORED_LABEL, Batch

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""The boundaries of documents, as FlashAttention takes them: all four, or none."""

DOCUMENT_ARGUMENTS = frozenset({*LENGTHS, "seq_idx", "use_cache"})
"""Arguments that many models hand on to their layers without naming them."""

MOST_DENSE_TOKENS = 16_384
"""The most tokens of several rows in one, without attention that skips other documents. A mask for
them is 0.25 GiB, and scores in float32 1 GiB a head."""

_ATTENTION_LAYERS = ("attention", "full", "sliding", "local", "global", "chunked")
"""Words in the names of layers that only look at other tokens through a mask."""


def is_packed(batch: Batch) -> bool:
    """Tell whether a batch has documents one behind the other, as ``batching=`` makes them."""
    return "cu_seq_lens_q" in batch


def packed_text(batch: Batch) -> dict[str, Any]:
    """Return the fields of a flat batch that describe its text. Invalid rows have no labels.

    Args:
        batch: A flat batch of a loader, or of `mm.to_device`.

    Returns:
        ``input_ids``, ``labels`` where there are some, ``position_ids``, ``document_ids`` and the
        four boundaries of documents.

    Raises:
        ConfigError: The batch lacks some of them.
    """
    names = ("input_ids", "position_ids", "document_ids", *LENGTHS)
    missing = [name for name in names if batch.get(name) is None]
    if missing:
        raise ConfigError(
            f"model_inputs: the batch has cu_seq_lens_q, and no {missing[0]}: keep all fields of "
            "batching=mm.Flat(), in transforms too"
        )
    text = {name: batch[name] for name in names}
    if isinstance(batch.get("labels"), Tensor):
        text["labels"] = batch["labels"]
        if "__valid__" in batch and not bool(batch["__valid__"].all()):
            text["labels"] = valid_labels(batch)
    return text


def with_padding_document(text: dict[str, Any], tokens: list[int]) -> tuple[dict[str, Any], int]:
    """Return the text with these tokens as a document of its own, behind all others, and its row.

    With several rows, each gets a document of as many tokens, with the id 0 in the others. No
    document sees it, and it has no labels.

    Example: rows of documents with 2 and 1, and with 3 tokens, have the boundaries [0, 2, 3, 6].
    With a document of one token in each row, they are [0, 2, 3, 4, 7, 8].

    Args:
        text: Of `packed_text`.
        tokens: The tokens of the document.
    """
    ids, documents = text["input_ids"], text["document_ids"]
    num_rows, width = ids.shape
    count = len(tokens)
    changed = dict(text)
    added = ids.new_zeros(num_rows, count)
    added[-1] = torch.tensor(tokens, device=ids.device)
    changed["input_ids"] = torch.cat((ids, added), dim=1)
    if "labels" in text:
        changed["labels"] = torch.cat((text["labels"], torch.full_like(added, IGNORED_LABEL)), 1)
    positions = text["position_ids"]
    counted = torch.arange(count, device=positions.device, dtype=positions.dtype)
    counted = counted.expand(*positions.shape[:-1], count)
    changed["position_ids"] = torch.cat((positions, counted), dim=-1)
    # A row's own documents move by the rows before it, as each of these has one more now.
    rows = torch.arange(num_rows, device=documents.device, dtype=documents.dtype)[:, None]
    last = documents[:, -1:] + rows + 1
    changed["document_ids"] = torch.cat((documents + rows, last.expand(-1, count)), dim=1)
    boundaries = text["cu_seq_lens_q"]
    ends = torch.arange(1, num_rows + 1, device=boundaries.device, dtype=boundaries.dtype)
    # A boundary at token b lies in row (b - 1) // width; the rows before it have grown by count.
    moved = boundaries + (boundaries - 1).clamp(min=0) // width * count
    joined = torch.cat((moved, ends * (width + count))).sort().values
    changed["cu_seq_lens_q"] = changed["cu_seq_lens_k"] = joined
    longest = max(text["max_length_q"], 1 << (count - 1).bit_length())
    changed["max_length_q"] = changed["max_length_k"] = longest
    return changed, num_rows - 1


def packed_arguments(text: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the text of a flat batch in the form that a model of transformers takes.

    - ``use_cache`` is False. With a cache, models do not look for documents, and let them leak.
    - There is no ``attention_mask``, for the same reason.
    - The lengths of documents are there for FlashAttention, which else asks the device for them in
      every layer, and for models with layers that are no attention.
    - ``seq_idx``, the number of each token's document, is there for such layers only.

    Args:
        text: Of `packed_text`.
        config: The model's config.
    """
    names = ["input_ids", "position_ids"] + ["labels"] * ("labels" in text)
    has_states = has_state_layers(config)
    if has_states or is_flash(config):
        names += LENGTHS
    arguments = {name: text[name] for name in names} | {"use_cache": False}
    if has_states:
        arguments["seq_idx"] = text["document_ids"].to(torch.int32)
    return arguments


def check_quadratic(batch: Batch, config: Any) -> None:
    """Refuse long rows for attention that computes the scores of all tokens with all others.

    Raises:
        ConfigError: Rows lie one behind the other, they have more than `MOST_DENSE_TOKENS` tokens
            together, and the model's attention is eager or sdpa.
    """
    num_rows, num_tokens = batch["input_ids"].shape
    attention = str(getattr(config.get_text_config(), "_attn_implementation", None))
    has_rows = num_rows == 1 and bool((batch["document_row"] > 0).any())
    if has_rows and num_tokens > MOST_DENSE_TOKENS and attention in ("eager", "sdpa"):
        raise ConfigError(
            f"model_inputs: {attention} attention compares all {num_tokens:,} tokens with each "
            'other: give batching= layout="rows", or the model '
            'attn_implementation="flash_attention_2" or "flex_attention"'
        )


def has_state_layers(config: Any) -> bool:
    """Tell whether a model has layers with a state, such as a convolution, beside attention."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    return any(
        "linear" in str(kind) or not any(word in str(kind) for word in _ATTENTION_LAYERS)
        for kind in kinds
    )


def is_flash(config: Any) -> bool:
    """Tell whether a model's attention is one of FlashAttention."""
    name = getattr(config.get_text_config(), "_attn_implementation", None)
    return "flash" in str(name)
