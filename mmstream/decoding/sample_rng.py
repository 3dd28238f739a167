"""Random draws of transforms: a generator per sample, the same on every topology."""

from __future__ import annotations

import numpy as np

from mmstream.errors import ConfigError
from mmstream.order.permute import stream_key
from mmstream.types import Sample, SampleLineage
from mmstream.wrong_arguments import checked


@checked(late=True)
def sample_rng(sample: Sample, stream: str = "transform") -> np.random.Generator:
    """Return the random generator of a sample in this epoch, for augmentations.

    The draws are a pure function of (seed, epoch, shard, index), so they do not depend on ranks,
    workers or resumes. Each call starts the stream anew: call it once per transform, or give each
    transform a stream name of its own. `ImageDecoder` uses the stream ``"image"``, `VideoDecoder`
    ``"video"``, `AudioDecoder` ``"audio"`` and `one_segment` ``"segment"``.

    Examples:
        >>> def add_noise(sample):
        ...     rng = mm.sample_rng(sample, "noise")
        ...     return sample | {"noise": rng.normal(size=4)}

    Raises:
        ConfigError: The sample has lost its ``__lineage__``.
    """
    lineage: SampleLineage | None = sample.get("__lineage__")
    if lineage is None:
        raise ConfigError(
            "sample_rng: the sample has no __lineage__, which says where it comes from: pass the "
            "sample that the function got, and return sample | {...} from functions before it"
        )
    key = stream_key(lineage.seed, lineage.epoch, stream, lineage.shard, lineage.index)
    return np.random.Generator(np.random.Philox(key=key))
