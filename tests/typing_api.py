"""What the public surface returns, for type checkers; never run.

That its arguments type-check is shown by ``tools/``, which uses them and is checked too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import numpy as np
import torch

import mmstream as mm
from mmstream.converting.convert import ConvertReport


def look(folder: Path) -> None:
    assert_type(mm.convert(folder / "rows.jsonl", folder), ConvertReport)
    dataset = mm.open_dataset([folder / "a.tar", "b.tar"])
    assert_type(dataset, mm.Dataset)
    assert_type(dataset[123], dict[str, Any])
    assert_type(dataset[:100], mm.Dataset)
    assert_type(len(dataset[:100]), int)
    for sample in dataset[:3]:
        assert_type(sample, dict[str, Any])
    mixture = mm.Mixture(
        {"captions": (dataset, 0.7)}, epoch_steps=100, changes={5: {"captions": 1}}
    )
    assert_type(mm.Mixture.open(folder / "mix.json"), mm.Mixture)
    assert_type(len(mixture), int)


def recordings(data: bytes, processor: Any) -> None:
    features = mm.families.whisper.WhisperFeatures(num_mels=128, padding="max")
    assert_type(mm.AudioDecoder.from_processor(processor), mm.AudioDecoder)
    decoder = mm.AudioDecoder(features=features, crop="random", duration_s=5)
    plan = decoder.plan(data, {"start_s": 0.0}, rng=np.random.default_rng(0))
    assert_type(plan.shape.num_samples, int)
    assert_type(decoder.decode(data, plan).num_samples, int)
    assert_type(features(torch.zeros(2, 16_000), torch.tensor([9, 16_000])), torch.Tensor)


def stream(dataset: mm.Dataset | mm.Mixture, normalize: mm.Normalize) -> None:
    loader = mm.Loader(mm.Pipeline(dataset, global_batch_size=256))
    assert_type(len(loader), int)
    batches = mm.to_device(loader, "cuda", normalize=normalize, dtype=torch.bfloat16)
    for batch in batches:
        assert_type(batch, dict[str, Any])
    batches.load_state_dict(batches.state_dict())
    assert_type(len(batches), int)
    order = mm.Order.from_counts([10, 20], global_batch_size=4, seed=0)
    shard: np.ndarray[Any, np.dtype[np.int64]] = order.refs(0, 1).shard
    assert len(shard) == 4
