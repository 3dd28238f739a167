"""The pipeline of a run on packs that ``mmstream train --pipeline`` takes: with a node cache."""

from __future__ import annotations

import os

import mmstream as mm
from mmstream.train import TrainConfig
from mmstream.train.models import open_model

CONFIG = TrainConfig(url="", out="", model="vlm", image_size=16)


def pipeline(dataset: mm.Dataset) -> mm.Pipeline:
    """Return six packs a step. The cache is in the folder that PACKS_CACHE names."""
    return mm.Pipeline(
        dataset,
        global_batch_size=6,
        seed=1,
        decode=open_model(CONFIG, 6)[1],
        batching=mm.Pack(512),
        reshuffle="global",
        cache_dir=os.environ["PACKS_CACHE"],
        max_cache_bytes=100_000_000,
    )
