"""Cuts a batch along its tokens, for context parallelism.

Place in the flow: between device and training. The ranks of a context-parallel group need the same
batch, and each of them keeps a part of the tokens of every row. Attention sees the whole.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from mmstream.batching.valid import has_token_labels
from mmstream.errors import ConfigError
from mmstream.settings import NonNegativeInt, PositiveInt, checked
from mmstream.types import IGNORED_LABEL, Batch, IntArray

Scheme: TypeAlias = Literal["document-zigzag", "row-zigzag", "contiguous"]
"""How tokens are dealt to the ranks of a context-parallel group."""

_TOKEN_FIELDS = (
    *("input_ids", "attention_mask", "token_type_ids", "position_ids", "document_ids"),
    *("shift_labels", "shift_label_weights"),
)
"""Fields of [..., B, T]."""

_EMBEDDINGS = "inputs_embeds"
"""[B, T, D]."""


@checked(late=True)
def shift_labels(batch: Batch) -> Batch:
    """Return a batch with the next token of each position in place of its labels.

    A part of a row does not know the token after its end, so labels are shifted before they are
    cut. `cut_sequence` does it by itself.

    Args:
        batch: A batch from a loader or from `mmstream.to_device`. It does not change.

    Returns:
        The same fields with ``shift_labels``, int64 [B, T], in place of ``labels``: -100 where no
        token follows in the same row or document. And ``shift_label_weights``, float32 [B, T], in
        place of ``label_weights``. A batch without a label for each token is returned as it is.

    Examples:
        >>> ids = torch.tensor([[5, 6, 7]])
        >>> shift_labels({"input_ids": ids, "labels": ids})["shift_labels"].tolist()
        [[6, 7, -100]]
    """
    if not has_token_labels(batch):
        return batch
    shifted = dict(batch)
    # The first label of a document is -100, so each document ends with -100.
    labels = F.pad(shifted.pop("labels"), (0, 1), value=IGNORED_LABEL)
    shifted["shift_labels"] = labels[..., 1:].contiguous()
    if isinstance(batch.get("label_weights"), torch.Tensor):
        weights = F.pad(shifted.pop("label_weights"), (0, 1))
        shifted["shift_label_weights"] = weights[..., 1:].contiguous()
    return shifted


@checked({"batch": "give a batch of a loader, with input_ids [B, T]"})
def cut_sequence(
    batch: Batch, rank: NonNegativeInt, size: PositiveInt, scheme: Scheme = "document-zigzag"
) -> Batch:
    """Return a rank's part of the tokens of a batch, for context parallelism.

    Causal attention costs most at the end of a document. So a zigzag cuts it into 2 x `size` chunks
    of equal length, and rank r gets chunk r and chunk 2 x `size` - 1 - r::

        tokens     0 1 2 3 4 5 6 7        size 2
        rank 0     0 1         6 7
        rank 1         2 3 4 5

    - "document-zigzag" cuts each document of `mm.Flat` and `mm.Pack` so, as Transformer Engine,
      Megatron and ring-flash-attention do for documents. In a padded batch it cuts rows.
    - "row-zigzag" cuts each row of the token fields so, all of ``[1, T]`` where they are flat:
      torch's ``context_parallel`` and its head-tail load balancer.
    - "contiguous" gives rank r the r-th of `size` equal pieces of each row.

    Fields of tokens are cut, and so is ``inputs_embeds`` [B, T, D]. All other fields stay whole:
    media, rows and keys, and also the lengths, ``cu_seq_lens_q`` to ``num_label_tokens``. So embed
    media first, with the whole ``input_ids``: put ``inputs_embeds`` into the batch, then cut.

    Args:
        batch: A batch from a loader or from `mmstream.to_device`, the same on all ranks of the
            group. It does not change. On CUDA, the host waits for the lengths of documents.
        rank: The rank within its context-parallel group.
        size: Number of ranks of the group.
        scheme: How tokens are dealt to them.

    Returns:
        The fields of the batch. ``sequence_index``, int64 [B, T / size], says where in its row each
        token of the part lies: the parts of all ranks side by side, sorted by it, are the whole.
        Labels are ``shift_labels``, see `shift_labels`. A padded batch gets ``position_ids``, int64
        [B, T / size].

    Raises:
        ConfigError: A document or a row cannot be cut into equal chunks. Or the batch is a part
            already, or has no ``input_ids``. Or a field of tokens has another shape.

    Examples:
        >>> batch = {"input_ids": torch.arange(8).view(1, 8)}
        >>> [cut_sequence(batch, rank, 2)["input_ids"].tolist() for rank in range(2)]
        [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    """
    if rank >= size:
        raise ConfigError(f"cut_sequence: rank {rank} of size {size}: give 0 to {size - 1}")
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or "sequence_index" in batch:
        advice = "it is cut already" if "sequence_index" in batch else "it has no input_ids [B, T]"
        raise ConfigError(f"cut_sequence: {advice}: pass a batch of a loader")
    part = dict(shift_labels(batch))
    num_rows, num_tokens = ids.shape
    # Without positions a model would count those of each part from 0.
    part.setdefault("position_ids", torch.arange(num_tokens, device=ids.device).expand(ids.shape))
    tokens = torch.from_numpy(_tokens_of_rank(_borders(batch, ids, scheme), rank, size, scheme))
    index = (tokens.view(num_rows, num_tokens // size) % max(1, num_tokens)).to(ids.device)
    for name in (*_TOKEN_FIELDS, _EMBEDDINGS):
        values = part.get(name)
        if isinstance(values, torch.Tensor):
            part[name] = _cut(name, values, index, ids.shape)
    return part | {"sequence_index": index}


def _cut(name: str, values: torch.Tensor, index: torch.Tensor, rows: torch.Size) -> torch.Tensor:
    """Return the tokens of a field by their places in its rows, int64 [B, T / size]."""
    width = values.shape[-1:] if name == _EMBEDDINGS else ()
    shape = values.shape[: values.ndim - len(width)]
    if shape[-2:] != rows:
        raise ConfigError(
            f"cut_sequence: {name} is {list(values.shape)}, and input_ids {list(rows)}: leave it "
            "out, or give it one entry for each token"
        )
    for _ in width:
        index = index[..., None]
    return values.gather(len(shape) - 1, index.expand(*shape[:-1], -1, *width))


def _borders(batch: Batch, ids: torch.Tensor, scheme: Scheme) -> IntArray:
    """Return where each of what is cut begins, and the end, in tokens of all rows: [N + 1]."""
    if scheme == "document-zigzag" and "cu_seq_lens_q" in batch:
        borders: IntArray = batch["cu_seq_lens_q"].numpy(force=True).astype(np.int64)
        return borders
    return np.arange(ids.shape[0] + 1) * ids.shape[1]


def _tokens_of_rank(borders: IntArray, rank: int, size: int, scheme: Scheme) -> IntArray:
    """Return the tokens of a rank, in tokens of all rows.

    Example: documents at [0, 4, 12], and rank 0 of 2 with a zigzag. The first one has chunks of 1
    token, and gives 0 and 3. The second one has chunks of 2, and gives 4, 5, 10 and 11.
    """
    num_chunks = size if scheme == "contiguous" else 2 * size
    lengths = np.diff(borders)
    if (uneven := np.flatnonzero(lengths % num_chunks)).size:
        number = int(uneven[0])
        is_document = scheme == "document-zigzag"
        times = "" if scheme == "contiguous" else "2 x "
        cure = f"mm.Flat(pad_to_multiple_of={num_chunks})"
        if is_document:
            cure = (
                f"mm.Flat(document_multiple_of={num_chunks}, pad_to_multiple_of={num_chunks}); "
                f"for packs mmstream plan --document-multiple-of {num_chunks}"
            )
        raise ConfigError(
            f"cut_sequence: {'document' if is_document else 'row'} {number} has "
            f"{lengths[number]:,} tokens, and {scheme} needs a multiple of {times}size = "
            f"{num_chunks}: pass {cure}; for padded rows mm.TextDecoder("
            'padding="max_length", max_length=)'
        )
    chunks = lengths // num_chunks
    starts = [borders[:-1] + rank * chunks]
    if scheme != "contiguous":
        starts.append(borders[1:] - (rank + 1) * chunks)
    # Chunks in the order of documents: the head and the tail of the first one, then of the second.
    firsts, counts = np.stack(starts, 1).ravel(), np.repeat(chunks, len(starts))
    places = np.repeat(firsts - np.cumsum(counts) + counts, counts)
    tokens: IntArray = places + np.arange(len(places))
    return tokens
