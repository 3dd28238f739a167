"""Random draws of transforms: a generator per sample, the same on every topology."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmstream.errors import ConfigError, DecodeError, SkipSample, escaped
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


# -- one piece of a long file ----------------------------------------------------------------------


@checked(late=True)
def one_segment(sample: Sample) -> Sample:
    """Make a sample of one of its segments, drawn anew in each epoch: for ``Pipeline(before=)``.

    The segments are ``json.segments``, a list of objects: ``{"start_s": 2.5, "end_s": 7, "text": "a
    dog barks"}``. All segments of a sample are equally likely. The draw is that of
    ``mm.sample_rng(sample, "segment")``, so it is the same on every topology and after a resume.

    Args:
        sample: A raw sample with ``json`` parsed. It is not changed.

    Returns:
        A sample in whose ``json`` the keys of the segment take the place of ``segments``:
        ``start_s`` and ``end_s``, which decoders with ``span="row"`` read, and others, such as
        ``messages``. A ``text`` becomes ``txt``, too. A sample without ``segments`` comes back as
        it is.

    Raises:
        SkipSample: The list is empty.
        DecodeError: It is no list of objects.

    Examples:
        >>> decode = mm.Decode(audio=mm.AudioDecoder(span="row"))
        >>> dataset = mm.open_dataset("shards/")
        >>> pipeline = mm.Pipeline(
        ...     dataset, global_batch_size=8, before=(mm.one_segment,), decode=decode
        ... )
    """
    row = sample.get("json")
    if not isinstance(row, dict) or "segments" not in row:
        return sample
    segments = row["segments"]
    if not isinstance(segments, list):
        raise DecodeError(f"json.segments is {_shown(segments)}, not a list")
    if not segments:
        raise SkipSample("json.segments is empty")
    number = int(sample_rng(sample, "segment").integers(len(segments)))
    segment = segments[number]
    if not isinstance(segment, dict):
        raise DecodeError(f"json.segments[{number}] is {_shown(segment)}, not an object")
    others = {name: value for name, value in row.items() if name != "segments"}
    changed = {**sample, "json": {**others, **segment}}
    if isinstance(segment.get("text"), str):
        changed["txt"] = segment["text"]
    return changed


def _shown(value: Any) -> str:
    return escaped(repr(value), 40)
