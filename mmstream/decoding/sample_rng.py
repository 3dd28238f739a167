"""Random draws of transforms: a generator per sample, the same on every topology."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from mmstream.errors import ConfigError, DecodeError, SkipSample, escaped
from mmstream.order.permute import stream_key
from mmstream.settings import checked
from mmstream.types import Sample, SampleLineage


@checked(
    {
        "sample": "give the sample that a transform gets; a function by field draws from "
        "numpy.random, torch or random, which are seeded for it"
    },
    late=True,
)
def sample_rng(sample: Sample, stream: str = "transform") -> np.random.Generator:
    """Return the random generator of a sample in this epoch, for augmentations.

    The draws are a pure function of (seed, epoch, shard, index), so they do not depend on ranks,
    workers or resumes. Each call restarts the stream: call it once per transform, or give each
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
    """Make a sample of one of its segments, drawn again in each epoch: for ``Pipeline(before=)``.

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
        DecodeError: It is not a list of objects.

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


# -- functions of the user draw as their sample says -----------------------------------------------
#
# Most augmentations draw from the generators of the process: those of torch, numpy and random.
# Before each call these are seeded from the sample, its epoch and the function's place. So a draw
# is the same on every topology and after a resume. `kept_generators` puts the states of the process
# back, so that its own draws, such as a model's dropout, do not move.
#
# These generators belong to a whole process. So functions of the user run in one thread: the one
# that asks for a batch, or the main thread of a worker.

_SEEDS = struct.Struct("<3I")
"""One for each generator. torch's has 32 bits of seed on a CPU, and so has numpy's."""


def is_user_function(function: object) -> bool:
    """Tell whether a function or decoder comes from elsewhere, and may draw at random.

    So does a decoder of ours that holds one of the user: in a setting, as `VideoDecoder.audio`.

    Examples:
        >>> is_user_function(int), is_user_function(is_user_function)
        (False, False)
    """
    module = "builtins"
    components: Iterable[object] = ()
    if isinstance(function, partial):
        components = (function.func, *function.args, *function.keywords.values())
    elif isinstance(function, MethodType):
        components = (function.__func__, function.__self__)
    elif isinstance(function, FunctionType):  # its `__module__` may be that of one that it wraps
        module = str(function.__globals__.get("__name__"))
    else:
        owner = function if isinstance(function, type | BuiltinFunctionType) else type(function)
        module = str(owner.__module__)
        components = (
            vars(function).values() if owner is not function and is_dataclass(function) else ()
        )
    return (module != "builtins" and not module.startswith("mmstream.")) or any(
        is_user_function(component)
        for component in components
        if callable(component) or is_dataclass(component)
    )


def seed_generators(sample: Sample, stage: str) -> None:
    """Seed the generators of this process for a function that gets a sample.

    Args:
        sample: With its lineage. Without one nothing is seeded.
        stage: The place of the function. Each place has draws of its own.
    """
    lineage: SampleLineage | None = sample.get("__lineage__")
    if lineage is not None:
        seed_draws(stage, lineage.seed, lineage.epoch, lineage.shard, lineage.index)


def seed_draws(stage: str, *key: int) -> None:
    """Seed the CPU generators of torch, numpy and random from a key.

    `torch.manual_seed` would also seed the generators of all devices, on which models draw.
    """
    purpose = f"user {stage}" + " %d" * len(key) % key  # numpy's integers are written alike
    seeds = _SEEDS.unpack_from(hashlib.sha256(purpose.encode()).digest())
    torch.default_generator.manual_seed(seeds[0])
    np.random.seed(seeds[1])
    random.seed(seeds[2])


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put the generators of this process back at the end, as if nothing had drawn from them."""
    states = torch.default_generator.get_state(), np.random.get_state(legacy=False)
    python_state = random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(python_state)
