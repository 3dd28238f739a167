"""Flat batches as other libraries take them: kernels, trainers, and TRL.

batch -> `flex_block_mask` -> flex_attention(q, k, v, block_mask=mask)
batch -> `flash_attention_arguments` -> flash_attn_varlen_func(q, k, v, **arguments)
batch -> `megatron_packing` -> PackedSeqParams(**arguments)
batch -> `torchtitan_batch` -> Trainer.forward_backward_step
batch -> `preference_inputs` -> TRL's DPOTrainer or RewardTrainer
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmstream.batching.valid import is_flat, valid_labels
from mmstream.errors import ConfigError
from mmstream.settings import PositiveInt, checked
from mmstream.types import IGNORED_LABEL, Batch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@checked(cure="give a batch of Pipeline(batching=mm.Flat()) or mm.Pack")
def flex_block_mask(batch: Batch, *, block_size: PositiveInt = 128) -> BlockMask:
    """Return the mask by which a token sees those before it in its own document.

    For models of your own: those of transformers make it from ``position_ids``. Blocks of other
    documents are skipped.

    Args:
        batch: A flat batch, of layout "flat" or "rows", on the device of the model.
        block_size: Side of a block, in tokens.

    Returns:
        A mask for queries and keys of [B, heads, T, D].

    Examples:
        >>> import numpy as np
        >>> from mmstream.batching.flat import flatten
        >>> samples = [{"input_ids": np.array([5, 6, 7])}, {"input_ids": np.array([8])}]
        >>> batch = flatten(samples, [0, 1], 2, mm.Flat())
        >>> flex_block_mask(batch).shape
        (1, 1, 4, 4)
    """
    from torch.nn.attention.flex_attention import create_block_mask  # it imports the compiler

    documents: Tensor = batch["document_ids"]
    num_rows, num_tokens = documents.shape

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del head
        return (query >= key) & (documents[row, query] == documents[row, key])

    return create_block_mask(
        is_seen,
        num_rows,
        None,
        num_tokens,
        num_tokens,
        device=str(documents.device),
        BLOCK_SIZE=block_size,
    )


@checked(cure="give a batch of Pipeline(batching=mm.Flat()) or mm.Pack")
def flash_attention_arguments(batch: Batch) -> dict[str, Any]:
    """Return the lengths of documents under the names of ``flash_attn_varlen_func``.

    For models of your own: those of transformers get them from `model_inputs`. Queries, keys and
    values are [B * T, heads, D], the tokens of all rows one after the other.

    Args:
        batch: A flat batch, of layout "flat" or "rows".

    Returns:
        ``cu_seqlens_q`` and ``cu_seqlens_k``, int32 [documents + 1], ``max_seqlen_q`` and
        ``max_seqlen_k``, numbers, and ``causal``, True.

    Examples:
        >>> import numpy as np
        >>> from mmstream.batching.flat import flatten
        >>> samples = [{"input_ids": np.array([5, 6, 7])}, {"input_ids": np.array([8])}]
        >>> batch = flatten(samples, [0, 1], 2, mm.Flat())
        >>> flash_attention_arguments(batch)["cu_seqlens_q"].tolist()
        [0, 3, 4]
    """
    return {
        "cu_seqlens_q": batch["cu_seq_lens_q"],
        "cu_seqlens_k": batch["cu_seq_lens_k"],
        "max_seqlen_q": batch["max_length_q"],
        "max_seqlen_k": batch["max_length_k"],
        "causal": True,
    }


@checked(cure="give a batch of Pipeline(batching=mm.Flat()) or mm.Pack")
def megatron_packing(batch: Batch, *, multiple_of: PositiveInt = 1) -> dict[str, Any]:
    """Return the arguments of Megatron's ``PackedSeqParams``.

    Documents have no padding between them, so the padded lengths are the lengths. Context
    parallelism cuts each document into 2 * its size parts, and sequence parallelism the tokens.
    Then documents must be multiples of ``2 * cp * tp``: plan packs with that, or give
    ``mm.Flat(document_multiple_of=)``.

    Args:
        batch: A flat batch, of layout "flat".
        multiple_of: What each document's length must be a multiple of.

    Returns:
        ``qkv_format``, "thd"; ``cu_seqlens_q`` and ``cu_seqlens_kv``, int32 [documents + 1], and
        the same as ``cu_seqlens_q_padded`` and ``cu_seqlens_kv_padded``; ``max_seqlen_q`` and
        ``max_seqlen_kv``, the longest document, at most T; and ``total_tokens``, T.

    Raises:
        ConfigError: The batch has several rows, or a document of another length.

    Examples:
        >>> import numpy as np
        >>> from mmstream.batching.flat import flatten
        >>> samples = [{"input_ids": np.array([5, 6, 7])}, {"input_ids": np.array([8])}]
        >>> batch = flatten(samples, [0, 1], 2, mm.Flat())
        >>> arguments = megatron_packing(batch)
        >>> arguments["qkv_format"], arguments["cu_seqlens_q"].tolist()
        ('thd', [0, 3, 4])
    """
    num_rows, num_tokens = batch["input_ids"].shape
    if num_rows > 1:
        raise ConfigError(
            f"megatron_packing: the batch has {num_rows} rows, and thd is one line of documents: "
            'give batching= layout="flat"'
        )
    queries, keys = batch["cu_seq_lens_q"], batch["cu_seq_lens_k"]
    uneven = queries.diff() % multiple_of
    if multiple_of > 1 and bool(uneven.any()):
        number = int(uneven.nonzero()[0])
        raise ConfigError(
            f"megatron_packing: document {number} has {int(queries.diff()[number])} tokens, no "
            f"multiple of {multiple_of}: plan packs with --document-multiple-of {multiple_of}"
        )
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": queries,
        "cu_seqlens_kv": keys,
        "cu_seqlens_q_padded": queries,
        "cu_seqlens_kv_padded": keys,
        "max_seqlen_q": min(batch["max_length_q"], num_tokens),
        "max_seqlen_kv": min(batch["max_length_k"], num_tokens),
        "total_tokens": num_tokens,
    }


@checked(cure="give a batch of Pipeline(batching=mm.Flat()) or mm.Pack")
def torchtitan_batch(batch: Batch) -> tuple[dict[str, Any], Tensor]:
    """Return the ``TrainerBatch`` of torchtitan: its input and its labels.

    torchtitan shifts no labels: the label of a token is the next one. It takes the tokens of a rank
    in one line, and masks documents where ``positions`` are 0.

    Args:
        batch: A flat batch. Of layout "rows", the rows are put one after the other.

    Returns:
        ``input`` and ``positions``, int64 [T], and the labels, int64 [T]: -100 at the end of each
        document. With positions of four rows, ``mrope_positions`` are int64 [T, 3]: time, height
        and width.

    Raises:
        ConfigError: The batch has no labels.

    Examples:
        >>> import numpy as np
        >>> from mmstream.batching.flat import flatten
        >>> ids = [np.array([5, 6, 7]), np.array([8, 9])]
        >>> samples = [{"input_ids": own, "labels": own} for own in ids]
        >>> batch = flatten(samples, [0, 1], 2, mm.Flat())
        >>> inputs, labels = torchtitan_batch(batch)
        >>> inputs["positions"].tolist(), labels.tolist()
        ([0, 1, 2, 0, 1], [6, 7, -100, 9, -100])
    """
    if "labels" not in batch:
        raise ConfigError("torchtitan_batch: the batch has no labels; give TextDecoder labels")
    positions = batch["position_ids"]
    text = positions[0] if positions.ndim == 3 else positions
    # The first label of a document is -100, so shifting ends each document with -100.
    labels = torch.roll(batch["labels"].flatten(), -1)
    labels[-1] = IGNORED_LABEL
    inputs = {"input": batch["input_ids"].flatten(), "positions": text.flatten()}
    if positions.ndim == 3:
        inputs["mrope_positions"] = positions[1:].flatten(1).T.contiguous()
    return inputs, labels


@checked(late=True)
def preference_inputs(batch: Batch, pad_token_id: int) -> dict[str, Tensor]:
    """Return what TRL's collator of preferences returns: the chosen answers, then the rejected.

    `LoaderTrainerMixin` calls it for TRL's trainers.

    Args:
        batch: Of preferences, with ``TextDecoder(texts="all")`` and ``batching=mm.Flat()``. Rows
            that are not valid are left out. Without a valid row there is a pair of equal rows,
            which no loss learns from.
        pad_token_id: The tokenizer's.

    Returns:
        ``input_ids``, ``attention_mask`` and ``completion_mask``, int64 [2 P, T] for P pairs: the
        question and an answer, which ones are tokens, and which ones are tokens of the answer.

    Raises:
        ConfigError: The batch is padded, has media or weights of labels, or samples without two
            texts.

    Examples:
        >>> import numpy as np
        >>> from mmstream.batching.flat import flatten
        >>> ids = [np.array([5, 6]), np.array([5, 7, 8])]
        >>> labels = [np.array([-100, 6]), np.array([-100, 7, 8])]
        >>> batch = flatten([{"input_ids": ids, "labels": labels}], [0], 1, mm.Flat())
        >>> batch["__valid__"] = torch.tensor([True])
        >>> inputs = preference_inputs(batch, pad_token_id=0)
        >>> inputs["input_ids"].tolist(), inputs["completion_mask"].tolist()
        ([[5, 6, 0], [5, 7, 8]], [[0, 1, 0], [0, 1, 1]])
    """
    if not is_flat(batch):
        raise ConfigError("preference_inputs: pass Pipeline(batching=mm.Flat())")
    if "label_weights" in batch or any(
        name.endswith("_document") and len(batch[name]) for name in batch
    ):
        raise ConfigError("preference_inputs: the batch has media or label_weights, it takes texts")
    samples = batch["document_sample"].tolist()
    counts = Counter(sample for sample in samples if sample >= 0)
    if set(counts.values()) - {2}:
        raise ConfigError(
            'preference_inputs: a sample has no two texts: pass TextDecoder(texts="all"), and '
            "samples of preferences"
        )
    is_valid = batch["__valid__"].cpu()[batch["document_row"].cpu()].tolist()
    pairs = [number for number, sample in enumerate(samples) if sample >= 0 and is_valid[number]]
    borders = batch["cu_seq_lens_q"].tolist()
    documents = [
        slice(borders[number], borders[number + 1])
        for number in (*pairs[::2], *pairs[1::2]) or (0, 0)
    ]
    ids, labels = batch["input_ids"].flatten(), valid_labels(batch).flatten()
    columns = {
        "input_ids": (ids, pad_token_id),
        "attention_mask": (torch.ones_like(ids), 0),
        "completion_mask": ((labels != IGNORED_LABEL).long(), 0),
    }
    return {
        name: pad_sequence(
            [values[part] for part in documents], batch_first=True, padding_value=fill
        )
        for name, (values, fill) in columns.items()
    }
