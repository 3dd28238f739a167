"""A flat batch as Megatron takes it, in the layout that it calls thd.

batch -> `megatron_packing` -> PackedSeqParams(**arguments)
"""

from __future__ import annotations

from typing import Any

from mmstream.errors import ConfigError
from mmstream.types import Batch
from mmstream.wrong_arguments import PositiveInt, checked


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
