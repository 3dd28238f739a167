"""The data of the runs of `tools.prove.resume`: a small corpus with bad samples, and its pipeline.

The corpus records its keys and bad samples as it writes them, so the proof need not ask mmstream.
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

Ref = tuple[int, int]
"""(shard, index) of a sample."""

NUM_FEATURES = 8
SHARES = (0.45, 0.0, 0.2, 0.002, 0.348)
"""The shards' shares of the samples: one shard is empty, and one has a sample or two."""

WEIGHTS = {"large": 0.9, "small": 0.098, "tiny": 0.002}
"""The weights of a mixture's sources."""
SIZES = {"large": 0.8, "small": 0.19, "tiny": 0.01}
"""The shares of the samples in a mixture's sources."""


@dataclass(frozen=True)
class Corpus:
    """A written dataset or mixture, and the samples in it."""

    url: str
    keys: dict[Ref, str]
    bad: set[Ref]
    is_mixture: bool = False


def write_corpus(folder: Path, num_samples: int, bad_fraction: float, seed: int) -> Corpus:
    """Write a dataset with a few hundred bytes per sample, and bad samples of two kinds."""
    corpus = Corpus(str(folder), {}, set())
    return _write(folder, num_samples, bad_fraction, random.Random(seed), corpus)


def write_mixture(folder: Path, num_samples: int, bad_fraction: float, seed: int) -> Corpus:
    """Write the three datasets of a mixture, with very different sizes."""
    draw = random.Random(seed)
    mixture = Corpus(str(folder), {}, set(), is_mixture=True)
    for number, (name, size) in enumerate(SIZES.items()):
        first_shard = number * len(SHARES)
        _write(folder / name, int(num_samples * size), bad_fraction, draw, mixture, first_shard)
    return mixture


def _write(
    folder: Path,
    num_samples: int,
    bad_fraction: float,
    draw: random.Random,
    corpus: Corpus,
    first_shard: int = 0,
) -> Corpus:
    """Write a dataset and add its samples to a corpus, after the keys and shards of others."""
    first = len(corpus.keys)
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
                corpus.keys[ref] = key
            writer.close()
        path.with_suffix(".tar.idx").write_bytes(encode_index(writer.offsets))
        shards.append(ShardInfo(path.name, stop - start, path.stat().st_size))
    (folder / MANIFEST_NAME).write_bytes(Manifest(tuple(shards)).to_bytes())
    return corpus


def open_pipeline(url: str, global_batch_size: int, seed: int) -> mm.Pipeline:
    """Return the pipeline of all runs.

    It has many windows. A dataset has a partial last step, and a mixture changes its weights.
    """
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
    """Return features and a target for a sample's number; the noise is like an augmentation."""
    number = sample["json"]["number"]
    waves = np.sin(number * np.arange(1.0, NUM_FEATURES + 1))
    noise = mm.sample_rng(sample).normal(scale=0.1, size=NUM_FEATURES)
    return {"features": waves + noise, "target": np.cos(number)}
