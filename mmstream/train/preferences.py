"""The answers of a flat batch, one a row, as TRL compares them.

batch -> `preference_inputs` -> TRL's DPOTrainer or RewardTrainer
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmstream.batching.valid import is_flat, valid_labels
from mmstream.errors import ConfigError
from mmstream.types import IGNORED_LABEL, Batch
from mmstream.wrong_arguments import checked


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
        name: pad_sequence([values[own] for own in documents], batch_first=True, padding_value=fill)
        for name, (values, fill) in columns.items()
    }
