"""What flows: a sample is a dict, and its lineage travels in one private field.

Keys of a raw sample: ``__key__``, ``__url__`` (of its shard), ``__source__`` (its name in a
mixture), then fields by extension (``jpg``,
``json``, ``0.png``) as bytes, and ``__lineage__``. Any function written for WebDataset's ``.map``
takes and returns such a dict.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mmstream.order.permute import stream_key

__all__ = ["Lineage", "Sample", "sample_rng"]

Sample: TypeAlias = dict[str, Any]


class Lineage(NamedTuple):
    """Where a sample comes from and when it is shown."""

    shard: int
    """Position of its shard in its dataset's manifest."""
    index: int  # type: ignore[assignment]  # the field's name wins over tuple.index
    """Position of the sample in its shard."""
    epoch: int = 0
    """Of its dataset: a source of a mixture comes round in epochs of its own."""
    step: int = 0
    seed: int = 0


def sample_rng(sample: Sample, stream: str = "transform") -> np.random.Generator:
    """Return the random generator of a sample in this epoch, for augmentations.

    A pure function of (seed, epoch, shard, index): the draws are the same on every topology and
    after every resume. Each call starts the stream anew, so call it once a transform, or name a
    stream of its own; ``"image"`` is that of `ImageDecoder`.
    """
    lineage: Lineage = sample["__lineage__"]
    key = stream_key(lineage.seed, lineage.epoch, stream, lineage.shard, lineage.index)
    return np.random.Generator(np.random.Philox(key=key))
