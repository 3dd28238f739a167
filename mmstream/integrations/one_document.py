"""A flat batch with one of its documents only, or with other content in some of them.

check_packing.py -> `one_document`, `with_other_texts`, `with_other_media`
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from mmstream.types import Batch

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
