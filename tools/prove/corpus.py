"""What the runs of `tools.prove.resume` train on: a small corpus, some of it bad, and its pipeline.

Keys and bad samples are known here from the writing, so that the proof need not ask the library.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import mmstream as mm
from mmstream.dataset.index import encode_index
from mmstream.dataset.manifest import MANIFEST_NAME, Manifest, ShardInfo
from mmstream.tar.writer import TarWriter
from mmstream.types import Sample

__all__ = ["NUM_FEATURES", "Corpus", "Ref", "make_features", "open_pipeline",
           "write_corpus", "write_mixture"]  # fmt: skip

Ref = tuple[int, int]
"""(shard, index) of a sample."""

NUM_FEATURES = 8
SHARES = (0.45, 0.0, 0.2, 0.002, 0.348)
"""Of the samples in each shard: uneven, one shard empty, one with a sample or two."""

WEIGHTS = {"large": 0.9, "small": 0.098, "tiny": 0.002}
SIZES = {"large": 0.8, "small": 0.19, "tiny": 0.01}
"""Of the sources of a mixture."""


@dataclass(frozen=True)
class Corpus:
    """What was written."""

    url: str
    key_of: dict[Ref, str]
    bad: set[Ref]
    is_mixture: bool = False


def write_corpus(folder: Path, num_samples: int, bad_fraction: float, seed: int) -> Corpus:
    """Write shards of a few hundred bytes a sample; the bad ones are broken in two ways."""
    return _write(
        folder, num_samples, bad_fraction, random.Random(seed), Corpus(str(folder), {}, set())
    )


def write_mixture(folder: Path, num_samples: int, bad_fraction: float, seed: int) -> Corpus:
    """Write three corpora of very different sizes in folders of their own."""
    draw, whole = random.Random(seed), Corpus(str(folder), {}, set(), is_mixture=True)
    for number, (name, size) in enumerate(SIZES.items()):
        first_shard = number * len(SHARES)
        _write(folder / name, int(num_samples * size), bad_fraction, draw, whole, first_shard)
    return whole


def _write(
    folder: Path,
    num_samples: int,
    bad_fraction: float,
    draw: random.Random,
    corpus: Corpus,
    first_shard: int = 0,
) -> Corpus:
    """Write one dataset, whose numbers of keys and shards go on from those of others."""
    first = len(corpus.key_of)
    bounds = [round(num_samples * sum(SHARES[:n])) for n in range(len(SHARES))] + [num_samples]
    shards = []
    folder.mkdir(parents=True)
    for shard, (start, stop) in enumerate(itertools.pairwise(bounds)):
        path = folder / f"shard-{shard:06d}.tar"
        with path.open("wb") as file:
            writer = TarWriter(file)
            for number in range(start, stop):
                ref = first_shard + shard, number - start
                key = f"{first + number:06d}"
                data = json.dumps({"number": first + number}).encode()
                if draw.random() < bad_fraction:
                    corpus.bad.add(ref)
                    data = draw.choice([b'{"number": ', b'{"no number": 0}'])
                writer.add(key, {"json": data})
                corpus.key_of[ref] = key
            writer.close()
        path.with_suffix(".tar.idx").write_bytes(encode_index(writer.offsets))
        shards.append(ShardInfo(path.name, stop - start, path.stat().st_size))
    (folder / MANIFEST_NAME).write_bytes(Manifest(tuple(shards)).to_bytes())
    return corpus


def open_pipeline(url: str, global_batch_size: int, seed: int) -> mm.Pipeline:
    """Return what all runs see: many windows; partial last steps, or weights that change."""
    dataset: mm.Dataset | mm.Mixture
    if Path(url, MANIFEST_NAME).exists():
        dataset = mm.open_dataset(url)
    else:
        dataset = mm.Mixture(
            {name: (mm.open_dataset(f"{url}/{name}"), weight) for name, weight in WEIGHTS.items()},
            epoch_steps=38,
            changes={50: dict.fromkeys(WEIGHTS, 1)},
        )
    return mm.Pipeline(
        dataset,
        global_batch_size=global_batch_size,
        seed=seed,
        window=48,
        drop_last=False,
        transforms=(make_features,),
        bad_samples=mm.BadSamplePolicy(max_fraction=1.0, max_consecutive=0, quarantine=None),
    )


def make_features(sample: Sample) -> Sample:
    """Turn a number into features and a target, with noise that is an augmentation's stand-in."""
    number = sample["json"]["number"]
    waves = np.sin(number * np.arange(1.0, NUM_FEATURES + 1))
    noise = mm.sample_rng(sample).normal(scale=0.1, size=NUM_FEATURES)
    return {"features": waves + noise, "target": np.cos(number)}
