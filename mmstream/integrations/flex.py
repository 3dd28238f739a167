"""A flat batch as torch's flex attention takes it.

batch -> `flex_block_mask` -> flex_attention(q, k, v, block_mask=mask)
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from mmstream.types import Batch
from mmstream.wrong_arguments import PositiveInt, checked


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
