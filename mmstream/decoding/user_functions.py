"""Functions of the user draw at random as the sample says, whatever runs beside them.

Most augmentations draw from the generators of the process: those of torch, numpy and random. Before
each call these are seeded from the sample, its epoch and the function's place. So a draw is the
same on every topology and after a resume. `kept_generators` puts the states of the process back, so
that its own draws, such as a model's dropout, do not move.

These generators belong to a whole process. So functions of the user run in one thread: the one that
asks for a batch, or the main thread of a worker.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType

import numpy as np
import torch

from mmstream.types import Sample, SampleLineage

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
    parts: Iterable[object] = ()
    if isinstance(function, partial):
        parts = (function.func, *function.args, *function.keywords.values())
    elif isinstance(function, MethodType):
        parts = (function.__func__, function.__self__)
    elif isinstance(function, FunctionType):  # its `__module__` may be that of one that it wraps
        module = str(function.__globals__.get("__name__"))
    else:
        owner = function if isinstance(function, type | BuiltinFunctionType) else type(function)
        module = str(owner.__module__)
        parts = vars(function).values() if owner is not function and is_dataclass(function) else ()
    return (module != "builtins" and not module.startswith("mmstream.")) or any(
        is_user_function(part) for part in parts if callable(part) or is_dataclass(part)
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
