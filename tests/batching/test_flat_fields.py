"""No field of a sample is forgotten in a flat batch, of whatever kind it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.batching.flat import flatten

NUM_SAMPLES = 5


def sample(number: int, *, one_shape: bool) -> dict[str, Any]:
    """A sample with a field of each kind."""
    size = (8, 8) if one_shape else (8, 8 + 2 * number)
    return {
        "__key__": str(number),
        "__url__": "a.tar",
        "__source__": "some",
        "input_ids": np.arange(number + 1),
        "attention_mask": np.ones(number + 1, np.int64),
        "labels": np.arange(number + 1),
        "image": [torch.full((3, *size), number, dtype=torch.uint8)] * (1 if one_shape else number),
        "video": [torch.full((number + 1, 3, *size), number, dtype=torch.uint8)] * (number % 2),
        "video_pts_s": [np.arange(number + 1) / 2] * (number % 2),
        "audio": [np.full(number + 3, number, np.float32)] * (number % 3),
        "json": {"number": number},
        "txt": f"text {number}",
        "raw": bytes([number]),
        "score": number / 2,
        "npy": np.full((2, 2), number),
        "boxes": np.zeros((number, 4), np.float32),
    }


@pytest.mark.parametrize("one_shape", [True, False])
@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_other_fields_are_those_of_collate(layout: Any, one_shape: bool) -> None:
    samples = [sample(number, one_shape=one_shape) for number in range(NUM_SAMPLES)]
    padded = mm.collate(samples)
    batch = flatten(samples, [0, 0, 1, 1, 3], 4, mm.Pack(16, layout=layout))
    assert padded.keys() - batch.keys() == {"attention_mask"}
    tokens = {"input_ids", "labels"}
    for name in padded.keys() - tokens - {"attention_mask"}:
        if not name.endswith("_row"):
            assert _plain(batch[name]) == _plain(padded[name]), name
    rows = batch["document_row"]
    for stem, count in (("image", None if one_shape else [0, 1, 2, 3, 4]), ("video", [0, 1] * 2)):
        counts = [1] * NUM_SAMPLES if count is None else [*count, 0][:NUM_SAMPLES]
        documents = batch[f"{stem}_document"]
        owners = batch["document_sample"][documents].tolist()
        assert owners == [n for n in range(NUM_SAMPLES) for _ in range(counts[n])]
        assert torch.equal(batch[f"{stem}_row"], rows[documents])
    assert batch["__source__"] == ["some"] * NUM_SAMPLES


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list) else value
