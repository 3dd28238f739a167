"""A use of the whole public surface; never run, only type-checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import torch

import mmstream as mm
from mmstream.dataset.dataset import DatasetView


def transform(sample: dict[str, Any]) -> dict[str, Any]:
    if not sample["txt"]:
        raise mm.SkipSample("no caption")
    return sample


def convert(rows: Path) -> int:
    report = mm.convert(
        rows, "s3://bucket/corpus", media_root="media/", samples_per_shard=5000, num_workers=8
    )
    assert_type(report, mm.ConvertReport)
    mm.convert(
        "rows.jsonl",
        Path("out"),
        reading=mm.RowReading(format="llava", columns={"image": "photo"}),
        splitting=mm.Splitting({"train": 0.98, "val": 0.02}),
        duplicates=mm.Duplicates(exact="drop"),
        rerun=mm.Rerun(check=True),
        shuffle_seed=1,
    )
    return report.num_samples + report.num_rejects


def look(folder: Path) -> None:
    dataset = mm.open_dataset("s3://bucket/corpus")
    mm.open_dataset(folder)
    mm.open_dataset([folder / "a.tar", "b.tar"])
    assert_type(dataset, mm.Dataset)
    assert_type(dataset[123], dict[str, Any])
    assert_type(dataset[:100], DatasetView)
    assert_type(len(dataset[:100]), int)
    for sample in dataset[:3]:
        assert_type(sample, dict[str, Any])


def recordings(data: bytes, processor: Any) -> None:
    features = mm.WhisperFeatures(num_mels=128, padding="max")
    assert_type(mm.AudioDecoder.from_processor(processor), mm.AudioDecoder)
    decoder = mm.AudioDecoder(features=features, crop="random", duration_s=5)
    plan = decoder.plan(data, {"start_s": 0.0}, rng=np.random.default_rng(0))
    assert_type(plan.shape.num_samples, int)
    assert_type(decoder.decode(data, plan).num_samples, int)
    samples = mm.AudioDecoder(sample_rate=None, channels=None, dtype="int16", span=(0.0, 1.5))
    samples(data, span=(0, 1))
    assert_type(features(torch.zeros(2, 16_000), torch.tensor([9, 16_000])), torch.Tensor)


def stream(tokenizer: Any, world: mm.World | None) -> None:
    dataset = mm.open_dataset("corpus")
    pipeline = mm.Pipeline(
        dataset,
        global_batch_size=256,
        seed=0,
        grid=None,
        window=None,
        decode=mm.Decode(
            image=mm.ImageDecoder(size=224),
            text=mm.TextDecoder(tokenizer, max_length=512, padding="longest"),
        ),
        transforms=(transform,),
        collate=mm.collate,
        shuffle=True,
        drop_last=True,
        bad_samples=mm.BadSamplePolicy(max_fraction=0.01, min_samples=1000, max_consecutive=100),
    )
    pipeline.take(8)
    loader = mm.Loader(pipeline, num_workers=8, rows_per_rank=None, world=world)
    assert_type(len(loader), int)
    mean, std = (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)
    batches = mm.to_device(loader, "cuda", normalize=mm.Normalize(mean, std), dtype=torch.bfloat16)
    for batch in batches:
        images, keys = batch["image"], batch["__key__"]
        assert len(images) == len(keys) == len(batch["__valid__"])
    state: Mapping[str, Any] = loader.state_dict()
    loader.load_state_dict(dict(state))
    batches.load_state_dict(batches.state_dict())
    assert_type(len(batches), int)
    assert loader.stats


def mix(captions: mm.Dataset, folder: Path) -> None:
    mixture = mm.Mixture(
        {"captions": (captions, 0.7), "chats": (mm.open_dataset("chats"), 3)},
        epoch_steps=100,
        changes={500: {"captions": 1, "chats": 0.5}},
    )
    mm.Mixture({"captions": (captions, 1)}, stop="first")
    assert_type(mm.open_mixture(folder / "mix.json"), mm.Mixture)
    assert_type(len(mixture), int)
    mm.Pipeline(mixture, global_batch_size=8)


def plan() -> None:
    order = mm.Order.from_counts([10, 20], global_batch_size=4, seed=0)
    refs = order.refs(0, 1)
    shard: np.ndarray[Any, np.dtype[np.int64]] = refs.shard
    assert len(shard) == len(refs.index) == len(refs.valid)
    mm.World(rank=0, world_size=2)


def errors() -> None:
    try:
        mm.open_dataset("corpus")[0]
    except (mm.ManifestError, mm.ShardError, mm.SampleError, mm.StorageError) as error:
        assert_type(str(error), str)
