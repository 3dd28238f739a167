"""A flat batch as torchtitan's trainer takes it.

batch -> `torchtitan_batch` -> Trainer.forward_backward_step
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmstream.errors import ConfigError
from mmstream.types import IGNORED_LABEL, Batch
from mmstream.wrong_arguments import checked


@checked(cure="give a batch of Pipeline(batching=mm.Flat()) or mm.Pack")
def torchtitan_batch(batch: Batch) -> tuple[dict[str, Any], Tensor]:
    """Return the ``TrainerBatch`` of torchtitan: its input and its labels.

    torchtitan shifts no labels: the label of a token is the next one. It takes the tokens of a rank
    in one line, and masks documents where ``positions`` are 0.

    Args:
        batch: A flat batch. Of layout "rows", the rows are put one behind the other.

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
