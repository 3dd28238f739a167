"""A flat batch as FlashAttention's varlen functions take it.

batch -> `flash_attention_arguments` -> flash_attn_varlen_func(q, k, v, **arguments)
"""

from __future__ import annotations

from typing import Any

from mmstream.types import Batch
from mmstream.wrong_arguments import checked


@checked(cure="give a batch of Pipeline(batching=mm.Flat()) or mm.Pack")
def flash_attention_arguments(batch: Batch) -> dict[str, Any]:
    """Return the lengths of documents under the names of ``flash_attn_varlen_func``.

    For models of your own: those of transformers get them from `model_inputs`. Queries, keys and
    values are [B * T, heads, D], the tokens of all rows one behind the other.

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
